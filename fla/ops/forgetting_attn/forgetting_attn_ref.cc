#include "fla/engine/attn/engine.h"
#include "fla/ops/forgetting_attn/forgetting_attn_problem.h"

namespace fla {

void register_forgetting_attn_ref(Registry& r) { register_reference(r, kForgettingAttnFunctions, kAttnReference); }

}  // namespace fla
