#include "fla/engine/diag/engine.h"
#include "fla/ops/lightning_attn/lightning_attn_problem.h"

namespace fla {

void register_lightning_attn_cpu(Registry& r) {
  r.add_backend("lightning_attn", cpu_backend());
  register_diag_cpu(r, kChunkLightningAttn, kChunkLightningAttnBackward, Form::Chunk);
  register_diag_cpu(r, kFusedRecurrentLightningAttn, kFusedRecurrentLightningAttnBackward, Form::Step);
  register_engine(r, kLightningStep, kDiagStep);
}

}  // namespace fla
