// Attention over a cache of keys that decay by channel, and how the cache is made. With c(j) = j / chunk:
//   s_ij = scale sum_c q_ic k_jc 2^{p_ic - r_c(j)c} + ln 2 (c_{T - Q + i} - c_j)                              (1)
//   o_i = sum_j e^{s_ij} v_j / Z_i,   lse_i = log2 Z_i,   Z_i = sum_j e^{s_ij} + e^b   over all j             (2)
//   r_c = P at the first row of chunk c,   k~_j = k_j 2^{r_c(j) - P_j}                                        (3)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/core/status.h"
#include "fla/core/tensor.h"
#include "fla/core/threads.h"

namespace fla {

struct WallDecodeProblem {
  TensorView q;     // [B, Q, HQ, K]
  TensorView v;     // [B, T, H, V]
  TensorView p;     // [B, Q, HQ, K]
  TensorView k;     // [B, T, HQ, K]
  TensorView r;     // [B, NC, HQ, K]
  TensorView sink;  // [HQ]; absent: none
  TensorView c;     // [B, T, HQ]; absent: 0
  double scale = 1.0;
  std::int64_t chunk = 1;
  TensorView o;    // [B, Q, HQ, V]
  TensorView lse;  // [B, Q, HQ]

  std::int64_t B() const { return v.dim(0); }
  std::int64_t T() const { return v.dim(1); }
  std::int64_t Q() const { return q.dim(1); }
  std::int64_t HQ() const { return q.dim(2); }
  std::int64_t K() const { return q.dim(3); }
  std::int64_t V() const { return v.dim(3); }
  std::int64_t group() const { return HQ() / v.dim(2); }
};

struct WallCacheProblem {
  TensorView q;  // [B, T, H, K] the keys; q is what engines look at for the type
  TensorView p;  // [B, T, HQ, K] P
  std::int64_t chunk = 1;
  TensorView k_tilde;  // [B, T, HQ, K]
  TensorView r;        // [B, NC, HQ, K]
};

namespace reference {
Status wall_decode(const WallDecodeProblem& p, ThreadPool& pool);
Status wall_cache(const WallCacheProblem& p, ThreadPool& pool);
}  // namespace reference

namespace cpu {
std::size_t wall_decode_workspace(const WallDecodeProblem& p, int threads);
Status wall_decode(const WallDecodeProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
std::size_t wall_cache_workspace(const WallCacheProblem& p, int threads);
Status wall_cache(const WallCacheProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
}  // namespace cpu

}  // namespace fla
