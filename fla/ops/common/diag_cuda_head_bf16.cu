#include "fla/ops/common/diag_cuda_head.cuh"

namespace fla::cuda {
template Status launch_diag_head<bf16>(const DiagParams&, const DiagPlan&, Stream);
}
