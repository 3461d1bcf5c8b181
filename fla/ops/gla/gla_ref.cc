#include "fla/engine/diag/engine.h"
#include "fla/ops/gla/gla_problem.h"

namespace fla {

void register_gla_ref(Registry& r) {
  register_diag_reference(r, kChunkGla, kChunkGlaBackward);
  register_diag_reference(r, kFusedChunkGla, kFusedChunkGlaBackward);
  register_diag_reference(r, kFusedRecurrentGla, kFusedRecurrentGlaBackward);
  register_engine(r, kGlaStep, kDiagReference);
}

}  // namespace fla
