#include "fla/engine/diag/engine.h"
#include "fla/ops/gla/gla_problem.h"

namespace fla {

void register_gla_cpu(Registry& r) {
  r.add_backend("gla", cpu_backend());
  register_diag_cpu(r, kChunkGla, kChunkGlaBackward, Form::Chunk);
  register_diag_cpu(r, kFusedChunkGla, kFusedChunkGlaBackward, Form::Chunk);
  register_diag_cpu(r, kFusedRecurrentGla, kFusedRecurrentGlaBackward, Form::Step);
  register_engine(r, kGlaStep, kDiagStep);
}

}  // namespace fla
