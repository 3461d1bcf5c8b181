#include "fla/ops/attn/attn.h"

namespace fla {

constinit const Function<AttnArgs> parallel_attn{kParallelAttn};
constinit const Function<AttnBackwardArgs> parallel_attn_backward{kParallelAttnBackward};
constinit const Function<AttnDecodeArgs> attn_decoding_one_step{kAttnDecodingOneStep};
constinit const Function<AttnCacheArgs> attn_decode{kAttnDecode};

}  // namespace fla
