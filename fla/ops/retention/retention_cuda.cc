#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/retention/retention_problem.h"

namespace fla {

void register_retention_cuda(Registry& r) { register_cuda(r, "retention", kRetentionFunctions, kDiagCuda); }

}  // namespace fla
