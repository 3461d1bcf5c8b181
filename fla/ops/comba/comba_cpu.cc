#include "fla/engine/delta/engine.h"
#include "fla/ops/comba/comba_problem.h"

namespace fla {

void register_comba_cpu(Registry& r) {
  r.add_backend("comba", cpu_backend());
  register_delta_cpu(r, kChunkComba, kChunkCombaBackward, Form::Chunk);
  register_delta_cpu(r, kFusedRecurrentComba, kFusedRecurrentCombaBackward, Form::Step);
}

}  // namespace fla
