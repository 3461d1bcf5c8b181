#include "fla/engine/diag/engine.h"
#include "fla/ops/lightning_attn/lightning_attn_problem.h"

namespace fla {

void register_lightning_attn_cpu(Registry& r) { register_diag_cpu(r, "lightning_attn", kLightningAttnFunctions); }

}  // namespace fla
