// Registers the two backends of a family whose arguments translate into a DiagProblem. The family supplies
// `DiagProblem to_problem(const Args&)` for its forward and its backward args.
#pragma once

#include <algorithm>

#include "fla/ops/common/diag.h"
#include "fla/ops/common/diag_cpu.h"
#include "fla/ops/common/diag_ref.h"
#include "fla/registry/registry.h"

namespace fla {

inline Backend cpu_backend() {
  Backend b;
  b.name = "cpu";
  b.env = "FLA_BACKEND_CPU";
  return b;
}

// The cpu kernels carry fp32; only the reference computes in double.
inline Verdict verify_cpu(const CallInfo& c, DType wide) {
  if (wide == DType::F64) return reject(c.spec.name + ": needs F32, F16 or BF16, got F64 (the reference serves F64)");
  return accept();
}

enum class DiagForm : std::uint8_t { Chunk, Step };

template <typename F, typename G>
void register_diag_reference(Registry& r, FunctionId<F> forward, FunctionId<G> backward) {
  r.add(Kernel<F>{
      .function = forward,
      .backend = kReference,
      .name = "recurrence",
      .verify = {},
      .workspace = [](const F& a,
                      const CallInfo& c) { return reference::diag_forward_workspace(to_problem(a), c.threads); },
      .launch =
          [](const F& a, const CallInfo& c, std::span<std::byte> ws) {
            const DiagProblem p = to_problem(a);
            if (p.attn)
              if (Status s = reference::diag_scores(p, p.attn, *c.pool); !s) return s;
            return reference::diag_forward(p, *c.pool, ws);
          }});
  r.add(Kernel<G>{
      .function = backward,
      .backend = kReference,
      .name = "recurrence",
      .verify = {},
      .workspace = [](const G& a,
                      const CallInfo& c) { return reference::diag_backward_workspace(to_problem(a), c.threads); },
      .launch = [](const G& a, const CallInfo& c,
                   std::span<std::byte> ws) { return reference::diag_backward(to_problem(a), *c.pool, ws); }});
}

template <typename F, typename G>
void register_diag_cpu(Registry& r, FunctionId<F> forward, FunctionId<G> backward, DiagForm form) {
  const auto verify_f = [](const F& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); };
  const auto verify_g = [](const G& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); };
  if (form == DiagForm::Step) {
    r.add(Kernel<F>{
        .function = forward,
        .backend = "cpu",
        .name = "step",
        .verify = verify_f,
        .workspace = [](const F& a,
                        const CallInfo& c) { return cpu::diag_step_forward_workspace(to_problem(a), c.threads); },
        .launch = [](const F& a, const CallInfo& c,
                     std::span<std::byte> ws) { return cpu::diag_step_forward(to_problem(a), *c.pool, ws); }});
    r.add(Kernel<G>{
        .function = backward,
        .backend = "cpu",
        .name = "step",
        .verify = verify_g,
        .workspace = [](const G& a,
                        const CallInfo& c) { return cpu::diag_step_backward_workspace(to_problem(a), c.threads); },
        .launch = [](const G& a, const CallInfo& c,
                     std::span<std::byte> ws) { return cpu::diag_step_backward(to_problem(a), *c.pool, ws); }});
    return;
  }
  r.add(Kernel<F>{.function = forward,
                  .backend = "cpu",
                  .name = "chunk",
                  .verify = verify_f,
                  .workspace =
                      [](const F& a, const CallInfo& c) {
                        const DiagProblem p = to_problem(a);
                        const std::size_t scores = p.attn ? cpu::diag_scores_workspace(p, c.threads) : 0;
                        return std::max(scores, cpu::diag_chunk_forward_workspace(p, p.chunk, c.threads));
                      },
                  .launch =
                      [](const F& a, const CallInfo& c, std::span<std::byte> ws) {
                        const DiagProblem p = to_problem(a);
                        if (p.attn)
                          if (Status s = cpu::diag_scores(p, p.attn, *c.pool, ws); !s) return s;
                        return cpu::diag_chunk_forward(p, p.chunk, *c.pool, ws);
                      }});
  r.add(Kernel<G>{.function = backward,
                  .backend = "cpu",
                  .name = "chunk",
                  .verify = verify_g,
                  .workspace =
                      [](const G& a, const CallInfo& c) {
                        const DiagProblem p = to_problem(a);
                        return cpu::diag_chunk_backward_workspace(p, p.chunk, c.threads);
                      },
                  .launch =
                      [](const G& a, const CallInfo& c, std::span<std::byte> ws) {
                        const DiagProblem p = to_problem(a);
                        return cpu::diag_chunk_backward(p, p.chunk, *c.pool, ws);
                      }});
}

}  // namespace fla
