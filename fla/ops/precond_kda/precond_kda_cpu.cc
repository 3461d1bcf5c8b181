#include "fla/engine/precond/engine.h"
#include "fla/ops/precond_kda/precond_kda_problem.h"

namespace fla {

void register_precond_kda_cpu(Registry& r) { register_precond_cpu(r, "precond_kda", kPrecondKdaFunctions); }

}  // namespace fla
