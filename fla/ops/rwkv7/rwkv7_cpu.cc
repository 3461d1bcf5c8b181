#include "fla/engine/delta/engine.h"
#include "fla/kernels/cpu/element.h"
#include "fla/ops/rwkv7/rwkv7_mul.h"
#include "fla/ops/rwkv7/rwkv7_problem.h"

namespace fla {

namespace {

float load(const TensorView& t, const std::byte* at) { return static_cast<float>(cpu::load_element(at, t.dtype)); }
void store(const TensorView& t, std::byte* at, float x) { cpu::store_element(at, t.dtype, x); }

template <typename Fn>
void for_each_channel(const DeltaProblem& p, ThreadPool& pool, Fn&& fn) {
  pool.run(p.B * p.T, [&](std::int64_t task, int) {
    for (std::int64_t h = 0; h < p.H; ++h)
      for (std::int64_t i = 0; i < p.K; ++i) fn(task / p.T, task % p.T, h, i);
  });
}

void make(const FusedMulRwkv7Args& x, const DeltaProblem& p, ThreadPool& pool) {
  for_each_channel(p, pool, [&](std::int64_t n, std::int64_t t, std::int64_t h, std::int64_t i) {
    const float kk = load(x.kk, x.kk.at(n, t, h, i)), eta = load(x.a, x.a.at(n, t, h, i));
    *reinterpret_cast<float*>(p.a.at(n, t, h, i)) = -kk;
    *reinterpret_cast<float*>(p.b.at(n, t, h, i)) = kk * eta;
  });
}

void put(const FusedMulRwkv7BackwardArgs& x, const DeltaBackwardProblem& p, ThreadPool& pool) {
  for_each_channel(p, pool, [&](std::int64_t n, std::int64_t t, std::int64_t h, std::int64_t i) {
    const float kk = load(x.kk, x.kk.at(n, t, h, i)), eta = load(x.a, x.a.at(n, t, h, i));
    const float da = *reinterpret_cast<const float*>(p.da.at(n, t, h, i)),
                db = *reinterpret_cast<const float*>(p.db.at(n, t, h, i));
    if (x.dkk) store(x.dkk, x.dkk.at(n, t, h, i), eta * db - da);
    if (x.da) store(x.da, x.da.at(n, t, h, i), kk * db);
  });
}

}  // namespace

void register_rwkv7_cpu(Registry& r) {
  register_delta_cpu(r, "rwkv7", kRwkv7Functions);
  register_rwkv7_mul<float>(r, "cpu",
                            {make, put, cpu::delta_step_forward_workspace, cpu::delta_step_forward,
                             cpu::delta_step_backward_workspace, cpu::delta_step_backward});
}

}  // namespace fla
