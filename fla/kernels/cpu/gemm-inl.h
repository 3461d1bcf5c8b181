// Small register-blocked matrix products on fp32 tiles that stay in cache. Per-target code.
//
// Every output element is one chain of fused multiply-adds over the reduction index in increasing order, started from
// its initial value, whatever tile it falls into: its bits do not depend on how many rows or columns are asked for.
#if defined(FLA_KERNELS_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_KERNELS_CPU_GEMM_INL_H_
#undef FLA_KERNELS_CPU_GEMM_INL_H_
#else
#define FLA_KERNELS_CPU_GEMM_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "fla/kernels/cpu/prefetch.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Register tile: rows x vectors. 16 accumulators where there are 32 registers; AVX2 has 16, of which 12 accumulate.
#if HWY_TARGET == HWY_AVX2
constexpr int kMR = 6, kNV = 2;
#elif HWY_TARGET <= HWY_AVX3
constexpr int kMR = 8, kNV = 2;
#else
constexpr int kMR = 4, kNV = 4;
#endif

// One product a . b of depth p. A is given by rows, A(i, p) = a[i * lda + p], or, where the caller says kTransA, by
// columns, A(i, p) = a[p * lda + i]. B(p, j) = b[p * ldb + j].
struct Operand {
  const float* a = nullptr;
  std::int64_t lda = 0;
  const float* b = nullptr;
  std::int64_t ldb = 0;
  std::int64_t depth = 0;
};

// What the sum starts from: nothing, c, or c scaled by rows, row_scale[i] * c(i, j), or by columns, col_scale[j] * c(i,
// j).
struct Start {
  const float* c = nullptr;
  std::int64_t ldc = 0;
  const float* row_scale = nullptr;
  const float* col_scale = nullptr;
};

// Which part of the second product's square A counts. Lower: p <= i, what lies above is not read. Upper: p >= i, what
// lies below within a register tile is read and must be zero. UpperPair: the first product's A is such a square too.
enum class Tri { None, Lower, Upper, UpperPair };

template <bool kTransA, int MR, int NV, class D, class V>
HWY_INLINE void accumulate(D d, const float* HWY_RESTRICT a, std::int64_t lda, const float* HWY_RESTRICT b,
                           std::int64_t ldb, std::int64_t depth, V (&acc)[MR][NV]) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
#pragma GCC unroll 4
  for (std::int64_t p = 0; p < depth; ++p) {
    V bv[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) bv[j] = hn::LoadU(d, b + p * ldb + j * lanes);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const V av = hn::Set(d, kTransA ? a[p * lda + i] : a[i * lda + p]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) acc[i][j] = hn::MulAdd(av, bv[j], acc[i][j]);
    }
  }
}

// last: how many lanes of the last vector are stored.
template <int MR, int NV, class D, class V>
HWY_INLINE void store_tile(D d, const V (&acc)[MR][NV], float* c, std::int64_t ldc, std::int64_t last) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j + 1 < NV; ++j) hn::StoreU(acc[i][j], d, c + i * ldc + j * lanes);
  }
  if (last == lanes) {
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) hn::StoreU(acc[i][NV - 1], d, c + i * ldc + (NV - 1) * lanes);
  } else {
    const auto m = hn::FirstN(d, static_cast<std::size_t>(last));
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) hn::BlendedStore(acc[i][NV - 1], m, d, c + i * ldc + (NV - 1) * lanes);
  }
}

template <bool kTransA, int MR, int NV>
HWY_INLINE void gemm_tile(const Operand& x, const Operand& y, bool triangle, const Start& start, float* c,
                          std::int64_t ldc, std::int64_t last) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) acc[i][j] = hn::Zero(d);
  }
  if (start.c != nullptr) {
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) acc[i][j] = hn::LoadU(d, start.c + i * start.ldc + j * lanes);
    }
    if (start.row_scale != nullptr) {
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        const V s = hn::Set(d, start.row_scale[i]);
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) acc[i][j] = hn::Mul(s, acc[i][j]);
      }
    }
    if (start.col_scale != nullptr) {
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) {
        const V s = hn::LoadU(d, start.col_scale + j * lanes);
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) acc[i][j] = hn::Mul(s, acc[i][j]);
      }
    }
  }
  accumulate<kTransA, MR, NV>(d, x.a, x.lda, x.b, x.ldb, x.depth, acc);
  if (y.depth != 0) accumulate<kTransA, MR, NV>(d, y.a, y.lda, y.b, y.ldb, y.depth, acc);
  if (triangle) {
#pragma GCC unroll 8
    for (int p = 0; p < MR; ++p) {
      V bv[NV];
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) bv[j] = hn::LoadU(d, y.b + (y.depth + p) * y.ldb + j * lanes);
#pragma GCC unroll 8
      for (int i = p; i < MR; ++i) {
        const V av = hn::Set(d, kTransA ? y.a[(y.depth + p) * y.lda + i] : y.a[i * y.lda + y.depth + p]);
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) acc[i][j] = hn::MulAdd(av, bv[j], acc[i][j]);
      }
    }
  }
  store_tile(d, acc, c, ldc, last);
}

// One strip of NV vectors of columns. The loop over its register tiles lies in here because a tile is short: a call for
// each, with the operands passed through memory, took a tenth of the time at depth 32 and a sixth at 16.
template <bool kTransA, int NV>
HWY_NOINLINE void gemm_strip(std::int64_t M, Operand x, Operand y, Tri tri, Start start, float* c, std::int64_t ldc,
                             std::int64_t last, Prefetcher* ahead) {
  const bool triangle = tri == Tri::Lower;
  for (std::int64_t left = M, mr = 0; left > 0; left -= mr) {
    if (ahead != nullptr) ahead->issue();
    // Six rows of eight would leave two, which are too few to hide the latency of a multiply-add. Nor are six or four
    // of one vector enough.
    if (NV == 1 && left >= 8) {
      gemm_tile<kTransA, 8, NV>(x, y, triangle, start, c, ldc, last);
      mr = 8;
    } else if (left >= kMR && (kMR != 6 || left != 8)) {
      gemm_tile<kTransA, kMR, NV>(x, y, triangle, start, c, ldc, last);
      mr = kMR;
    } else if (kMR > 4 && left >= 4) {
      gemm_tile<kTransA, 4, NV>(x, y, triangle, start, c, ldc, last);
      mr = 4;
    } else if (left >= 2) {
      gemm_tile<kTransA, 2, NV>(x, y, triangle, start, c, ldc, last);
      mr = 2;
    } else {
      gemm_tile<kTransA, 1, NV>(x, y, triangle, start, c, ldc, last);
      mr = 1;
    }
    x.a += kTransA ? mr : mr * x.lda;
    y.a += kTransA ? mr : mr * y.lda;
    if (tri == Tri::Lower) y.depth += mr;
    if (tri == Tri::Upper || tri == Tri::UpperPair) {
      y.a += kTransA ? mr * y.lda : mr;
      y.b += mr * y.ldb;
      y.depth -= mr;
    }
    if (tri == Tri::UpperPair) {
      x.a += kTransA ? mr * x.lda : mr;
      x.b += mr * x.ldb;
      x.depth -= mr;
    }
    if (start.c != nullptr) start.c += mr * start.ldc;
    if (start.row_scale != nullptr) start.row_scale += mr;
    c += mr * ldc;
  }
}

// c[M, N] = start + x.a x.b + tri(y.a) y.b. Loads of b and start run up to the next multiple of the vector width past N
// (tiles are padded so); stores do not.
// With diagonal >= 0 only the elements with column <= diagonal + row are wanted: most of the others are skipped.
// `ahead` is served once per register tile.
template <bool kTransA>
HWY_NOINLINE void gemm(std::int64_t M, std::int64_t N, const Operand& x, const Operand& y, Tri tri, const Start& start,
                       float* c, std::int64_t ldc, std::int64_t diagonal = -1, Prefetcher* ahead = nullptr) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t j = 0; j < N;) {
    const bool wide = N - j > (kNV - 1) * lanes;
    const std::int64_t width = wide ? kNV * lanes : lanes;
    const std::int64_t last = std::min(lanes, N - j - (width - lanes));
    const auto rows = [&](std::int64_t from, std::int64_t to, bool narrow) HWY_ATTR {
      if (from >= to) return;
      Operand xj = x, yj = y;
      Start sj = start;
      xj.a += kTransA ? from : from * x.lda;
      xj.b += j;
      if (tri != Tri::None || y.depth != 0) {
        yj.a += kTransA ? from : from * y.lda;
        yj.b += j;
        if (tri == Tri::Lower) yj.depth = from;
      }
      if (sj.c != nullptr) sj.c += from * start.ldc + j;
      if (sj.row_scale != nullptr) sj.row_scale += from;
      if (sj.col_scale != nullptr) sj.col_scale += j;
      float* cj = c + from * ldc + j;
      if (wide && !narrow) {
        gemm_strip<kTransA, kNV>(to - from, xj, yj, tri, sj, cj, ldc, last, ahead);
      } else {
        gemm_strip<kTransA, 1>(to - from, xj, yj, tri, sj, cj, ldc, wide ? lanes : last, ahead);
      }
    };
    if (diagonal < 0) {
      rows(0, M, false);
    } else {
      const std::int64_t first = std::clamp<std::int64_t>(j - diagonal, 0, M);
      const std::int64_t second = wide ? std::clamp<std::int64_t>(j + lanes - diagonal, first, M) : first;
      rows(first, second, true);
      rows(second, M, false);
    }
    j += width;
  }
}

// A whose columns lie in panels of `width`, `step` floats apart.
struct PanelOperand {
  const float* a = nullptr;
  std::int64_t lda = 0, width = 0, step = 0;
  const float* b = nullptr;
  std::int64_t ldb = 0;
  std::int64_t depth = 0;
};

template <int MR, int NV>
HWY_INLINE void panels_tile(const PanelOperand& x, float* c, std::int64_t ldc, std::int64_t last) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  V acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) acc[i][j] = hn::Zero(d);
  }
  const float *a = x.a, *b = x.b;
  for (std::int64_t left = x.depth; left > 0; left -= x.width, a += x.step, b += x.width * x.ldb) {
    accumulate<false, MR, NV>(d, a, x.lda, b, x.ldb, std::min(left, x.width), acc);
  }
  store_tile(d, acc, c, ldc, last);
}

template <int NV>
HWY_NOINLINE void panels_strip(std::int64_t M, PanelOperand x, float* c, std::int64_t ldc, std::int64_t last) {
  for (std::int64_t left = M, mr = 0; left > 0; left -= mr) {
    if (left >= kMR && (kMR != 6 || left != 8)) {
      panels_tile<kMR, NV>(x, c, ldc, last);
      mr = kMR;
    } else if (kMR > 4 && left >= 4) {
      panels_tile<4, NV>(x, c, ldc, last);
      mr = 4;
    } else {
      panels_tile<1, NV>(x, c, ldc, last);
      mr = 1;
    }
    x.a += mr * x.lda;
    c += mr * ldc;
  }
}

// c[M, N] = a b, the sum over all panels in registers. b and c as for gemm.
inline HWY_NOINLINE void gemm_panels(std::int64_t M, std::int64_t N, PanelOperand x, float* c, std::int64_t ldc) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  for (std::int64_t j = 0; j < N;) {
    const bool wide = N - j > (kNV - 1) * lanes;
    const std::int64_t width = wide ? kNV * lanes : lanes, last = std::min(lanes, N - j - (width - lanes));
    if (wide) {
      panels_strip<kNV>(M, x, c + j, ldc, last);
    } else {
      panels_strip<1>(M, x, c + j, ldc, last);
    }
    x.b += width;
    j += width;
  }
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
