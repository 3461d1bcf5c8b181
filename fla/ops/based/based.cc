#include "fla/ops/based/based.h"

namespace fla {

constinit const Function<BasedArgs> fused_chunk_based{kFusedChunkBased};
constinit const Function<BasedBackwardArgs> fused_chunk_based_backward{kFusedChunkBasedBackward};
constinit const Function<BasedArgs> parallel_based{kParallelBased};
constinit const Function<BasedBackwardArgs> parallel_based_backward{kParallelBasedBackward};

}  // namespace fla
