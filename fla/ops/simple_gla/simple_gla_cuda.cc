#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/simple_gla/simple_gla_problem.h"

namespace fla {

void register_simple_gla_cuda(Registry& r) { register_cuda(r, "simple_gla", kSimpleGlaFunctions, kDiagCuda); }

}  // namespace fla
