#include "fla/ops/kda/kda.h"

namespace fla {

constinit const Function<KdaArgs> chunk_kda{kChunkKda};
constinit const Function<KdaBackwardArgs> chunk_kda_backward{kChunkKdaBackward};
constinit const Function<KdaArgs> fused_recurrent_kda{kFusedRecurrentKda};
constinit const Function<KdaBackwardArgs> fused_recurrent_kda_backward{kFusedRecurrentKdaBackward};
constinit const Function<KdaStepArgs> kda_step{kKdaStep};
constinit const Function<KdaPoolArgs> fused_recurrent_kda_fwd{kFusedRecurrentKdaFwd};

}  // namespace fla
