#include "fla/ops/common/diag_kernels.h"
#include "fla/ops/gated_oja_rule/gated_oja_rule.h"

namespace fla {

void register_gated_oja_rule_cpu(Registry& r) { r.add_backend("gated_oja_rule", cpu_backend()); }

}  // namespace fla
