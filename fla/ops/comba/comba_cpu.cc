#include "fla/engine/delta/engine.h"
#include "fla/ops/comba/comba_problem.h"

namespace fla {

void register_comba_cpu(Registry& r) { register_delta_cpu(r, "comba", kCombaFunctions); }

}  // namespace fla
