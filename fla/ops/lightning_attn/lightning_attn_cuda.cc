#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/lightning_attn/lightning_attn_problem.h"

namespace fla {

void register_lightning_attn_cuda(Registry& r) {
  register_cuda(r, "lightning_attn", kLightningAttnFunctions, kDiagCuda);
}

}  // namespace fla
