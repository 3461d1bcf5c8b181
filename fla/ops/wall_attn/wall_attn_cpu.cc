#include <type_traits>

#include "fla/engine/attn/engine.h"
#include "fla/ops/wall_attn/wall_attn_problem.h"

namespace fla {

void register_wall_attn_cpu(Registry& r) {
  register_cpu(r, "wall_attn", kWallAttnFunctions, kAttnTiles, kAttnTiles);
  register_cpu_engine(r, kParallelWallAttnDecode, std::false_type(), kWallDecodeCpu);
  register_cpu_engine(r, kBuildWallKvCache, std::false_type(), kWallCacheCpu);
}

}  // namespace fla
