#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/gla/gla_problem.h"

namespace fla {

void register_gla_cuda(Registry& r) {
  r.add_backend("gla", cuda_backend());
  register_cuda_engine(r, kChunkGla, kChunkGlaBackward, kDiagCuda);
  register_cuda_engine(r, kFusedChunkGla, kFusedChunkGlaBackward, kDiagCuda);
  register_cuda_engine(r, kFusedRecurrentGla, kFusedRecurrentGlaBackward, kDiagCuda);
  register_cuda_engine(r, kGlaStep, kDiagCuda);
}

}  // namespace fla
