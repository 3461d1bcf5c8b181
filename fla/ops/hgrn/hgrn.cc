#include "fla/ops/hgrn/hgrn.h"

namespace fla {

constinit const Function<HgrnArgs> fused_recurrent_hgrn{kFusedRecurrentHgrn};
constinit const Function<HgrnBackwardArgs> fused_recurrent_hgrn_backward{kFusedRecurrentHgrnBackward};
constinit const Function<HgrnArgs> chunk_hgrn{kChunkHgrn};
constinit const Function<HgrnBackwardArgs> chunk_hgrn_backward{kChunkHgrnBackward};

}  // namespace fla
