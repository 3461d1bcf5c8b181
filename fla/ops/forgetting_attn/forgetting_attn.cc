#include "fla/ops/forgetting_attn/forgetting_attn.h"

namespace fla {

constinit const Function<ForgettingAttnArgs> parallel_forgetting_attn{kParallelForgettingAttn};
constinit const Function<ForgettingAttnBackwardArgs> parallel_forgetting_attn_backward{kParallelForgettingAttnBackward};

}  // namespace fla
