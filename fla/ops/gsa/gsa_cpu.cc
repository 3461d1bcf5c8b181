#include "fla/engine/slot/engine.h"
#include "fla/ops/gsa/gsa_problem.h"

namespace fla {

void register_gsa_cpu(Registry& r) {
  r.add_backend("gsa", cpu_backend());
  register_engine(r, kChunkGsa, kChunkGsaBackward, kSlotChunk);
  register_engine(r, kFusedRecurrentGsa, kFusedRecurrentGsaBackward, kSlotStep);
}

}  // namespace fla
