#include "fla/ops/precond_kda/precond_kda.h"

namespace fla {

constinit const Function<PrecondKdaArgs> chunk_precond_kda{kChunkPrecondKda};
constinit const Function<PrecondKdaBackwardArgs> chunk_precond_kda_backward{kChunkPrecondKdaBackward};
constinit const Function<PrecondKdaArgs> fused_recurrent_precond_kda{kFusedRecurrentPrecondKda};
constinit const Function<PrecondKdaBackwardArgs> fused_recurrent_precond_kda_backward{
    kFusedRecurrentPrecondKdaBackward};

}  // namespace fla
