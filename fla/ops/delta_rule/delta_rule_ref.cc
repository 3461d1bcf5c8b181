#include "fla/engine/delta/engine.h"
#include "fla/ops/delta_rule/delta_rule_problem.h"

namespace fla {

void register_delta_rule_ref(Registry& r) { register_delta_reference(r, kDeltaRuleFunctions); }

}  // namespace fla
