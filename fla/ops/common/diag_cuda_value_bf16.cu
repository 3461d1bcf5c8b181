#include "fla/ops/common/diag_cuda_value.cuh"

namespace fla::cuda {
template Status launch_diag_value<bf16>(const DiagParams&, const DiagPlan&, Stream);
}
