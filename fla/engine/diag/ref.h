// The double-precision reference of the diagonal-decay recurrence: the equations of problem.h token by token, written
// for reading. It shares no helper with any kernel.
#pragma once

#include <cstddef>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/diag/problem.h"

namespace fla::reference {

std::size_t diag_forward_workspace(const DiagProblem& p, int threads);
Status diag_forward(const DiagProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t diag_backward_workspace(const DiagBackwardProblem& p, int threads);
Status diag_backward(const DiagBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

// attn[b, h, i, j] = scale <q_i, k_j> e^{G_i - G_j} for j <= i, else 0. No gk, no gv.
Status diag_scores(const DiagProblem& p, const TensorView& attn, ThreadPool& pool);

}  // namespace fla::reference
