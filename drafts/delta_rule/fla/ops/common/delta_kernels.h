// Registers the two backends of a family whose arguments translate into a DeltaProblem. The family supplies
// `DeltaProblem to_problem(const Args&)` for its forward and its backward args.
#pragma once

#include "fla/ops/common/delta.h"
#include "fla/ops/common/delta_cpu.h"
#include "fla/ops/common/delta_ref.h"
#include "fla/ops/common/diag_kernels.h"
#include "fla/registry/registry.h"

namespace fla {

enum class DeltaForm : std::uint8_t { Chunk, Step };

template <typename F, typename G>
void register_delta_reference(Registry& r, FunctionId<F> forward, FunctionId<G> backward) {
  r.add(Kernel<F>{
      .function = forward,
      .backend = kReference,
      .name = "recurrence",
      .verify = {},
      .workspace = [](const F& a,
                      const CallInfo& c) { return reference::delta_forward_workspace(to_problem(a), c.threads); },
      .launch = [](const F& a, const CallInfo& c,
                   std::span<std::byte> ws) { return reference::delta_forward(to_problem(a), *c.pool, ws); }});
  r.add(Kernel<G>{
      .function = backward,
      .backend = kReference,
      .name = "recurrence",
      .verify = {},
      .workspace = [](const G& a,
                      const CallInfo& c) { return reference::delta_backward_workspace(to_problem(a), c.threads); },
      .launch = [](const G& a, const CallInfo& c,
                   std::span<std::byte> ws) { return reference::delta_backward(to_problem(a), *c.pool, ws); }});
}

template <typename F, typename G>
void register_delta_cpu(Registry& r, FunctionId<F> forward, FunctionId<G> backward, DeltaForm form) {
  const auto verify_f = [](const F& a, const CallInfo& c) { return verify_cpu(c, to_problem(a).q.dtype); };
  const auto verify_g = [](const G& a, const CallInfo& c) { return verify_cpu(c, to_problem(a).q.dtype); };
  if (form == DeltaForm::Step) {
    r.add(Kernel<F>{
        .function = forward,
        .backend = "cpu",
        .name = "step",
        .verify = verify_f,
        .workspace = [](const F& a,
                        const CallInfo& c) { return cpu::delta_step_forward_workspace(to_problem(a), c.threads); },
        .launch = [](const F& a, const CallInfo& c,
                     std::span<std::byte> ws) { return cpu::delta_step_forward(to_problem(a), *c.pool, ws); }});
    r.add(Kernel<G>{
        .function = backward,
        .backend = "cpu",
        .name = "step",
        .verify = verify_g,
        .workspace = [](const G& a,
                        const CallInfo& c) { return cpu::delta_step_backward_workspace(to_problem(a), c.threads); },
        .launch = [](const G& a, const CallInfo& c,
                     std::span<std::byte> ws) { return cpu::delta_step_backward(to_problem(a), *c.pool, ws); }});
    return;
  }
  r.add(Kernel<F>{
      .function = forward,
      .backend = "cpu",
      .name = "chunk",
      .verify = verify_f,
      .workspace = [](const F& a,
                      const CallInfo& c) { return cpu::delta_chunk_forward_workspace(to_problem(a), c.threads); },
      .launch = [](const F& a, const CallInfo& c,
                   std::span<std::byte> ws) { return cpu::delta_chunk_forward(to_problem(a), *c.pool, ws); }});
  r.add(Kernel<G>{
      .function = backward,
      .backend = "cpu",
      .name = "chunk",
      .verify = verify_g,
      .workspace = [](const G& a,
                      const CallInfo& c) { return cpu::delta_chunk_backward_workspace(to_problem(a), c.threads); },
      .launch = [](const G& a, const CallInfo& c,
                   std::span<std::byte> ws) { return cpu::delta_chunk_backward(to_problem(a), *c.pool, ws); }});
}

}  // namespace fla
