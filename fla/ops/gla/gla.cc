#include "fla/ops/gla/gla.h"

namespace fla {

constinit const Function<GlaArgs> chunk_gla{kChunkGla};
constinit const Function<GlaBackwardArgs> chunk_gla_backward{kChunkGlaBackward};
constinit const Function<GlaArgs> fused_chunk_gla{kFusedChunkGla};
constinit const Function<GlaBackwardArgs> fused_chunk_gla_backward{kFusedChunkGlaBackward};
constinit const Function<GlaArgs> fused_recurrent_gla{kFusedRecurrentGla};
constinit const Function<GlaBackwardArgs> fused_recurrent_gla_backward{kFusedRecurrentGlaBackward};
constinit const Function<GlaStepArgs> gla_step{kGlaStep};

}  // namespace fla
