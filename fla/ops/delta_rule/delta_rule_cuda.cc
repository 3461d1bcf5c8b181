#include "fla/engine/delta/cuda_engine.h"
#include "fla/ops/delta_rule/delta_rule_problem.h"

namespace fla {

void register_delta_rule_cuda(Registry& r) {
  r.add_backend("delta_rule", cuda_backend());
  register_cuda_engine(r, kChunkDeltaRule, kChunkDeltaRuleBackward, kDeltaCuda);
  register_cuda_engine(r, kFusedRecurrentDeltaRule, kFusedRecurrentDeltaRuleBackward, kDeltaCuda);
  register_cuda_engine(r, kFusedChunkDeltaRule, kFusedChunkDeltaRuleBackward, kDeltaCuda);
  register_cuda_engine(r, kDeltaRuleStep, kDeltaCuda);
}

}  // namespace fla
