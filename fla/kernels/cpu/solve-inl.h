// Substitution with a unit triangular matrix that is given by its negated strict lower triangle, on fp32 tiles in
// cache. Per-target code.
//
// Four rows at a time are held in registers, so the chains of several rows and columns overlap. Every element is one
// chain of fused multiply-adds in a fixed order: its bits do not depend on the number of columns, in the forward direction
// not on the number of rows, and in the other one not on rows at the end that are zero.
#if defined(FLA_KERNELS_CPU_SOLVE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_KERNELS_CPU_SOLVE_INL_H_
#undef FLA_KERNELS_CPU_SOLVE_INL_H_
#else
#define FLA_KERNELS_CPU_SOLVE_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <int MR, int NV>
HWY_INLINE void solve_lower_block(const float* HWY_RESTRICT n, std::int64_t ldn, std::int64_t i0, float* x,
                                  std::int64_t ldx) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V acc[MR][NV];
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = hn::LoadU(d, x + (i0 + i) * ldx + j * lanes);
  }
  const float* a = n + i0 * ldn;
  for (std::int64_t p = 0; p < i0; ++p) {
    V b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) b[j] = hn::LoadU(d, x + p * ldx + j * lanes);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      const V s = hn::Set(d, a[i * ldn + p]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = hn::MulAdd(s, b[j], acc[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p + 1 < MR; ++p) {
#pragma GCC unroll 4
    for (int i = p + 1; i < MR; ++i) {
      const V s = hn::Set(d, a[i * ldn + i0 + p]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = hn::MulAdd(s, acc[p][j], acc[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) hn::StoreU(acc[i][j], d, x + (i0 + i) * ldx + j * lanes);
  }
}

// Rows [i0, i0 + MR) of the transposed system, rows from i0 + MR to `rows` being done.
template <int MR, int NV>
HWY_INLINE void solve_upper_block(const float* HWY_RESTRICT n, std::int64_t ldn, std::int64_t i0, std::int64_t rows,
                                  float* x, std::int64_t ldx) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V acc[MR][NV];
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = hn::LoadU(d, x + (i0 + i) * ldx + j * lanes);
  }
  const float* a = n + i0;
  for (std::int64_t p = i0 + MR; p < rows; ++p) {
    V b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) b[j] = hn::LoadU(d, x + p * ldx + j * lanes);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      const V s = hn::Set(d, a[p * ldn + i]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = hn::MulAdd(s, b[j], acc[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int p = MR - 1; p > 0; --p) {
#pragma GCC unroll 4
    for (int i = 0; i < p; ++i) {
      const V s = hn::Set(d, a[(i0 + p) * ldn + i]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = hn::MulAdd(s, acc[p][j], acc[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) hn::StoreU(acc[i][j], d, x + (i0 + i) * ldx + j * lanes);
  }
}

template <int NV>
HWY_NOINLINE void solve_lower_columns(const float* n, std::int64_t ldn, std::int64_t rows, float* x, std::int64_t ldx) {
  std::int64_t i = 0;
  for (; i + 4 <= rows; i += 4) solve_lower_block<4, NV>(n, ldn, i, x, ldx);
  for (; i < rows; ++i) solve_lower_block<1, NV>(n, ldn, i, x, ldx);
}

template <int NV>
HWY_NOINLINE void solve_upper_columns(const float* n, std::int64_t ldn, std::int64_t rows, float* x, std::int64_t ldx) {
  // The rows past the last four in one block: row by row their sums would have another order than in a block of four.
  const std::int64_t rest = rows % 4, whole = rows - rest;
  if (rest == 1) solve_upper_block<1, NV>(n, ldn, whole, rows, x, ldx);
  if (rest == 2) solve_upper_block<2, NV>(n, ldn, whole, rows, x, ldx);
  if (rest == 3) solve_upper_block<3, NV>(n, ldn, whole, rows, x, ldx);
  for (std::int64_t i = whole; i > 0; i -= 4) solve_upper_block<4, NV>(n, ldn, i - 4, rows, x, ldx);
}

// x <- (I - n)^{-1} x in place, n strictly lower [rows, rows] (the rest is not read), x [rows, columns] with columns a
// multiple of kPad.
HWY_INLINE void solve_lower(const float* n, std::int64_t ldn, std::int64_t rows, float* x, std::int64_t ldx,
                            std::int64_t columns) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  std::int64_t j = 0;
  for (; j + 2 * lanes <= columns; j += 2 * lanes) solve_lower_columns<2>(n, ldn, rows, x + j, ldx);
  for (; j < columns; j += lanes) solve_lower_columns<1>(n, ldn, rows, x + j, ldx);
}

// x <- (I - n)^{-T} x.
HWY_INLINE void solve_upper(const float* n, std::int64_t ldn, std::int64_t rows, float* x, std::int64_t ldx,
                            std::int64_t columns) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  std::int64_t j = 0;
  for (; j + 2 * lanes <= columns; j += 2 * lanes) solve_upper_columns<2>(n, ldn, rows, x + j, ldx);
  for (; j < columns; j += lanes) solve_upper_columns<1>(n, ldn, rows, x + j, ldx);
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
