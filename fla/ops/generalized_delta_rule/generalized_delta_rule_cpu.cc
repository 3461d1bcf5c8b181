#include "fla/engine/delta/engine.h"
#include "fla/ops/generalized_delta_rule/generalized_delta_rule_problem.h"

namespace fla {

void register_generalized_delta_rule_cpu(Registry& r) {
  register_delta_cpu(r, "generalized_delta_rule", kGeneralizedDeltaRuleFunctions);
}

}  // namespace fla
