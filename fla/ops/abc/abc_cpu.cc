// The CPU kernels of abc: weights and gates by a scan over time, README.md (2), then the attention over slots, then in
// the backward the scan of (4).
// numerics  the running sum is kept relative to a running maximum, in F32. The gate is -log1p of what the token adds
//           where that is less than half, a difference of maxima and a logarithm of sums elsewhere: neither loses
//           digits
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/diag/cpu/internal.h"
#include "fla/engine/slot/cpu/entry.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/targets.h"
#include "fla/ops/abc/abc_problem.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/ops/abc/abc_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/kernels/cpu/io-inl.h"
#include "fla/kernels/cpu/math-inl.h"
#include "hwy/contrib/math/math-inl.h"

#ifndef FLA_OPS_ABC_CPU_CC_ONCE
#define FLA_OPS_ABC_CPU_CC_ONCE
namespace fla::cpu {

struct AbcMemory {
  TensorView w, g, dw, path;  // [B, T, H, M]
  TensorView dhk, dhv;        // [B, H, K, M], [B, H, M, V]; where there is an initial state
  TensorView hk, hv;          // likewise, the final states; where they have a gradient
  float* rows = nullptr;      // per thread: [6][pad_up(M)]
  std::span<std::byte> engine;
  std::size_t bytes = 0;

  AbcMemory(const AbcArgs& a, int threads, std::byte* base) {
    Arena arena = common(a, threads, base);
    finish(arena, slot_chunk_forward_workspace(abc_problem(a, w, g), threads));
  }
  AbcMemory(const AbcBackwardArgs& a, int threads, std::byte* base) {
    Arena arena = common(a, threads, base);
    dw = view(arena, a.s.dims());
    path = view(arena, a.s.dims());
    if (a.initial_state) dhk = view(arena, a.initial_state.dims());
    if (a.initial_values) dhv = view(arena, a.initial_values.dims());
    if (a.dht) hk = view(arena, a.dht.dims());
    if (a.dht_values) hv = view(arena, a.dht_values.dims());
    finish(arena, std::max(slot_chunk_backward_workspace(problem(a), threads),
                           slot_chunk_forward_workspace(final_states(a), threads)));
  }
  SlotProblem final_states(const AbcArgs& a) const {
    SlotProblem p = abc_problem(a, w, g);
    p.o = {};
    p.hkt = hk;
    p.hvt = hv;
    return p;
  }
  SlotBackwardProblem problem(const AbcBackwardArgs& a) const {
    SlotBackwardProblem p = abc_problem(a, w, g);
    p.ds = dw;
    p.path = path;
    p.dhk0 = dhk;
    p.dhv0 = dhv;
    return p;
  }

 private:
  static TensorView view(Arena& arena, std::span<const std::int64_t> dims) {
    std::int64_t n = 1;
    for (const std::int64_t d : dims) n *= d;
    return {arena.floats(n), DType::F32, dims};
  }
  Arena common(const AbcArgs& a, int threads, std::byte* base) {
    Arena arena;
    if (base != nullptr) arena = Arena(base);
    w = view(arena, a.s.dims());
    g = view(arena, a.s.dims());
    rows = arena.floats(std::int64_t{6} * threads * pad_up(a.s.dim(3)));
    return arena;
  }
  void finish(Arena& arena, std::size_t need) {
    std::byte* rest = arena.take<std::byte>(static_cast<std::int64_t>(need));
    engine = {rest, rest == nullptr ? 0 : need};
    bytes = arena.bytes();
  }
};

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace {

float* slots_of(const TensorView& x, std::int64_t b, std::int64_t t, std::int64_t h) {
  return reinterpret_cast<float*>(x.at(b, t, h));
}

Rows tokens_of(const TensorView& x, std::int64_t b, std::int64_t h) {
  return {x.at(b, 0, h), x.dtype, x.stride[1] * static_cast<std::int64_t>(size_of(x.dtype)), x.stride[3]};
}

// (2)
void abc_weights(const AbcArgs& a, const AbcMemory& mem, ThreadPool& pool) {
  const std::int64_t T = a.s.dim(1), H = a.s.dim(2), M = a.s.dim(3), mp = pad_up(M);
  if (T == 0) return;
  pool.run(a.s.dim(0) * H, [&](std::int64_t task, int worker) HWY_ATTR {
    const hn::ScalableTag<float> d;
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), b = task / H, h = task % H;
    const Rows s = tokens_of(a.s, b, h);
    float* x = mem.rows + static_cast<std::int64_t>(worker) * 6 * mp;
    float *most = x + mp, *sum = x + 2 * mp, *w = x + 3 * mp, *g = x + 4 * mp;
    const auto zero = hn::Zero(d), half = hn::Set(d, 0.5F), one = hn::Set(d, 1.0F);
    for (std::int64_t t = 0; t < T; ++t) {
      load_rows(s, t, 1, 0, M, x, mp);
      for (std::int64_t c = 0; c < mp; c += lanes) {
        const auto xt = hn::LoadU(d, x + c);
        if (t == 0) {
          hn::StoreU(xt, d, most + c);
          hn::StoreU(one, d, sum + c);
          hn::StoreU(one, d, w + c);
          hn::StoreU(zero, d, g + c);
          continue;
        }
        const auto before = hn::LoadU(d, most + c), old_sum = hn::LoadU(d, sum + c);
        const auto now = hn::Max(before, xt), moved = hn::Sub(before, now);
        const auto old = hn::Mul(old_sum, exp_v(d, moved)), added = exp_v(d, hn::Sub(xt, now));
        const auto total = hn::Add(old, added), weight = hn::Div(added, total);
        const auto small = hn::Log1p(d, hn::Neg(hn::Min(weight, half)));
        const auto large = hn::Add(moved, hn::Log(d, hn::Div(old_sum, total)));
        hn::StoreU(now, d, most + c);
        hn::StoreU(total, d, sum + c);
        hn::StoreU(weight, d, w + c);
        hn::StoreU(hn::IfThenElse(hn::Lt(weight, half), small, large), d, g + c);
      }
      std::copy(w, w + M, slots_of(mem.w, b, t, h));
      std::copy(g, g + M, slots_of(mem.g, b, t, h));
    }
  });
}

// States against their gradients by slots, [M] of one sequence and head: colsum(hk o dhk) + rowsum(hv o dhv).
void by_slots(const TensorView& hk, const TensorView& dhk, const TensorView& hv, const TensorView& dhv, std::int64_t b,
              std::int64_t h, std::int64_t M, float* sum) {
  std::fill(sum, sum + M, 0.0F);
  const auto add = [&](const TensorView& x, const TensorView& y, bool columns) {
    if (!x || !y) return;
    const Rows rx = state_rows(x, b, h), ry = state_rows(y, b, h);
    for (std::int64_t i = 0; i < x.dim(2); ++i)
      for (std::int64_t j = 0; j < x.dim(3); ++j)
        sum[columns ? j : i] += static_cast<float>(scalar_at(rx, i, j)) * static_cast<float>(scalar_at(ry, i, j));
  };
  add(hk, dhk, true);
  add(hv, dhv, false);
}

// (4). The first token's weight is 1 whatever its logits are: where nothing comes back from a later one, ds is exactly
// 0, and not what rounding leaves of a difference.
void abc_logit_gradients(const AbcBackwardArgs& a, const AbcMemory& mem, ThreadPool& pool) {
  const std::int64_t T = a.s.dim(1), H = a.s.dim(2), M = a.s.dim(3), mp = pad_up(M);
  if (T == 0) return;
  pool.run(a.s.dim(0) * H, [&](std::int64_t task, int worker) HWY_ATTR {
    const hn::ScalableTag<float> d;
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), b = task / H, h = task % H;
    const Rows ds = tokens_of(a.ds, b, h);
    float* carry = mem.rows + static_cast<std::int64_t>(worker) * 6 * mp;
    float *first = carry + mp, *decay = carry + 2 * mp, *out = carry + 3 * mp, *last = carry + 4 * mp,
          *later = carry + 5 * mp;
    by_slots(a.initial_state, mem.dhk, a.initial_values, mem.dhv, b, h, M, first);
    by_slots(mem.hk, a.dht, mem.hv, a.dht_values, b, h, M, last);
    std::fill(carry, carry + mp, 0.0F);
    std::fill(decay, decay + mp, 0.0F);
    for (std::int64_t m = 0; m < M; ++m) later[m] = T > 1 && last[m] != 0.0F ? 1.0F : 0.0F;
    for (std::int64_t t = T - 1; t >= 0; --t) {
      for (std::int64_t c = 0; c < mp; c += lanes) hn::StoreU(exp_v(d, hn::LoadU(d, decay + c)), d, decay + c);
      const float *w = slots_of(mem.w, b, t, h), *dw = slots_of(mem.dw, b, t, h), *path = slots_of(mem.path, b, t, h);
      for (std::int64_t m = 0; m < M; ++m) {
        const float dz = (t == 0 ? first[m] : 0.0F) - path[m] - (t == T - 1 ? last[m] : 0.0F);
        carry[m] = dz + decay[m] * carry[m];
        out[m] = t == 0 && later[m] == 0.0F ? 0.0F : w[m] * (dw[m] + carry[m]);
        if (dw[m] != 0.0F || path[m] != 0.0F) later[m] = 1.0F;
      }
      store_row(out, ds.at(t, 0), ds.dtype, ds.last, M);
      std::copy(slots_of(mem.g, b, t, h), slots_of(mem.g, b, t, h) + M, decay);
    }
  });
}

}  // namespace

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla {
namespace cpu {
namespace {

HWY_EXPORT(abc_weights);
HWY_EXPORT(abc_logit_gradients);

Status forward(const AbcArgs& a, const CallInfo&, const LaunchInfo& l) {
  const AbcMemory mem(a, l.pool->size(), l.workspace.data());
  HWY_DYNAMIC_DISPATCH(abc_weights)(a, mem, *l.pool);
  return slot_chunk_forward(abc_problem(a, mem.w, mem.g), *l.pool, mem.engine);
}

void copy_state(const TensorView& from, const TensorView& to) {
  if (!from || !to) return;
  for (std::int64_t n = 0; n < to.dim(0); ++n)
    for (std::int64_t h = 0; h < to.dim(1); ++h)
      for (std::int64_t i = 0; i < to.dim(2); ++i)
        for (std::int64_t j = 0; j < to.dim(3); ++j)
          store_element(to.at(n, h, i, j), to.dtype,
                        static_cast<double>(*reinterpret_cast<const float*>(from.at(n, h, i, j))));
}

Status backward(const AbcBackwardArgs& a, const CallInfo&, const LaunchInfo& l) {
  const AbcMemory mem(a, l.pool->size(), l.workspace.data());
  HWY_DYNAMIC_DISPATCH(abc_weights)(a, mem, *l.pool);
  if (Status s = slot_chunk_backward(mem.problem(a), *l.pool, mem.engine); !s) return s;
  if (a.ds) {
    if (mem.hk || mem.hv)
      if (Status s = slot_chunk_forward(mem.final_states(a), *l.pool, mem.engine); !s) return s;
    HWY_DYNAMIC_DISPATCH(abc_logit_gradients)(a, mem, *l.pool);
  }
  copy_state(mem.dhk, a.dh0);
  copy_state(mem.dhv, a.dh0_values);
  return {};
}

}  // namespace
}  // namespace cpu

void register_abc_cpu(Registry& r) {
  r.add_backend("abc", cpu_backend());
  r.add(Kernel<AbcArgs>{
      .function = kChunkAbc,
      .backend = "cpu",
      .name = "abc.chunk.forward",
      .verify = [](const AbcArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace = [](const AbcArgs& a, const CallInfo& c) { return cpu::AbcMemory(a, c.threads, nullptr).bytes; },
      .launch = cpu::forward});
  r.add(Kernel<AbcBackwardArgs>{
      .function = kChunkAbcBackward,
      .backend = "cpu",
      .name = "abc.chunk.backward",
      .verify = [](const AbcBackwardArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace = [](const AbcBackwardArgs& a,
                      const CallInfo& c) { return cpu::AbcMemory(a, c.threads, nullptr).bytes; },
      .launch = cpu::backward});
}

}  // namespace fla
#endif
