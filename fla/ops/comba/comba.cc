#include "fla/ops/comba/comba.h"

namespace fla {

constinit const Function<CombaArgs> chunk_comba{kChunkComba};
constinit const Function<CombaBackwardArgs> chunk_comba_backward{kChunkCombaBackward};
constinit const Function<CombaArgs> fused_recurrent_comba{kFusedRecurrentComba};
constinit const Function<CombaBackwardArgs> fused_recurrent_comba_backward{kFusedRecurrentCombaBackward};

}  // namespace fla
