#include "fla/engine/delta/engine.h"
#include "fla/ops/gdn2/gdn2_problem.h"

namespace fla {

void register_gdn2_ref(Registry& r) {
  register_delta_reference(r, kChunkGdn2, kChunkGdn2Backward);
  register_delta_reference(r, kFusedRecurrentGdn2, kFusedRecurrentGdn2Backward);
}

}  // namespace fla
