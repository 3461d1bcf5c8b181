#include "fla/engine/delta/engine.h"
#include "fla/ops/comba/comba_problem.h"

namespace fla {

void register_comba_ref(Registry& r) { register_delta_reference(r, kCombaFunctions); }

}  // namespace fla
