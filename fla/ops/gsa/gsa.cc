#include "fla/ops/gsa/gsa.h"

namespace fla {

constinit const Function<GsaArgs> chunk_gsa{kChunkGsa};
constinit const Function<GsaBackwardArgs> chunk_gsa_backward{kChunkGsaBackward};
constinit const Function<GsaArgs> fused_recurrent_gsa{kFusedRecurrentGsa};
constinit const Function<GsaBackwardArgs> fused_recurrent_gsa_backward{kFusedRecurrentGsaBackward};

}  // namespace fla
