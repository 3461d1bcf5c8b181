#include "fla/engine/delta/engine.h"
#include "fla/ops/delta_rule/delta_rule_problem.h"

namespace fla {

void register_delta_rule_cpu(Registry& r) {
  r.add_backend("delta_rule", cpu_backend());
  register_delta_cpu(r, kChunkDeltaRule, kChunkDeltaRuleBackward, Form::Chunk);
  register_delta_cpu(r, kFusedRecurrentDeltaRule, kFusedRecurrentDeltaRuleBackward, Form::Step);
  register_delta_cpu(r, kFusedChunkDeltaRule, kFusedChunkDeltaRuleBackward, Form::Chunk);
  register_engine(r, kDeltaRuleStep, kDeltaStep);
}

}  // namespace fla
