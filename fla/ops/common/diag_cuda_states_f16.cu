#include "fla/ops/common/diag_cuda_states.cuh"

namespace fla::cuda {
template Status launch_diag_states<f16>(const StateRuns&, const DiagPlan&, Stream);
}  // namespace fla::cuda
