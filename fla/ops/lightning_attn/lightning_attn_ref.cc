#include "fla/engine/diag/engine.h"
#include "fla/ops/lightning_attn/lightning_attn_problem.h"

namespace fla {

void register_lightning_attn_ref(Registry& r) { register_diag_reference(r, kLightningAttnFunctions); }

}  // namespace fla
