#include "fla/ops/common/diag_cuda_head.cuh"

namespace fla::cuda {
template Status launch_diag_head<f16>(const DiagParams&, const DiagPlan&, Stream);
}
