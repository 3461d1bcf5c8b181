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

// A backend's functions, and the element type of what is made.
template <typename E>
struct Rwkv7MulEngine {
  double (*load)(const TensorView&, const std::byte*);
  void (*store)(const TensorView&, std::byte*, double);
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

template <typename Fn>
void for_each_channel(const DeltaProblem& p, ThreadPool& pool, Fn&& fn) {
  pool.run(p.B * p.T, [&](std::int64_t task, int) {
    for (std::int64_t h = 0; h < p.H; ++h)
      for (std::int64_t i = 0; i < p.K; ++i) fn(task / p.T, task % p.T, h, i);
  });
}

template <typename E>
void make_rwkv7_mul(const FusedMulRwkv7Args& x, const DeltaProblem& p, const Rwkv7MulEngine<E>& e, ThreadPool& pool) {
  for_each_channel(p, pool, [&](std::int64_t n, std::int64_t t, std::int64_t h, std::int64_t i) {
    const E kk = static_cast<E>(e.load(x.kk, x.kk.at(n, t, h, i))),
            eta = static_cast<E>(e.load(x.a, x.a.at(n, t, h, i)));
    *reinterpret_cast<E*>(p.a.at(n, t, h, i)) = -kk;
    *reinterpret_cast<E*>(p.b.at(n, t, h, i)) = kk * eta;
  });
}

template <typename E>
void put_rwkv7_mul(const FusedMulRwkv7BackwardArgs& x, const DeltaBackwardProblem& p, const Rwkv7MulEngine<E>& e,
                   ThreadPool& pool) {
  for_each_channel(p, pool, [&](std::int64_t n, std::int64_t t, std::int64_t h, std::int64_t i) {
    const E kk = static_cast<E>(e.load(x.kk, x.kk.at(n, t, h, i))),
            eta = static_cast<E>(e.load(x.a, x.a.at(n, t, h, i)));
    const E da = *reinterpret_cast<const E*>(p.da.at(n, t, h, i)),
            db = *reinterpret_cast<const E*>(p.db.at(n, t, h, i));
    if (x.dkk) e.store(x.dkk, x.dkk.at(n, t, h, i), eta * db - da);
    if (x.da) e.store(x.da, x.da.at(n, t, h, i), kk * db);
  });
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
                        make_rwkv7_mul(x, p, e, *l.pool);
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
                        make_rwkv7_mul(x, p, e, *l.pool);
                        if (Status s = e.backward(p, *l.pool, l.workspace.subspan(placed)); !s) return s;
                        put_rwkv7_mul(x, p, e, *l.pool);
                        return Status();
                      }});
}

}  // namespace fla
