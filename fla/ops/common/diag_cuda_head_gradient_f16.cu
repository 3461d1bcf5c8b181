#include "fla/ops/common/diag_cuda_head_gradient.cuh"

namespace fla::cuda {
template Status launch_diag_head_gradient<f16>(const GradientParams&, const DiagPlan&, Stream);
}  // namespace fla::cuda
