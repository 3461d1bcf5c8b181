// The diagonal-decay engine on the CPU, for families whose arguments translate into a DiagProblem.
#pragma once

#include <algorithm>

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/diag/cpu/entry.h"
#include "fla/engine/diag/problem.h"
#include "fla/engine/diag/ref.h"

namespace fla {

namespace detail {

// The kernels of the CPU's diagonal-decay engine, by what decays the state; a call that wants scores has one more.
inline std::size_t diag_key_gate(const DiagProblem& p) {
  return p.gk ? 2 : p.g || p.head.kind != HeadDecay::Kind::None ? 1 : 0;
}
inline std::size_t diag_chunk_gate(const DiagProblem& p) { return p.attn ? 3 + diag_key_gate(p) : diag_key_gate(p); }
inline std::size_t diag_step_gate(const DiagProblem& p) { return p.gv ? 3 : diag_key_gate(p); }

inline constexpr const char* kDiagRecurrence[] = {"diag.recurrence"};
inline constexpr const char* kDiagChunkForward[] = {
    "diag.chunk.none.forward", "diag.chunk.head.forward", "diag.chunk.channel.forward",
    "diag.chunk.none.forward+diag.chunk.scores", "diag.chunk.head.forward+diag.chunk.scores"};
inline constexpr const char* kDiagChunkBackward[] = {"diag.chunk.none.backward", "diag.chunk.head.backward",
                                                     "diag.chunk.channel.backward"};
inline constexpr const char* kDiagStepForward[] = {"diag.step.none.forward", "diag.step.head.forward",
                                                   "diag.step.channel.forward", "diag.step.value.forward"};
inline constexpr const char* kDiagStepBackward[] = {"diag.step.none.backward", "diag.step.head.backward",
                                                    "diag.step.channel.backward", "diag.step.value.backward"};

}  // namespace detail

using DiagEngine = CpuEngine<DiagProblem, DiagBackwardProblem>;

inline constexpr DiagEngine kDiagReference = {
    kReference,
    "diag.recurrence",
    {detail::kDiagRecurrence, [](const DiagProblem&) { return std::size_t{0}; }, reference::diag_forward_workspace,
     [](const DiagProblem& p, ThreadPool& pool, std::span<std::byte> ws) {
       if (p.attn)
         if (Status s = reference::diag_scores(p, p.attn, pool); !s) return s;
       return reference::diag_forward(p, pool, ws);
     }},
    {detail::kDiagRecurrence, [](const DiagBackwardProblem&) { return std::size_t{0}; },
     reference::diag_backward_workspace, reference::diag_backward},
};
inline constexpr DiagEngine kDiagChunk = {
    "cpu",
    "diag.chunk",
    {detail::kDiagChunkForward, detail::diag_chunk_gate,
     [](const DiagProblem& p, int threads) {
       const std::size_t scores = p.attn ? cpu::diag_scores_workspace(p, threads) : 0;
       return std::max(scores, cpu::diag_chunk_forward_workspace(p, p.chunk, threads));
     },
     [](const DiagProblem& p, ThreadPool& pool, std::span<std::byte> ws) {
       if (p.attn)
         if (Status s = cpu::diag_scores(p, p.attn, pool, ws); !s) return s;
       return cpu::diag_chunk_forward(p, p.chunk, pool, ws);
     }},
    {detail::kDiagChunkBackward, [](const DiagBackwardProblem& p) { return detail::diag_key_gate(p); },
     [](const DiagBackwardProblem& p, int threads) { return cpu::diag_chunk_backward_workspace(p, p.chunk, threads); },
     [](const DiagBackwardProblem& p, ThreadPool& pool, std::span<std::byte> ws) {
       return cpu::diag_chunk_backward(p, p.chunk, pool, ws);
     }},
};
inline constexpr DiagEngine kDiagStep = {
    "cpu",
    "diag.step",
    {detail::kDiagStepForward, detail::diag_step_gate, cpu::diag_step_forward_workspace, cpu::diag_step_forward},
    {detail::kDiagStepBackward, [](const DiagBackwardProblem& p) { return detail::diag_step_gate(p); },
     cpu::diag_step_backward_workspace, cpu::diag_step_backward},
};

template <typename Functions>
void register_diag_cpu(Registry& r, const char* operation, const Functions& functions) {
  register_cpu(r, operation, functions, kDiagChunk, kDiagStep);
}
template <typename Functions>
void register_diag_reference(Registry& r, const Functions& functions) {
  register_reference(r, functions, kDiagReference);
}

}  // namespace fla
