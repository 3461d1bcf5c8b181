// Operands of products: rows of keys, and pairs of 16-bit elements with what their rounding leaves out.
#pragma once

#include <cstdint>

#include "fla/engine/diag/cuda/params.cuh"

namespace fla::cuda {

// N tiles of 8 rows of k, as columns of a product over WIDTH channels.
template <typename T, int N, int WIDTH>
FLA_DEVICE void load_key_rows(FragB<T> (&b)[WIDTH / 16][N], Shared<T> k, int ld) {
  if constexpr (N == 1) {
    static_assert(WIDTH == 32);
    std::uint32_t r[4];
    ldmatrix_x4<false>(r, k + (lane_id() % 8 * ld + lane_id() / 8 * 8));
    b[0][0] = {{r[0], r[1]}};
    b[1][0] = {{r[2], r[3]}};
  } else {
    FLA_UNROLL
    for (int kk = 0; kk < WIDTH / 16; ++kk) {
      FLA_UNROLL
      for (int n = 0; n < N; n += 2) load_b(b[kk][n], b[kk][n + 1], k + (8 * n * ld + 16 * kk), ld);
    }
  }
}

// Both elements of a word times their factors, rounded to T again.
template <typename T>
FLA_DEVICE std::uint32_t scale_pair(std::uint32_t w, float lo, float hi) {
  return pack2<T>(to_f32(T{static_cast<std::uint16_t>(w)}) * lo, to_f32(T{static_cast<std::uint16_t>(w >> 16U)}) * hi);
}

// What the word of T that is nearest to a pair leaves out, as a word.
template <typename T>
FLA_DEVICE std::uint32_t low_pair(std::uint32_t nearest, float lo, float hi) {
  return pack2<T>(lo - to_f32(T{static_cast<std::uint16_t>(nearest)}),
                  hi - to_f32(T{static_cast<std::uint16_t>(nearest >> 16U)}));
}

// What scale_pair rounds away.
template <typename T>
FLA_DEVICE std::uint32_t rest_of_pair(std::uint32_t w, float lo, float hi) {
  lo *= to_f32(T{static_cast<std::uint16_t>(w)});
  hi *= to_f32(T{static_cast<std::uint16_t>(w >> 16U)});
  return low_pair<T>(pack2<T>(lo, hi), lo, hi);
}

// What a state's 16-bit form leaves out, as a second operand: gradients of gates are differences of large numbers.
template <typename T>
FLA_DEVICE FragA<T> rest_of(const FragC& c0, const FragC& c1, const FragA<T>& a) {
  FragA<T> r;
  FLA_UNROLL
  for (int w = 0; w < 4; ++w) {
    const FragC& c = w < 2 ? c0 : c1;
    r.x[w] = low_pair<T>(a.x[w], c.x[2 * (w % 2)], c.x[2 * (w % 2) + 1]);
  }
  return r;
}

// What an operand that was scaled up may reach: the exponent where 16 bits keep its mantissa whole, and the largest
// value.
template <typename T>
struct RaisedRange;
template <>
struct RaisedRange<bf16> {
  static constexpr float kLeast = -100.0F, kMost = 1e38F;
};
template <>
struct RaisedRange<f16> {
  static constexpr float kLeast = -8.0F, kMost = 6e4F;
};

}  // namespace fla::cuda
