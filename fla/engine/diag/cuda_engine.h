// The diagonal-decay engine's CUDA kernels, for families whose arguments translate into a DiagProblem.
#pragma once

#include "fla/engine/common/cuda_engine.h"
#include "fla/engine/diag/cuda/entry.h"

namespace fla {

inline constexpr CudaEngine<DiagProblem, cuda::DiagPlan, DiagBackwardProblem, cuda::DiagBackwardPlan> kDiagCuda = {
    "diag",
    {cuda::diag_plan_forward, cuda::diag_forward_kernel, cuda::diag_forward_text, cuda::diag_forward_workspace,
     cuda::diag_forward, cuda::diag_forward_kernels},
    {cuda::diag_plan_backward, cuda::diag_backward_kernel, cuda::diag_backward_text, cuda::diag_backward_workspace,
     cuda::diag_backward, cuda::diag_backward_kernels},
};

}  // namespace fla
