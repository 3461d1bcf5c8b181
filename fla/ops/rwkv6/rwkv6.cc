#include "fla/ops/rwkv6/rwkv6.h"

namespace fla {

constinit const Function<Rwkv6Args> chunk_rwkv6{kChunkRwkv6};
constinit const Function<Rwkv6BackwardArgs> chunk_rwkv6_backward{kChunkRwkv6Backward};
constinit const Function<Rwkv6Args> fused_recurrent_rwkv6{kFusedRecurrentRwkv6};
constinit const Function<Rwkv6BackwardArgs> fused_recurrent_rwkv6_backward{kFusedRecurrentRwkv6Backward};
constinit const Function<Rwkv6StepArgs> rwkv6_step{kRwkv6Step};

}  // namespace fla
