#include "fla/engine/delta/engine.h"
#include "fla/ops/delta_rule/delta_rule_problem.h"

namespace fla {

void register_delta_rule_cpu(Registry& r) { register_delta_cpu(r, "delta_rule", kDeltaRuleFunctions); }

}  // namespace fla
