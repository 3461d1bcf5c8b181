// What the tiles of softmax-like attention are made of: loads with zeros behind, logits, exponentials, decays, products
// under a mask. Per-target code.
#if defined(FLA_ENGINE_ATTN_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_ENGINE_ATTN_CPU_TILE_INL_H_
#undef FLA_ENGINE_ATTN_CPU_TILE_INL_H_
#else
#define FLA_ENGINE_ATTN_CPU_TILE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include "fla/engine/attn/cpu/internal.h"
#include "fla/kernels/cpu/gemm-inl.h"
#include "fla/kernels/cpu/io-inl.h"
#include "fla/kernels/cpu/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows [a, b) of x into rows [a - t0, b - t0) of a tile of `rows` rows, the others zero.
HWY_INLINE void load_tile(const Rows& x, std::int64_t t0, std::int64_t a, std::int64_t b, std::int64_t rows,
                          std::int64_t width, float* tile, std::int64_t ld) {
  const std::int64_t first = std::clamp<std::int64_t>(a - t0, 0, rows);
  std::fill(tile, tile + first * ld, 0.0F);
  if (b > a) load_rows(x, a, b - a, 0, width, tile + (a - t0) * ld, ld);
  const std::int64_t last = std::clamp<std::int64_t>(b - t0, first, rows);
  std::fill(tile + last * ld, tile + rows * ld, 0.0F);
}

// The same of tokens [a, b) of sequence n of the keys or values x, wherever they are.
HWY_INLINE void load_keys(const AttnProblem& p, const TensorView& x, const AttnSpan& s, std::int64_t n, std::int64_t h,
                          std::int64_t t0, std::int64_t a, std::int64_t b, std::int64_t rows, std::int64_t width,
                          float* tile, std::int64_t ld) {
  std::fill(tile, tile + (a - t0) * ld, 0.0F);
  p.runs(s, n, a, b, [&](std::int64_t row, std::int64_t at, std::int64_t count, std::int64_t j) HWY_ATTR {
    load_rows(head_rows(x, row, at, count, h), 0, count, 0, width, tile + (j - t0) * ld, ld);
  });
  std::fill(tile + (b - t0) * ld, tile + rows * ld, 0.0F);
}

HWY_INLINE bool all_finite(const float* x, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);  // 0 x is 0 or NaN
  for (std::int64_t i = 0; i < n; i += lanes) sum = hn::MulAdd(hn::Zero(d), hn::LoadU(d, x + i), sum);
  return hn::AllTrue(d, hn::Eq(sum, hn::Zero(d)));
}

// out_j = float(c_i - c_j), n rounded up to a whole vector. The sums lie inside a workspace, which goes on behind them.
HWY_INLINE void differences(double ci, const double* HWY_RESTRICT c, std::int64_t n, float* HWY_RESTRICT out) {
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, decltype(dd)> df;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(dd));
  const auto v = hn::Set(dd, ci);
  for (std::int64_t j = 0; j < n; j += lanes) {
    const auto in = hn::FirstN(dd, static_cast<std::size_t>(std::min(lanes, n - j)));
    hn::StoreU(hn::DemoteTo(df, hn::Sub(v, hn::MaskedLoad(in, dd, c + j))), df, out + j);
  }
}

// out_c = e^{float(a_c - b_c)}; width is a multiple of kPad.
HWY_INLINE void decays(const double* HWY_RESTRICT a, const double* HWY_RESTRICT b, std::int64_t width,
                       float* HWY_RESTRICT out) {
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, decltype(dd)> df;
  const hn::ScalableTag<float> d;
  const std::int64_t half = static_cast<std::int64_t>(hn::Lanes(dd)), lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < width; c += half)
    hn::StoreU(hn::DemoteTo(df, hn::Sub(hn::LoadU(dd, a + c), hn::LoadU(dd, b + c))), df, out + c);
  for (std::int64_t c = 0; c < width; c += lanes) hn::StoreU(exp_v(d, hn::LoadU(d, out + c)), d, out + c);
}

// out = x o y over whole vectors.
HWY_INLINE void multiply(const float* x, const float* y, std::int64_t width, float* out) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < width; c += lanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, x + c), hn::LoadU(d, y + c)), d, out + c);
}

// out += x o y.
HWY_INLINE void multiply_add(const float* x, const float* y, std::int64_t width, float* out) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < width; c += lanes)
    hn::StoreU(hn::MulAdd(hn::LoadU(d, x + c), hn::LoadU(d, y + c), hn::LoadU(d, out + c)), d, out + c);
}

HWY_INLINE float dot(const float* x, const float* y, std::int64_t width) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  for (std::int64_t c = 0; c < width; c += lanes) sum = hn::MulAdd(hn::LoadU(d, x + c), hn::LoadU(d, y + c), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// The lanes of a vector at column c that lie in [a, b).
template <class D>
HWY_INLINE auto lanes_in(D d, std::int64_t c, std::int64_t a, std::int64_t b) {
  const auto upto = [&](std::int64_t n) HWY_ATTR {
    return hn::FirstN(
        d, static_cast<std::size_t>(std::clamp<std::int64_t>(n - c, 0, static_cast<std::int64_t>(hn::Lanes(d)))));
  };
  return hn::AndNot(upto(a), upto(b));
}

// s_j <- scale s_j (+ gate_j) in columns [a, b) of a row, -inf in the other ones before `end`; the largest.
template <bool kGate>
HWY_INLINE float logits(float* HWY_RESTRICT s, std::int64_t a, std::int64_t b, std::int64_t end, float scale,
                        const float* HWY_RESTRICT gate) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto vscale = hn::Set(d, scale), nothing = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto most = nothing;
  for (std::int64_t c = 0; c < end; c += lanes) {
    auto x = nothing;
    if (c + lanes > a && c < b) {
      const auto raw = hn::LoadU(d, s + c);
      x = kGate ? hn::MulAdd(raw, vscale, hn::LoadU(d, gate + c)) : hn::Mul(raw, vscale);
      if (c < a || c + lanes > b) x = hn::IfThenElse(lanes_in(d, c, a, b), x, nothing);
    }
    hn::StoreU(x, d, s + c);
    most = hn::Max(most, x);
  }
  return hn::GetLane(hn::MaxOfLanes(d, most));
}

// What a tile of D gives the gates of a logit: the gate at m is between query and key where i >= m > j, so
//   dg_m = sum_{i >= m > j} D_ij
// and nothing that has to cancel is in it: a gate that hides almost everything keeps its digits. Rows stand at t0 on,
// keys at j0 on, and tiles of keys come in order: `before` has what each row has had from the tiles so far, and gets
// this one.
// column: [N]; dg: of the tile's keys.
HWY_INLINE void gate_gradients(const float* D, std::int64_t M, std::int64_t N, std::int64_t t0, std::int64_t j0,
                               double* before, float* column, double* dg) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (t0 >= j0 + N) {  // rows behind all of the keys
    for (std::int64_t x = 0; x < N; x += lanes) {
      auto sum = hn::Zero(d);
      for (std::int64_t i = 0; i < M; ++i) sum = hn::Add(sum, hn::LoadU(d, D + i * kKeysLd + x));
      hn::StoreU(sum, d, column + x);
    }
    double run = 0.0;
    for (std::int64_t i = 0; i < M; ++i) run += before[i];
    for (std::int64_t j = 0; j < N; ++j) {
      dg[j] += run;
      run += static_cast<double>(column[j]);
    }
  } else {
    for (std::int64_t i = 0; i < M; ++i) {
      double run = before[i];
      for (std::int64_t j = 0; j < std::min(N, t0 + i + 1 - j0); ++j) {
        dg[j] += run;
        run += static_cast<double>(D[i * kKeysLd + j]);
      }
    }
  }
  for (std::int64_t i = 0; i < M; ++i) {
    auto sum = hn::Zero(d);
    for (std::int64_t x = 0; x < N; x += lanes) sum = hn::Add(sum, hn::LoadU(d, D + i * kKeysLd + x));
    before[i] += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
}

// c[i] = start + sum_p a(i, p) b[p] over the p in [lo(i), hi(i)) alone. Where b is finite the caller's zeros in a do
// the same in one product; this is for the others: 0 times an infinity must not be seen.
template <bool kTransA, typename Range>
HWY_INLINE void product_by_rows(std::int64_t M, std::int64_t N, const Operand& x, const Start& start, float* c,
                                std::int64_t ldc, const Range& range) {
  for (std::int64_t i = 0; i < M; ++i) {
    const KeyRange r = range(i);
    const std::int64_t lo = std::min(r.lo, r.hi);
    Start si = start;
    if (si.c != nullptr) si.c += i * start.ldc;
    if (si.row_scale != nullptr) si.row_scale += i;
    const float* a = kTransA ? x.a + lo * x.lda + i : x.a + i * x.lda + lo;
    gemm<kTransA>(1, N, {a, x.lda, x.b + lo * x.ldb, x.ldb, std::max<std::int64_t>(r.hi - lo, 0)}, {}, Tri::None, si,
                  c + i * ldc, ldc);
  }
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
