#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/gla/gla_problem.h"

namespace fla {

void register_gla_cuda(Registry& r) { register_cuda(r, "gla", kGlaFunctions, kDiagCuda); }

}  // namespace fla
