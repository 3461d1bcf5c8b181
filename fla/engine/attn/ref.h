// The double-precision reference of softmax-like attention: the equations of problem.h row by row, written for reading.
// It shares no helper with any kernel.
#pragma once

#include <cstddef>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/attn/problem.h"

namespace fla::reference {

Status attn_forward(const AttnProblem& p, ThreadPool& pool);
Status attn_backward(const AttnProblem& p, ThreadPool& pool);

}  // namespace fla::reference
