#include "fla/engine/diag/engine.h"
#include "fla/ops/simple_gla/simple_gla_problem.h"

namespace fla {

void register_simple_gla_cpu(Registry& r) { register_diag_cpu(r, "simple_gla", kSimpleGlaFunctions); }

}  // namespace fla
