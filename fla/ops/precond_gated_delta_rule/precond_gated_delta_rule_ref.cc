#include "fla/engine/precond/engine.h"
#include "fla/ops/precond_gated_delta_rule/precond_gated_delta_rule_problem.h"

namespace fla {

void register_precond_gated_delta_rule_ref(Registry& r) {
  register_precond_reference(r, kPrecondGatedDeltaRuleFunctions);
}

}  // namespace fla
