#include "fla/engine/delta/engine.h"
#include "fla/ops/generalized_delta_rule/generalized_delta_rule_problem.h"

namespace fla {

void register_generalized_delta_rule_cpu(Registry& r) {
  r.add_backend("generalized_delta_rule", cpu_backend());
  register_delta_cpu(r, kChunkIplrDeltaRule, kChunkIplrDeltaRuleBackward, Form::Chunk);
  register_delta_cpu(r, kFusedRecurrentIplrDeltaRule, kFusedRecurrentIplrDeltaRuleBackward, Form::Step);
  register_delta_cpu(r, kChunkDplrDeltaRule, kChunkDplrDeltaRuleBackward, Form::Chunk);
  register_delta_cpu(r, kFusedRecurrentDplrDeltaRule, kFusedRecurrentDplrDeltaRuleBackward, Form::Step);
}

}  // namespace fla
