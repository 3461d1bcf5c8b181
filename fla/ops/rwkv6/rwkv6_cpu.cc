#include "fla/engine/diag/engine.h"
#include "fla/ops/rwkv6/rwkv6_problem.h"

namespace fla {

void register_rwkv6_cpu(Registry& r) { register_diag_cpu(r, "rwkv6", kRwkv6Functions); }

}  // namespace fla
