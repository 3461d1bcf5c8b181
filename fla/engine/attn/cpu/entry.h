// The CPU engine of softmax-like attention, forward and backward, for every AttnProblem.
#pragma once

#include <cstddef>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/attn/problem.h"

namespace fla::cpu {

// Workspace sizes are exact upper bounds for a pool of `threads`; memory need not be initialised or aligned.
std::size_t attn_forward_workspace(const AttnProblem& p, int threads);
Status attn_forward(const AttnProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t attn_backward_workspace(const AttnProblem& p, int threads);
Status attn_backward(const AttnProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

}  // namespace fla::cpu
