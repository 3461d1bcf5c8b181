#include "fla/engine/attn/engine.h"
#include "fla/ops/attn/attn_problem.h"

namespace fla {

void register_attn_ref(Registry& r) { register_reference(r, kAttnFunctions, kAttnReference); }

}  // namespace fla
