#include "fla/engine/delta/engine.h"
#include "fla/ops/kda/kda_problem.h"

namespace fla {

void register_kda_cpu(Registry& r) { register_delta_cpu(r, "kda", kKdaFunctions); }

}  // namespace fla
