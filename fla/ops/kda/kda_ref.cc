#include "fla/engine/delta/engine.h"
#include "fla/ops/kda/kda_problem.h"

namespace fla {

void register_kda_ref(Registry& r) {
  register_delta_reference(r, kChunkKda, kChunkKdaBackward);
  register_delta_reference(r, kFusedRecurrentKda, kFusedRecurrentKdaBackward);
  register_engine(r, kKdaStep, kDeltaReference);
  register_engine(r, kFusedRecurrentKdaFwd, kDeltaReference);
}

}  // namespace fla
