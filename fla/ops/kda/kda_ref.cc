#include "fla/engine/delta/engine.h"
#include "fla/ops/kda/kda_problem.h"

namespace fla {

void register_kda_ref(Registry& r) { register_delta_reference(r, kKdaFunctions); }

}  // namespace fla
