#include "fla/ops/common/diag_cuda_channel.cuh"

namespace fla::cuda {
template Status launch_diag_channel<bf16>(const DiagParams&, const DiagPlan&, Stream);
}
