#include "fla/engine/precond/engine.h"
#include "fla/ops/precond_kda/precond_kda_problem.h"

namespace fla {

void register_precond_kda_ref(Registry& r) { register_precond_reference(r, kPrecondKdaFunctions); }

}  // namespace fla
