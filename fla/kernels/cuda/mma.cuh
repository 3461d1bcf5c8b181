// Tensor-core tiles of one warp. In every fragment lane l has g = l / 4 and t = l % 4:
//   FragA<T>    16 x 16 (m, k), T 16 bits: words (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8), the next k beside each
//   FragB<T>    16 x 8  (k, n): words (k 2t, n g), (k 2t+8, n g), each with the next k beside it
//   FragC       16 x 8  (m, n) fp32: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)
//   FragATf32   16 x 8  (m, k): (g, t), (g+8, t), (g, t+4), (g+8, t+4)
//   FragBTf32   8 x 8   (k, n): (k t, n g), (k t+4, n g)
// Tiles in shared memory are row-major with a row pitch `ld` in elements, a multiple of 8 (16-byte rows); ld % 64 == 8
// is free of bank conflicts for every load below.
#pragma once

#include <cstdint>

#include "fla/kernels/cuda/simt.cuh"

namespace fla::cuda {

template <typename T>
struct FragA {
  std::uint32_t x[4];
};
template <typename T>
struct FragB {
  std::uint32_t x[2];
};
struct FragC {
  float x[4];
};
struct FragATf32 {
  float x[4];
};
struct FragBTf32 {
  float x[2];
};

// Row and column of element i of this lane in a FragC.
FLA_DEVICE int frag_row(int i) { return lane_id() / 4 + 8 * (i >> 1); }
FLA_DEVICE int frag_col(int i) { return 2 * (lane_id() % 4) + (i & 1); }

FLA_DEVICE void clear(FragC& c) { c.x[0] = c.x[1] = c.x[2] = c.x[3] = 0.0F; }

// c += a b
template <typename T>
FLA_DEVICE void mma(FragC& c, const FragA<T>& a, const FragB<T>& b) {
  mma_16816<T>(c.x, a.x, b.x);
}
// The operands' upper 19 bits count: round with to_tf32 first, or the product is of truncated values.
FLA_DEVICE void mma(FragC& c, const FragATf32& a, const FragBTf32& b) { mma_1688_tf32(c.x, a.x, b.x); }

// c += a b for fp32 operands: each is split into two tf32 numbers and the product of the two low parts, below 2^-22 of
// the whole, is left out.
FLA_DEVICE void mma_3xtf32(FragC& c, const FragATf32& a, const FragBTf32& b) {
  FragATf32 a_hi, a_lo;
  FragBTf32 b_hi, b_lo;
  FLA_UNROLL
  for (int i = 0; i < 4; ++i) {
    a_hi.x[i] = to_tf32(a.x[i]);
    a_lo.x[i] = to_tf32(a.x[i] - a_hi.x[i]);
  }
  FLA_UNROLL
  for (int i = 0; i < 2; ++i) {
    b_hi.x[i] = to_tf32(b.x[i]);
    b_lo.x[i] = to_tf32(b.x[i] - b_hi.x[i]);
  }
  mma(c, a_lo, b_hi);
  mma(c, a_hi, b_lo);
  mma(c, a_hi, b_hi);
}

// ---- 16-bit tiles from shared memory; s is the tile's first element

// a = M for M stored [m][k]
template <typename T>
FLA_DEVICE void load_a(FragA<T>& a, Shared<T> s, int ld) {
  const int l = lane_id();
  ldmatrix_x4<false>(a.x, s + ((l % 16) * ld + (l / 16) * 8));
}
// a = M for M stored [k][m]
template <typename T>
FLA_DEVICE void load_a_trans(FragA<T>& a, Shared<T> s, int ld) {
  const int l = lane_id();
  ldmatrix_x4<true>(a.x, s + ((l % 8 + (l / 16) * 8) * ld + (l / 8 % 2) * 8));
}
// Two neighbours b0 (n 0 to 7) and b1 (n 8 to 15) of 16 k for M stored [n][k]
template <typename T>
FLA_DEVICE void load_b(FragB<T>& b0, FragB<T>& b1, Shared<T> s, int ld) {
  const int l = lane_id();
  std::uint32_t r[4];
  ldmatrix_x4<false>(r, s + ((l % 8 + (l / 16) * 8) * ld + (l / 8 % 2) * 8));
  b0 = {{r[0], r[1]}};
  b1 = {{r[2], r[3]}};
}
// The same for M stored [k][n]
template <typename T>
FLA_DEVICE void load_b_trans(FragB<T>& b0, FragB<T>& b1, Shared<T> s, int ld) {
  const int l = lane_id();
  std::uint32_t r[4];
  ldmatrix_x4<true>(r, s + ((l % 16) * ld + (l / 16) * 8));
  b0 = {{r[0], r[1]}};
  b1 = {{r[2], r[3]}};
}

// ---- fp32 tiles from shared memory, by address: M(m, k) = s[m row + k col]

FLA_DEVICE void load_a(FragATf32& a, Shared<float> s, int row, int col) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  FLA_UNROLL
  for (int i = 0; i < 4; ++i) a.x[i] = s[(g + 8 * (i & 1)) * row + (t + 4 * (i >> 1)) * col];
}
// M(k, n) = s[k row + n col]
FLA_DEVICE void load_b(FragBTf32& b, Shared<float> s, int row, int col) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  FLA_UNROLL
  for (int i = 0; i < 2; ++i) b.x[i] = s[(t + 4 * i) * row + g * col];
}

// ---- accumulators as operands of the next product, rounded to T

// The 16 x 16 tile (left, right) as A.
template <typename T>
FLA_DEVICE FragA<T> to_a(const FragC& left, const FragC& right) {
  return {{pack2<T>(left.x[0], left.x[1]), pack2<T>(left.x[2], left.x[3]), pack2<T>(right.x[0], right.x[1]),
           pack2<T>(right.x[2], right.x[3])}};
}
// The transpose of the 16 x 16 tile (left, right) as two B: b0 has its rows 0 to 7 as n, b1 its rows 8 to 15.
template <typename T>
FLA_DEVICE void to_b_transposed(FragB<T>& b0, FragB<T>& b1, const FragC& left, const FragC& right) {
  b0 = {{pack2<T>(left.x[0], left.x[1]), pack2<T>(right.x[0], right.x[1])}};
  b1 = {{pack2<T>(left.x[2], left.x[3]), pack2<T>(right.x[2], right.x[3])}};
}
// The 16 x 8 tile itself as B (its rows are k): two register transposes.
template <typename T>
FLA_DEVICE FragB<T> to_b(const FragC& c) {
  return {{transpose_8x8(pack2<T>(c.x[0], c.x[1])), transpose_8x8(pack2<T>(c.x[2], c.x[3]))}};
}

// ---- triangular factors

// A product with a triangular matrix whose other half is zeros must not see what meets these zeros, as 0 NaN is NaN:
// what comes later in time would change what was before. Whether a fragment's elements are all finite is asked first, for
// an instruction a word; where they are not, elements of the first k are left out or added one k after the other.

// 0 while all elements that were asked about are finite: `seen` is the answer so far.
template <typename T, int N>
FLA_DEVICE std::uint32_t ask_finite(const std::uint32_t (&words)[N], std::uint32_t seen = 0) {
  FLA_UNROLL
  for (int i = 0; i < N; ++i) seen = add_zero_of<T>(seen, words[i]);
  return seen;
}
// Of all lanes' answers.
FLA_DEVICE bool all_finite(std::uint32_t seen) { return ballot(seen != 0) == 0; }

// The first k of a fragment where some element of the warp is not finite, 16 if there is none; words of k below 8 come
// first, N in all.
template <typename T, int N>
FLA_DEVICE int first_not_finite(const std::uint32_t (&words)[N], int first = 16) {
  FLA_UNROLL
  for (int i = 0; i < N; ++i) {
    const std::uint32_t bad = add_zero_of<T>(0, words[i]);
    const int k = 8 * (i / (N / 2)) + 2 * (lane_id() % 4);
    const int mine = (bad & 0xFFFFU) != 0 ? k : bad != 0 ? k + 1 : 16;
    first = mine < first ? mine : first;
  }
  FLA_UNROLL
  for (int by = 16; by > 0; by /= 2) {
    const int other = shuffle_xor(first, by);
    first = other < first ? other : first;
  }
  return first;
}
// The elements of such words with from <= k < to; the others are zeros.
template <int N>
FLA_DEVICE void keep_k(std::uint32_t (&to_words)[N], const std::uint32_t (&words)[N], int from, int to) {
  FLA_UNROLL
  for (int i = 0; i < N; ++i) {
    const int k = 8 * (i / (N / 2)) + 2 * (lane_id() % 4);
    const std::uint32_t low = from <= k && k < to ? 0xFFFFU : 0U, high = from <= k + 1 && k + 1 < to ? 0xFFFF0000U : 0U;
    to_words[i] = words[i] & (low | high);
  }
}

// c += a b with a(m, k) zero for k > m, where some b(k, n) is not finite. Rows before the first such k are those that
// finite elements in its place would give, bit for bit.
template <typename T, int N>
FLA_DEVICE void add_lower_exact(FragC (&c)[N], const FragA<T>& a, const FragB<T> (&b)[N]) {
  int first = 16;
  FLA_UNROLL
  for (int n = 0; n < N; ++n) first = first_not_finite<T>(b[n].x, first);
  FLA_UNROLL
  for (int n = 0; n < N; ++n) {
    FragB<T> kept;
    keep_k(kept.x, b[n].x, 0, first);
    mma(c[n], a, kept);
  }
  FLA_ROLL
  for (int k = first; k < 16; ++k) {
    FLA_UNROLL
    for (int n = 0; n < N; ++n) {
      FragB<T> kept;
      keep_k(kept.x, b[n].x, k, k + 1);
      FragC one;
      clear(one);
      mma(one, a, kept);
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) c[n].x[e] = frag_row(e) >= k ? c[n].x[e] + one.x[e] : c[n].x[e];
    }
  }
}
// The same for the 16 x 16 tile (c0, c1) += a b with b(k, n) zero for k > n, STRICT: for k >= n, where some a(m, k) is
// not finite.
template <bool STRICT, typename T>
FLA_DEVICE void add_upper_exact(FragC& c0, FragC& c1, const FragA<T>& a, const FragB<T> (&b)[2]) {
  const int first = first_not_finite<T>(a.x);
  FragA<T> kept;
  keep_k(kept.x, a.x, 0, first);
  mma(c0, kept, b[0]);
  mma(c1, kept, b[1]);
  FLA_ROLL
  for (int k = first; k < 16; ++k) {
    keep_k(kept.x, a.x, k, k + 1);
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      FragC one;
      clear(one);
      mma(one, kept, b[n]);
      FragC& c = n == 0 ? c0 : c1;
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int column = 8 * n + frag_col(e);
        c.x[e] = (STRICT ? column > k : column >= k) ? c.x[e] + one.x[e] : c.x[e];
      }
    }
  }
}

// Stores a 16 x 8 tile at s[m ld + n], two columns at a time.
template <typename T>
FLA_DEVICE void store_c(Shared<T> s, int ld, const FragC& c) {
  FLA_UNROLL
  for (int i = 0; i < 4; i += 2) {
    s.template store_vec<2>(frag_row(i) * ld + frag_col(i), Vec<T, 2>{{from_f32<T>(c.x[i]), from_f32<T>(c.x[i + 1])}});
  }
}

}  // namespace fla::cuda
