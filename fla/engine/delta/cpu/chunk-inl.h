// What the chunk form's forward and backward share: the front end (normalisation, beta, gates), the preparation of a
// chunk, and its action on the state. Per-target code.
#if defined(FLA_ENGINE_DELTA_CPU_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_ENGINE_DELTA_CPU_CHUNK_INL_H_
#undef FLA_ENGINE_DELTA_CPU_CHUNK_INL_H_
#else
#define FLA_ENGINE_DELTA_CPU_CHUNK_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fla/engine/delta/cpu/internal.h"
#include "fla/engine/diag/cpu/chunk-inl.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/gemm-inl.h"
#include "fla/kernels/cpu/io-inl.h"
#include "fla/kernels/cpu/math-inl.h"
#include "fla/kernels/cpu/norm-inl.h"
#include "fla/kernels/cpu/prefetch.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/kernels/cpu/solve-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, class V = hn::Vec<D>>
HWY_INLINE V sigmoid_v(D d, V x) {
  const V one = hn::Set(d, 1.0F);
  return hn::Div(one, hn::Add(one, exp_v(d, hn::Neg(x))));
}

// Below this a softplus is e^y to the last bit of fp32. With a multiplier that makes something of it, the two are one
// power: e^y alone would be 0 where the gate is not.
constexpr float kSoftplusTail = -20.0F, kLargeA = 40.0F;

// e^{A_log} x; where that multiplier is 0, x may be infinite.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V multiplied(D d, const DeltaGate& gate, V x) {
  return gate.multiplier == 0.0F ? hn::Zero(d) : hn::Mul(hn::Set(d, gate.multiplier), x);
}

// The log gate of y = raw + bias.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V activate_v(D d, const DeltaGate& gate, V y) {
  if (gate.kind == GateActivation::Kind::Softplus) {
    const V cut = hn::Set(d, 20.0F);
    const V soft = hn::Log1p(d, exp_v(d, hn::Min(y, cut)));
    const V g = hn::Neg(multiplied(d, gate, hn::IfThenElse(hn::Gt(y, cut), y, soft)));
    if (gate.A_log < kLargeA) return g;
    const V tail = hn::Neg(exp_v(d, hn::Add(y, hn::Set(d, gate.A_log))));
    return hn::IfThenElse(hn::Lt(y, hn::Set(d, kSoftplusTail)), tail, g);
  }
  if (gate.kind == GateActivation::Kind::Bounded)
    return hn::Mul(hn::Set(d, gate.lower_bound), sigmoid_v(d, multiplied(d, gate, y)));
  return y;
}

// slope = dg/dy, slope_A = dg/dA_log. The latter grows with y where nothing depends on it any more: it is 0 there, as
// the product is in the limit, so that an infinite raw gate has gradients too. Both are finite, as the gradient of g that
// they multiply may be 0.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void gate_slopes(D d, const DeltaGate& gate, V y, V g, V* slope, V* slope_A) {
  const V m = hn::Set(d, gate.multiplier), one = hn::Set(d, 1.0F), least = hn::Set(d, -0x1.fffffep127F);
  if (gate.kind == GateActivation::Kind::Softplus) {
    *slope = hn::Neg(hn::Mul(m, sigmoid_v(d, y)));
    if (gate.A_log >= kLargeA) *slope = hn::IfThenElse(hn::Lt(y, hn::Set(d, kSoftplusTail)), hn::Max(g, least), *slope);
    *slope_A = hn::IfThenZeroElse(hn::Le(g, hn::Set(d, static_cast<float>(kLeastGate))), g);
    return;
  }
  if (gate.kind == GateActivation::Kind::Bounded) {
    // s (1 - s) = e / (1 + e)^2 with e = e^-|x|: 0 at both ends, and no difference to lose digits in. Bound and
    // multiplier come after it, as their product may be no float.
    const V x = multiplied(d, gate, y), e = exp_v(d, hn::Neg(hn::Abs(x))), under = hn::Add(one, e);
    const V by_x = hn::Mul(hn::Set(d, gate.lower_bound), hn::Div(e, hn::Mul(under, under)));
    *slope = hn::Max(hn::Mul(by_x, m), least);
    *slope_A = hn::IfThenZeroElse(hn::Eq(by_x, hn::Zero(d)), hn::Mul(by_x, x));
    return;
  }
  *slope = one;
  *slope_A = hn::Zero(d);
}

// dst[i] = factor[i] * src[i]; whole padded rows.
inline HWY_NOINLINE void scale_rows(const float* src, std::int64_t ld, std::int64_t rows, const float* factor,
                                    float* dst) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto f = hn::Set(d, factor[i]);
    for (std::int64_t c = 0; c < ld; c += lanes) {
      hn::StoreU(hn::Mul(f, hn::LoadU(d, src + i * ld + c)), d, dst + i * ld + c);
    }
  }
}

// Rows [t0, t0 + n) of a tensor that has one row per token, at the row `phase` of each token's R; zero elsewhere.
inline HWY_NOINLINE void load_token_rows(const Rows& x, std::int64_t R, std::int64_t phase, std::int64_t t0,
                                         std::int64_t n, std::int64_t width, float* dst, std::int64_t ld) {
  if (R == 1) return load_rows(x, t0, n, 0, width, dst, ld);
  for (std::int64_t i = 0; i < n; ++i) {
    if ((t0 + i) % R == phase) {
      load_rows(x, (t0 + i) / R, 1, 0, width, dst + i * ld, ld);
    } else {
      std::fill(dst + i * ld, dst + i * ld + pad_up(width), 0.0F);
    }
  }
}

inline HWY_NOINLINE void store_token_rows(const float* src, std::int64_t ld, const Rows& x, std::int64_t R,
                                          std::int64_t phase, std::int64_t t0, std::int64_t n, std::int64_t c0,
                                          std::int64_t width) {
  if (R == 1) return store_rows(src, ld, x, t0, n, c0, width);
  for (std::int64_t i = 0; i < n; ++i) {
    if ((t0 + i) % R == phase) store_rows(src + i * ld, ld, x, (t0 + i) / R, 1, c0, width);
  }
}

// Scratch of one chunk. Token-major tiles are [token_rows_padded(BT), pad_up(K)], key-major ones
// [pad_up(K), token_ld(BT)], squares [token_rows_padded(BT), token_ld(BT)]. In the forward the three stages of q, n, s
// share one tile each, and s is k where there is no separate write key.
struct DeltaTiles {
  float *q = nullptr, *k = nullptr, *n = nullptr, *s = nullptr, *s1 = nullptr;  // after the front end
  float *p = nullptr, *eb = nullptr;                                            // Other, Gated
  float *g = nullptr, *y = nullptr;          // channel gates; before activation (backward)
  float *qa = nullptr, *na = nullptr;        // scale q e^{G - anchor}, n e^{level - anchor}; head gate: without e
  float *sa = nullptr, *sa1 = nullptr;       // s e^{anchor - G}
  float *qe = nullptr, *ne = nullptr;        // the same from the chunk's entry on, where that is something else
  const float *q0 = nullptr, *n0 = nullptr;  // what q and n read of the entering state: qa, na or qe, ne
  // As in the diagonal engine's chunk-inl.h; jump also in row 0, 1 where nothing jumps.
  float *e = nullptr, *jump = nullptr;
  float *st = nullptr, *st1 = nullptr;  // s e^{G_C - G}, key-major
  float *N = nullptr, *P = nullptr;     // squares <n_i, s_j>, <scale q_i, s_j> with their decay
  float *N1 = nullptr, *P1 = nullptr;   // for s1
  float* mask = nullptr;                // square e^{G_i - G_j}, j <= i; head gate
  float *decay = nullptr, *ep = nullptr, *rel = nullptr, *bias = nullptr;  // [pad_up(K)], rel twice
  float *eg = nullptr, *en = nullptr, *ec = nullptr;  // [token_ld] e^{G_i}, e^{level of n_i}, e^{G_C - G_i}; head gate
  float *hg = nullptr, *hy = nullptr;                 // [token_ld] g and raw g + bias per row
  float *beta = nullptr, *rq = nullptr, *rk = nullptr, *rp = nullptr;  // [token_ld]; beta, 1 / norms
  double* gsum = nullptr;                                              // [token_ld]
  std::int64_t* segment = nullptr;                                     // [BT + 1]
  std::int64_t segments = 0;
  bool entry_jump = false;  // the first anchor is not the chunk's entry

  void carve(Arena& arena, const DeltaProblem& p_, std::int64_t BT, bool backward) {
    const std::int64_t kp = pad_up(p_.K), lt = token_ld(BT), rows = token_rows_padded(BT), tile = rows * kp;
    const bool general = p_.erase == Erase::General;
    const KeyGate gate = delta_gate(p_);
    q = arena.floats(tile);
    k = arena.floats(tile);
    n = arena.floats(tile);
    s = general || p_.w ? arena.floats(tile) : k;
    s1 = general ? k : nullptr;
    if (p_.erase == Erase::Other && p_.p) p = backward ? arena.floats(tile) : n;
    if (p_.erase == Erase::Gated) eb = backward ? arena.floats(tile) : n;
    if (gate == KeyGate::Channel) {
      g = arena.floats(tile);
      y = backward ? arena.floats(tile) : g;
    }
    qa = backward ? arena.floats(tile) : q;
    na = backward && gate == KeyGate::Channel ? arena.floats(tile) : n;
    sa = backward && gate == KeyGate::Channel ? arena.floats(tile) : s;
    sa1 = backward && gate == KeyGate::Channel && general ? arena.floats(tile) : s1;
    qe = backward && gate != KeyGate::None ? arena.floats(tile) : qa;
    ne = backward && gate != KeyGate::None ? arena.floats(tile) : na;
    if (backward && gate == KeyGate::Channel) {
      e = arena.floats(tile);
      jump = arena.floats(tile);
    }
    st = arena.floats(kp * lt);
    N = arena.floats(rows * lt);
    P = arena.floats(rows * lt);
    if (general) {
      st1 = arena.floats(kp * lt);
      N1 = arena.floats(rows * lt);
      P1 = arena.floats(rows * lt);
    }
    if (gate == KeyGate::Head) mask = arena.floats(rows * lt);
    decay = arena.floats(kp);
    ep = arena.floats(kp);
    rel = arena.floats(2 * kp);
    bias = arena.floats(kp);
    for (float** x : {&eg, &en, &ec, &hg, &hy, &beta, &rq, &rk, &rp}) *x = arena.floats(lt);
    gsum = arena.take<double>(lt);
    segment = arena.take<std::int64_t>(BT + 1);
  }
};

// beta (absent: ones) of C rows, after the sigmoid. Entries past C are finite.
inline HWY_NOINLINE void load_beta(const DeltaProblem& p, const Rows& beta, std::int64_t t0, std::int64_t C, float* out,
                                   std::int64_t size) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < C; ++i) out[i] = beta ? static_cast<float>(scalar_at(beta, t0 + i)) : 1.0F;
  std::fill(out + C, out + size, 0.0F);
  if (p.beta_sigmoid == 0.0) return;
  const auto c = hn::Set(d, static_cast<float>(p.beta_sigmoid));
  for (std::int64_t i = 0; i < C; i += lanes) hn::StoreU(hn::Mul(c, sigmoid_v(d, hn::LoadU(d, out + i))), d, out + i);
}

// Log gates per row, after activation; y before it. Rows other than a token's first have none.
inline HWY_NOINLINE void load_head_gate(const DeltaGate& gate, std::int64_t R, std::int64_t t0, std::int64_t C,
                                        float* g, float* y, std::int64_t size) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const double bias = gate.kind != GateActivation::Kind::None && gate.bias ? scalar_at(gate.bias, 0) : 0.0;
  std::fill(y, y + size, 0.0F);
  for (std::int64_t i = 0; i < C; ++i) {
    if ((t0 + i) % R == 0) y[i] = static_cast<float>(scalar_at(gate.g, (t0 + i) / R) + bias);
  }
  const auto least = hn::Set(d, static_cast<float>(kLeastGate));
  for (std::int64_t i = 0; i < size; i += lanes) {
    const auto x = activate_v(d, gate, hn::LoadU(d, y + i));
    hn::StoreU(hn::IfThenElse(hn::Lt(x, least), least, x), d, g + i);
  }
  for (std::int64_t i = 0; i < C; ++i) {
    if ((t0 + i) % R != 0) g[i] = 0.0F;
  }
}

// The same per channel, into tiles, y only where there is an activation; bias: [pad_up(K)], loaded. hg: the head gate
// that comes on top, or nullptr.
inline HWY_NOINLINE void load_channel_gate(const DeltaGate& gate, std::int64_t R, std::int64_t t0, std::int64_t C,
                                           std::int64_t K, const float* bias, const float* hg, float* g, float* y) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), kp = pad_up(K);
  const bool active = gate.kind != GateActivation::Kind::None && hg == nullptr;
  if (!active) y = g;
  load_token_rows(gate.gk, R, 0, t0, C, K, y, kp);
  if (!active && hg == nullptr) return;
  for (std::int64_t i = 0; i < C; ++i) {
    const bool live = (t0 + i) % R == 0;
    for (std::int64_t c = 0; c < kp; c += lanes) {
      auto x = hn::LoadU(d, y + i * kp + c);
      if (active) {
        x = hn::Add(x, hn::LoadU(d, bias + c));
        hn::StoreU(x, d, y + i * kp + c);
        x = live ? activate_v(d, gate, x) : hn::Zero(d);
      }
      if (hg != nullptr) x = hn::Add(x, hn::Set(d, hg[i]));
      hn::StoreU(x, d, g + i * kp + c);
    }
    std::fill(g + i * kp + K, g + (i + 1) * kp, 0.0F);
  }
}

inline HWY_NOINLINE void load_gate_bias(const DeltaGate& gate, KeyGate kind, std::int64_t K, float* bias) {
  std::fill(bias, bias + pad_up(K), 0.0F);
  if (kind == KeyGate::Channel && !gate.g && gate.bias)
    load_row(gate.bias.base, gate.bias.dtype, gate.bias.last, K, bias);
}

// The front end of C rows from t0 on: q (if wanted), k, n, s, gates, beta.
template <DeltaKind kKind, KeyGate kGate>
HWY_NOINLINE void load_chunk(const DeltaProblem& p, const DeltaInputs& x, DeltaTiles& t, std::int64_t BT,
                             std::int64_t t0, std::int64_t C, bool want_q) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, kp = pad_up(K), lt = token_ld(BT);
  if (want_q) {
    load_token_rows(x.q, p.R, p.R - 1, t0, C, K, t.q, kp);
    if (p.normalize_q) normalize_rows(t.q, kp, C, t.rq);
  }
  load_rows(x.k, t0, C, 0, K, t.k, kp);
  if (p.normalize_k) normalize_rows(t.k, kp, C, t.rk);
  if constexpr (kKind == DeltaKind::General) {
    load_rows(x.a, t0, C, 0, K, t.n, kp);
    load_rows(x.b, t0, C, 0, K, t.s, kp);
  } else {
    if (x.channel_beta) {
      std::fill(t.beta, t.beta + lt, 1.0F);
    } else {
      load_beta(p, x.beta, t0, C, t.beta, lt);
    }
    const float* r = t.k;
    if (x.p) {
      load_rows(x.p, t0, C, 0, K, t.p, kp);
      if (p.normalize_k) normalize_rows(t.p, kp, C, t.rp);
      r = t.p;
    }
    if (x.eb) {
      load_rows(x.eb, t0, C, 0, K, t.eb, kp);
      for (std::int64_t i = 0; i < C * kp; i += lanes) {
        hn::StoreU(hn::Neg(hn::Mul(hn::LoadU(d, t.eb + i), hn::LoadU(d, t.k + i))), d, t.n + i);
      }
    } else {
      for (std::int64_t i = 0; i < C; ++i) {
        const auto f = hn::Set(d, -t.beta[i]);
        for (std::int64_t c = 0; c < kp; c += lanes) {
          hn::StoreU(hn::Mul(f, hn::LoadU(d, r + i * kp + c)), d, t.n + i * kp + c);
        }
      }
    }
    if (x.w) load_rows(x.w, t0, C, 0, K, t.s, kp);
  }
  if (x.gate.g) load_head_gate(x.gate, p.R, t0, C, t.hg, t.hy, lt);
  if constexpr (kGate == KeyGate::Channel) {
    load_channel_gate(x.gate, p.R, t0, C, K, t.bias, x.gate.g ? t.hg : nullptr, t.g, t.y);
  }
}

// vbar (Delta) or v (General), columns [v0, v0 + width), into rows of ld floats.
template <DeltaKind kKind>
HWY_NOINLINE void load_values(const DeltaInputs& x, const DeltaTiles& t, std::int64_t t0, std::int64_t C,
                              std::int64_t v0, std::int64_t width, float* v, std::int64_t ld, float* tmp) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), wp = pad_up(width);
  load_rows(x.v, t0, C, v0, width, v, ld);
  if (kKind == DeltaKind::General) return;
  for (std::int64_t i = 0; i < C; ++i) {
    float* r = v + i * ld;
    if (x.ew) {
      load_rows(x.ew, t0 + i, 1, v0, width, tmp, wp);
      for (std::int64_t c = 0; c < wp; c += lanes)
        hn::StoreU(hn::Mul(hn::LoadU(d, tmp + c), hn::LoadU(d, r + c)), d, r + c);
    } else {
      const auto f = hn::Set(d, t.beta[i]);
      for (std::int64_t c = 0; c < wp; c += lanes) hn::StoreU(hn::Mul(f, hn::LoadU(d, r + c)), d, r + c);
    }
  }
}

// As kSegmentRange. A sum of 32 gates of about -0.8, log sigmoids of a normal variable, stays within this, so that the
// backward's chunks are seldom cut.
constexpr float kDeltaSegmentRange = 40.0F;

// In: the tiles of load_chunk. Out: st, decay, N and ne; with want_q also P and qe; General: st1, N1 (zero on the
// diagonal), P1. N is strictly lower, P lower; what lies above is not written, except that the backward gets zeros.
//
// The level of n_i is G_i, or with `before` G_{i-1}: then row i goes with the anchor of row i - 1, so that its exponent
// against earlier rows and towards the chunk's entry stays in the range of that anchor, however strong g_i is.
// Segments and anchors otherwise as in the diagonal engine's chunk-inl.h.
template <DeltaKind kKind, KeyGate kGate>
HWY_NOINLINE void prepare_delta_chunk(DeltaTiles& t, std::int64_t BT, std::int64_t K, std::int64_t C, float scale,
                                      bool before, bool want_q, bool backward) {
  constexpr bool kGeneral = kKind == DeltaKind::General;
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t kp = pad_up(K), lt = token_ld(BT);
  const auto vscale = hn::Set(d, scale);
  const std::int64_t shift = before ? 1 : 0;

  const auto scores = [&](std::int64_t start, std::int64_t end, std::int64_t lo, std::int64_t hi) HWY_ATTR {
    gemm<false>(hi - lo, end, {t.na + lo * kp, kp, t.st, lt, K}, {}, Tri::None, {}, t.N + lo * lt, lt, lo);
    if (kGeneral)
      gemm<false>(hi - lo, end, {t.na + lo * kp, kp, t.st1, lt, K}, {}, Tri::None, {}, t.N1 + lo * lt, lt, lo);
    if (!want_q) return;
    gemm<false>(end - start, end, {t.qa + start * kp, kp, t.st, lt, K}, {}, Tri::None, {}, t.P + start * lt, lt, start);
    if (kGeneral) {
      gemm<false>(end - start, end, {t.qa + start * kp, kp, t.st1, lt, K}, {}, Tri::None, {}, t.P1 + start * lt, lt,
                  start);
    }
  };
  t.segments = 0;
  t.entry_jump = false;
  t.q0 = t.qe;
  t.n0 = t.ne;

  if constexpr (kGate != KeyGate::Channel) {
    transpose(t.s, kp, C, K, t.st, lt);
    if (kGeneral) transpose(t.s1, kp, C, K, t.st1, lt);
    if (want_q) {
      for (std::int64_t i = 0; i < C * kp; i += lanes) hn::StoreU(hn::Mul(vscale, hn::LoadU(d, t.q + i)), d, t.qa + i);
    }
    t.segment[0] = 0;
    t.segment[1] = C;
    t.segments = 1;
    scores(0, C, 0, C);
    if constexpr (kGate == KeyGate::Head) {
      double sum = 0.0;
      for (std::int64_t i = 0; i < C; ++i) t.gsum[i] = sum += static_cast<double>(t.hg[i]);
      for (std::int64_t i = C; i < lt; ++i) t.gsum[i] = sum;
      for (std::int64_t i = 0; i < lt; ++i) {
        t.eg[i] = static_cast<float>(t.gsum[i]);
        t.ec[i] = static_cast<float>(sum - t.gsum[i]);
      }
      for (std::int64_t i = 0; i < lt; i += lanes) {
        hn::StoreU(exp_v(d, hn::LoadU(d, t.eg + i)), d, t.eg + i);
        hn::StoreU(exp_v(d, hn::LoadU(d, t.ec + i)), d, t.ec + i);
      }
      if (before) {
        t.en[0] = 1.0F;
        std::copy(t.eg, t.eg + lt - 1, t.en + 1);
      } else {
        std::copy(t.eg, t.eg + lt, t.en);
      }
      std::fill(t.decay, t.decay + kp, t.eg[C - 1]);
      const hn::ScalableTag<double> dd;
      const hn::Rebind<float, decltype(dd)> df;
      const std::int64_t doubles = static_cast<std::int64_t>(hn::Lanes(dd));
      for (std::int64_t i = 0; i < C; ++i) {
        float* m = t.mask + i * lt;
        const std::int64_t n = pad_up(i + 1);
        const auto gi = hn::Set(dd, t.gsum[i]);
        for (std::int64_t j = 0; j < n; j += doubles) {
          hn::StoreU(hn::DemoteTo(df, hn::Sub(gi, hn::LoadU(dd, t.gsum + j))), df, m + j);
        }
        for (std::int64_t j = 0; j < n; j += lanes) {
          // Clamped above the diagonal, where the difference is positive and nobody reads the result.
          const auto below = hn::FirstN(d, static_cast<std::size_t>(std::max<std::int64_t>(i + 1 - j, 0)));
          hn::StoreU(exp_v(d, hn::IfThenElseZero(below, hn::LoadU(d, m + j))), d, m + j);
        }
        const auto apply = [&](const float* by, float* a, std::int64_t count) HWY_ATTR {
          for (std::int64_t j = 0; j < count; j += lanes) {
            hn::StoreU(hn::Mul(hn::LoadU(d, by + j), hn::LoadU(d, a + j)), d, a + j);
          }
        };
        const float* mn = t.mask + std::max<std::int64_t>(i - shift, 0) * lt;
        apply(mn, t.N + i * lt, i);
        if (kGeneral) apply(mn, t.N1 + i * lt, i);
        if (want_q) apply(m, t.P + i * lt, i + 1);
        if (want_q && kGeneral) apply(m, t.P1 + i * lt, i + 1);
      }
      scale_rows(t.na, kp, C, t.en, t.ne);
      if (want_q) scale_rows(t.qa, kp, C, t.eg, t.qe);
      for (std::int64_t c = 0; c < K; ++c) {
        for (std::int64_t j = 0; j < C; j += lanes) {
          const auto x = hn::LoadU(d, t.ec + j);
          hn::StoreU(hn::Mul(x, hn::LoadU(d, t.st + c * lt + j)), d, t.st + c * lt + j);
          if (kGeneral) hn::StoreU(hn::Mul(x, hn::LoadU(d, t.st1 + c * lt + j)), d, t.st1 + c * lt + j);
        }
      }
    }
  } else {
    const auto one = hn::Set(d, 1.0F);
    float* rel = t.rel;
    float* next = t.rel + kp;
    std::fill(t.ep, t.ep + kp, 1.0F);
    std::fill(rel, rel + kp, 0.0F);
    if (t.jump != nullptr) std::fill(t.jump, t.jump + kp, 1.0F);
    bool entry = true;
    std::int64_t start = 0;

    const auto to_entry = [&](const float* src, float* dst, std::int64_t lo, std::int64_t hi) HWY_ATTR {
      if (entry && src == dst) return;
      for (std::int64_t i = lo; i < hi; ++i) {
        for (std::int64_t c = 0; c < kp; c += lanes) {
          const auto x = hn::LoadU(d, src + i * kp + c);
          hn::StoreU(entry ? x : hn::Mul(hn::LoadU(d, t.ep + c), x), d, dst + i * kp + c);
        }
      }
    };
    const auto close = [&](std::int64_t end) HWY_ATTR {
      if (end == start) return;
      t.segment[t.segments++] = start;
      transpose(t.sa + start * kp, kp, end - start, K, t.st + start, lt);
      if (kGeneral) transpose(t.sa1 + start * kp, kp, end - start, K, t.st1 + start, lt);
      const std::int64_t lo = start + shift, hi = std::min(end + shift, C);
      scores(start, end, lo, hi);
      if (entry && start == 0 && end == C) {
        t.q0 = t.qa;
        t.n0 = t.na;
        return;
      }
      to_entry(t.na, t.ne, lo, hi);
      if (want_q) to_entry(t.qa, t.qe, start, end);
    };
    const auto scaled = [&](const float* src, const float* by, float* dst) HWY_ATTR {  // one row
      for (std::int64_t c = 0; c < kp; c += lanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, src + c), hn::LoadU(d, by + c)), d, dst + c);
      }
    };
    if (before) {  // row 0 reads the entering state as it is
      if (t.na != t.n) std::copy(t.n, t.n + kp, t.na);
      if (t.ne != t.na) std::copy(t.n, t.n + kp, t.ne);
    }

    for (std::int64_t i = 0; i < C; ++i) {
      float* e = t.e != nullptr ? t.e + i * kp : t.decay;
      const std::int64_t in = i + shift;  // the row of n at this level
      if (within_range(rel, t.g + i * kp, kp, kDeltaSegmentRange, next)) {
        for (std::int64_t c = 0; c < kp; c += lanes) {
          const auto x = hn::LoadU(d, next + c);
          const auto ex = exp_v(d, x);
          hn::StoreU(x, d, rel + c);
          hn::StoreU(ex, d, e + c);
          const auto inv = hn::Div(one, ex);
          hn::StoreU(hn::Mul(inv, hn::LoadU(d, t.s + i * kp + c)), d, t.sa + i * kp + c);
          if (kGeneral) hn::StoreU(hn::Mul(inv, hn::LoadU(d, t.s1 + i * kp + c)), d, t.sa1 + i * kp + c);
          if (want_q) hn::StoreU(hn::Mul(hn::Mul(vscale, hn::LoadU(d, t.q + i * kp + c)), ex), d, t.qa + i * kp + c);
        }
        if (in < C) scaled(t.n + in * kp, e, t.na + in * kp);
        continue;
      }
      close(i);
      float* jump = t.jump != nullptr ? t.jump + i * kp : next;
      start_anchor(next, kp, jump, t.ep, rel);
      for (std::int64_t c = 0; c < kp; c += lanes) {
        hn::StoreU(one, d, e + c);
        if (want_q) hn::StoreU(hn::Mul(vscale, hn::LoadU(d, t.q + i * kp + c)), d, t.qa + i * kp + c);
      }
      if (t.sa != t.s) std::copy(t.s + i * kp, t.s + (i + 1) * kp, t.sa + i * kp);
      if (kGeneral && t.sa1 != t.s1) std::copy(t.s1 + i * kp, t.s1 + (i + 1) * kp, t.sa1 + i * kp);
      if (in < C && t.na != t.n) std::copy(t.n + in * kp, t.n + (in + 1) * kp, t.na + in * kp);
      scale_columns(t.st, lt, K, i, jump);
      if (kGeneral) scale_columns(t.st1, lt, K, i, jump);
      start = i;
      entry = false;
      t.entry_jump = t.entry_jump || i == 0;
    }
    close(C);
    t.segment[t.segments] = C;
    const float* last = t.e != nullptr ? t.e + (C - 1) * kp : t.decay;
    scale_columns(t.st, lt, K, C, last);
    if (kGeneral) scale_columns(t.st1, lt, K, C, last);
    for (std::int64_t c = 0; c < kp; c += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, t.ep + c), hn::LoadU(d, last + c)), d, t.decay + c);
    }
  }
  if (kGeneral) {
    for (std::int64_t i = 0; i < C; ++i) t.N1[i * lt + i] = 0.0F;
  }
  if (backward) {
    for (std::int64_t i = 0; i < C; ++i) {
      if (want_q) std::fill(t.P + i * lt + i + 1, t.P + (i + 1) * lt, 0.0F);
      if (!kGeneral) continue;
      std::fill(t.N1 + i * lt + i, t.N1 + (i + 1) * lt, 0.0F);
      if (want_q) std::fill(t.P1 + i * lt + i + 1, t.P1 + (i + 1) * lt, 0.0F);
    }
  }
}

// x of one panel: in vbar (Delta) or nothing (General, v beside it), out E or Z. S_0 is the panel `state`.
template <DeltaKind kKind>
HWY_NOINLINE void solve_panel(const DeltaTiles& t, std::int64_t BT, std::int64_t K, std::int64_t C, std::int64_t width,
                              const float* state, const float* v, float* x, std::int64_t ldx) {
  const std::int64_t kp = pad_up(K), lt = token_ld(BT);
  if constexpr (kKind == DeltaKind::General) {
    gemm<false>(C, width, {t.n0, kp, state, kBV, K}, {t.N1, lt, v, ldx, 0}, Tri::Lower, {}, x, ldx);
  } else {
    gemm<false>(C, width, {t.n0, kp, state, kBV, K}, {}, Tri::None, {x, ldx, nullptr}, x, ldx);
  }
  solve_lower(t.N, lt, C, x, ldx, width);
}

// S_C of one panel; may be in place.
template <DeltaKind kKind, KeyGate kGate>
HWY_NOINLINE void advance_panel(const DeltaTiles& t, std::int64_t BT, std::int64_t K, std::int64_t C,
                                std::int64_t width, const float* from, const float* v, const float* x, std::int64_t ldx,
                                float* to, Prefetcher* ahead = nullptr) {
  const std::int64_t lt = token_ld(BT);
  const Start start{from, kBV, kGate == KeyGate::None ? nullptr : t.decay};
  if constexpr (kKind == DeltaKind::General) {
    gemm<false>(K, width, {t.st, lt, x, ldx, C}, {t.st1, lt, v, ldx, C}, Tri::None, start, to, kBV, -1, ahead);
  } else {
    gemm<false>(K, width, {t.st, lt, x, ldx, C}, {}, Tri::None, start, to, kBV, -1, ahead);
  }
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
