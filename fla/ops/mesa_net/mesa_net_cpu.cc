// The CPU kernels of mesa_net; README.md (1) to (4), by chunks of kMesaBT tokens. With G the sums of g in the chunk,
// A, C the entering states and m_ij = beta_j e^{G_i - G_j}, j <= i, the states of all rows act at once:
//   rows p_i A_i = e^{G_i} p_i A + (p k^T o m) k       rows x_i C_i = e^{G_i} x_i C + (x k^T o m) v
// so a step of conjugate gradients is three matrix products for all tokens of a chunk.
//
// forward   every row makes max_CG_iteration steps of (3)
// backward  (4) asks for the exact solve: conjugate gradients without the 1e-5, preconditioned by the diagonal, until
// the
//           residual is at the rounding of fp32; a row that is there stands still. States are kept every kSegmentChunks
//           chunks and made again from there
// gates     dg_t is the sum over pairs (source before t, use at or after t); the others are left out from the start, so
//           that nothing has to cancel beside gates of -1000
// task      one sequence and head; scratch per worker
// bits      a row's sums run in one order whatever rows are beside it: the past does not depend on the future
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/diag/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"
#include "fla/ops/mesa_net/mesa_net.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/ops/mesa_net/mesa_net_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/kernels/cpu/gemm-inl.h"
#include "fla/kernels/cpu/io-inl.h"
#include "fla/kernels/cpu/math-inl.h"
#include "fla/kernels/cpu/norm-inl.h"

#ifndef FLA_OPS_MESA_NET_CPU_CC_ONCE
#define FLA_OPS_MESA_NET_CPU_CC_ONCE
namespace fla::cpu {

// The work inside a chunk grows with it; 32 rows make enough of the state while it comes from L2.
inline constexpr std::int64_t kMesaBT = 32;
inline constexpr std::int64_t kMesaSegment = 8 * kMesaBT;

// One head of one sequence.
struct MesaHead {
  std::int64_t n, h, row, begin, length;

  MesaHead(const MesaNetArgs& a, std::int64_t sequence, std::int64_t head) : n(sequence), h(head) {
    const Sequence s = sequence_at(a.cu_seqlens, a.q.dim(1), n);
    row = s.row;
    begin = s.begin;
    length = s.length;
  }
  Rows rows(const TensorView& x) const {
    if (!x || length == 0) return {};
    return {x.at(row, begin, h), x.dtype, x.stride[1] * static_cast<std::int64_t>(size_of(x.dtype)),
            x.ndim > 3 ? x.stride[3] : 1};
  }
};

// Tiles: token-major [rows, kp] with spare rows for transposes, squares [rows, lt], states [kp, kp].
struct MesaTiles {
  float *A = nullptr, *C = nullptr;                                             // entering states
  float *q = nullptr, *k = nullptr, *v = nullptr;                               // token-major
  float *kt = nullptr, *ket = nullptr;                                          // [kp, lt] k; beta e^{G_C - G} k
  float *e = nullptr, *m = nullptr;                                             // squares e^{G_i - G_j}; m; 0 above
  float *x = nullptr, *r = nullptr, *p = nullptr, *pe = nullptr, *y = nullptr;  // token-major, of the solve
  float* w = nullptr;                                                           // square
  float *lamb = nullptr, *decay = nullptr;                                      // [kp]; e^{G_C} everywhere
  float *beta = nullptr, *eg = nullptr, *ec = nullptr, *delta = nullptr, *made = nullptr;  // [lt]; r . r, steps
  float *rq = nullptr, *rk = nullptr;                                                      // [lt]; 1 / norms
  double* gsum = nullptr;                                                                  // [lt]
  // backward
  float *kept = nullptr, *inside = nullptr;  // [segments, 2, kp, kp], [chunks of a segment, 2, kp, kp]
  float *a = nullptr, *c = nullptr;          // gradients of the leaving states
  float *flip = nullptr, *sym = nullptr;     // C^T, then c^T; a + a^T
  float *up = nullptr, *z = nullptr, *inv = nullptr, *s = nullptr, *t = nullptr, *dk = nullptr, *dv = nullptr;
  float* vt = nullptr;                                                                       // [kp, lt]
  float *sz = nullptr, *sy = nullptr, *sd = nullptr;                                         // squares
  float *rho = nullptr, *use = nullptr, *source = nullptr, *dg = nullptr, *dbeta = nullptr;  // [lt]

  void carve(Arena& arena, std::int64_t K, std::int64_t T, bool backward) {
    const std::int64_t kp = pad_up(K), lt = token_ld(kMesaBT), rows = token_rows_padded(kMesaBT);
    for (float** f : {&A, &C}) *f = arena.floats(kp * kp);
    for (float** f : {&q, &k, &v, &x, &r, &p, &pe, &y}) *f = arena.floats(rows * kp);
    for (float** f : {&kt, &ket}) *f = arena.floats(kp * lt);
    for (float** f : {&e, &m, &w}) *f = arena.floats(rows * lt);
    for (float** f : {&lamb, &decay}) *f = arena.floats(kp);
    for (float** f : {&beta, &eg, &ec, &delta, &made, &rq, &rk}) *f = arena.floats(lt);
    gsum = arena.take<double>(lt);
    if (!backward) return;
    kept = arena.floats(std::max<std::int64_t>(1, (T + kMesaSegment - 1) / kMesaSegment) * 2 * kp * kp);
    inside = arena.floats(kMesaSegment / kMesaBT * 2 * kp * kp);
    for (float** f : {&a, &c, &flip, &sym}) *f = arena.floats(kp * kp);
    for (float** f : {&up, &z, &inv, &s, &t, &dk, &dv}) *f = arena.floats(rows * kp);
    vt = arena.floats(kp * lt);
    for (float** f : {&sz, &sy, &sd}) *f = arena.floats(rows * lt);
    for (float** f : {&rho, &use, &source, &dg, &dbeta}) *f = arena.floats(lt);
  }
  static std::size_t bytes(std::int64_t K, std::int64_t T, bool backward) {
    Arena arena;
    MesaTiles().carve(arena, K, T, backward);
    return arena.bytes();
  }
};

struct MesaStepTiles {
  float *A = nullptr, *C = nullptr;  // [K, kp], [K, vp]
  float *q = nullptr, *k = nullptr, *lamb = nullptr, *x = nullptr, *r = nullptr, *p = nullptr, *y = nullptr;  // [kp]
  float *v = nullptr, *o = nullptr;                                                                           // [vp]

  void carve(Arena& arena, std::int64_t K, std::int64_t V) {
    A = arena.floats(K * pad_up(K));
    C = arena.floats(K * pad_up(V));
    for (float** f : {&q, &k, &lamb, &x, &r, &p, &y}) *f = arena.floats(pad_up(K));
    for (float** f : {&v, &o}) *f = arena.floats(pad_up(V));
  }
  static std::size_t bytes(std::int64_t K, std::int64_t V) {
    Arena arena;
    MesaStepTiles().carve(arena, K, V);
    return arena.bytes();
  }
};

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace {

using F = hn::ScalableTag<float>;

HWY_INLINE std::int64_t lanes_of(F d) { return static_cast<std::int64_t>(hn::Lanes(d)); }

// Rows of n floats, n a multiple of the padding.
HWY_NOINLINE float dot(const float* x, const float* y, std::int64_t n) {
  const F d;
  auto s = hn::Zero(d);
  for (std::int64_t i = 0; i < n; i += lanes_of(d)) s = hn::MulAdd(hn::LoadU(d, x + i), hn::LoadU(d, y + i), s);
  return hn::GetLane(hn::SumOfLanes(d, s));
}

// y = f x, y += f x.
HWY_NOINLINE void scale(float f, const float* x, float* y, std::int64_t n) {
  const F d;
  const auto vf = hn::Set(d, f);
  for (std::int64_t i = 0; i < n; i += lanes_of(d)) hn::StoreU(hn::Mul(vf, hn::LoadU(d, x + i)), d, y + i);
}
HWY_NOINLINE void add(float f, const float* x, float* y, std::int64_t n) {
  const F d;
  const auto vf = hn::Set(d, f);
  for (std::int64_t i = 0; i < n; i += lanes_of(d))
    hn::StoreU(hn::MulAdd(vf, hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, y + i);
}
HWY_NOINLINE void multiply(const float* by, float* x, std::int64_t n) {
  const F d;
  for (std::int64_t i = 0; i < n; i += lanes_of(d))
    hn::StoreU(hn::Mul(hn::LoadU(d, by + i), hn::LoadU(d, x + i)), d, x + i);
}

// y = p (A_i + diag(lamb)) in rows, without lamb; w.pe holds e^{G_i} p_i.
HWY_NOINLINE void apply_states(MesaTiles& w, std::int64_t K, std::int64_t C) {
  const std::int64_t kp = pad_up(K), lt = token_ld(kMesaBT);
  gemm<false>(C, C, {w.p, kp, w.kt, lt, K}, {}, Tri::None, {}, w.w, lt, 0);
  for (std::int64_t i = 0; i < C; ++i) multiply(w.m + i * lt, w.w + i * lt, pad_up(i + 1));
  gemm<false>(C, kp, {w.pe, kp, w.A, kp, K}, {w.w, lt, w.k, kp, 0}, Tri::Lower, {}, w.y, kp);
}

// y += lamb o p; returns p . y.
HWY_NOINLINE float add_regulariser(const float* lamb, const float* p, float* y, std::int64_t kp) {
  const F d;
  auto s = hn::Zero(d);
  for (std::int64_t c = 0; c < kp; c += lanes_of(d)) {
    const auto vp = hn::LoadU(d, p + c), vy = hn::MulAdd(hn::LoadU(d, lamb + c), vp, hn::LoadU(d, y + c));
    hn::StoreU(vy, d, y + c);
    s = hn::MulAdd(vp, vy, s);
  }
  return hn::GetLane(hn::SumOfLanes(d, s));
}

// x += alpha p, r -= alpha y; returns r . r.
HWY_NOINLINE float move_along(float alpha, const float* p, const float* y, float* x, float* r, std::int64_t kp) {
  const F d;
  const auto f = hn::Set(d, alpha);
  auto s = hn::Zero(d);
  for (std::int64_t c = 0; c < kp; c += lanes_of(d)) {
    hn::StoreU(hn::MulAdd(f, hn::LoadU(d, p + c), hn::LoadU(d, x + c)), d, x + c);
    const auto vr = hn::NegMulAdd(f, hn::LoadU(d, y + c), hn::LoadU(d, r + c));
    hn::StoreU(vr, d, r + c);
    s = hn::MulAdd(vr, vr, s);
  }
  return hn::GetLane(hn::SumOfLanes(d, s));
}

// p = r + f p, pe = e p.
HWY_NOINLINE void turn(const float* r, float f, float e, float* p, float* pe, std::int64_t kp) {
  const F d;
  const auto vf = hn::Set(d, f), ve = hn::Set(d, e);
  for (std::int64_t c = 0; c < kp; c += lanes_of(d)) {
    const auto x = hn::MulAdd(vf, hn::LoadU(d, p + c), hn::LoadU(d, r + c));
    hn::StoreU(x, d, p + c);
    hn::StoreU(hn::Mul(ve, x), d, pe + c);
  }
}

// (3) from zero for all rows: w.q to w.x.
HWY_NOINLINE void conjugate_gradients(MesaTiles& w, std::int64_t K, std::int64_t C, std::int64_t steps) {
  const std::int64_t kp = pad_up(K);
  std::fill(w.x, w.x + C * kp, 0.0F);
  for (std::int64_t i = 0; i < C; ++i) {
    const std::int64_t at = i * kp;
    std::copy(w.q + at, w.q + at + kp, w.r + at);
    std::copy(w.q + at, w.q + at + kp, w.p + at);
    scale(w.eg[i], w.p + at, w.pe + at, kp);
    w.delta[i] = dot(w.r + at, w.r + at, kp);
    w.made[i] = 0.0F;
  }
  for (std::int64_t step = 0; step < steps; ++step) {
    apply_states(w, K, C);
    for (std::int64_t i = 0; i < C; ++i) {
      const std::int64_t at = i * kp;
      const float alpha = w.delta[i] / (add_regulariser(w.lamb, w.p + at, w.y + at, kp) + 1e-5F);
      const float next = move_along(alpha, w.p + at, w.y + at, w.x + at, w.r + at, kp);
      w.made[i] += w.delta[i] > 0.0F ? 1.0F : 0.0F;
      turn(w.r + at, next / (w.delta[i] + 1e-5F), w.eg[i], w.p + at, w.pe + at, kp);
      w.delta[i] = next;
    }
  }
}

// out = (A_i + diag(lamb))^{-1} b_i for all rows, to the rounding of fp32. w.inv: 1 / diagonal.
HWY_NOINLINE void solve_exactly(MesaTiles& w, std::int64_t K, std::int64_t C, const float* b, float* out) {
  // Of the residual in the norm of the preconditioner, squared. In exact arithmetic K steps would do.
  constexpr float kReached = 1e-14F;
  const std::int64_t kp = pad_up(K), most = 4 * K + 16;
  std::fill(out, out + C * kp, 0.0F);
  std::int64_t open = 0;
  for (std::int64_t i = 0; i < C; ++i) {
    const std::int64_t at = i * kp;
    std::copy(b + at, b + at + kp, w.r + at);
    std::copy(b + at, b + at + kp, w.p + at);
    multiply(w.inv + at, w.p + at, kp);
    scale(w.eg[i], w.p + at, w.pe + at, kp);
    w.rho[i] = dot(w.r + at, w.p + at, kp);
    w.delta[i] = kReached * w.rho[i];
    open += w.rho[i] > 0.0F ? 1 : 0;
  }
  for (std::int64_t step = 0; step < most && open > 0; ++step) {
    apply_states(w, K, C);
    open = 0;
    for (std::int64_t i = 0; i < C; ++i) {
      if (!(w.rho[i] > w.delta[i])) continue;
      const std::int64_t at = i * kp;
      const float py = add_regulariser(w.lamb, w.p + at, w.y + at, kp);
      if (!(py > 0.0F)) {
        w.rho[i] = 0.0F;
        continue;
      }
      move_along(w.rho[i] / py, w.p + at, w.y + at, out + at, w.r + at, kp);
      std::copy(w.r + at, w.r + at + kp, w.s + at);
      multiply(w.inv + at, w.s + at, kp);
      const float next = dot(w.r + at, w.s + at, kp);
      turn(w.s + at, next / w.rho[i], w.eg[i], w.p + at, w.pe + at, kp);
      w.rho[i] = next;
      open += next > w.delta[i] ? 1 : 0;
    }
  }
}

// k, v, gates and weights of C tokens from t0 on, and what follows from them.
HWY_NOINLINE void load_tokens(const MesaNetArgs& args, const MesaHead& s, MesaTiles& w, std::int64_t K, std::int64_t t0,
                              std::int64_t C) {
  const F d;
  const std::int64_t kp = pad_up(K), lt = token_ld(kMesaBT);
  load_rows(s.rows(args.k), t0, C, 0, K, w.k, kp);
  if (args.use_qk_l2norm_in_kernel) normalize_rows(w.k, kp, C, w.rk);
  load_rows(s.rows(args.v), t0, C, 0, K, w.v, kp);
  const Rows g = s.rows(args.g), beta = s.rows(args.beta);
  double sum = 0.0;
  std::fill(w.beta, w.beta + lt, 0.0F);
  for (std::int64_t i = 0; i < C; ++i) {
    w.gsum[i] = sum += bounded_gate(scalar_at(g, t0 + i));
    w.beta[i] = static_cast<float>(scalar_at(beta, t0 + i));
  }
  for (std::int64_t i = C; i < lt; ++i) w.gsum[i] = sum;
  const auto exp_row = [&](float* x, std::int64_t n) HWY_ATTR {
    for (std::int64_t j = 0; j < n; j += lanes_of(d)) hn::StoreU(exp_v(d, hn::LoadU(d, x + j)), d, x + j);
  };
  for (std::int64_t i = 0; i < lt; ++i) {
    w.eg[i] = static_cast<float>(w.gsum[i]);
    w.ec[i] = static_cast<float>(sum - w.gsum[i]);
  }
  exp_row(w.eg, lt);
  exp_row(w.ec, lt);
  std::fill(w.decay, w.decay + kp, w.eg[C - 1]);
  for (std::int64_t i = 0; i < C; ++i) {
    float *e = w.e + i * lt, *m = w.m + i * lt;
    for (std::int64_t j = 0; j <= i; ++j) e[j] = static_cast<float>(w.gsum[i] - w.gsum[j]);
    std::fill(e + i + 1, e + lt, 0.0F);
    exp_row(e, pad_up(i + 1));
    std::fill(e + i + 1, e + lt, 0.0F);
    std::copy(e, e + lt, m);
    multiply(w.beta, m, lt);
  }
  transpose(w.k, kp, C, K, w.kt, lt);
}

// The states of the chunk's end; may be in place.
HWY_NOINLINE void advance_states(MesaTiles& w, std::int64_t K, std::int64_t C, const float* A, const float* Cs,
                                 float* to_A, float* to_C) {
  const std::int64_t kp = pad_up(K), lt = token_ld(kMesaBT);
  for (std::int64_t c = 0; c < K; ++c) {
    float* row = w.ket + c * lt;
    std::copy(w.kt + c * lt, w.kt + c * lt + pad_up(C), row);
    multiply(w.ec, row, pad_up(C));
    multiply(w.beta, row, pad_up(C));
  }
  gemm<false>(K, kp, {w.ket, lt, w.k, kp, C}, {}, Tri::None, {A, kp, w.decay}, to_A, kp);
  gemm<false>(K, kp, {w.ket, lt, w.v, kp, C}, {}, Tri::None, {Cs, kp, w.decay}, to_C, kp);
}

HWY_NOINLINE void load_head_state(const TensorView& x, const MesaHead& s, std::int64_t K, float* to) {
  const std::int64_t kp = pad_up(K);
  std::fill(to, to + kp * kp, 0.0F);
  if (x) load_rows(state_rows(x, s.n, s.h), 0, K, 0, K, to, kp);
}

HWY_NOINLINE void store_head_state(const float* from, const TensorView& x, const MesaHead& s, std::int64_t K) {
  if (x) store_rows(from, pad_up(K), state_rows(x, s.n, s.h), 0, K, 0, K);
}

// Padding channels get 1: nothing divides by zero there.
HWY_NOINLINE void load_regulariser(const TensorView& x, std::int64_t h, std::int64_t K, float* to) {
  std::fill(to, to + pad_up(K), 1.0F);
  load_row(x.at(h), x.dtype, x.stride[1], K, to);
}

HWY_NOINLINE void load_queries(const MesaNetArgs& args, const MesaHead& s, MesaTiles& w, std::int64_t K,
                               std::int64_t t0, std::int64_t C) {
  load_rows(s.rows(args.q), t0, C, 0, K, w.q, pad_up(K));
  if (args.use_qk_l2norm_in_kernel) normalize_rows(w.q, pad_up(K), C, w.rq);
}

HWY_INLINE void store_scalars(const float* x, const Rows& to, std::int64_t t0, std::int64_t C) {
  for (std::int64_t i = 0; to && i < C; ++i) store_row(x + i, to.at(t0 + i, 0), to.dtype, 1, 1);
}

HWY_NOINLINE void forward_head(const MesaNetArgs& args, MesaTiles& w, const MesaHead& s) {
  const std::int64_t K = args.q.dim(3), kp = pad_up(K), lt = token_ld(kMesaBT);
  load_regulariser(args.lamb, s.h, K, w.lamb);
  load_head_state(args.h_kk_init, s, K, w.A);
  load_head_state(args.h_kv_init, s, K, w.C);
  for (std::int64_t t0 = 0; t0 < s.length; t0 += kMesaBT) {
    const std::int64_t C = std::min(kMesaBT, s.length - t0);
    load_tokens(args, s, w, K, t0, C);
    if (args.o || args.cg_iterations || args.cg_residual) {
      load_queries(args, s, w, K, t0, C);
      conjugate_gradients(w, K, C, args.max_CG_iteration);
      for (std::int64_t i = 0; i < C; ++i) w.delta[i] = std::sqrt(w.delta[i]);
      store_scalars(w.made, s.rows(args.cg_iterations), t0, C);
      store_scalars(w.delta, s.rows(args.cg_residual), t0, C);
    }
    if (args.o) {
      gemm<false>(C, C, {w.x, kp, w.kt, lt, K}, {}, Tri::None, {}, w.w, lt, 0);
      for (std::int64_t i = 0; i < C; ++i) {
        multiply(w.m + i * lt, w.w + i * lt, pad_up(i + 1));
        scale(w.eg[i], w.x + i * kp, w.x + i * kp, kp);
      }
      gemm<false>(C, kp, {w.x, kp, w.C, kp, K}, {w.w, lt, w.v, kp, 0}, Tri::Lower, {}, w.y, kp);
      store_rows(w.y, kp, s.rows(args.o), t0, C, 0, K);
    }
    advance_states(w, K, C, w.A, w.C, w.A, w.C);
  }
  store_head_state(w.A, args.h_kk_final, s, K);
  store_head_state(w.C, args.h_kv_final, s, K);
}

// The whole padded square, as rows are.
HWY_NOINLINE void flip_state(const float* x, std::int64_t kp, float* to) { transpose(x, kp, kp, kp, to, kp); }

// z, y and what they say of q, lamb and the entering states' use: w.z, w.y, w.use.
HWY_NOINLINE void solve_gradients(const MesaNetBackwardArgs& args, const MesaHead& s, MesaTiles& w, std::int64_t K,
                                  std::int64_t t0, std::int64_t C, double* dlamb) {
  const std::int64_t kp = pad_up(K), lt = token_ld(kMesaBT);
  load_rows(s.rows(args.do_), t0, C, 0, K, w.up, kp);
  load_queries(args, s, w, K, t0, C);
  // 1 / diagonal of A_i + diag(lamb)
  for (std::int64_t i = 0; i < C * kp; i += kp) {
    std::copy(w.k + i, w.k + i + kp, w.s + i);
    multiply(w.k + i, w.s + i, kp);
  }
  for (std::int64_t i = 0; i < C; ++i)
    for (std::int64_t c = 0; c < kp; ++c) w.inv[i * kp + c] = w.lamb[c] + w.eg[i] * w.A[c * kp + c];
  gemm<false>(C, kp, {}, {w.m, lt, w.s, kp, 0}, Tri::Lower, {w.inv, kp, nullptr}, w.inv, kp);
  for (std::int64_t i = 0; i < C * kp; ++i) w.inv[i] = 1.0F / w.inv[i];

  // u = C_i do_i
  flip_state(w.C, kp, w.flip);
  transpose(w.v, kp, C, K, w.vt, lt);
  gemm<false>(C, kp, {w.up, kp, w.flip, kp, K}, {}, Tri::None, {}, w.t, kp);
  gemm<false>(C, C, {w.up, kp, w.vt, lt, K}, {}, Tri::None, {}, w.sd, lt, 0);
  for (std::int64_t i = 0; i < C; ++i) {
    std::copy(w.sd + i * lt, w.sd + i * lt + pad_up(i + 1), w.w + i * lt);
    multiply(w.m + i * lt, w.w + i * lt, pad_up(i + 1));
  }
  gemm<false>(C, kp, {}, {w.w, lt, w.k, kp, 0}, Tri::Lower, {w.t, kp, w.eg}, w.x, kp);
  solve_exactly(w, K, C, w.q, w.z);
  solve_exactly(w, K, C, w.x, w.dk);
  std::swap(w.dk, w.y);

  gemm<false>(C, kp, {w.z, kp, w.A, kp, K}, {}, Tri::None, {}, w.s, kp);
  for (std::int64_t i = 0; i < C; ++i) {
    const std::int64_t at = i * kp;
    w.use[i] = w.eg[i] * (dot(w.z + at, w.t + at, kp) - dot(w.y + at, w.s + at, kp));
    for (std::int64_t c = 0; c < K; ++c) dlamb[c] -= static_cast<double>(w.y[at + c] * w.z[at + c]);
  }
}

// dx = r (dy - x <x, dy>) in rows, where x was normalised.
HWY_NOINLINE void store_key_gradient(bool unit, float* dy, const float* x, const float* r, const Rows& to,
                                     std::int64_t K, std::int64_t t0, std::int64_t C) {
  const std::int64_t kp = pad_up(K);
  if (!to) return;
  for (std::int64_t i = 0; unit && i < C; ++i) {
    add(-dot(x + i * kp, dy + i * kp, kp), x + i * kp, dy + i * kp, kp);
    scale(r[i], dy + i * kp, dy + i * kp, kp);
  }
  store_rows(dy, kp, to, t0, C, 0, K);
}

// dg from the pairs of the chunk: w.sd holds m_ij dm_ij, j < i; w.use, of row i with the entering states; w.source, of
// token j with the gradients of the leaving states; through: of the entering with the leaving states.
HWY_NOINLINE void gate_gradients(MesaTiles& w, std::int64_t C, float through) {
  const std::int64_t lt = token_ld(kMesaBT);
  std::fill(w.dg, w.dg + C, through);
  for (std::int64_t i = 0; i < C; ++i) {
    float before = 0.0F;
    for (std::int64_t t = 0; t <= i; ++t) {
      w.dg[t] += w.use[i] + before;
      before += w.sd[i * lt + t];
    }
  }
  float before = 0.0F;
  for (std::int64_t t = 0; t < C; ++t) {
    w.dg[t] += before;
    before += w.source[t];
  }
}

// The gradients of one chunk's tokens; w.a and w.c move to its entry.
HWY_NOINLINE void backward_chunk(const MesaNetBackwardArgs& args, const MesaHead& s, MesaTiles& w, std::int64_t K,
                                 std::int64_t t0, std::int64_t C, double* dlamb) {
  const std::int64_t kp = pad_up(K), lt = token_ld(kMesaBT);
  const bool unit = args.use_qk_l2norm_in_kernel;
  if (args.do_) {
    solve_gradients(args, s, w, K, t0, C, dlamb);
  } else {
    for (float* x : {w.up, w.z, w.y}) std::fill(x, x + C * kp, 0.0F);
    std::fill(w.sd, w.sd + C * lt, 0.0F);
    std::fill(w.use, w.use + C, 0.0F);
    load_queries(args, s, w, K, t0, C);
  }

  // Through the leaving states, before beta.
  flip_state(w.c, kp, w.flip);
  flip_state(w.a, kp, w.sym);
  add(1.0F, w.a, w.sym, kp * kp);
  for (std::int64_t i = 0; i < C; ++i) {
    scale(w.ec[i], w.k + i * kp, w.s + i * kp, kp);
    scale(w.ec[i], w.v + i * kp, w.t + i * kp, kp);
  }
  gemm<false>(C, kp, {w.s, kp, w.sym, kp, K}, {w.t, kp, w.flip, kp, K}, Tri::None, {}, w.dk, kp);
  gemm<false>(C, kp, {w.s, kp, w.c, kp, K}, {}, Tri::None, {}, w.dv, kp);
  const auto strength = [&](std::int64_t j) {  // <dk, k> counts k^T a k twice
    return 0.5F * (dot(w.dk + j * kp, w.k + j * kp, kp) + dot(w.dv + j * kp, w.v + j * kp, kp));
  };
  for (std::int64_t j = 0; j < C; ++j) w.source[j] = w.beta[j] * strength(j);
  const float through = w.decay[0] * (dot(w.a, w.A, K * kp) + dot(w.c, w.C, K * kp));

  // Through the chunk's own rows.
  gemm<false>(C, C, {w.z, kp, w.kt, lt, K}, {}, Tri::None, {}, w.sz, lt, 0);
  gemm<false>(C, C, {w.y, kp, w.kt, lt, K}, {}, Tri::None, {}, w.sy, lt, 0);
  for (std::int64_t i = 0; i < C; ++i) {
    float *sz = w.sz + i * lt, *sy = w.sy + i * lt, *sd = w.sd + i * lt;
    const float *e = w.e + i * lt, *m = w.m + i * lt;
    for (std::int64_t j = 0; j <= i; ++j) {
      const float both = sd[j] - sy[j];
      sd[j] = j < i ? m[j] * sz[j] * both : 0.0F;
      sy[j] = e[j] * both;
      sz[j] *= e[j];
    }
    for (float* x : {sz, sy, sd}) std::fill(x + i + 1, x + lt, 0.0F);
    scale(-1.0F, w.y + i * kp, w.t + i * kp, kp);
  }
  gemm<true>(C, kp, {w.sz, lt, w.t, kp, C}, {w.sy, lt, w.z, kp, C}, Tri::None, {w.dk, kp, nullptr}, w.dk, kp);
  gemm<true>(C, kp, {w.sz, lt, w.up, kp, C}, {}, Tri::None, {w.dv, kp, nullptr}, w.dv, kp);
  gate_gradients(w, C, through);
  for (std::int64_t j = 0; j < C; ++j) {
    w.dbeta[j] = strength(j);
    scale(w.beta[j], w.dk + j * kp, w.dk + j * kp, kp);
    scale(w.beta[j], w.dv + j * kp, w.dv + j * kp, kp);
  }

  // The entering states' gradients, before dq's rows lose their meaning.
  for (std::int64_t i = 0; i < C; ++i) {
    scale(w.eg[i], w.t + i * kp, w.t + i * kp, kp);
    scale(w.eg[i], w.z + i * kp, w.s + i * kp, kp);
  }
  gemm<true>(K, kp, {w.t, kp, w.z, kp, C}, {}, Tri::None, {w.a, kp, w.decay}, w.a, kp);
  gemm<true>(K, kp, {w.s, kp, w.up, kp, C}, {}, Tri::None, {w.c, kp, w.decay}, w.c, kp);

  store_key_gradient(unit, w.y, w.q, w.rq, s.rows(args.dq), K, t0, C);
  store_key_gradient(unit, w.dk, w.k, w.rk, s.rows(args.dk), K, t0, C);
  store_key_gradient(false, w.dv, nullptr, nullptr, s.rows(args.dv), K, t0, C);
  store_scalars(w.dg, s.rows(args.dg), t0, C);
  store_scalars(w.dbeta, s.rows(args.dbeta), t0, C);
}

HWY_NOINLINE void backward_head(const MesaNetBackwardArgs& args, MesaTiles w, const MesaHead& s, double* dlamb) {
  const std::int64_t K = args.q.dim(3), kp = pad_up(K), size = kp * kp;
  std::fill(dlamb, dlamb + K, 0.0);
  load_regulariser(args.lamb, s.h, K, w.lamb);
  load_head_state(args.dh_kkt, s, K, w.a);
  load_head_state(args.dh_kvt, s, K, w.c);
  load_head_state(args.h_kk_init, s, K, w.kept);
  load_head_state(args.h_kv_init, s, K, w.kept + size);
  const std::int64_t segments = (s.length + kMesaSegment - 1) / kMesaSegment;
  // Rows past K of a state are not written by products, but whole squares are flipped.
  if (segments > 1) std::fill_n(w.kept + 2 * size, (segments - 1) * 2 * size, 0.0F);
  std::fill_n(w.inside, kMesaSegment / kMesaBT * 2 * size, 0.0F);
  for (std::int64_t t0 = 0; t0 < (segments - 1) * kMesaSegment; t0 += kMesaBT) {
    float* to = w.kept + (t0 / kMesaSegment + 1) * 2 * size;
    const float* from = t0 % kMesaSegment == 0 ? to - 2 * size : to;
    load_tokens(args, s, w, K, t0, kMesaBT);
    advance_states(w, K, kMesaBT, from, from + size, to, to + size);
  }
  for (std::int64_t segment = segments - 1; segment >= 0; --segment) {
    const std::int64_t begin = segment * kMesaSegment, end = std::min(begin + kMesaSegment, s.length);
    const std::int64_t chunks = (end - begin + kMesaBT - 1) / kMesaBT;
    const auto entering = [&](std::int64_t i) {
      return i == 0 ? w.kept + segment * 2 * size : w.inside + i * 2 * size;
    };
    for (std::int64_t i = 0; i + 1 < chunks; ++i) {
      load_tokens(args, s, w, K, begin + i * kMesaBT, kMesaBT);
      advance_states(w, K, kMesaBT, entering(i), entering(i) + size, entering(i + 1), entering(i + 1) + size);
    }
    for (std::int64_t i = chunks - 1; i >= 0; --i) {
      const std::int64_t t0 = begin + i * kMesaBT, C = std::min(kMesaBT, end - t0);
      w.A = entering(i);
      w.C = w.A + size;
      load_tokens(args, s, w, K, t0, C);
      backward_chunk(args, s, w, K, t0, C, dlamb);
    }
  }
  store_head_state(w.a, args.dh_kk0, s, K);
  store_head_state(w.c, args.dh_kv0, s, K);
}

// y = x M, x [K], M [K, ld].
HWY_NOINLINE void row_product(const float* x, const float* M, std::int64_t K, std::int64_t ld, float* y) {
  const F d;
  const std::int64_t lanes = lanes_of(d);
  std::int64_t j = 0;
  for (; j + 4 * lanes <= ld; j += 4 * lanes)
    gemm_tile<false, 1, 4>({x, K, M + j, ld, K}, {}, false, {}, y + j, ld, lanes);
  for (; j < ld; j += lanes) gemm_tile<false, 1, 1>({x, K, M + j, ld, K}, {}, false, {}, y + j, ld, lanes);
}

HWY_NOINLINE void step_head(const MesaNetStepArgs& args, const MesaStepTiles& w, std::int64_t n, std::int64_t h) {
  const std::int64_t K = args.q.dim(2), V = args.v.dim(2), kp = pad_up(K), vp = pad_up(V);
  const auto row = [&](const TensorView& x) { return Rows{x.at(n, h), x.dtype, 0, x.ndim > 2 ? x.stride[2] : 1}; };
  const float e = std::exp(static_cast<float>(scalar_at(row(args.g), 0))),
              beta = static_cast<float>(scalar_at(row(args.beta), 0));
  load_regulariser(args.lamb, h, K, w.lamb);
  load_rows(row(args.q), 0, 1, 0, K, w.q, kp);
  load_rows(row(args.k), 0, 1, 0, K, w.k, kp);
  load_rows(row(args.v), 0, 1, 0, V, w.v, vp);
  load_rows(state_rows(args.prev_h_kk, n, h), 0, K, 0, K, w.A, kp);
  load_rows(state_rows(args.prev_h_kv, n, h), 0, K, 0, V, w.C, vp);
  std::fill(w.x, w.x + kp, 0.0F);
  for (std::int64_t i = 0; i < K; ++i) {
    float *A = w.A + i * kp, *C = w.C + i * vp;
    scale(e, A, A, kp);
    scale(e, C, C, vp);
    add(beta * w.k[i], w.k, A, kp);
    add(beta * w.k[i], w.v, C, vp);
    w.x[i] = w.q[i] / (A[i] + w.lamb[i] + 1e-5F);
  }
  row_product(w.x, w.A, K, kp, w.y);
  add_regulariser(w.lamb, w.x, w.y, kp);
  std::copy(w.q, w.q + kp, w.r);
  add(-1.0F, w.y, w.r, kp);
  std::copy(w.r, w.r + kp, w.p);
  float delta = dot(w.r, w.r, kp), made = 0.0F;
  for (std::int64_t i = 0; i < args.max_CG_iteration; ++i) {
    row_product(w.p, w.A, K, kp, w.y);
    const float alpha = delta / (add_regulariser(w.lamb, w.p, w.y, kp) + 1e-5F);
    const float next = move_along(alpha, w.p, w.y, w.x, w.r, kp);
    scale(next / (delta + 1e-5F), w.p, w.p, kp);
    add(1.0F, w.r, w.p, kp);
    made += delta > 0.0F ? 1.0F : 0.0F;
    delta = next;
  }
  delta = std::sqrt(delta);
  if (args.cg_iterations) store_scalars(&made, row(args.cg_iterations), 0, 1);
  if (args.cg_residual) store_scalars(&delta, row(args.cg_residual), 0, 1);
  if (args.o) {
    row_product(w.x, w.C, K, vp, w.o);
    store_rows(w.o, vp, row(args.o), 0, 1, 0, V);
  }
  if (args.h_kk) store_rows(w.A, kp, state_rows(args.h_kk, n, h), 0, K, 0, K);
  if (args.h_kv) store_rows(w.C, vp, state_rows(args.h_kv, n, h), 0, K, 0, V);
}

}  // namespace

void mesa_forward(const MesaNetArgs& a, std::int64_t N, std::int64_t slots, ThreadPool& pool, std::byte* workspace) {
  const std::int64_t H = a.q.dim(2), K = a.q.dim(3), T = a.q.dim(1);
  const std::size_t bytes = MesaTiles::bytes(K, T, false);
  run_items(pool, N * H, slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    MesaTiles w;
    w.carve(arena, K, T, false);
    forward_head(a, w, MesaHead(a, item / H, item % H));
  });
}

// dlamb: [N, H, K].
void mesa_backward(const MesaNetBackwardArgs& a, std::int64_t N, std::int64_t slots, ThreadPool& pool, double* dlamb,
                   std::byte* workspace) {
  const std::int64_t H = a.q.dim(2), K = a.q.dim(3), T = a.q.dim(1);
  const std::size_t bytes = MesaTiles::bytes(K, T, true);
  run_items(pool, N * H, slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    MesaTiles w;
    w.carve(arena, K, T, true);
    backward_head(a, w, MesaHead(a, item / H, item % H), dlamb + item * K);
  });
  if (!a.dlamb) return;
  for (std::int64_t h = 0; h < H; ++h)
    for (std::int64_t c = 0; c < K; ++c) {
      double sum = 0.0;
      for (std::int64_t n = 0; n < N; ++n) sum += dlamb[(n * H + h) * K + c];
      const float value = static_cast<float>(sum);
      store_row(&value, a.dlamb.at(h, c), a.dlamb.dtype, 1, 1);
    }
}

void mesa_step(const MesaNetStepArgs& a, std::int64_t slots, ThreadPool& pool, std::byte* workspace) {
  const std::int64_t H = a.q.dim(1), K = a.q.dim(2), V = a.v.dim(2);
  const std::size_t bytes = MesaStepTiles::bytes(K, V);
  run_items(pool, a.q.dim(0) * H, slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    MesaStepTiles w;
    w.carve(arena, K, V);
    step_head(a, w, item / H, item % H);
  });
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla {

namespace cpu {

HWY_EXPORT(mesa_forward);
HWY_EXPORT(mesa_backward);
HWY_EXPORT(mesa_step);

}  // namespace cpu

namespace {

using namespace cpu;  // HWY_DYNAMIC_DISPATCH takes a plain name when there is one instruction set

std::int64_t slots(std::int64_t items, const CallInfo& c) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(c.threads, items));
}

std::size_t workspace_of(const MesaNetArgs& a, const CallInfo& c, bool backward) {
  return cpu::MesaTiles::bytes(a.q.dim(3), a.q.dim(1), backward) *
         static_cast<std::size_t>(slots(c.dims["N"] * a.q.dim(2), c));
}

// The partial sums of dlamb lie before the workers' scratch.
double* place_dlamb(cpu::Arena& arena, const MesaNetArgs& a, const CallInfo& c) {
  return arena.take<double>(c.dims["N"] * a.q.dim(2) * a.q.dim(3));
}

Status forward(const MesaNetArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const std::int64_t N = c.dims["N"];
  HWY_DYNAMIC_DISPATCH(mesa_forward)(a, N, slots(N * a.q.dim(2), c), *l.pool, l.workspace.data());
  return {};
}

Status backward(const MesaNetBackwardArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const std::int64_t N = c.dims["N"];
  cpu::Arena arena(l.workspace.data());
  double* dlamb = place_dlamb(arena, a, c);
  HWY_DYNAMIC_DISPATCH(mesa_backward)
  (a, N, slots(N * a.q.dim(2), c), *l.pool, dlamb, arena.take<std::byte>(0));
  return {};
}

Status step(const MesaNetStepArgs& a, const CallInfo& c, const LaunchInfo& l) {
  HWY_DYNAMIC_DISPATCH(mesa_step)(a, slots(a.q.dim(0) * a.q.dim(1), c), *l.pool, l.workspace.data());
  return {};
}

}  // namespace

void register_mesa_net_cpu(Registry& r) {
  r.add_backend("mesa_net", cpu_backend());
  r.add(Kernel<MesaNetArgs>{
      .function = kChunkMesaNet,
      .backend = "cpu",
      .name = "mesa.chunk.forward",
      .verify = [](const MesaNetArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace = [](const MesaNetArgs& a, const CallInfo& c) { return workspace_of(a, c, false); },
      .launch = forward});
  r.add(Kernel<MesaNetBackwardArgs>{
      .function = kChunkMesaNetBackward,
      .backend = "cpu",
      .name = "mesa.chunk.backward",
      .verify = [](const MesaNetBackwardArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace =
          [](const MesaNetBackwardArgs& a, const CallInfo& c) {
            cpu::Arena arena;
            place_dlamb(arena, a, c);
            return arena.bytes() + workspace_of(a, c, true);
          },
      .launch = backward});
  r.add(Kernel<MesaNetStepArgs>{
      .function = kMesaNetDecodingOneStep,
      .backend = "cpu",
      .name = "mesa.step.forward",
      .verify = [](const MesaNetStepArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace =
          [](const MesaNetStepArgs& a, const CallInfo& c) {
            return cpu::MesaStepTiles::bytes(a.q.dim(2), a.v.dim(2)) *
                   static_cast<std::size_t>(slots(a.q.dim(0) * a.q.dim(1), c));
          },
      .launch = step});
}

}  // namespace fla
#endif
