#include "fla/engine/diag/engine.h"
#include "fla/ops/rwkv6/rwkv6_problem.h"

namespace fla {

void register_rwkv6_ref(Registry& r) {
  register_diag_reference(r, kChunkRwkv6, kChunkRwkv6Backward);
  register_diag_reference(r, kFusedRecurrentRwkv6, kFusedRecurrentRwkv6Backward);
  register_engine(r, kRwkv6Step, kDiagReference);
}

}  // namespace fla
