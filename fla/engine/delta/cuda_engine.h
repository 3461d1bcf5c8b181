// The delta-rule engine's CUDA kernels, for families whose arguments translate into a DeltaProblem.
#pragma once

#include "fla/engine/common/cuda_engine.h"
#include "fla/engine/delta/cuda/entry.h"

namespace fla {

inline constexpr CudaEngine<DeltaProblem, cuda::DeltaPlan, DeltaBackwardProblem, cuda::DeltaPlan> kDeltaCuda = {
    "delta",
    {cuda::delta_plan_forward, cuda::delta_forward_kernel, cuda::delta_forward_text, cuda::delta_forward_workspace,
     cuda::delta_forward, cuda::delta_forward_kernels},
    {cuda::delta_plan_backward, cuda::delta_backward_kernel, cuda::delta_backward_text, cuda::delta_backward_workspace,
     cuda::delta_backward, cuda::delta_backward_kernels},
};

}  // namespace fla
