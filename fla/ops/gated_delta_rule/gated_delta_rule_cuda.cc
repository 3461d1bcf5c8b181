#include "fla/engine/delta/cuda_engine.h"
#include "fla/ops/gated_delta_rule/gated_delta_rule_problem.h"

namespace fla {

void register_gated_delta_rule_cuda(Registry& r) {
  r.add_backend("gated_delta_rule", cuda_backend());
  register_cuda_engine(r, kChunkGatedDeltaRule, kChunkGatedDeltaRuleBackward, kDeltaCuda);
  register_cuda_engine(r, kChunkGdn, kChunkGdnBackward, kDeltaCuda);
  register_cuda_engine(r, kFusedRecurrentGatedDeltaRule, kFusedRecurrentGatedDeltaRuleBackward, kDeltaCuda);
  register_cuda_engine(r, kFusedRecurrentGdn, kFusedRecurrentGdnBackward, kDeltaCuda);
  register_cuda_engine(r, kGdnStep, kDeltaCuda);
}

}  // namespace fla
