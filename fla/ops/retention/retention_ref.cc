#include "fla/engine/diag/engine.h"
#include "fla/ops/retention/retention_problem.h"

namespace fla {

void register_retention_ref(Registry& r) { register_diag_reference(r, kRetentionFunctions); }

}  // namespace fla
