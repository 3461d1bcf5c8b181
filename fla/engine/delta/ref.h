// The double-precision reference of the delta-rule recurrences: the equations of problem.h token by token, written for
// reading. It shares no helper with any kernel.
#pragma once

#include <cstddef>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/delta/problem.h"

namespace fla::reference {

std::size_t delta_forward_workspace(const DeltaProblem& p, int threads);
Status delta_forward(const DeltaProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t delta_backward_workspace(const DeltaBackwardProblem& p, int threads);
Status delta_backward(const DeltaBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

}  // namespace fla::reference
