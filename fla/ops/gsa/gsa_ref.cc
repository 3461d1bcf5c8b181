#include "fla/engine/slot/engine.h"
#include "fla/ops/gsa/gsa_problem.h"

namespace fla {

void register_gsa_ref(Registry& r) {
  register_engine(r, kChunkGsa, kChunkGsaBackward, kSlotReference);
  register_engine(r, kFusedRecurrentGsa, kFusedRecurrentGsaBackward, kSlotReference);
}

}  // namespace fla
