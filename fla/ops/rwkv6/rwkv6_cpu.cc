#include "fla/engine/diag/engine.h"
#include "fla/ops/rwkv6/rwkv6_problem.h"

namespace fla {

void register_rwkv6_cpu(Registry& r) {
  r.add_backend("rwkv6", cpu_backend());
  register_diag_cpu(r, kChunkRwkv6, kChunkRwkv6Backward, Form::Chunk);
  register_diag_cpu(r, kFusedRecurrentRwkv6, kFusedRecurrentRwkv6Backward, Form::Step);
  register_engine(r, kRwkv6Step, kDiagStep);
}

}  // namespace fla
