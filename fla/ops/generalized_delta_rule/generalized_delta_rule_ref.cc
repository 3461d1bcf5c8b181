#include "fla/engine/delta/engine.h"
#include "fla/ops/generalized_delta_rule/generalized_delta_rule_problem.h"

namespace fla {

void register_generalized_delta_rule_ref(Registry& r) {
  register_delta_reference(r, kChunkIplrDeltaRule, kChunkIplrDeltaRuleBackward);
  register_delta_reference(r, kFusedRecurrentIplrDeltaRule, kFusedRecurrentIplrDeltaRuleBackward);
  register_delta_reference(r, kChunkDplrDeltaRule, kChunkDplrDeltaRuleBackward);
  register_delta_reference(r, kFusedRecurrentDplrDeltaRule, kFusedRecurrentDplrDeltaRuleBackward);
}

}  // namespace fla
