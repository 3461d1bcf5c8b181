#include "fla/engine/attn/engine.h"
#include "fla/ops/forgetting_attn/forgetting_attn_problem.h"

namespace fla {

void register_forgetting_attn_cpu(Registry& r) {
  register_cpu(r, "forgetting_attn", kForgettingAttnFunctions, kAttnTiles, kAttnTiles);
}

}  // namespace fla
