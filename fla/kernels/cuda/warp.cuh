// Sums, maxima and running sums across a warp. Every lane calls, the order of additions is fixed.
#pragma once

#include <cstdint>

#include "fla/kernels/cuda/simt.cuh"

namespace fla::cuda {

// Over groups of WIDTH neighbouring lanes (a power of two); every lane gets the result.
template <int WIDTH = 32>
FLA_DEVICE float warp_sum(float x) {
  FLA_UNROLL
  for (int by = WIDTH / 2; by > 0; by /= 2) x += shuffle_xor(x, by);
  return x;
}
template <int WIDTH = 32>
FLA_DEVICE float warp_max(float x) {
  FLA_UNROLL
  for (int by = WIDTH / 2; by > 0; by /= 2) {
    const float other = shuffle_xor(x, by);
    x = other > x ? other : x;
  }
  return x;
}
// x of this lane and those before it.
FLA_DEVICE float warp_prefix_sum(float x) {
  FLA_UNROLL
  for (int by = 1; by < 32; by *= 2) {
    const float before = shuffle_up(x, by);
    if (lane_id() >= by) x += before;
  }
  return x;
}

}  // namespace fla::cuda
