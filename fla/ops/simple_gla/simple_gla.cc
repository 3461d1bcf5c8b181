#include "fla/ops/simple_gla/simple_gla.h"

namespace fla {

constinit const Function<SimpleGlaArgs> chunk_simple_gla{kChunkSimpleGla};
constinit const Function<SimpleGlaBackwardArgs> chunk_simple_gla_backward{kChunkSimpleGlaBackward};
constinit const Function<SimpleGlaArgs> fused_chunk_simple_gla{kFusedChunkSimpleGla};
constinit const Function<SimpleGlaBackwardArgs> fused_chunk_simple_gla_backward{kFusedChunkSimpleGlaBackward};
constinit const Function<SimpleGlaArgs> fused_recurrent_simple_gla{kFusedRecurrentSimpleGla};
constinit const Function<SimpleGlaBackwardArgs> fused_recurrent_simple_gla_backward{kFusedRecurrentSimpleGlaBackward};
constinit const Function<SimpleGlaArgs> parallel_simple_gla{kParallelSimpleGla};
constinit const Function<SimpleGlaBackwardArgs> parallel_simple_gla_backward{kParallelSimpleGlaBackward};
constinit const Function<SimpleGlaStepArgs> simple_gla_step{kSimpleGlaStep};

}  // namespace fla
