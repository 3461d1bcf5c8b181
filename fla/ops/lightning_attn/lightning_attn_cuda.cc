#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/lightning_attn/lightning_attn_problem.h"

namespace fla {

void register_lightning_attn_cuda(Registry& r) {
  r.add_backend("lightning_attn", cuda_backend());
  register_cuda_engine(r, kChunkLightningAttn, kChunkLightningAttnBackward, kDiagCuda);
  register_cuda_engine(r, kFusedRecurrentLightningAttn, kFusedRecurrentLightningAttnBackward, kDiagCuda);
  register_cuda_engine(r, kLightningStep, kDiagCuda);
}

}  // namespace fla
