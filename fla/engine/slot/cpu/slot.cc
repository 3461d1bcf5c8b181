// Attention over slots on the CPU; problem.h (1), (2).
//
// forward   by chunks: the diagonal-decay engine gives y as the gradient of its queries (keys s, values k, upstream
//           gradient q), a softmax over slots makes p, and the engine's forward reads with p. Token by token: both
//           states of a head in scratch, one pass over each per token
// backward  y and p again; the engine's backward of the second pass gives dp, the softmax dy; with dy as queries the
//           engine's forward gives dq (its output) and its backward the rest. Each query of a group goes through on its
//           own and what a group shares is summed in fp32, in order
// bits      those of the engine; rows of the softmax stand alone
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "fla/engine/diag/cpu/entry.h"
#include "fla/engine/diag/cpu/internal.h"
#include "fla/engine/slot/cpu/entry.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/slot/cpu/slot.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/diag/cpu/chunk-inl.h"

#ifndef FLA_ENGINE_SLOT_CPU_SLOT_CC_ONCE
#define FLA_ENGINE_SLOT_CPU_SLOT_CC_ONCE
namespace fla::cpu {

// A contiguous view; without memory it has a shape all the same.
inline TensorView slot_floats(Arena& arena, std::initializer_list<std::int64_t> dims) {
  std::int64_t n = 1;
  for (const std::int64_t d : dims) n *= d;
  return {arena.floats(n), DType::F32, std::span(dims.begin(), dims.size())};
}

// Every G-th head of x, from head j on.
inline TensorView queries_of(TensorView x, std::int64_t G, std::int64_t j) {
  if (!x) return x;
  if (x.data != nullptr)
    x.data = static_cast<std::byte*>(x.data) + j * x.stride[2] * static_cast<std::int64_t>(size_of(x.dtype));
  x.shape[2] /= G;
  x.stride[2] *= G;
  return x;
}

// The two passes as problems of the diagonal-decay engine. The first: keys s, values k.
inline DiagProblem slot_pass(const SlotProblem& p, const TensorView& values, std::int64_t width) {
  DiagProblem d;
  d.B = p.B;
  d.T = p.T;
  d.H = p.H;
  d.N = p.N;
  d.K = p.M;
  d.V = width;
  d.cu_seqlens = p.cu_seqlens;
  d.reverse = p.reverse;
  d.chunk = p.chunk;
  d.k = p.s;
  d.v = values;
  d.gk = p.g;
  return d;
}
inline DiagProblem first_pass(const SlotProblem& p) {
  DiagProblem d = slot_pass(p, p.k, p.K);
  d.scale = p.scale;
  d.h0 = swap_state_axes(p.hk0);
  return d;
}
inline DiagProblem second_pass(const SlotProblem& p) {
  DiagProblem d = slot_pass(p, p.v, p.V);
  d.h0 = p.hv0;
  return d;
}
// y is the gradient of the first pass's queries, whose own values do not matter.
inline DiagBackwardProblem scores_of_slots(const SlotProblem& p, std::int64_t j, const TensorView& y) {
  DiagBackwardProblem d(first_pass(p));
  d.q = p.s;
  d.do_ = queries_of(p.q, p.G, j);
  d.dq = y;
  return d;
}

struct SlotForward {
  TensorView y;  // [B, T, H, M], then p
  std::span<std::byte> engine;
  std::size_t bytes = 0;

  SlotForward(const SlotProblem& p, int threads, std::byte* base) {
    Arena arena;
    if (base != nullptr) arena = Arena(base);
    y = slot_floats(arena, {p.B, p.T, p.H, p.M});
    const std::size_t need = std::max({diag_chunk_backward_workspace(scores_of_slots(p, 0, y), p.chunk, threads),
                                       diag_chunk_forward_workspace(reading(p, 0), p.chunk, threads),
                                       diag_chunk_forward_workspace(key_state(p), p.chunk, threads)});
    std::byte* rest = arena.take<std::byte>(static_cast<std::int64_t>(need));
    engine = {rest, rest == nullptr ? 0 : need};
    bytes = arena.bytes();
  }
  // The second pass of query j of each group. The last one leaves the state, which may lie where all of them start.
  DiagProblem reading(const SlotProblem& p, std::int64_t j) const {
    DiagProblem d = second_pass(p);
    d.q = p.o ? y : p.s;
    d.o = queries_of(p.o, p.G, j);
    if (j + 1 == p.G) d.ht = p.hvt;
    return d;
  }
  DiagProblem key_state(const SlotProblem& p) const {
    DiagProblem d = first_pass(p);
    d.q = p.s;
    d.ht = swap_state_axes(p.hkt);
    return d;
  }
};

struct SlotBackward {
  TensorView y, p, dp;      // [B, T, H, M]; dp becomes dy
  TensorView ds1, ds2;      // [B, T, H, M] of the two passes
  TensorView dg1, dg2;      // likewise; absent: not wanted
  TensorView ds, dg, path;  // sums over the queries of a group; absent where they need no sum, or are not wanted
  TensorView dk, dv;        // of one query of a group, as k, v in F32
  TensorView dk_sum, dv_sum, dhk_sum, dhv_sum, dhk, dhv;
  std::span<std::byte> engine;
  std::size_t bytes = 0;

  SlotBackward(const SlotBackwardProblem& s, int threads, std::byte* base) {
    Arena arena;
    if (base != nullptr) arena = Arena(base);
    const auto by_slot = [&] { return slot_floats(arena, {s.B, s.T, s.H, s.M}); };
    for (TensorView* x : {&y, &p, &dp, &ds1, &ds2}) *x = by_slot();
    if (s.dg)
      for (TensorView* x : {&dg1, &dg2}) *x = by_slot();
    if (s.G > 1) {
      if (s.ds) ds = by_slot();
      if (s.dg) dg = by_slot();
      if (s.dk)
        for (TensorView* x : {&dk, &dk_sum}) *x = slot_floats(arena, {s.B, s.T, s.H, s.K});
      if (s.dv)
        for (TensorView* x : {&dv, &dv_sum}) *x = slot_floats(arena, {s.B, s.T, s.H, s.V});
      if (s.dhk0)
        for (TensorView* x : {&dhk, &dhk_sum}) *x = slot_floats(arena, {s.N, s.H, s.K, s.M});
      if (s.dhv0)
        for (TensorView* x : {&dhv, &dhv_sum}) *x = slot_floats(arena, {s.N, s.H, s.M, s.V});
    }
    const std::size_t need = std::max({diag_chunk_backward_workspace(scores_of_slots(s, 0, y), s.chunk, threads),
                                       diag_chunk_backward_workspace(second_back(s, 0), s.chunk, threads),
                                       diag_chunk_backward_workspace(first_back(s, 0), s.chunk, threads),
                                       diag_chunk_forward_workspace(query_gradient(s, 0), s.chunk, threads)});
    std::byte* rest = arena.take<std::byte>(static_cast<std::int64_t>(need));
    engine = {rest, rest == nullptr ? 0 : need};
    bytes = arena.bytes();
  }

  DiagBackwardProblem second_back(const SlotBackwardProblem& s, std::int64_t j) const {
    DiagBackwardProblem d(second_pass(s));
    d.q = p;
    d.do_ = queries_of(s.do_, s.G, j);
    if (j == 0) d.dht = s.dhvt;
    d.dq = dp;
    d.dk = ds2;
    d.dgk = dg2;
    d.dv = s.G > 1 ? dv : s.dv;
    d.dh0 = s.G > 1 ? dhv : s.dhv0;
    return d;
  }
  DiagBackwardProblem first_back(const SlotBackwardProblem& s, std::int64_t j) const {
    DiagBackwardProblem d(first_pass(s));
    d.q = dp;
    d.do_ = queries_of(s.q, s.G, j);
    if (j == 0) d.dht = swap_state_axes(s.dhkt);
    d.dk = ds1;
    d.dgk = dg1;
    d.dv = s.G > 1 ? dk : s.dk;
    d.dh0 = swap_state_axes(s.G > 1 ? dhk : s.dhk0);
    return d;
  }
  DiagProblem query_gradient(const SlotBackwardProblem& s, std::int64_t j) const {
    DiagProblem d = first_pass(s);
    d.q = dp;
    d.o = queries_of(s.dq, s.G, j);
    return d;
  }
};

struct SlotStepTiles {
  float *hk = nullptr, *hv = nullptr;                                // [K, mp], [M, vp]
  float *k = nullptr, *v = nullptr, *s = nullptr, *decay = nullptr;  // [kp], [vp], [mp], [mp]
  float *q = nullptr, *y = nullptr, *o = nullptr, *tmp = nullptr;    // [kp], [mp], [vp], transposes

  void carve(Arena& arena, std::int64_t K, std::int64_t V, std::int64_t M) {
    const std::int64_t kp = pad_up(K), vp = pad_up(V), mp = pad_up(M);
    hk = arena.floats(kp * mp);
    hv = arena.floats(mp * vp);
    for (float** x : {&k, &q}) *x = arena.floats(kp);
    for (float** x : {&v, &o}) *x = arena.floats(vp);
    for (float** x : {&s, &decay, &y}) *x = arena.floats(mp);
    tmp = arena.floats((kPad + 4) * std::max(kp, mp));
  }
  static std::size_t bytes(const SlotProblem& p) {
    Arena arena;
    SlotStepTiles().carve(arena, p.K, p.V, p.M);
    return arena.bytes();
  }
};

inline std::int64_t slot_step_slots(const SlotProblem& p, int threads) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(threads, p.N * p.H));
}

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace {

using F32 = hn::ScalableTag<float>;

HWY_INLINE std::int64_t lanes_of(F32 d) { return static_cast<std::int64_t>(hn::Lanes(d)); }

// out = softmax of y [M]. Rows lie side by side: nothing behind the M is read or written.
HWY_NOINLINE void softmax(const float* y, std::int64_t M, float* out) {
  const F32 d;
  const std::int64_t lanes = lanes_of(d), whole = M / lanes * lanes;
  float most = y[0];
  for (std::int64_t m = 1; m < M; ++m) most = std::max(most, y[m]);
  const auto shift = hn::Set(d, most);
  float sum = 0.0F;
  for (std::int64_t m = 0; m < whole; m += lanes) hn::StoreU(exp_v(d, hn::Sub(hn::LoadU(d, y + m), shift)), d, out + m);
  if (whole < M) {
    float rest[kPad] = {};
    std::copy(y + whole, y + M, rest);
    hn::StoreU(exp_v(d, hn::Sub(hn::LoadU(d, rest), shift)), d, rest);
    std::copy(rest, rest + (M - whole), out + whole);
  }
  for (std::int64_t m = 0; m < M; ++m) sum += out[m];
  const float inverse = 1.0F / sum;
  for (std::int64_t m = 0; m < M; ++m) out[m] *= inverse;
}

float* row(const TensorView& x, std::int64_t b, std::int64_t t, std::int64_t h) {
  return reinterpret_cast<float*>(x.at(b, t, h));
}

// fn(b, t, h) for all rows of a [B, T, H, .] tensor.
template <typename Fn>
HWY_INLINE void for_rows(const SlotProblem& p, ThreadPool& pool, const Fn& fn) {
  constexpr std::int64_t kRows = 64;
  const std::int64_t parts = (p.T + kRows - 1) / kRows;
  pool.run(p.B * parts, [&](std::int64_t task, int) HWY_ATTR {
    const std::int64_t b = task / parts, t0 = task % parts * kRows, t1 = std::min(p.T, t0 + kRows);
    for (std::int64_t t = t0; t < t1; ++t)
      for (std::int64_t h = 0; h < p.H; ++h) fn(b, t, h);
  });
}

void softmax_rows(const SlotProblem& p, const TensorView& y, const TensorView& out, ThreadPool& pool) {
  for_rows(p, pool, [&](std::int64_t b, std::int64_t t, std::int64_t h) HWY_ATTR {
    softmax(row(y, b, t, h), p.M, row(out, b, t, h));
  });
}

// dp becomes dy = p o (dp - <p, dp>); path gets, or has added, y o dy + p o dp.
void softmax_back(const SlotBackwardProblem& s, const SlotBackward& w, bool first, ThreadPool& pool) {
  for_rows(s, pool, [&](std::int64_t b, std::int64_t t, std::int64_t h) HWY_ATTR {
    const float *y = row(w.y, b, t, h), *p = row(w.p, b, t, h);
    float* dp = row(w.dp, b, t, h);
    float* path = s.path ? row(s.path, b, t, h) : nullptr;
    float mean = 0.0F;
    for (std::int64_t m = 0; m < s.M; ++m) mean += p[m] * dp[m];
    for (std::int64_t m = 0; m < s.M; ++m) {
      const float dy = p[m] * (dp[m] - mean);
      if (path != nullptr) path[m] = (first ? 0.0F : path[m]) + (y[m] * dy + p[m] * dp[m]);
      dp[m] = dy;
    }
  });
}

// to = a + b, and what it had before unless first; rounded where `to` is narrow.
void add_rows(const SlotProblem& s, const TensorView& a, const TensorView& b2, const TensorView& to, bool first,
              std::int64_t width, ThreadPool& pool) {
  for_rows(s, pool, [&](std::int64_t b, std::int64_t t, std::int64_t h) HWY_ATTR {
    const float* x = row(a, b, t, h);
    const float* y = b2 ? row(b2, b, t, h) : nullptr;
    for (std::int64_t m = 0; m < width; ++m) {
      float sum = y != nullptr ? x[m] + y[m] : x[m];
      if (!first) sum += row(to, b, t, h)[m];
      store_element(to.at(b, t, h, m), to.dtype, static_cast<double>(sum));
    }
  });
}

void add_states(const TensorView& from, const TensorView& to, bool first) {
  for (std::int64_t n = 0; n < from.dim(0); ++n)
    for (std::int64_t h = 0; h < from.dim(1); ++h)
      for (std::int64_t i = 0; i < from.dim(2); ++i) {
        const float* x = reinterpret_cast<const float*>(from.at(n, h, i));
        for (std::int64_t j = 0; j < from.dim(3); ++j) {
          const float before = first ? 0.0F : *reinterpret_cast<const float*>(to.at(n, h, i, j));
          store_element(to.at(n, h, i, j), to.dtype, static_cast<double>(before + x[j]));
        }
      }
}

// ---- token by token

HWY_INLINE void load_tile(const Rows& from, std::int64_t rows, std::int64_t columns, float* to, float* tmp) {
  const std::int64_t ld = pad_up(columns);
  if (from) return load_state(from, rows, 0, columns, to, ld, tmp);
  std::fill(to, to + pad_up(rows) * ld, 0.0F);
}

// state_c = e_c o state_c + a_c x for rows c, the decay per column (kByColumn) or per row.
template <bool kByColumn>
HWY_INLINE void advance_rows(float* state, std::int64_t rows, std::int64_t ld, const float* decay, const float* a,
                             const float* x) {
  const F32 d;
  for (std::int64_t c = 0; c < rows; ++c) {
    const auto ac = hn::Set(d, a[c]), ec = hn::Set(d, kByColumn ? 1.0F : decay[c]);
    for (std::int64_t j = 0; j < ld; j += lanes_of(d)) {
      const auto e = kByColumn ? hn::LoadU(d, decay + j) : ec;
      const auto old = hn::Mul(e, hn::LoadU(d, state + c * ld + j));
      hn::StoreU(hn::MulAdd(ac, hn::LoadU(d, x + j), old), d, state + c * ld + j);
    }
  }
}

// out = factor * sum_c a_c state_c
HWY_INLINE void read_rows(const float* state, std::int64_t rows, std::int64_t ld, const float* a, float factor,
                          float* out) {
  const F32 d;
  const auto f = hn::Set(d, factor);
  for (std::int64_t j = 0; j < ld; j += lanes_of(d)) {
    auto s0 = hn::Zero(d), s1 = s0;
    std::int64_t c = 0;
    for (; c + 2 <= rows; c += 2) {
      s0 = hn::MulAdd(hn::Set(d, a[c]), hn::LoadU(d, state + c * ld + j), s0);
      s1 = hn::MulAdd(hn::Set(d, a[c + 1]), hn::LoadU(d, state + (c + 1) * ld + j), s1);
    }
    if (c < rows) s0 = hn::MulAdd(hn::Set(d, a[c]), hn::LoadU(d, state + c * ld + j), s0);
    hn::StoreU(hn::Mul(f, hn::Add(s0, s1)), d, out + j);
  }
}

HWY_NOINLINE void step_head(const SlotProblem& p, const SlotStepTiles& w, std::int64_t n, std::int64_t h) {
  const F32 d;
  const std::int64_t K = p.K, V = p.V, M = p.M, kp = pad_up(K), vp = pad_up(V), mp = pad_up(M);
  DiagProblem order;  // for the rows of a sequence
  order.reverse = p.reverse;
  const Sequence span = p.sequence(n);
  const auto rows = [&](const TensorView& x, std::int64_t head) { return token_rows(x, order, span, head); };
  const Rows k = rows(p.k, h), v = rows(p.v, h), s = rows(p.s, h), g = rows(p.g, h);
  load_tile(state_rows(p.hk0, n, h), K, M, w.hk, w.tmp);
  load_tile(state_rows(p.hv0, n, h), M, V, w.hv, w.tmp);
  for (std::int64_t t = 0; t < span.length; ++t) {
    load_rows(k, t, 1, 0, K, w.k, kp);
    load_rows(v, t, 1, 0, V, w.v, vp);
    load_rows(s, t, 1, 0, M, w.s, mp);
    load_rows(g, t, 1, 0, M, w.decay, mp);
    for (std::int64_t j = 0; j < mp; j += lanes_of(d)) hn::StoreU(exp_v(d, hn::LoadU(d, w.decay + j)), d, w.decay + j);
    advance_rows<true>(w.hk, K, mp, w.decay, w.k, w.s);
    advance_rows<false>(w.hv, M, vp, w.decay, w.s, w.v);
    for (std::int64_t i = h * p.G; p.o && i < (h + 1) * p.G; ++i) {
      load_rows(rows(p.q, i), t, 1, 0, K, w.q, kp);
      read_rows(w.hk, K, mp, w.q, static_cast<float>(p.scale), w.y);
      softmax(w.y, M, w.y);
      read_rows(w.hv, M, vp, w.y, 1.0F, w.o);
      store_rows(w.o, vp, rows(p.o, i), t, 1, 0, V);
    }
  }
  if (p.hkt) store_state(w.hk, mp, state_rows(p.hkt, n, h), K, 0, M, w.tmp);
  if (p.hvt) store_state(w.hv, vp, state_rows(p.hvt, n, h), M, 0, V, w.tmp);
}

void step_heads(const SlotProblem& p, ThreadPool& pool, std::byte* workspace) {
  const std::size_t bytes = SlotStepTiles::bytes(p);
  run_items(pool, p.N * p.H, slot_step_slots(p, pool.size()), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    SlotStepTiles w;
    w.carve(arena, p.K, p.V, p.M);
    step_head(p, w, item / p.H, item % p.H);
  });
}

}  // namespace

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
namespace {

HWY_EXPORT(softmax_rows);
HWY_EXPORT(softmax_back);
HWY_EXPORT(add_rows);
HWY_EXPORT(add_states);
HWY_EXPORT(step_heads);

}  // namespace

std::size_t slot_chunk_forward_workspace(const SlotProblem& p, int threads) {
  return SlotForward(p, threads, nullptr).bytes;
}

Status slot_chunk_forward(const SlotProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  const SlotForward w(p, pool.size(), workspace.data());
  for (std::int64_t j = 0; p.o && j < p.G; ++j) {
    if (Status s = diag_chunk_backward(scores_of_slots(p, j, w.y), p.chunk, pool, w.engine); !s) return s;
    HWY_DYNAMIC_DISPATCH(softmax_rows)(p, w.y, w.y, pool);
    if (Status s = diag_chunk_forward(w.reading(p, j), p.chunk, pool, w.engine); !s) return s;
  }
  if (!p.o && p.hvt)
    if (Status s = diag_chunk_forward(w.reading(p, p.G - 1), p.chunk, pool, w.engine); !s) return s;
  if (!p.hkt) return {};
  return diag_chunk_forward(w.key_state(p), p.chunk, pool, w.engine);
}

std::size_t slot_chunk_backward_workspace(const SlotBackwardProblem& p, int threads) {
  return SlotBackward(p, threads, nullptr).bytes;
}

Status slot_chunk_backward(const SlotBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  const SlotBackward w(p, pool.size(), workspace.data());
  const bool grouped = p.G > 1;
  for (std::int64_t j = 0; j < p.G; ++j) {
    const bool first = j == 0, last = j + 1 == p.G;
    if (Status s = diag_chunk_backward(scores_of_slots(p, j, w.y), p.chunk, pool, w.engine); !s) return s;
    HWY_DYNAMIC_DISPATCH(softmax_rows)(p, w.y, w.p, pool);
    if (Status s = diag_chunk_backward(w.second_back(p, j), p.chunk, pool, w.engine); !s) return s;
    HWY_DYNAMIC_DISPATCH(softmax_back)(p, w, first, pool);
    if (p.dq)
      if (Status s = diag_chunk_forward(w.query_gradient(p, j), p.chunk, pool, w.engine); !s) return s;
    if (Status s = diag_chunk_backward(w.first_back(p, j), p.chunk, pool, w.engine); !s) return s;
    if (p.ds) HWY_DYNAMIC_DISPATCH(add_rows)(p, w.ds1, w.ds2, grouped ? w.ds : p.ds, first, p.M, pool);
    if (p.dg) HWY_DYNAMIC_DISPATCH(add_rows)(p, w.dg1, w.dg2, grouped ? w.dg : p.dg, first, p.M, pool);
    if (!grouped) continue;
    if (p.dk) HWY_DYNAMIC_DISPATCH(add_rows)(p, w.dk, {}, w.dk_sum, first, p.K, pool);
    if (p.dv) HWY_DYNAMIC_DISPATCH(add_rows)(p, w.dv, {}, w.dv_sum, first, p.V, pool);
    if (p.dhk0) HWY_DYNAMIC_DISPATCH(add_states)(w.dhk, w.dhk_sum, first);
    if (p.dhv0) HWY_DYNAMIC_DISPATCH(add_states)(w.dhv, w.dhv_sum, first);
    if (!last) continue;
    if (p.ds) HWY_DYNAMIC_DISPATCH(add_rows)(p, w.ds, {}, p.ds, true, p.M, pool);
    if (p.dg) HWY_DYNAMIC_DISPATCH(add_rows)(p, w.dg, {}, p.dg, true, p.M, pool);
    if (p.dk) HWY_DYNAMIC_DISPATCH(add_rows)(p, w.dk_sum, {}, p.dk, true, p.K, pool);
    if (p.dv) HWY_DYNAMIC_DISPATCH(add_rows)(p, w.dv_sum, {}, p.dv, true, p.V, pool);
    if (p.dhk0) HWY_DYNAMIC_DISPATCH(add_states)(w.dhk_sum, p.dhk0, true);
    if (p.dhv0) HWY_DYNAMIC_DISPATCH(add_states)(w.dhv_sum, p.dhv0, true);
  }
  return {};
}

std::size_t slot_step_forward_workspace(const SlotProblem& p, int threads) {
  return SlotStepTiles::bytes(p) * static_cast<std::size_t>(slot_step_slots(p, threads));
}

Status slot_step_forward(const SlotProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (p.N == 0 || p.H == 0) return {};
  HWY_DYNAMIC_DISPATCH(step_heads)(p, pool, workspace.data());
  return {};
}

}  // namespace fla::cpu
#endif
