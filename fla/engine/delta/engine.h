// The delta-rule engine's kernels, for families whose arguments translate into a DeltaProblem.
#pragma once

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/delta/cpu/entry.h"
#include "fla/engine/delta/problem.h"
#include "fla/engine/delta/ref.h"

namespace fla {

inline constexpr Engine<DeltaProblem, DeltaBackwardProblem> kDeltaReference = {
    kReference,
    "recurrence",
    reference::delta_forward_workspace,
    reference::delta_forward,
    reference::delta_backward_workspace,
    reference::delta_backward,
};
inline constexpr Engine<DeltaProblem, DeltaBackwardProblem> kDeltaChunk = {
    "cpu",
    "chunk",
    cpu::delta_chunk_forward_workspace,
    cpu::delta_chunk_forward,
    cpu::delta_chunk_backward_workspace,
    cpu::delta_chunk_backward,
};
inline constexpr Engine<DeltaProblem, DeltaBackwardProblem> kDeltaStep = {
    "cpu",
    "step",
    cpu::delta_step_forward_workspace,
    cpu::delta_step_forward,
    cpu::delta_step_backward_workspace,
    cpu::delta_step_backward,
};

template <typename F, typename G>
void register_delta_reference(Registry& r, FunctionId<F> forward, FunctionId<G> backward) {
  register_engine(r, forward, backward, kDeltaReference);
}

template <typename F, typename G>
void register_delta_cpu(Registry& r, FunctionId<F> forward, FunctionId<G> backward, Form form) {
  register_engine(r, forward, backward, form == Form::Step ? kDeltaStep : kDeltaChunk);
}

}  // namespace fla
