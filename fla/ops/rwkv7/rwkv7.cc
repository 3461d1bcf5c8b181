#include "fla/ops/rwkv7/rwkv7.h"

namespace fla {

constinit const Function<Rwkv7Args> chunk_rwkv7{kChunkRwkv7};
constinit const Function<Rwkv7BackwardArgs> chunk_rwkv7_backward{kChunkRwkv7Backward};
constinit const Function<RecurrentRwkv7Args> fused_recurrent_rwkv7{kFusedRecurrentRwkv7};
constinit const Function<RecurrentRwkv7BackwardArgs> fused_recurrent_rwkv7_backward{kFusedRecurrentRwkv7Backward};
constinit const Function<FusedMulRwkv7Args> fused_mul_recurrent_rwkv7{kFusedMulRecurrentRwkv7};
constinit const Function<FusedMulRwkv7BackwardArgs> fused_mul_recurrent_rwkv7_backward{kFusedMulRecurrentRwkv7Backward};
constinit const Function<Rwkv7StepArgs> rwkv7_step{kRwkv7Step};

}  // namespace fla
