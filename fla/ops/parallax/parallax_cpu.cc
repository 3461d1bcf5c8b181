#include "fla/engine/attn/engine.h"
#include "fla/ops/parallax/parallax_problem.h"

namespace fla {

void register_parallax_cpu(Registry& r) { register_cpu(r, "parallax", kParallaxFunctions, kAttnTiles, kAttnTiles); }

}  // namespace fla
