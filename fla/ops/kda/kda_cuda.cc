#include "fla/engine/delta/cuda_engine.h"
#include "fla/ops/kda/kda_problem.h"

namespace fla {

void register_kda_cuda(Registry& r) { register_cuda(r, "kda", kKdaFunctions, kDeltaCuda); }

}  // namespace fla
