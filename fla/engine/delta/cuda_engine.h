// The delta-rule engine's CUDA kernels, for families whose arguments translate into a DeltaProblem.
#pragma once

#include "fla/engine/common/cuda_engine.h"
#include "fla/engine/delta/cuda/entry.h"

namespace fla {

inline constexpr CudaEngine<DeltaProblem, DeltaBackwardProblem> kDeltaCuda = {
    "delta",
    {
        cuda::delta_refusal,
        [](const DeltaProblem& p, const DeviceInfo& d) { return cuda::delta_forward_plan(p, d).text(); },
        cuda::delta_forward_workspace,
        cuda::delta_forward,
    },
    {
        cuda::delta_backward_refusal,
        [](const DeltaBackwardProblem& p, const DeviceInfo& d) { return cuda::delta_backward_plan(p, d).text(); },
        cuda::delta_backward_workspace,
        cuda::delta_backward,
    },
};

}  // namespace fla
