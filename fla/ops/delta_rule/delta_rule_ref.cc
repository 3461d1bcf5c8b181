#include "fla/engine/delta/engine.h"
#include "fla/ops/delta_rule/delta_rule_problem.h"

namespace fla {

void register_delta_rule_ref(Registry& r) {
  register_delta_reference(r, kChunkDeltaRule, kChunkDeltaRuleBackward);
  register_delta_reference(r, kFusedRecurrentDeltaRule, kFusedRecurrentDeltaRuleBackward);
  register_delta_reference(r, kFusedChunkDeltaRule, kFusedChunkDeltaRuleBackward);
  register_engine(r, kDeltaRuleStep, kDeltaReference);
}

}  // namespace fla
