// The diagonal-decay engine's kernels, for families whose arguments translate into a DiagProblem.
#pragma once

#include <algorithm>

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/diag/cpu/entry.h"
#include "fla/engine/diag/problem.h"
#include "fla/engine/diag/ref.h"

namespace fla {

inline constexpr Engine<DiagProblem, DiagBackwardProblem> kDiagReference = {
    kReference,
    "recurrence",
    reference::diag_forward_workspace,
    [](const DiagProblem& p, ThreadPool& pool, std::span<std::byte> ws) {
      if (p.attn)
        if (Status s = reference::diag_scores(p, p.attn, pool); !s) return s;
      return reference::diag_forward(p, pool, ws);
    },
    reference::diag_backward_workspace,
    reference::diag_backward,
};
inline constexpr Engine<DiagProblem, DiagBackwardProblem> kDiagChunk = {
    "cpu",
    "chunk",
    [](const DiagProblem& p, int threads) {
      const std::size_t scores = p.attn ? cpu::diag_scores_workspace(p, threads) : 0;
      return std::max(scores, cpu::diag_chunk_forward_workspace(p, p.chunk, threads));
    },
    [](const DiagProblem& p, ThreadPool& pool, std::span<std::byte> ws) {
      if (p.attn)
        if (Status s = cpu::diag_scores(p, p.attn, pool, ws); !s) return s;
      return cpu::diag_chunk_forward(p, p.chunk, pool, ws);
    },
    [](const DiagBackwardProblem& p, int threads) { return cpu::diag_chunk_backward_workspace(p, p.chunk, threads); },
    [](const DiagBackwardProblem& p, ThreadPool& pool, std::span<std::byte> ws) {
      return cpu::diag_chunk_backward(p, p.chunk, pool, ws);
    },
};
inline constexpr Engine<DiagProblem, DiagBackwardProblem> kDiagStep = {
    "cpu",
    "step",
    cpu::diag_step_forward_workspace,
    cpu::diag_step_forward,
    cpu::diag_step_backward_workspace,
    cpu::diag_step_backward,
};

template <typename F, typename G>
void register_diag_reference(Registry& r, FunctionId<F> forward, FunctionId<G> backward) {
  register_engine(r, forward, backward, kDiagReference);
}

template <typename F, typename G>
void register_diag_cpu(Registry& r, FunctionId<F> forward, FunctionId<G> backward, Form form) {
  register_engine(r, forward, backward, form == Form::Step ? kDiagStep : kDiagChunk);
}

}  // namespace fla
