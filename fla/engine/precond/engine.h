// Registers the two backends of a preconditioned family. The family supplies `PrecondCall to_problem(const Args&)` for
// its forward and its backward args; w, and in the backward dw and the erasing part of dk, pass through the workspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/engine/common/made_tensors.h"
#include "fla/engine/delta/engine.h"
#include "fla/engine/precond/problem.h"

namespace fla {

struct PrecondCall {
  DeltaProblem delta;
  PrecondProblem stage;
};
struct PrecondBackwardCall {
  DeltaBackwardProblem delta;
  PrecondBackwardProblem stage;

  explicit PrecondBackwardCall(const PrecondCall& forward) : delta(forward.delta), stage(forward.stage) {}
};

// The stage before the recurrence `p`; both families name its arguments alike.
template <typename A>
PrecondProblem precond_stage(const DeltaProblem& p, const A& a) {
  PrecondProblem s;
  s.B = p.B;
  s.T = p.T;
  s.H = p.H;
  s.HA = a.g_atk.dim(2);
  s.K = p.K;
  s.N = p.N;
  s.cu_seqlens = a.cu_seqlens;
  s.normalize = a.use_qk_l2norm_in_kernel;
  s.x = a.x;
  s.eps = a.eps;
  s.k = a.k;
  s.g_atk = a.g_atk;
  s.beta_atk = a.beta_atk;
  s.log_atk_scale = a.log_atk_scale;
  s.a0 = a.initial_A_state;
  s.at = a.final_A_state;
  return s;
}
template <typename G>
void set_stage_gradients(PrecondBackwardProblem& s, const G& a) {
  s.dat = a.dAt;
  s.dk = a.dk;
  s.dg_atk = a.dg_atk;
  s.dbeta_atk = a.dbeta_atk;
  s.dlog_atk_scale = a.dlog_atk_scale;
  s.da0 = a.dA0;
}

// A backend's functions, and the element type of what the stage hands to the recurrence.
struct PrecondEngine {
  const char* backend;
  const char* name;
  DType element;
  std::size_t (*stage_forward_workspace)(const PrecondProblem&, int);
  Status (*stage_forward)(const PrecondProblem&, ThreadPool&, std::span<std::byte>);
  std::size_t (*stage_backward_workspace)(const PrecondBackwardProblem&, int);
  Status (*stage_backward)(const PrecondBackwardProblem&, ThreadPool&, std::span<std::byte>);
  std::size_t (*delta_forward_workspace)(const DeltaProblem&, int);
  Status (*delta_forward)(const DeltaProblem&, ThreadPool&, std::span<std::byte>);
  std::size_t (*delta_backward_workspace)(const DeltaBackwardProblem&, int);
  Status (*delta_backward)(const DeltaBackwardProblem&, ThreadPool&, std::span<std::byte>);
};

inline constexpr PrecondEngine kPrecondReference = {kReference,
                                                    "recurrence",
                                                    DType::F64,
                                                    reference::precond_forward_workspace,
                                                    reference::precond_forward,
                                                    reference::precond_backward_workspace,
                                                    reference::precond_backward,
                                                    reference::delta_forward_workspace,
                                                    reference::delta_forward,
                                                    reference::delta_backward_workspace,
                                                    reference::delta_backward};
inline constexpr PrecondEngine kPrecondChunk = {"cpu",
                                                "chunk",
                                                DType::F32,
                                                cpu::precond_forward_workspace,
                                                cpu::precond_forward,
                                                cpu::precond_backward_workspace,
                                                cpu::precond_backward,
                                                cpu::delta_chunk_forward_workspace,
                                                cpu::delta_chunk_forward,
                                                cpu::delta_chunk_backward_workspace,
                                                cpu::delta_chunk_backward};
inline constexpr PrecondEngine kPrecondStep = {"cpu",
                                               "step",
                                               DType::F32,
                                               cpu::precond_forward_workspace,
                                               cpu::precond_forward,
                                               cpu::precond_backward_workspace,
                                               cpu::precond_backward,
                                               cpu::delta_step_forward_workspace,
                                               cpu::delta_step_forward,
                                               cpu::delta_step_backward_workspace,
                                               cpu::delta_step_backward};

// Lays what the stage hands to the recurrence, and in the backward back, into the workspace; returns where that ends.
inline MadeTensors place_precond(PrecondCall& c, DType element, std::byte* base) {
  MadeTensors made(element, base);
  c.stage.w = c.delta.w = made.make({c.stage.B, c.stage.T, c.stage.HA, c.stage.K});
  return made;
}
inline MadeTensors place_precond(PrecondBackwardCall& c, DType element, std::byte* base) {
  MadeTensors made(element, base);
  c.stage.w = c.delta.w = made.make({c.stage.B, c.stage.T, c.stage.HA, c.stage.K});
  c.stage.dw = c.delta.dw = made.make({c.stage.B, c.stage.T, c.stage.HA, c.stage.K});
  if (c.delta.dk) c.stage.dk_erase = c.delta.dk = made.make({c.stage.B, c.stage.T, c.stage.H, c.stage.K});
  return made;
}

template <typename F, typename G>
void register_precond(Registry& r, FunctionId<F> forward, FunctionId<G> backward, const PrecondEngine& e) {
  const bool checks = e.element == DType::F32;
  r.add(Kernel<F>{
      .function = forward,
      .backend = e.backend,
      .name = e.name,
      .verify = [checks](const F& a, const CallInfo& c) { return checks ? verify_cpu(c, a.q.dtype) : accept(); },
      .workspace =
          [&e](const F& a, const CallInfo& c) {
            PrecondCall p = to_problem(a);
            const std::size_t placed = place_precond(p, e.element, nullptr).anywhere();
            return placed + std::max(e.stage_forward_workspace(p.stage, c.threads),
                                     e.delta_forward_workspace(p.delta, c.threads));
          },
      .launch =
          [&e](const F& a, const CallInfo& c, std::span<std::byte> ws) {
            PrecondCall p = to_problem(a);
            const std::span<std::byte> rest = ws.subspan(place_precond(p, e.element, ws.data()).used());
            if (Status s = e.stage_forward(p.stage, *c.pool, rest); !s) return s;
            return e.delta_forward(p.delta, *c.pool, rest);
          }});
  r.add(Kernel<G>{
      .function = backward,
      .backend = e.backend,
      .name = e.name,
      .verify = [checks](const G& a, const CallInfo& c) { return checks ? verify_cpu(c, a.q.dtype) : accept(); },
      .workspace =
          [&e](const G& a, const CallInfo& c) {
            PrecondBackwardCall p = to_problem(a);
            const std::size_t placed = place_precond(p, e.element, nullptr).anywhere();
            return placed + std::max({e.stage_forward_workspace(p.stage, c.threads),
                                      e.stage_backward_workspace(p.stage, c.threads),
                                      e.delta_backward_workspace(p.delta, c.threads)});
          },
      .launch =
          [&e](const G& a, const CallInfo& c, std::span<std::byte> ws) {
            PrecondBackwardCall p = to_problem(a);
            const std::span<std::byte> rest = ws.subspan(place_precond(p, e.element, ws.data()).used());
            PrecondProblem forward_stage = p.stage;
            forward_stage.at = {};
            if (Status s = e.stage_forward(forward_stage, *c.pool, rest); !s) return s;
            if (Status s = e.delta_backward(p.delta, *c.pool, rest); !s) return s;
            return e.stage_backward(p.stage, *c.pool, rest);
          }});
}

}  // namespace fla
