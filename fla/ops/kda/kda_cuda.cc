#include "fla/engine/delta/cuda_engine.h"
#include "fla/ops/kda/kda_problem.h"

namespace fla {

void register_kda_cuda(Registry& r) {
  r.add_backend("kda", cuda_backend());
  register_cuda_engine(r, kChunkKda, kChunkKdaBackward, kDeltaCuda);
  register_cuda_engine(r, kFusedRecurrentKda, kFusedRecurrentKdaBackward, kDeltaCuda);
  register_cuda_engine(r, kKdaStep, kDeltaCuda);
  register_cuda_engine(r, kFusedRecurrentKdaFwd, kDeltaCuda);
}

}  // namespace fla
