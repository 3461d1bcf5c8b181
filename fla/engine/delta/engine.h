// The delta-rule engine on the CPU, for families whose arguments translate into a DeltaProblem.
#pragma once

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/delta/cpu/entry.h"
#include "fla/engine/delta/problem.h"
#include "fla/engine/delta/ref.h"

namespace fla {

namespace detail {

// The kernels of the CPU's delta-rule engine: by the kind of update, then by what decays the state.
inline std::size_t delta_update(const DeltaProblem& p) {
  const std::size_t gate = p.gk ? 2 : p.g ? 1 : 0;
  return (p.erase == Erase::General ? 3 : 0) + gate;
}
inline std::size_t delta_step(const DeltaProblem& p) {
  return p.gv || (p.beta && p.beta.ndim > 3) || (p.g && p.gk) ? 6 : delta_update(p);
}

inline constexpr const char* kDeltaRecurrence[] = {"delta.recurrence"};
inline constexpr const char* kDeltaChunkForward[] = {
    "delta.chunk.none.forward",         "delta.chunk.head.forward",         "delta.chunk.channel.forward",
    "delta.chunk.general.none.forward", "delta.chunk.general.head.forward", "delta.chunk.general.channel.forward"};
inline constexpr const char* kDeltaChunkBackward[] = {
    "delta.chunk.none.backward",         "delta.chunk.head.backward",         "delta.chunk.channel.backward",
    "delta.chunk.general.none.backward", "delta.chunk.general.head.backward", "delta.chunk.general.channel.backward"};
inline constexpr const char* kDeltaStepForward[] = {
    "delta.step.none.forward",         "delta.step.head.forward",         "delta.step.channel.forward",
    "delta.step.general.none.forward", "delta.step.general.head.forward", "delta.step.general.channel.forward",
    "delta.step.value.forward"};
inline constexpr const char* kDeltaStepBackward[] = {
    "delta.step.none.backward",         "delta.step.head.backward",         "delta.step.channel.backward",
    "delta.step.general.none.backward", "delta.step.general.head.backward", "delta.step.general.channel.backward",
    "delta.step.value.backward"};

}  // namespace detail

using DeltaEngine = CpuEngine<DeltaProblem, DeltaBackwardProblem>;

inline constexpr DeltaEngine kDeltaReference = {
    kReference,
    "delta.recurrence",
    {detail::kDeltaRecurrence, [](const DeltaProblem&) { return std::size_t{0}; }, reference::delta_forward_workspace,
     reference::delta_forward},
    {detail::kDeltaRecurrence, [](const DeltaBackwardProblem&) { return std::size_t{0}; },
     reference::delta_backward_workspace, reference::delta_backward},
};
inline constexpr DeltaEngine kDeltaChunk = {
    "cpu",
    "delta.chunk",
    {detail::kDeltaChunkForward, detail::delta_update, cpu::delta_chunk_forward_workspace, cpu::delta_chunk_forward},
    {detail::kDeltaChunkBackward, [](const DeltaBackwardProblem& p) { return detail::delta_update(p); },
     cpu::delta_chunk_backward_workspace, cpu::delta_chunk_backward},
};
inline constexpr DeltaEngine kDeltaStep = {
    "cpu",
    "delta.step",
    {detail::kDeltaStepForward, detail::delta_step, cpu::delta_step_forward_workspace, cpu::delta_step_forward},
    {detail::kDeltaStepBackward, [](const DeltaBackwardProblem& p) { return detail::delta_step(p); },
     cpu::delta_step_backward_workspace, cpu::delta_step_backward},
};

template <typename Functions>
void register_delta_cpu(Registry& r, const char* operation, const Functions& functions) {
  register_cpu(r, operation, functions, kDeltaChunk, kDeltaStep);
}
template <typename Functions>
void register_delta_reference(Registry& r, const Functions& functions) {
  register_reference(r, functions, kDeltaReference);
}

}  // namespace fla
