// Registers reference and cpu kernels of a preconditioned family. The family supplies `PrecondCall to_problem(const Args&)` for
// its forward and its backward args; w, and in the backward dw and the erasing part of dk, pass through the workspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

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
                                                    "precond.recurrence",
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
                                                "precond.chunk",
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
                                               "precond.step",
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

namespace detail {

// A call of a preconditioned family: the stage, then the recurrence, or both backwards.
template <typename A, bool BACKWARD>
class PrecondPlan final : public Plan {
 public:
  using Call = std::conditional_t<BACKWARD, PrecondBackwardCall, PrecondCall>;

  PrecondPlan(const PrecondEngine& e, const A& args, const CallInfo& c) : e_(e), args_(args), call_(to_problem(args)) {
    Call p = call_;
    const std::size_t placed = place_precond(p, e.element, nullptr).anywhere();
    std::size_t most = e.stage_forward_workspace(p.stage, c.threads);
    if constexpr (BACKWARD) {
      most = std::max(
          {most, e.stage_backward_workspace(p.stage, c.threads), e.delta_backward_workspace(p.delta, c.threads)});
    } else {
      most = std::max(most, e.delta_forward_workspace(p.delta, c.threads));
    }
    workspace_ = placed + most;
  }
  KernelName kernel() const override { return KernelName(e_.name).add(BACKWARD ? ".backward" : ".forward"); }
  std::size_t workspace() const override { return workspace_; }
  void rebind() override { call_ = to_problem(args_); }
  Status launch(const LaunchInfo& l) const override {
    Call p = call_;
    const std::span<std::byte> rest = l.workspace.subspan(place_precond(p, e_.element, l.workspace.data()).used());
    if constexpr (BACKWARD) {
      PrecondProblem forward_stage = p.stage;
      forward_stage.at = {};
      if (Status s = e_.stage_forward(forward_stage, *l.pool, rest); !s) return s;
      if (Status s = e_.delta_backward(p.delta, *l.pool, rest); !s) return s;
      return e_.stage_backward(p.stage, *l.pool, rest);
    } else {
      if (Status s = e_.stage_forward(p.stage, *l.pool, rest); !s) return s;
      return e_.delta_forward(p.delta, *l.pool, rest);
    }
  }

 private:
  const PrecondEngine& e_;
  const A& args_;
  Call call_;
  std::size_t workspace_ = 0;
};

}  // namespace detail

// Registers the engine for one function and direction. The engine object has to stay.
template <typename A, bool BACKWARD>
void register_precond_engine(Registry& r, FunctionId<A> function, std::bool_constant<BACKWARD>,
                             const PrecondEngine& e) {
  const bool narrow = e.element == DType::F32;
  r.add(ErasedKernel{.function = function.name,
                     .backend = e.backend,
                     .name = e.name,
                     .make = [&e, narrow](const void* a, const CallInfo& c, PlanMemory& memory, Verdict& v) -> Plan* {
                       const A& args = *static_cast<const A*>(a);
                       if (narrow) v = verify_cpu(c, args.q.dtype);
                       return v.accepted ? memory.make<detail::PrecondPlan<A, BACKWARD>>(e, args, c) : nullptr;
                     },
                     .kernels =
                         [&e](const DeviceInfo*) {
                           return std::vector<std::string>{std::string(e.name) + (BACKWARD ? ".backward" : ".forward")};
                         }});
}

template <typename Functions>
void register_precond_cpu(Registry& r, const char* operation, const Functions& functions) {
  r.add_backend(operation, cpu_backend());
  for_each_function(functions, [&](Form form, auto id, auto backward) {
    register_precond_engine(r, id, backward, form == Form::Chunk ? kPrecondChunk : kPrecondStep);
  });
}
template <typename Functions>
void register_precond_reference(Registry& r, const Functions& functions) {
  for_each_function(functions,
                    [&](Form, auto id, auto backward) { register_precond_engine(r, id, backward, kPrecondReference); });
}

}  // namespace fla
