// fused_mul_recurrent_rwkv7 on the delta engine: a := -kk and b := kk o a are made in the workspace, and so are their
// gradients, from which those of kk and a follow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/engine/common/made_tensors.h"
#include "fla/engine/delta/engine.h"
#include "fla/ops/rwkv7/rwkv7_problem.h"

namespace fla {

// A backend's functions, and the element type of what is made. The formulas are each backend's own: the reference shares
// none of them.
template <typename E>
struct Rwkv7MulEngine {
  // p.a = -kk and p.b = kk o a.
  void (*make)(const FusedMulRwkv7Args& x, const DeltaProblem& p, ThreadPool& pool);
  // dkk = a o p.db - p.da and da = kk o p.db.
  void (*put)(const FusedMulRwkv7BackwardArgs& x, const DeltaBackwardProblem& p, ThreadPool& pool);
  std::size_t (*forward_workspace)(const DeltaProblem&, int);
  Status (*forward)(const DeltaProblem&, ThreadPool&, std::span<std::byte>);
  std::size_t (*backward_workspace)(const DeltaBackwardProblem&, int);
  Status (*backward)(const DeltaBackwardProblem&, ThreadPool&, std::span<std::byte>);
};

// Lays a and b, and in the backward da and db, into the workspace; returns where that ends.
template <typename E>
MadeTensors place_rwkv7_mul(DeltaProblem& p, std::byte* base) {
  MadeTensors made(dtype_of<E>::value, base);
  p.a = made.make({p.B, p.T, p.H, p.K});
  p.b = made.make({p.B, p.T, p.H, p.K});
  return made;
}
template <typename E>
MadeTensors place_rwkv7_mul(DeltaBackwardProblem& p, std::byte* base) {
  MadeTensors made = place_rwkv7_mul<E>(static_cast<DeltaProblem&>(p), base);
  p.da = made.make({p.B, p.T, p.H, p.K});
  p.db = made.make({p.B, p.T, p.H, p.K});
  return made;
}

template <typename E>
void register_rwkv7_mul(Registry& r, const char* backend, const Rwkv7MulEngine<E>& e) {
  using F = FusedMulRwkv7Args;
  using G = FusedMulRwkv7BackwardArgs;
  constexpr bool narrow = sizeof(E) < sizeof(double);
  r.add(Kernel<F>{.function = kFusedMulRecurrentRwkv7,
                  .backend = backend,
                  .name = narrow ? "rwkv7.mul.forward" : "rwkv7.mul.recurrence",
                  .verify = [](const F& x, const CallInfo& c) { return narrow ? verify_cpu(c, x.r.dtype) : accept(); },
                  .workspace =
                      [e](const F& x, const CallInfo& c) {
                        DeltaProblem p = to_problem(x);
                        const std::size_t placed = place_rwkv7_mul<E>(p, nullptr).anywhere();
                        return placed + e.forward_workspace(p, c.threads);
                      },
                  .launch =
                      [e](const F& x, const CallInfo&, const LaunchInfo& l) {
                        DeltaProblem p = to_problem(x);
                        const std::size_t placed = place_rwkv7_mul<E>(p, l.workspace.data()).used();
                        e.make(x, p, *l.pool);
                        return e.forward(p, *l.pool, l.workspace.subspan(placed));
                      }});
  r.add(Kernel<G>{.function = kFusedMulRecurrentRwkv7Backward,
                  .backend = backend,
                  .name = narrow ? "rwkv7.mul.backward" : "rwkv7.mul.recurrence",
                  .verify = [](const G& x, const CallInfo& c) { return narrow ? verify_cpu(c, x.r.dtype) : accept(); },
                  .workspace =
                      [e](const G& x, const CallInfo& c) {
                        DeltaBackwardProblem p = to_problem(x);
                        const std::size_t placed = place_rwkv7_mul<E>(p, nullptr).anywhere();
                        return placed + e.backward_workspace(p, c.threads);
                      },
                  .launch =
                      [e](const G& x, const CallInfo&, const LaunchInfo& l) {
                        DeltaBackwardProblem p = to_problem(x);
                        const std::size_t placed = place_rwkv7_mul<E>(p, l.workspace.data()).used();
                        e.make(x, p, *l.pool);
                        if (Status s = e.backward(p, *l.pool, l.workspace.subspan(placed)); !s) return s;
                        e.put(x, p, *l.pool);
                        return Status();
                      }});
}

}  // namespace fla
