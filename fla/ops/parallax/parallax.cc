#include "fla/ops/parallax/parallax.h"

namespace fla {

constinit const Function<ParallaxArgs> parallel_parallax{kParallelParallax};
constinit const Function<ParallaxBackwardArgs> parallel_parallax_backward{kParallelParallaxBackward};
constinit const Function<ParallaxDecodeArgs> parallax_decode{kParallaxDecode};
constinit const Function<ParallaxDecodeArgs> parallax_decode_one_step{kParallaxDecodeOneStep};

}  // namespace fla
