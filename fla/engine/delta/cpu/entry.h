// The CPU engine of the delta-rule recurrences: chunkwise and stepwise, forward and backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/delta/problem.h"

namespace fla::cpu {

// Workspace sizes are upper bounds for a pool of `threads`; memory need not be initialised or aligned. The chunk form
// serves every problem without gv and vector beta, the step form all. Requested gradients only; h0 may alias ht.
std::size_t delta_chunk_forward_workspace(const DeltaProblem& p, int threads);
Status delta_chunk_forward(const DeltaProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t delta_chunk_backward_workspace(const DeltaBackwardProblem& p, int threads);
Status delta_chunk_backward(const DeltaBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t delta_step_forward_workspace(const DeltaProblem& p, int threads);
Status delta_step_forward(const DeltaProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

// Without gv and vector beta this is the chunk backward.
std::size_t delta_step_backward_workspace(const DeltaBackwardProblem& p, int threads);
Status delta_step_backward(const DeltaBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

}  // namespace fla::cpu
