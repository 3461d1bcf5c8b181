#include "fla/engine/delta/engine.h"
#include "fla/ops/gdn2/gdn2_problem.h"

namespace fla {

void register_gdn2_cpu(Registry& r) { register_delta_cpu(r, "gdn2", kGdn2Functions); }

}  // namespace fla
