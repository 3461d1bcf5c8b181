#include <type_traits>

#include "fla/engine/attn/engine.h"
#include "fla/ops/wall_attn/wall_attn_problem.h"

namespace fla {

void register_wall_attn_ref(Registry& r) {
  register_reference(r, kWallAttnFunctions, kAttnReference);
  register_cpu_engine(r, kParallelWallAttnDecode, std::false_type(), kWallDecodeReference);
  register_cpu_engine(r, kBuildWallKvCache, std::false_type(), kWallCacheReference);
}

}  // namespace fla
