#include "fla/engine/attn/engine.h"
#include "fla/ops/attn/attn_problem.h"

namespace fla {

void register_attn_cpu(Registry& r) { register_cpu(r, "attn", kAttnFunctions, kAttnTiles, kAttnTiles); }

}  // namespace fla
