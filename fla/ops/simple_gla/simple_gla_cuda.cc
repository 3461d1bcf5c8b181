#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/simple_gla/simple_gla_problem.h"

namespace fla {

void register_simple_gla_cuda(Registry& r) {
  r.add_backend("simple_gla", cuda_backend());
  register_cuda_engine(r, kChunkSimpleGla, kChunkSimpleGlaBackward, kDiagCuda);
  register_cuda_engine(r, kFusedChunkSimpleGla, kFusedChunkSimpleGlaBackward, kDiagCuda);
  register_cuda_engine(r, kFusedRecurrentSimpleGla, kFusedRecurrentSimpleGlaBackward, kDiagCuda);
  register_cuda_engine(r, kParallelSimpleGla, kParallelSimpleGlaBackward, kDiagCuda);
  register_cuda_engine(r, kSimpleGlaStep, kDiagCuda);
}

}  // namespace fla
