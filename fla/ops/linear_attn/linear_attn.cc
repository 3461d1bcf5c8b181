#include "fla/ops/linear_attn/linear_attn.h"

namespace fla {

constinit const Function<LinearAttnArgs> chunk_linear_attn{kChunkLinearAttn};
constinit const Function<LinearAttnBackwardArgs> chunk_linear_attn_backward{kChunkLinearAttnBackward};
constinit const Function<LinearAttnArgs> fused_chunk_linear_attn{kFusedChunkLinearAttn};
constinit const Function<LinearAttnBackwardArgs> fused_chunk_linear_attn_backward{kFusedChunkLinearAttnBackward};
constinit const Function<LinearAttnArgs> fused_recurrent_linear_attn{kFusedRecurrentLinearAttn};
constinit const Function<LinearAttnBackwardArgs> fused_recurrent_linear_attn_backward{
    kFusedRecurrentLinearAttnBackward};

}  // namespace fla
