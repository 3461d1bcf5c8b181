#include "fla/ops/path_attn/path_attn.h"

namespace fla {

constinit const Function<PathAttnArgs> parallel_path_attn{kParallelPathAttn};
constinit const Function<PathAttnBackwardArgs> parallel_path_attn_backward{kParallelPathAttnBackward};

}  // namespace fla
