#include "fla/engine/diag/engine.h"
#include "fla/ops/gla/gla_problem.h"

namespace fla {

void register_gla_cpu(Registry& r) { register_diag_cpu(r, "gla", kGlaFunctions); }

}  // namespace fla
