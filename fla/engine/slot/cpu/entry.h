// The CPU kernels of attention over slots: by chunks, forward and backward, and token by token.
#pragma once

#include <cstddef>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/slot/problem.h"

namespace fla::cpu {

// Workspace sizes are upper bounds for a pool of `threads`; memory need not be initialised or aligned.
std::size_t slot_chunk_forward_workspace(const SlotProblem& p, int threads);
Status slot_chunk_forward(const SlotProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t slot_chunk_backward_workspace(const SlotBackwardProblem& p, int threads);
Status slot_chunk_backward(const SlotBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t slot_step_forward_workspace(const SlotProblem& p, int threads);
Status slot_step_forward(const SlotProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

}  // namespace fla::cpu
