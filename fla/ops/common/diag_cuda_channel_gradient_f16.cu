#include "fla/ops/common/diag_cuda_channel_gradient.cuh"

namespace fla::cuda {
template Status launch_diag_channel_gradient<f16>(const GradientParams&, const DiagPlan&, Stream);
}  // namespace fla::cuda
