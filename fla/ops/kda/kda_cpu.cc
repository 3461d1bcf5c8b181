#include "fla/engine/delta/engine.h"
#include "fla/ops/kda/kda_problem.h"

namespace fla {

void register_kda_cpu(Registry& r) {
  r.add_backend("kda", cpu_backend());
  register_delta_cpu(r, kChunkKda, kChunkKdaBackward, Form::Chunk);
  register_delta_cpu(r, kFusedRecurrentKda, kFusedRecurrentKdaBackward, Form::Step);
  register_engine(r, kKdaStep, kDeltaStep);
  register_engine(r, kFusedRecurrentKdaFwd, kDeltaStep);
}

}  // namespace fla
