#include "fla/ops/retention/retention.h"

namespace fla {

constinit const Function<RetentionArgs> chunk_retention{kChunkRetention};
constinit const Function<RetentionBackwardArgs> chunk_retention_backward{kChunkRetentionBackward};
constinit const Function<RetentionArgs> fused_chunk_retention{kFusedChunkRetention};
constinit const Function<RetentionBackwardArgs> fused_chunk_retention_backward{kFusedChunkRetentionBackward};
constinit const Function<RetentionArgs> fused_recurrent_retention{kFusedRecurrentRetention};
constinit const Function<RetentionBackwardArgs> fused_recurrent_retention_backward{kFusedRecurrentRetentionBackward};
constinit const Function<RetentionArgs> parallel_retention{kParallelRetention};
constinit const Function<RetentionBackwardArgs> parallel_retention_backward{kParallelRetentionBackward};

}  // namespace fla
