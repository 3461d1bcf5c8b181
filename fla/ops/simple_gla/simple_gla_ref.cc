#include "fla/engine/diag/engine.h"
#include "fla/ops/simple_gla/simple_gla_problem.h"

namespace fla {

void register_simple_gla_ref(Registry& r) {
  register_diag_reference(r, kChunkSimpleGla, kChunkSimpleGlaBackward);
  register_diag_reference(r, kFusedChunkSimpleGla, kFusedChunkSimpleGlaBackward);
  register_diag_reference(r, kFusedRecurrentSimpleGla, kFusedRecurrentSimpleGlaBackward);
  register_diag_reference(r, kParallelSimpleGla, kParallelSimpleGlaBackward);
  register_engine(r, kSimpleGlaStep, kDiagReference);
}

}  // namespace fla
