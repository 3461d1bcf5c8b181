#include "fla/engine/delta/engine.h"
#include "fla/ops/gdn2/gdn2_problem.h"

namespace fla {

void register_gdn2_ref(Registry& r) { register_delta_reference(r, kGdn2Functions); }

}  // namespace fla
