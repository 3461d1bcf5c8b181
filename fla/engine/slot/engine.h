// The kernels of attention over slots, for families whose arguments translate into a SlotProblem.
#pragma once

#include <cstddef>

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/slot/cpu/entry.h"
#include "fla/engine/slot/problem.h"
#include "fla/engine/slot/ref.h"

namespace fla {

namespace detail {

inline constexpr const char* kSlotRecurrence[] = {"slot.recurrence"};
inline constexpr const char* kSlotChunkForward[] = {"slot.chunk.forward"};
inline constexpr const char* kSlotStepForward[] = {"slot.step.forward"};
inline constexpr const char* kSlotChunkBackward[] = {"slot.chunk.backward"};

inline constexpr auto kOnlyForward = [](const SlotProblem&) { return std::size_t{0}; };
inline constexpr auto kOnlyBackward = [](const SlotBackwardProblem&) { return std::size_t{0}; };

}  // namespace detail

using SlotEngine = CpuEngine<SlotProblem, SlotBackwardProblem>;

inline constexpr SlotEngine kSlotReference = {
    kReference,
    "slot.recurrence",
    {detail::kSlotRecurrence, detail::kOnlyForward, reference::slot_forward_workspace, reference::slot_forward},
    {detail::kSlotRecurrence, detail::kOnlyBackward, reference::slot_backward_workspace, reference::slot_backward},
};
inline constexpr SlotEngine kSlotChunk = {
    "cpu",
    "slot.chunk",
    {detail::kSlotChunkForward, detail::kOnlyForward, cpu::slot_chunk_forward_workspace, cpu::slot_chunk_forward},
    {detail::kSlotChunkBackward, detail::kOnlyBackward, cpu::slot_chunk_backward_workspace, cpu::slot_chunk_backward},
};
// Its backward is that of the chunk form.
inline constexpr SlotEngine kSlotStep = {
    "cpu",
    "slot.step",
    {detail::kSlotStepForward, detail::kOnlyForward, cpu::slot_step_forward_workspace, cpu::slot_step_forward},
    {detail::kSlotChunkBackward, detail::kOnlyBackward, cpu::slot_chunk_backward_workspace, cpu::slot_chunk_backward},
};

}  // namespace fla
