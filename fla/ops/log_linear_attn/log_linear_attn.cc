#include "fla/ops/log_linear_attn/log_linear_attn.h"

namespace fla {

constinit const Function<LogLinearAttnArgs> chunk_log_linear_attn{kChunkLogLinearAttn};
constinit const Function<LogLinearAttnBackwardArgs> chunk_log_linear_attn_backward{kChunkLogLinearAttnBackward};

}  // namespace fla
