#include "fla/engine/delta/engine.h"
#include "fla/ops/generalized_delta_rule/generalized_delta_rule_problem.h"

namespace fla {

void register_generalized_delta_rule_ref(Registry& r) { register_delta_reference(r, kGeneralizedDeltaRuleFunctions); }

}  // namespace fla
