#include "fla/engine/delta/engine.h"
#include "fla/ops/gated_delta_rule/gated_delta_rule_problem.h"

namespace fla {

void register_gated_delta_rule_ref(Registry& r) { register_delta_reference(r, kGatedDeltaRuleFunctions); }

}  // namespace fla
