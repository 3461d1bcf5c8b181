#include "fla/engine/delta/engine.h"
#include "fla/ops/gated_delta_rule/gated_delta_rule_problem.h"

namespace fla {

void register_gated_delta_rule_ref(Registry& r) {
  register_delta_reference(r, kChunkGatedDeltaRule, kChunkGatedDeltaRuleBackward);
  register_delta_reference(r, kChunkGdn, kChunkGdnBackward);
  register_delta_reference(r, kFusedRecurrentGatedDeltaRule, kFusedRecurrentGatedDeltaRuleBackward);
  register_delta_reference(r, kFusedRecurrentGdn, kFusedRecurrentGdnBackward);
  register_engine(r, kGdnStep, kDeltaReference);
}

}  // namespace fla
