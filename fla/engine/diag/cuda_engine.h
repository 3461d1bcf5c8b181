// The diagonal-decay engine's CUDA kernels, for families whose arguments translate into a DiagProblem.
#pragma once

#include "fla/engine/common/cuda_engine.h"
#include "fla/engine/diag/cuda/entry.h"

namespace fla {

inline constexpr CudaEngine<DiagProblem, DiagBackwardProblem> kDiagCuda = {
    "diag",
    {
        cuda::diag_refusal,
        [](const DiagProblem& p, const DeviceInfo& d) { return cuda::diag_forward_plan(p, d).text(); },
        cuda::diag_forward_workspace,
        cuda::diag_forward,
    },
    {
        cuda::diag_backward_refusal,
        [](const DiagBackwardProblem& p, const DeviceInfo& d) { return cuda::diag_backward_plan(p, d).text(); },
        cuda::diag_backward_workspace,
        cuda::diag_backward,
    },
};

}  // namespace fla
