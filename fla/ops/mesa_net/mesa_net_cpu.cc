#include "fla/ops/common/diag_kernels.h"
#include "fla/ops/mesa_net/mesa_net.h"

namespace fla {

void register_mesa_net_cpu(Registry& r) { r.add_backend("mesa_net", cpu_backend()); }

}  // namespace fla
