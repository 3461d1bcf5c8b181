// The kernels of attention over slots, for families whose arguments translate into a SlotProblem.
#pragma once

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/slot/cpu/entry.h"
#include "fla/engine/slot/problem.h"
#include "fla/engine/slot/ref.h"

namespace fla {

inline constexpr Engine<SlotProblem, SlotBackwardProblem> kSlotReference = {
    kReference,
    "recurrence",
    reference::slot_forward_workspace,
    reference::slot_forward,
    reference::slot_backward_workspace,
    reference::slot_backward,
};
inline constexpr Engine<SlotProblem, SlotBackwardProblem> kSlotChunk = {
    "cpu",
    "chunk",
    cpu::slot_chunk_forward_workspace,
    cpu::slot_chunk_forward,
    cpu::slot_chunk_backward_workspace,
    cpu::slot_chunk_backward,
};
inline constexpr Engine<SlotProblem, SlotBackwardProblem> kSlotStep = {
    "cpu",
    "step",
    cpu::slot_step_forward_workspace,
    cpu::slot_step_forward,
    cpu::slot_chunk_backward_workspace,
    cpu::slot_chunk_backward,
};

}  // namespace fla
