// The double-precision reference of attention over slots: problem.h (1), (2) token by token, written for reading. It
// shares no helper with any kernel.
#pragma once

#include <cstddef>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/slot/problem.h"

namespace fla::reference {

std::size_t slot_forward_workspace(const SlotProblem& p, int threads);
Status slot_forward(const SlotProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t slot_backward_workspace(const SlotBackwardProblem& p, int threads);
Status slot_backward(const SlotBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

}  // namespace fla::reference
