// PaTH attention, forward and backward, by blocks of C = kKeys tokens. Inside a block, rows Q, K, W, W_b = beta W:
//   L = strict(W_b W^T),   U = (I + L)^{-1} W_b,   Y = (I + L)^{-1} strict(W_b K^T),   A = lower(Q W^T)
//   own block: X = lower(Q K^T - A Y); q' = Q - A U goes back to the block's start, k' = K - Y^T W on to its end    (1)
//   earlier blocks J from the nearest on, y = q': X_J = y k'_J^T, y <- y - (y W_J^T) U_J                      (2)
// The backward follows (2) from the farthest block on, d being the gradient of y after block J:
//   dk'_J += dX_J^T y_J, dU_J -= (y_J W_J^T)^T d, dW_J -= (d U_J^T)^T y_J, d <- d - (d U_J^T) W_J + dX_J k'_J   (3)
// and ends with the blocks themselves (block_gradients).
// task     forward: one query head of one sequence or a share of its blocks; backward: one key head with its query
// heads scratch  U, k', Y and every gradient in fp32: linear in T; the backward's y_J of one block of queries too
// bits     a row's sums run over earlier tokens in one order; what is above a diagonal is never read
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fla/engine/attn/cpu/internal.h"
#include "fla/engine/attn/path.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/attn/cpu/path.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/attn/cpu/forward-inl.h"
#include "fla/kernels/cpu/solve-inl.h"

#ifndef FLA_ENGINE_ATTN_CPU_PATH_CC_ONCE
#define FLA_ENGINE_ATTN_CPU_PATH_CC_ONCE
namespace fla::cpu {

// What every block of keys is turned into once, for all query heads: [H][B * T] rows.
struct PathBlocks {
  float* u = nullptr;   // [kp]
  float* kc = nullptr;  // [kp] k'
  float* y = nullptr;   // [kKeysLd] row s of Y, by key of the block
  std::int64_t rows = 0, kp = 0;

  void carve(Arena& arena, const PathProblem& p) {
    rows = p.B * p.TK;
    kp = pad_up(p.K);
    u = arena.floats(p.H * rows * kp);
    kc = arena.floats(p.H * rows * kp);
    y = arena.floats(p.H * rows * kKeysLd);
  }
  std::int64_t at(const AttnSpan& s, std::int64_t T, std::int64_t kv) const {
    return kv * rows + s.row * T + s.k_begin;
  }
};

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr std::int64_t kC = kKeys;

struct PathTiles {
  float* k = nullptr;     // [kC + 4, kp]
  float* w = nullptr;     // [kC + 4, kp]
  float* wb = nullptr;    // [kC + 4, kp] beta w
  float* wt = nullptr;    // [kp, kKeysLd]
  float* kt = nullptr;    // [kp, kKeysLd]
  float* tmp = nullptr;   // [kC + 4, kp]
  float* n = nullptr;     // [kC, kKeysLd] -strict(W_b W^T)
  float* beta = nullptr;  // [kC]

  void carve(Arena& arena, std::int64_t K) {
    const std::int64_t kp = pad_up(K);
    for (float** x : {&k, &w, &wb, &tmp}) *x = arena.floats((kC + 4) * kp);
    wt = arena.floats(kp * kKeysLd);
    kt = arena.floats(kp * kKeysLd);
    n = arena.floats(kC * kKeysLd);
    beta = arena.floats(kC);
  }
};

HWY_INLINE void negate(float* x, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < n; c += lanes) hn::StoreU(hn::Neg(hn::LoadU(d, x + c)), d, x + c);
}
HWY_INLINE void add_to(float* x, const float* y, std::int64_t n, float sign) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto s = hn::Set(d, sign);
  for (std::int64_t c = 0; c < n; c += lanes)
    hn::StoreU(hn::MulAdd(s, hn::LoadU(d, y + c), hn::LoadU(d, x + c)), d, x + c);
}

// Zeros from column i + `above` on in row i.
HWY_INLINE void clear_above(float* x, std::int64_t rows, std::int64_t above) {
  for (std::int64_t i = 0; i < rows; ++i) std::fill(x + i * kKeysLd + i + above, x + (i + 1) * kKeysLd, 0.0F);
}

// k, w, wb, wt, n of the N tokens from j0 on.
HWY_INLINE void load_block(const PathProblem& p, PathTiles& t, const AttnSpan& s, std::int64_t kv, std::int64_t j0,
                           std::int64_t N) {
  const std::int64_t K = p.K, kp = pad_up(K);
  load_rows(head_rows(p.k, s.row, s.k_begin, s.k_length, kv), j0, N, 0, K, t.k, kp);
  load_rows(head_rows(p.w, s.row, s.k_begin, s.k_length, kv), j0, N, 0, K, t.w, kp);
  const Rows beta = head_rows(p.beta, s.row, s.k_begin, s.k_length, kv);
  for (std::int64_t i = 0; i < N; ++i) {
    t.beta[i] = static_cast<float>(scalar_at(beta, j0 + i));
    std::fill(t.wb + i * kp, t.wb + (i + 1) * kp, 0.0F);
    add_to(t.wb + i * kp, t.w + i * kp, kp, t.beta[i]);
  }
  transpose(t.w, kp, N, K, t.wt, kKeysLd);
  gemm<false>(N, N, {t.wb, kp, t.wt, kKeysLd, K}, {}, Tri::None, {}, t.n, kKeysLd);
  negate(t.n, N * kKeysLd);
}

HWY_NOINLINE void make_block(const PathProblem& p, PathTiles& t, const PathBlocks& b, const AttnSpan& s,
                             std::int64_t kv, std::int64_t j0) {
  const std::int64_t K = p.K, kp = pad_up(K), N = std::min(kC, s.k_length - j0), at = b.at(s, p.TK, kv) + j0;
  float *u = b.u + at * kp, *kc = b.kc + at * kp, *y = b.y + at * kKeysLd;
  load_block(p, t, s, kv, j0, N);
  std::copy(t.wb, t.wb + N * kp, u);
  solve_lower(t.n, kKeysLd, N, u, kp, kp);
  transpose(t.k, kp, N, K, t.kt, kKeysLd);
  gemm<false>(N, N, {t.wb, kp, t.kt, kKeysLd, K}, {}, Tri::None, {}, y, kKeysLd);
  clear_above(y, N, 0);
  solve_lower(t.n, kKeysLd, N, y, kKeysLd, pad_up(N));
  gemm<true>(N, kp, {y, kKeysLd, t.w, kp, N}, {}, Tri::None, {}, t.tmp, kp);
  std::copy(t.k, t.k + N * kp, kc);
  add_to(kc, t.tmp, N * kp, -1.0F);
}

struct PathQueries {
  ForwardTiles f;
  float* a = nullptr;   // [kC, kKeysLd] -A
  float* y = nullptr;   // [kC + 4, kp]
  float* pw = nullptr;  // [kC, kKeysLd] -(y W^T)
  void carve(Arena& arena, const PathProblem& p, bool stats) {
    f.carve(arena, p.K, p.V, false, false, stats);
    a = arena.floats(kC * kKeysLd);
    y = arena.floats((kC + 4) * pad_up(p.K));
    pw = arena.floats(kC * kKeysLd);
  }
};

// (1): logits of the own block into s, -A into a, q' into y. Queries are in q.
HWY_INLINE void own_block(const PathProblem& p, const PathTiles& t, const PathBlocks& b, std::int64_t at,
                          std::int64_t M, const float* q, float* kt, float* s, float* a, float* y) {
  const std::int64_t K = p.K, kp = pad_up(K);
  gemm<false>(M, M, {q, kp, t.wt, kKeysLd, K}, {}, Tri::None, {}, a, kKeysLd);
  negate(a, M * kKeysLd);
  clear_above(a, M, 1);
  transpose(t.k, kp, M, K, kt, kKeysLd);
  gemm<false>(M, M, {q, kp, kt, kKeysLd, K}, {a, kKeysLd, b.y + at * kKeysLd, kKeysLd, 0}, Tri::Lower, {}, s, kKeysLd);
  gemm<false>(M, kp, {q, kp, b.u + at * kp, kp, 0}, {a, kKeysLd, b.u + at * kp, kp, 0}, Tri::Lower, {q, kp}, y, kp);
}

// y <- y - (y W^T) U; -(y W^T) stays in pw.
HWY_INLINE void step_back(std::int64_t M, std::int64_t N, std::int64_t K, const float* wt, const float* u, float* pw,
                          float* y) {
  const std::int64_t kp = pad_up(K);
  gemm<false>(M, N, {y, kp, wt, kKeysLd, K}, {}, Tri::None, {}, pw, kKeysLd);
  negate(pw, M * kKeysLd);
  gemm<false>(M, kp, {pw, kKeysLd, u, kp, N}, {}, Tri::None, {y, kp}, y, kp);
}

template <bool kGate, bool kStats>
HWY_NOINLINE void path_tile(const PathProblem& p, PathTiles& t, PathQueries& x, const PathBlocks& b,
                            const GateSums& sums, const RowStats* st, const AttnSpan& span, std::int64_t h,
                            std::int64_t i0) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, kp = pad_up(K), vp = pad_up(p.V), kv = h / p.group(),
                     M = std::min(kC, span.q_length - i0), base = b.at(span, p.TK, kv);
  const float scale = static_cast<float>(p.scale);
  const Rows v = head_rows(p.v, span.row, span.k_begin, span.k_length, kv),
             w = head_rows(p.w, span.row, span.k_begin, span.k_length, kv);
  const double* C = kGate ? sums.head(p, span, h) : nullptr;
  ForwardTiles& f = x.f;
  load_rows(head_rows(p.q, span.row, span.q_begin, span.q_length, h), i0, M, 0, K, f.q, kp);
  std::fill(f.m, f.m + M, -std::numeric_limits<float>::infinity());
  std::fill(f.l, f.l + M, 0.0F);
  if constexpr (kStats) {
    start_sums(f, head_rows(p.do_, span.row, span.q_begin, span.q_length, h), i0, M, p.V, false);
  } else {
    std::fill(f.o, f.o + M * vp, 0.0F);
  }

  load_block(p, t, span, kv, i0, M);
  own_block(p, t, b, base + i0, M, f.q, f.kt, f.s, x.a, x.y);
  for (std::int64_t j0 = i0; j0 >= 0; j0 -= kC) {
    const std::int64_t N = std::min(kC, span.k_length - j0);
    const auto columns = [&](std::int64_t i) { return KeyRange{0, j0 == i0 ? i + 1 : N}; };
    const std::int64_t at = base + j0;
    if (j0 < i0) {
      transpose(b.kc + at * kp, kp, N, K, f.kt, kKeysLd);
      gemm<false>(M, N, {x.y, kp, f.kt, kKeysLd, K}, {}, Tri::None, {}, f.s, kKeysLd);
    }
    load_rows(v, j0, N, 0, p.V, f.v, vp);
    const bool partial =
        online_softmax<kGate, false>(f, 0, M, N, scale, kGate ? C + i0 : nullptr, kGate ? C + j0 : nullptr, columns);
    if constexpr (kStats) {
      add_sums<false>(f, 0, M, N, p.V, columns);
    } else {
      add_values(f, f.s, 0, M, N, vp, partial && !all_finite(f.v, N * vp), f.o, columns);
    }
    if (j0 == i0 || j0 == 0) continue;
    load_rows(w, j0, N, 0, K, t.w, kp);
    transpose(t.w, kp, N, K, t.wt, kKeysLd);
    step_back(M, N, K, t.wt, b.u + at * kp, x.pw, x.y);
  }

  if constexpr (kStats) {
    for (std::int64_t i = 0; i < M; ++i) keep_row<false>(f, i, *st, st->at(p, span, h, i0 + i), 1.0);
  } else {
    for (std::int64_t i = 0; i < M; ++i) {
      float* row = f.o + i * vp;
      const auto norm = hn::Set(d, 1.0F / f.l[i]);
      for (std::int64_t c = 0; c < vp; c += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, row + c), norm), d, row + c);
    }
    store_rows(f.o, vp, head_rows(p.o, span.row, span.q_begin, span.q_length, h), i0, M, 0, p.V);
  }
}

// (2) of path.h: M^T, the product of what later blocks do, from the last one on.
HWY_NOINLINE void carry_keys(const PathProblem& p, PathTiles& t, const PathBlocks& b, const AttnSpan& s,
                             std::int64_t kv, float* m, float* m_next, float* rows) {
  const std::int64_t K = p.K, kp = pad_up(K), base = b.at(s, p.TK, kv);
  const Rows to = head_rows(p.k_cache, s.row, s.k_begin, s.k_length, kv);
  if (!to) return;
  std::fill(m, m + kp * kp, 0.0F);
  for (std::int64_t i = 0; i < K; ++i) m[i * kp + i] = 1.0F;
  for (std::int64_t j0 = (s.k_length - 1) / kC * kC; j0 >= 0; j0 -= kC) {
    const std::int64_t N = std::min(kC, s.k_length - j0), at = base + j0;
    gemm<false>(N, kp, {b.kc + at * kp, kp, m, kp, K}, {}, Tri::None, {}, rows, kp);
    store_rows(rows, kp, to, j0, N, 0, K);
    if (j0 == 0) break;
    // k as a row goes on through k <- k - (k U^T) W, so M^T <- M^T - U^T (W M^T).
    load_rows(head_rows(p.w, s.row, s.k_begin, s.k_length, kv), j0, N, 0, K, t.w, kp);
    gemm<false>(N, kp, {t.w, kp, m, kp, K}, {}, Tri::None, {}, rows, kp);
    negate(rows, N * kp);
    gemm<true>(K, kp, {b.u + at * kp, kp, rows, kp, N}, {}, Tri::None, {m, kp}, m_next, kp);
    std::copy(m_next, m_next + K * kp, m);
  }
}

std::size_t forward_bytes(const PathProblem& p, bool stats) {
  Arena arena;
  PathTiles t;
  PathQueries x;
  t.carve(arena, p.K);
  x.carve(arena, p, stats);
  if (p.k_cache) arena.floats(2 * pad_up(p.K) * pad_up(p.K) + kC * pad_up(p.K));
  return arena.bytes();
}

template <bool kGate, bool kStats>
HWY_NOINLINE void path_rows(const PathProblem& p, const PathBlocks& b, const GateSums& sums, const RowStats* st,
                            ThreadPool& pool, std::byte* scratch, std::size_t bytes) {
  const std::int64_t threads = std::max<std::int64_t>(pool.size(), 1);
  const auto parts_of = [&](std::int64_t heads) {
    const std::int64_t most = std::max<std::int64_t>((p.TK + kC - 1) / kC, 1);
    return std::clamp<std::int64_t>((8 * threads + heads - 1) / std::max<std::int64_t>(heads, 1), 1, most);
  };
  const std::int64_t made = parts_of(p.N * p.H), rows = parts_of(p.N * p.HQ);
  run_items(pool, p.N * p.H * made, threads, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    PathTiles t;
    t.carve(arena, p.K);
    const std::int64_t head = item / made;
    const AttnSpan s = p.sequence(head / p.H);
    for (std::int64_t j0 = item % made * kC; j0 < s.k_length; j0 += made * kC) make_block(p, t, b, s, head % p.H, j0);
  });
  if (p.k_cache) {
    run_items(pool, p.N * p.H, threads, [&](std::int64_t head, std::int64_t slot) {
      Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
      PathTiles t;
      PathQueries x;
      t.carve(arena, p.K);
      x.carve(arena, p, false);
      const std::int64_t kp = pad_up(p.K);
      float* m = arena.floats(2 * kp * kp + kC * kp);
      const AttnSpan s = p.sequence(head / p.H);
      if (s.k_length > 0) carry_keys(p, t, b, s, head % p.H, m, m + kp * kp, m + 2 * kp * kp);
    });
  }
  if (!p.o && !kStats) return;
  run_items(pool, p.N * p.HQ * rows, threads, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    PathTiles t;
    PathQueries x;
    t.carve(arena, p.K);
    x.carve(arena, p, kStats);
    const std::int64_t head = item / rows;
    const AttnSpan s = p.sequence(head / p.HQ);
    for (std::int64_t i0 = item % rows * kC; i0 < s.q_length; i0 += rows * kC)
      path_tile<kGate, kStats>(p, t, x, b, sums, st, s, head % p.HQ, i0);
  });
}

struct PathGradients {
  PathTiles t;
  float *dk = nullptr, *dkc = nullptr, *du = nullptr, *dw = nullptr;  // [T, kp], over the group
  float* dv = nullptr;                                                // [T, vp]
  float* dy = nullptr;                                                // [T, kKeysLd] of Y
  float* ys = nullptr;       // [T, kp] y_J of one block of queries, at J's rows: M of kC rows
  double* dg = nullptr;      // [T]; gate
  double* before = nullptr;  // [kC] sums of the rows over earlier blocks; gate
  float *q = nullptr, *y = nullptr, *d = nullptr, *tmp = nullptr, *uc = nullptr;  // [kC + 4, kp]
  float *dout = nullptr, *v = nullptr;                                            // [kC + 4, vp]
  float *vt = nullptr, *ut = nullptr;                                             // [vp, ld], [kp, ld]
  float *s = nullptr, *a = nullptr, *A = nullptr, *pw = nullptr, *e = nullptr;    // [kC, kKeysLd]
  float *x = nullptr, *e1 = nullptr, *yt = nullptr;                               // [kC, kKeysLd]
  float* gate = nullptr;

  void carve(Arena& arena, const PathProblem& p) {
    const std::int64_t kp = pad_up(p.K), vp = pad_up(p.V), T = pad_up(p.TK, kC);
    t.carve(arena, p.K);
    for (float** z : {&dk, &dkc, &du, &dw, &ys}) *z = arena.floats(T * kp);
    dv = arena.floats(T * vp);
    dy = arena.floats(T * kKeysLd);
    dg = arena.take<double>(T);
    before = arena.take<double>(kC);
    for (float** z : {&q, &y, &d, &tmp, &uc}) *z = arena.floats((kC + 4) * kp);
    for (float** z : {&dout, &v}) *z = arena.floats((kC + 4) * vp);
    vt = arena.floats(vp * kKeysLd);
    ut = arena.floats(kp * kKeysLd);
    for (float** z : {&s, &a, &A, &pw, &e, &x, &e1, &yt}) *z = arena.floats((kC + 4) * kKeysLd);
    gate = arena.floats(kKeysLd);
  }
};

// s holds X: p goes to a, dX = scale D to s, with zeros where a mask hides; the gate's sums are kept.
template <bool kGate>
HWY_INLINE void weights_of(const PathProblem& p, PathGradients& w, const RowStats& st, const AttnSpan& span,
                           std::int64_t h, std::int64_t i0, std::int64_t M, std::int64_t j0, std::int64_t N,
                           const double* C) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), end = pad_up(N);
  const float scale = static_cast<float>(p.scale);
  for (std::int64_t i = 0; i < M; ++i) {
    const std::int64_t hi = j0 == i0 ? i + 1 : N, at = st.at(p, span, h, i0 + i);
    float *s = w.s + i * kKeysLd, *a = w.a + i * kKeysLd;
    if constexpr (kGate) differences(C[i0 + i], C + j0, N, w.gate);
    logits<kGate>(s, 0, hi, end, scale, w.gate);
    const auto m = hn::Set(d, st.m[at]), norm = hn::Set(d, st.norm[at]), t = hn::Set(d, st.t[at]);
    for (std::int64_t x = 0; x < end; x += lanes) {
      const auto in = lanes_in(d, x, 0, hi);
      const auto prob = hn::IfThenElseZero(in, hn::Mul(exp_down(d, hn::Sub(hn::LoadU(d, s + x), m)), norm));
      const auto D = hn::IfThenElseZero(in, hn::Mul(prob, hn::Sub(hn::LoadU(d, a + x), t)));
      hn::StoreU(prob, d, a + x);
      hn::StoreU(hn::Mul(hn::Set(d, scale), D), d, s + x);
    }
  }
  if constexpr (kGate) gate_gradients(w.s, M, N, i0, j0, w.before, w.gate, w.dg + j0);
}

template <bool kGate>
HWY_NOINLINE void path_head(const PathProblem& p, PathGradients& w, const PathBlocks& b, const GateSums& sums,
                            const RowStats& st, const AttnSpan& span, std::int64_t h) {
  const std::int64_t K = p.K, kp = pad_up(K), vp = pad_up(p.V), kv = h / p.group(), L = span.k_length,
                     base = b.at(span, p.TK, kv);
  const Rows q = head_rows(p.q, span.row, span.q_begin, L, h), dout = head_rows(p.do_, span.row, span.q_begin, L, h),
             v = head_rows(p.v, span.row, span.k_begin, L, kv), wr = head_rows(p.w, span.row, span.k_begin, L, kv),
             dq = head_rows(p.dq, span.row, span.q_begin, L, h);
  const double* C = kGate ? sums.head(p, span, h) : nullptr;
  if constexpr (kGate) std::fill(w.dg, w.dg + L, 0.0);
  // a = do v^T of a block of keys, and dv += p^T do once a holds p.
  const auto products_with_values = [&](std::int64_t j0, std::int64_t M, std::int64_t N) HWY_ATTR {
    load_rows(v, j0, N, 0, p.V, w.v, vp);
    transpose(w.v, vp, N, p.V, w.vt, kKeysLd);
    gemm<false>(M, N, {w.dout, vp, w.vt, kKeysLd, p.V}, {}, Tri::None, {}, w.a, kKeysLd);
  };
  const auto add_dv = [&](std::int64_t j0, std::int64_t M, std::int64_t N) HWY_ATTR {
    float* dv = w.dv + j0 * vp;
    gemm<true>(N, vp, {w.a, kKeysLd, w.dout, vp, M}, {}, Tri::None, {dv, vp}, dv, vp);
  };
  for (std::int64_t i0 = 0; i0 < L; i0 += kC) {
    const std::int64_t M = std::min(kC, L - i0), own = base + i0;
    load_rows(q, i0, M, 0, K, w.q, kp);
    if (dout) {
      load_rows(dout, i0, M, 0, p.V, w.dout, vp);
    } else {
      std::fill(w.dout, w.dout + M * vp, 0.0F);
    }
    load_block(p, w.t, span, kv, i0, M);
    own_block(p, w.t, b, own, M, w.q, w.t.kt, w.x, w.A, w.y);
    // Back to the first block, keeping every y_J; then (3) from there on.
    for (std::int64_t j0 = i0 - kC; j0 >= 0; j0 -= kC) {
      std::copy(w.y, w.y + M * kp, w.ys + j0 * kp);
      if (j0 == 0) break;
      load_rows(wr, j0, kC, 0, K, w.t.w, kp);
      transpose(w.t.w, kp, kC, K, w.t.wt, kKeysLd);
      step_back(M, kC, K, w.t.wt, b.u + (base + j0) * kp, w.pw, w.y);
    }
    std::fill(w.d, w.d + M * kp, 0.0F);
    if constexpr (kGate) std::fill(w.before, w.before + M, 0.0);
    for (std::int64_t j0 = 0; j0 < i0; j0 += kC) {
      const std::int64_t at = base + j0;
      float* y = w.ys + j0 * kp;
      const float *kc = b.kc + at * kp, *u = b.u + at * kp;
      transpose(kc, kp, kC, K, w.t.kt, kKeysLd);
      gemm<false>(M, kC, {y, kp, w.t.kt, kKeysLd, K}, {}, Tri::None, {}, w.s, kKeysLd);
      products_with_values(j0, M, kC);
      weights_of<kGate>(p, w, st, span, h, i0, M, j0, kC, C);
      add_dv(j0, M, kC);
      float *dkc = w.dkc + j0 * kp, *du = w.du + j0 * kp, *dw = w.dw + j0 * kp;
      gemm<true>(kC, kp, {w.s, kKeysLd, y, kp, M}, {}, Tri::None, {dkc, kp}, dkc, kp);
      load_rows(wr, j0, kC, 0, K, w.t.w, kp);
      if (j0 > 0) {
        transpose(w.t.w, kp, kC, K, w.t.wt, kKeysLd);
        gemm<false>(M, kC, {y, kp, w.t.wt, kKeysLd, K}, {}, Tri::None, {}, w.pw, kKeysLd);
        negate(w.pw, M * kKeysLd);
        gemm<true>(kC, kp, {w.pw, kKeysLd, w.d, kp, M}, {}, Tri::None, {du, kp}, du, kp);
        transpose(u, kp, kC, K, w.ut, kKeysLd);
        gemm<false>(M, kC, {w.d, kp, w.ut, kKeysLd, K}, {}, Tri::None, {}, w.e, kKeysLd);
        negate(w.e, M * kKeysLd);
        gemm<true>(kC, kp, {w.e, kKeysLd, y, kp, M}, {}, Tri::None, {dw, kp}, dw, kp);
        gemm<false>(M, kp, {w.e, kKeysLd, w.t.w, kp, kC}, {}, Tri::None, {w.d, kp}, w.d, kp);
      }
      gemm<false>(M, kp, {w.s, kKeysLd, kc, kp, kC}, {}, Tri::None, {w.d, kp}, w.d, kp);
    }
    // The own block: x = lower(dX), d = dq'. w.A is -A.
    load_block(p, w.t, span, kv, i0, M);
    std::copy(w.x, w.x + M * kKeysLd, w.s);
    products_with_values(i0, M, M);
    weights_of<kGate>(p, w, st, span, h, i0, M, i0, M, C);
    add_dv(i0, M, M);
    float *du = w.du + i0 * kp, *dw = w.dw + i0 * kp, *dk = w.dk + i0 * kp, *dy = w.dy + i0 * kKeysLd;
    const float *u = b.u + own * kp, *y = b.y + own * kKeysLd;
    gemm<true>(M, kp, {w.A, kKeysLd, w.d, kp, M}, {}, Tri::None, {du, kp}, du, kp);
    gemm<true>(M, pad_up(M), {w.A, kKeysLd, w.s, kKeysLd, M}, {}, Tri::None, {dy, kKeysLd}, dy, kKeysLd);
    // dA = -lower(x Y^T + dq' U^T)
    transpose(y, kKeysLd, M, M, w.yt, kKeysLd);
    transpose(u, kp, M, K, w.ut, kKeysLd);
    gemm<false>(M, M, {w.s, kKeysLd, w.yt, kKeysLd, M}, {w.d, kp, w.ut, kKeysLd, K}, Tri::None, {}, w.e, kKeysLd);
    negate(w.e, M * kKeysLd);
    clear_above(w.e, M, 1);
    // dQ = dq' + dA W + x K
    gemm<false>(M, kp, {w.e, kKeysLd, w.t.w, kp, M}, {w.s, kKeysLd, w.t.k, kp, M}, Tri::None, {w.d, kp}, w.tmp, kp);
    if (dq) store_rows(w.tmp, kp, dq, i0, M, 0, K);
    gemm<true>(M, kp, {w.e, kKeysLd, w.q, kp, M}, {}, Tri::None, {dw, kp}, dw, kp);
    gemm<true>(M, kp, {w.s, kKeysLd, w.q, kp, M}, {}, Tri::None, {dk, kp}, dk, kp);
  }
  if constexpr (kGate) {
    if (const Rows dg = head_rows(p.dg, span.row, span.k_begin, L, h); dg) {
      for (std::int64_t t = 0; t < L; ++t) {
        const float x = static_cast<float>(w.dg[t]);
        store_row(&x, dg.at(t, 0), dg.dtype, 1, 1);
      }
    }
  }
}

// From dk', dU, dY of a block, summed over its query heads, to dk, dw and dbeta:
//   E1 = (I + L)^{-T} dY,   E2 = (I + L)^{-T} dU,   dL = -strict(E1 Y^T + E2 U^T),   dB = strict(E1)
//   dW_b = E2 + dL W + dB K,   dK += dk' + dB^T W_b,   dW += -Y dk' + dL^T W_b + beta dW_b,   dbeta = rowsum(dW_b o W)
HWY_NOINLINE void block_gradients(const PathProblem& p, PathGradients& w, const PathBlocks& b, const AttnSpan& s,
                                  std::int64_t kv, std::int64_t j0) {
  const std::int64_t K = p.K, kp = pad_up(K), N = std::min(kC, s.k_length - j0), at = b.at(s, p.TK, kv) + j0;
  float *du = w.du + j0 * kp, *dw = w.dw + j0 * kp, *dk = w.dk + j0 * kp, *dkc = w.dkc + j0 * kp,
        *dy = w.dy + j0 * kKeysLd;
  const float *u = b.u + at * kp, *y = b.y + at * kKeysLd;
  load_block(p, w.t, s, kv, j0, N);
  // k' = K - Y^T W:  dY -= W dk'^T,  dW -= Y dk'
  transpose(dkc, kp, N, K, w.ut, kKeysLd);
  gemm<false>(N, N, {w.t.w, kp, w.ut, kKeysLd, K}, {}, Tri::None, {}, w.e, kKeysLd);
  for (std::int64_t i = 0; i < N; ++i) add_to(dy + i * kKeysLd, w.e + i * kKeysLd, pad_up(N), -1.0F);
  clear_above(dy, N, 0);
  gemm<false>(N, kp, {y, kKeysLd, dkc, kp, N}, {}, Tri::None, {}, w.tmp, kp);
  add_to(dw, w.tmp, N * kp, -1.0F);
  add_to(dk, dkc, N * kp, 1.0F);
  solve_upper(w.t.n, kKeysLd, N, dy, kKeysLd, pad_up(N));
  solve_upper(w.t.n, kKeysLd, N, du, kp, kp);
  // dL
  transpose(y, kKeysLd, N, N, w.yt, kKeysLd);
  transpose(u, kp, N, K, w.ut, kKeysLd);
  gemm<false>(N, N, {dy, kKeysLd, w.yt, kKeysLd, N}, {du, kp, w.ut, kKeysLd, K}, Tri::None, {}, w.e, kKeysLd);
  negate(w.e, N * kKeysLd);
  clear_above(w.e, N, 0);
  std::copy(dy, dy + N * kKeysLd, w.e1);
  clear_above(w.e1, N, 0);
  // dW_b into tmp
  gemm<false>(N, kp, {w.e, kKeysLd, w.t.w, kp, N}, {w.e1, kKeysLd, w.t.k, kp, N}, Tri::None, {du, kp}, w.tmp, kp);
  gemm<true>(N, kp, {w.e1, kKeysLd, w.t.wb, kp, N}, {}, Tri::None, {dk, kp}, dk, kp);
  gemm<true>(N, kp, {w.e, kKeysLd, w.t.wb, kp, N}, {}, Tri::None, {dw, kp}, dw, kp);
  const Rows dbeta = head_rows(p.dbeta, s.row, s.k_begin, s.k_length, kv);
  for (std::int64_t i = 0; i < N; ++i) {
    add_to(dw + i * kp, w.tmp + i * kp, kp, w.t.beta[i]);
    const float x = dot(w.tmp + i * kp, w.t.w + i * kp, kp);
    if (dbeta) store_row(&x, dbeta.at(j0 + i, 0), dbeta.dtype, 1, 1);
  }
}

std::size_t backward_bytes(const PathProblem& p) {
  Arena arena;
  PathGradients w;
  w.carve(arena, p);
  return std::max(arena.bytes(), forward_bytes(p, true));
}

template <bool kGate>
HWY_NOINLINE void path_gradients(const PathProblem& p, const PathBlocks& b, const GateSums& sums, const RowStats& st,
                                 ThreadPool& pool, std::byte* scratch, std::size_t bytes) {
  const std::int64_t kp = pad_up(p.K), vp = pad_up(p.V), G = p.group();
  run_items(pool, p.N * p.H, std::max<std::int64_t>(pool.size(), 1), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    PathGradients w;
    w.carve(arena, p);
    const std::int64_t kv = item % p.H;
    const AttnSpan s = p.sequence(item / p.H);
    const std::int64_t L = s.k_length;
    if (L <= 0) return;
    for (float* x : {w.dk, w.dkc, w.du, w.dw}) std::fill(x, x + L * kp, 0.0F);
    std::fill(w.dv, w.dv + L * vp, 0.0F);
    std::fill(w.dy, w.dy + L * kKeysLd, 0.0F);
    for (std::int64_t h = kv * G; h < (kv + 1) * G; ++h) path_head<kGate>(p, w, b, sums, st, s, h);
    for (std::int64_t j0 = 0; j0 < L; j0 += kC) block_gradients(p, w, b, s, kv, j0);
    if (const Rows dk = head_rows(p.dk, s.row, s.k_begin, L, kv); dk) store_rows(w.dk, kp, dk, 0, L, 0, p.K);
    if (const Rows dw = head_rows(p.dw, s.row, s.k_begin, L, kv); dw) store_rows(w.dw, kp, dw, 0, L, 0, p.K);
    if (const Rows dv = head_rows(p.dv, s.row, s.k_begin, L, kv); dv) store_rows(w.dv, vp, dv, 0, L, 0, p.V);
  });
}

void rows(const PathProblem& p, const PathBlocks& b, const GateSums& sums, const RowStats* st, ThreadPool& pool,
          std::byte* scratch, std::size_t bytes) {
  const bool stats = st != nullptr;
  const auto run = p.g ? (stats ? path_rows<true, true> : path_rows<true, false>)
                       : (stats ? path_rows<false, true> : path_rows<false, false>);
  run(p, b, sums, st, pool, scratch, bytes);
}

void gradients(const PathProblem& p, const PathBlocks& b, const GateSums& sums, const RowStats& st, ThreadPool& pool,
               std::byte* scratch, std::size_t bytes) {
  if (p.g) return path_gradients<true>(p, b, sums, st, pool, scratch, bytes);
  path_gradients<false>(p, b, sums, st, pool, scratch, bytes);
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(forward_bytes);
HWY_EXPORT(backward_bytes);
HWY_EXPORT(rows);
HWY_EXPORT(gradients);

namespace {

// What both passes share: the blocks, the gates' sums and, for the backward, the rows' statistics.
struct PathKept {
  PathBlocks blocks;
  GateSums sums;
  RowStats st;
  std::size_t bytes = 0;

  PathKept(const PathProblem& p, std::byte* memory, bool backward) {
    Arena arena = memory == nullptr ? Arena() : Arena(memory);
    blocks.carve(arena, p);
    sums.carve(arena, p);
    if (backward) st.carve(arena, p);
    bytes = arena.bytes();
  }
};

}  // namespace

std::size_t path_forward_workspace(const PathProblem& p, int threads) {
  return PathKept(p, nullptr, false).bytes +
         HWY_DYNAMIC_DISPATCH(forward_bytes)(p, false) * static_cast<std::size_t>(std::max(threads, 1));
}

Status path_forward(const PathProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (workspace.size() < path_forward_workspace(p, pool.size()))
    return {Code::OutOfMemory, "path_forward: workspace too small"};
  if (p.N == 0 || p.TK == 0) return {};
  const PathKept kept(p, workspace.data(), false);
  sum_gates(p, kept.sums, pool);
  HWY_DYNAMIC_DISPATCH(rows)
  (p, kept.blocks, kept.sums, nullptr, pool, workspace.data() + PathKept(p, nullptr, false).bytes,
   HWY_DYNAMIC_DISPATCH(forward_bytes)(p, false));
  return {};
}

std::size_t path_backward_workspace(const PathProblem& p, int threads) {
  return PathKept(p, nullptr, true).bytes +
         HWY_DYNAMIC_DISPATCH(backward_bytes)(p) * static_cast<std::size_t>(std::max(threads, 1));
}

Status path_backward(const PathProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (workspace.size() < path_backward_workspace(p, pool.size()))
    return {Code::OutOfMemory, "path_backward: workspace too small"};
  if (p.N == 0 || p.TK == 0) return {};
  const PathKept kept(p, workspace.data(), true);
  std::byte* scratch = workspace.data() + PathKept(p, nullptr, true).bytes;
  const std::size_t bytes = HWY_DYNAMIC_DISPATCH(backward_bytes)(p);
  sum_gates(p, kept.sums, pool);
  PathProblem first = p;  // the first pass gives no output
  first.o = first.k_cache = TensorView();
  HWY_DYNAMIC_DISPATCH(rows)(first, kept.blocks, kept.sums, &kept.st, pool, scratch, bytes);
  HWY_DYNAMIC_DISPATCH(gradients)(p, kept.blocks, kept.sums, kept.st, pool, scratch, bytes);
  return {};
}

}  // namespace fla::cpu
#endif
