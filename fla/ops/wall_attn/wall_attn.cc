#include "fla/ops/wall_attn/wall_attn.h"

namespace fla {

constinit const Function<WallAttnArgs> parallel_wall_attn{kParallelWallAttn};
constinit const Function<WallAttnBackwardArgs> parallel_wall_attn_backward{kParallelWallAttnBackward};
constinit const Function<WallAttnDecodeArgs> parallel_wall_attn_decode{kParallelWallAttnDecode};
constinit const Function<WallCacheArgs> build_wall_kv_cache{kBuildWallKvCache};

}  // namespace fla
