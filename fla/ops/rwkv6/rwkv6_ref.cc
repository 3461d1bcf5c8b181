#include "fla/engine/diag/engine.h"
#include "fla/ops/rwkv6/rwkv6_problem.h"

namespace fla {

void register_rwkv6_ref(Registry& r) { register_diag_reference(r, kRwkv6Functions); }

}  // namespace fla
