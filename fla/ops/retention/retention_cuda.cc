#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/retention/retention_problem.h"

namespace fla {

void register_retention_cuda(Registry& r) {
  r.add_backend("retention", cuda_backend());
  register_cuda_engine(r, kChunkRetention, kChunkRetentionBackward, kDiagCuda);
  register_cuda_engine(r, kFusedChunkRetention, kFusedChunkRetentionBackward, kDiagCuda);
  register_cuda_engine(r, kFusedRecurrentRetention, kFusedRecurrentRetentionBackward, kDiagCuda);
  register_cuda_engine(r, kParallelRetention, kParallelRetentionBackward, kDiagCuda);
}

}  // namespace fla
