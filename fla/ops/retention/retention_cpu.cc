#include "fla/engine/diag/engine.h"
#include "fla/ops/retention/retention_problem.h"

namespace fla {

void register_retention_cpu(Registry& r) { register_diag_cpu(r, "retention", kRetentionFunctions); }

}  // namespace fla
