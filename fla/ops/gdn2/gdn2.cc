#include "fla/ops/gdn2/gdn2.h"

namespace fla {

constinit const Function<Gdn2Args> chunk_gdn2{kChunkGdn2};
constinit const Function<Gdn2BackwardArgs> chunk_gdn2_backward{kChunkGdn2Backward};
constinit const Function<Gdn2Args> fused_recurrent_gdn2{kFusedRecurrentGdn2};
constinit const Function<Gdn2BackwardArgs> fused_recurrent_gdn2_backward{kFusedRecurrentGdn2Backward};

}  // namespace fla
