#include "fla/engine/diag/engine.h"
#include "fla/ops/retention/retention_problem.h"

namespace fla {

void register_retention_cpu(Registry& r) {
  r.add_backend("retention", cpu_backend());
  register_diag_cpu(r, kChunkRetention, kChunkRetentionBackward, Form::Chunk);
  register_diag_cpu(r, kFusedChunkRetention, kFusedChunkRetentionBackward, Form::Chunk);
  register_diag_cpu(r, kFusedRecurrentRetention, kFusedRecurrentRetentionBackward, Form::Step);
  register_diag_cpu(r, kParallelRetention, kParallelRetentionBackward, Form::Chunk);
}

}  // namespace fla
