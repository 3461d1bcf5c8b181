#include "fla/engine/precond/engine.h"
#include "fla/ops/precond_gated_delta_rule/precond_gated_delta_rule_problem.h"

namespace fla {

void register_precond_gated_delta_rule_cpu(Registry& r) {
  register_precond_cpu(r, "precond_gated_delta_rule", kPrecondGatedDeltaRuleFunctions);
}

}  // namespace fla
