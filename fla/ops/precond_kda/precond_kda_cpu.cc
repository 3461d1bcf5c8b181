#include "fla/engine/precond/engine.h"
#include "fla/ops/precond_kda/precond_kda_problem.h"

namespace fla {

void register_precond_kda_cpu(Registry& r) {
  r.add_backend("precond_kda", cpu_backend());
  register_precond(r, kChunkPrecondKda, kChunkPrecondKdaBackward, kPrecondChunk);
  register_precond(r, kFusedRecurrentPrecondKda, kFusedRecurrentPrecondKdaBackward, kPrecondStep);
}

}  // namespace fla
