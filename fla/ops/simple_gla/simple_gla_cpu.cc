#include "fla/ops/common/diag_kernels.h"
#include "fla/ops/simple_gla/simple_gla_problem.h"

namespace fla {

void register_simple_gla_cpu(Registry& r) {
  r.add_backend("simple_gla", cpu_backend());
  register_diag_cpu(r, kChunkSimpleGla, kChunkSimpleGlaBackward, DiagForm::Chunk);
  register_diag_cpu(r, kFusedChunkSimpleGla, kFusedChunkSimpleGlaBackward, DiagForm::Chunk);
  register_diag_cpu(r, kFusedRecurrentSimpleGla, kFusedRecurrentSimpleGlaBackward, DiagForm::Step);
  register_diag_cpu(r, kParallelSimpleGla, kParallelSimpleGlaBackward, DiagForm::Chunk);
}

}  // namespace fla
