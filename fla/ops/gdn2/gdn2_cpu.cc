#include "fla/engine/delta/engine.h"
#include "fla/ops/gdn2/gdn2_problem.h"

namespace fla {

void register_gdn2_cpu(Registry& r) {
  r.add_backend("gdn2", cpu_backend());
  register_delta_cpu(r, kChunkGdn2, kChunkGdn2Backward, Form::Chunk);
  register_delta_cpu(r, kFusedRecurrentGdn2, kFusedRecurrentGdn2Backward, Form::Step);
}

}  // namespace fla
