#include "fla/engine/diag/engine.h"
#include "fla/ops/gla/gla_problem.h"

namespace fla {

void register_gla_ref(Registry& r) { register_diag_reference(r, kGlaFunctions); }

}  // namespace fla
