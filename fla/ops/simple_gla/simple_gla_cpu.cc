#include "fla/engine/diag/engine.h"
#include "fla/ops/simple_gla/simple_gla_problem.h"

namespace fla {

void register_simple_gla_cpu(Registry& r) {
  r.add_backend("simple_gla", cpu_backend());
  register_diag_cpu(r, kChunkSimpleGla, kChunkSimpleGlaBackward, Form::Chunk);
  register_diag_cpu(r, kFusedChunkSimpleGla, kFusedChunkSimpleGlaBackward, Form::Chunk);
  register_diag_cpu(r, kFusedRecurrentSimpleGla, kFusedRecurrentSimpleGlaBackward, Form::Step);
  register_diag_cpu(r, kParallelSimpleGla, kParallelSimpleGlaBackward, Form::Chunk);
  register_engine(r, kSimpleGlaStep, kDiagStep);
}

}  // namespace fla
