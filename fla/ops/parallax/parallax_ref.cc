#include "fla/engine/attn/engine.h"
#include "fla/ops/parallax/parallax_problem.h"

namespace fla {

void register_parallax_ref(Registry& r) { register_reference(r, kParallaxFunctions, kAttnReference); }

}  // namespace fla
