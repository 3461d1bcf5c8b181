// The way back through the front end: from the gradients of n, s, s1, x and the log gates of some rows to those of the
// user's tensors. Shared by the chunk and the step form's backward. Per-target code.
#if defined(FLA_ENGINE_DELTA_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_ENGINE_DELTA_CPU_ROWS_INL_H_
#undef FLA_ENGINE_DELTA_CPU_ROWS_INL_H_
#else
#define FLA_ENGINE_DELTA_CPU_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "fla/engine/delta/cpu/chunk-inl.h"
#include "fla/engine/delta/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/rows.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The gradients' rows of one sequence and value head; absent ones are not wanted.
struct DeltaGradients {
  Rows dq, dk, dv, dbeta, dp, deb, dew, da, db, dw, dg, dgk, dgv;
  bool sums = false;  // dA_log or ddt_bias

  DeltaGradients(const DeltaBackwardProblem& x, std::int64_t n, std::int64_t hv) {
    const Sequence s = x.sequence(n);
    const std::int64_t h = hv / x.group();
    dq = delta_rows(x.dq, x, s, h);
    dk = delta_rows(x.dk, x, s, h, x.R);
    dv = delta_rows(x.dv, x, s, hv, x.R);
    dbeta = delta_rows(x.dbeta, x, s, hv, x.R);
    if (x.p) dp = delta_rows(x.dp, x, s, h);
    deb = delta_rows(x.deb, x, s, hv);
    dew = delta_rows(x.dew, x, s, hv);
    da = delta_rows(x.da, x, s, h);
    db = delta_rows(x.db, x, s, h);
    dw = delta_rows(x.dw, x, s, write_head(x, hv));
    dg = delta_rows(x.dg, x, s, hv);
    dgk = delta_rows(x.dgk, x, s, hv);
    dgv = delta_rows(x.dgv, x, s, hv);
    sums = x.dA_log || x.ddt_bias;
    const bool stream = beyond_caches({&x.dq, &x.dk, &x.dv, &x.dgk});
    for (Rows* r : {&dq, &dk, &dv, &dgk}) r->stream = stream;
  }
  bool gate() const { return dg || dgk || sums; }
};

// Sums over a group's value heads, fp32, rows of pad_up(K): of q, k, the erase vector (p or a), the write vector (w or
// b).
struct GroupSums {
  float *dq = nullptr, *dk = nullptr, *dr = nullptr, *dw = nullptr;
  void carve(Arena& arena, const DeltaProblem& p, std::int64_t rows) {
    const std::int64_t n = rows * pad_up(p.K);
    dq = arena.floats(n);
    dk = arena.floats(n);
    if (p.erase == Erase::General || p.erase == Erase::Other) dr = arena.floats(n);
    if (p.erase == Erase::General || p.w) dw = arena.floats(n);
  }
};

// sum = x or sum + x, n a multiple of the padding. A sum of one may be x itself.
inline HWY_NOINLINE void accumulate_row(bool begin, const float* x, float* sum, std::int64_t n) {
  if (begin && x == sum) return;
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < n; c += lanes) {
    const auto v = hn::LoadU(d, x + c);
    hn::StoreU(begin ? v : hn::Add(hn::LoadU(d, sum + c), v), d, sum + c);
  }
}

inline HWY_NOINLINE float dot_rows(const float* x, const float* y, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto s = hn::Zero(d);
  for (std::int64_t c = 0; c < n; c += lanes) s = hn::MulAdd(hn::LoadU(d, x + c), hn::LoadU(d, y + c), s);
  return hn::GetLane(hn::SumOfLanes(d, s));
}

inline HWY_NOINLINE float sum_of_row(const float* x, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto s = hn::Zero(d);
  for (std::int64_t c = 0; c < n; c += lanes) s = hn::Add(s, hn::LoadU(d, x + c));
  return hn::GetLane(hn::SumOfLanes(d, s));
}

// One row's part of the group sums. dn, ds, ds1: gradients of n, s, s1. k, p, eb: the rows of load_chunk. scratch:
// [pad_up(K)]. Returns <gradient of n, -r>, the erase side's part of dbeta.
template <DeltaKind kKind>
HWY_NOINLINE float add_group_row(const DeltaBackwardProblem& x, const DeltaGradients& grad, const GroupSums& sums,
                                 bool begin, std::int64_t row, std::int64_t token, float beta, const float* k,
                                 const float* p, const float* eb, const float* dn, const float* ds, const float* ds1,
                                 float* scratch) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), kp = pad_up(x.K), at = row * kp;
  if constexpr (kKind == DeltaKind::General) {
    accumulate_row(begin, dn, sums.dr + at, kp);
    accumulate_row(begin, ds, sums.dw + at, kp);
    accumulate_row(begin, ds1, sums.dk + at, kp);
    return 0.0F;
  }
  float dbeta = 0.0F;
  float* dk = sums.dk + at;
  if (x.w) {
    accumulate_row(begin || writes_per_value_head(x), ds, sums.dw + at, kp);
    if (begin) std::fill(dk, dk + kp, 0.0F);
  } else {
    accumulate_row(begin, ds, dk, kp);
  }
  if (x.erase == Erase::Gated) {
    for (std::int64_t c = 0; c < kp; c += lanes) {
      const auto v = hn::LoadU(d, dn + c);
      hn::StoreU(hn::Neg(hn::Mul(hn::LoadU(d, k + c), v)), d, scratch + c);
      hn::StoreU(hn::NegMulAdd(hn::LoadU(d, eb + c), v, hn::LoadU(d, dk + c)), d, dk + c);
    }
    if (grad.deb) store_row(scratch, grad.deb.at(token, 0), grad.deb.dtype, grad.deb.last, x.K);
    return 0.0F;
  }
  const bool other = x.erase == Erase::Other && x.p;
  dbeta = -dot_rows(dn, other ? p : k, kp);
  const auto f = hn::Set(d, -beta);
  float* to = other ? sums.dr + at : dk;
  for (std::int64_t c = 0; c < kp; c += lanes) {
    const auto v = hn::Mul(f, hn::LoadU(d, dn + c));
    hn::StoreU(other && begin ? v : hn::Add(hn::LoadU(d, to + c), v), d, to + c);
  }
  return dbeta;
}

// dx = r (dy - y <y, dy>) in place; y = r x. With one channel that difference is the 1e-6 inside the root alone.
inline HWY_NOINLINE void normalize_backward(float* dy, const float* y, float r, std::int64_t K) {
  const std::int64_t n = pad_up(K);
  if (K == 1) {
    dy[0] *= 1e-6F * r * r * r;
    return;
  }
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto s = hn::Set(d, dot_rows(y, dy, n)), f = hn::Set(d, r);
  for (std::int64_t c = 0; c < n; c += lanes) {
    hn::StoreU(hn::Mul(f, hn::NegMulAdd(hn::LoadU(d, y + c), s, hn::LoadU(d, dy + c))), d, dy + c);
  }
}

// Rows [row, row + C) of the finished group sums, which are the sequence's rows from t0 on; q, k, p, rq, rk, rp: of
// load_chunk.
inline HWY_NOINLINE void store_group_rows(const DeltaBackwardProblem& x, const DeltaGradients& grad,
                                          const GroupSums& sums, std::int64_t row, std::int64_t t0, std::int64_t C,
                                          const float* q, const float* k, const float* p, const float* rq,
                                          const float* rk, const float* rp) {
  const std::int64_t K = x.K, kp = pad_up(K), at = row * kp;
  if (grad.dq) {
    for (std::int64_t i = 0; x.normalize_q && i < C; ++i) {
      normalize_backward(sums.dq + at + i * kp, q + i * kp, rq[i], K);
    }
    store_token_rows(sums.dq + at, kp, grad.dq, x.R, x.R - 1, t0, C, 0, K);
  }
  if (grad.dk) {
    for (std::int64_t i = 0; x.normalize_k && i < C; ++i) {
      normalize_backward(sums.dk + at + i * kp, k + i * kp, rk[i], K);
    }
    store_rows(sums.dk + at, kp, grad.dk, t0, C, 0, K);
  }
  if (grad.dp) {
    for (std::int64_t i = 0; x.normalize_k && i < C; ++i) {
      normalize_backward(sums.dr + at + i * kp, p + i * kp, rp[i], K);
    }
    store_rows(sums.dr + at, kp, grad.dp, t0, C, 0, K);
  }
  if (grad.da) store_rows(sums.dr + at, kp, grad.da, t0, C, 0, K);
  if (grad.db) store_rows(sums.dw + at, kp, grad.db, t0, C, 0, K);
  if (grad.dw && !writes_per_value_head(x)) store_rows(sums.dw + at, kp, grad.dw, t0, C, 0, K);
}

HWY_INLINE void store_scalar(const Rows& x, std::int64_t t, float value) {
  store_row(&value, x.at(t, 0), x.dtype, 1, 1);
}

// dbeta of one row through the sigmoid: beta = c s(b).
HWY_INLINE float beta_chain(const DeltaProblem& x, float beta, float dbeta) {
  if (x.beta_sigmoid == 0.0) return dbeta;
  return dbeta * beta * (1.0F - beta / static_cast<float>(x.beta_sigmoid));
}

// dv and dew of one row and value panel from y, the gradient of vbar (before beta). Leaves beta's part in *dbeta.
// v: the raw values, in; ew: scratch, one row each of `width` floats and padding.
inline HWY_NOINLINE void store_value_row(const DeltaInputs& x, const DeltaGradients& grad, std::int64_t t,
                                         std::int64_t v0, std::int64_t width, float beta, const float* y, float* v,
                                         float* ew, float* dbeta) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), wp = pad_up(width);
  load_rows(x.v, t, 1, v0, width, v, wp);
  if (x.ew) {
    load_rows(x.ew, t, 1, v0, width, ew, wp);
    for (std::int64_t c = 0; c < wp; c += lanes) {
      const auto vy = hn::LoadU(d, y + c);
      hn::StoreU(hn::Mul(hn::LoadU(d, v + c), vy), d, v + c);
      hn::StoreU(hn::Mul(hn::LoadU(d, ew + c), vy), d, ew + c);
    }
    if (grad.dew) store_row(v, grad.dew.at(t, v0), grad.dew.dtype, grad.dew.last, width);
    if (grad.dv) store_row(ew, grad.dv.at(t, v0), grad.dv.dtype, grad.dv.last, width);
    return;
  }
  *dbeta += dot_rows(y, v, wp);
  if (!grad.dv) return;
  const auto f = hn::Set(d, beta);
  for (std::int64_t c = 0; c < wp; c += lanes) hn::StoreU(hn::Mul(f, hn::LoadU(d, y + c)), d, v + c);
  store_rows(v, wp, grad.dv, t, 1, v0, width);
}

// Partial sums of the gate's parameters over one sequence and value head; absent where nobody asks.
struct GateSums {
  double* dA_log = nullptr;    // one
  double* ddt_bias = nullptr;  // [pad_up(K)], or one
};

inline std::int64_t gate_sums_size(const DeltaProblem& p) { return 1 + (p.g ? kPad : pad_up(p.K)); }

// dg of one row of a head gate through the activation.
inline HWY_NOINLINE void store_head_gate(const DeltaInputs& x, const DeltaGradients& grad, const GateSums& sums,
                                         std::int64_t token, float g, float y, float dg) {
  const hn::ScalableTag<float> d;
  if (x.gate.kind != GateActivation::Kind::None) {
    auto slope = hn::Zero(d), slope_A = slope;
    gate_slopes(d, x.gate, hn::Set(d, y), hn::Set(d, g), &slope, &slope_A);
    if (sums.dA_log != nullptr) *sums.dA_log += static_cast<double>(dg * hn::GetLane(slope_A));
    dg *= hn::GetLane(slope);
    if (sums.ddt_bias != nullptr) *sums.ddt_bias += static_cast<double>(dg);
  }
  if (grad.dg) store_scalar(grad.dg, token, dg);
}

// dgk of one row in place, per channel.
inline HWY_NOINLINE void store_channel_gate(const DeltaInputs& x, const DeltaGradients& grad, const GateSums& sums,
                                            std::int64_t K, std::int64_t token, const float* g, const float* y,
                                            float* dg) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), kp = pad_up(K);
  if (x.gate.kind != GateActivation::Kind::None && !x.gate.g) {
    auto sum = hn::Zero(d);
    for (std::int64_t c = 0; c < kp; c += lanes) {
      auto slope = hn::Zero(d), slope_A = slope;
      gate_slopes(d, x.gate, hn::LoadU(d, y + c), hn::LoadU(d, g + c), &slope, &slope_A);
      const auto v = hn::LoadU(d, dg + c);
      sum = hn::MulAdd(v, slope_A, sum);
      hn::StoreU(hn::Mul(v, slope), d, dg + c);
    }
    if (sums.dA_log != nullptr) *sums.dA_log += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
    for (std::int64_t c = 0; sums.ddt_bias != nullptr && c < K; ++c) sums.ddt_bias[c] += static_cast<double>(dg[c]);
  }
  if (grad.dgk) store_rows(dg, kp, grad.dgk, token, 1, 0, K);
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

// The sums over sequences, in order. partial: [N, HV, gate_sums_size].
#ifndef FLA_ENGINE_DELTA_CPU_ROWS_ONCE
#define FLA_ENGINE_DELTA_CPU_ROWS_ONCE
namespace fla::cpu {

inline void store_gate_sums(const DeltaBackwardProblem& p, const double* partial, std::int64_t size) {
  const auto total = [&](std::int64_t hv, std::int64_t i) {
    double sum = 0.0;
    for (std::int64_t n = 0; n < p.N; ++n) sum += partial[(n * p.HV + hv) * size + i];
    return sum;
  };
  for (std::int64_t hv = 0; hv < p.HV; ++hv) {
    if (p.dA_log) store_element(p.dA_log.at(hv), p.dA_log.dtype, total(hv, 0));
    if (!p.ddt_bias) continue;
    if (p.g) {
      store_element(p.ddt_bias.at(hv), p.ddt_bias.dtype, total(hv, 1));
    } else {
      for (std::int64_t c = 0; c < p.K; ++c) store_element(p.ddt_bias.at(hv, c), p.ddt_bias.dtype, total(hv, 1 + c));
    }
  }
}

}  // namespace fla::cpu
#endif
#endif
