// path_attn: softmax attention whose product of query and key passes through the Householder-like steps between them
// (Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations", 2025). With R_s = I -
// beta_s w_s w_s^T and C the running sum of g inside a sequence:
//   x_ij = q_i^T R_i R_{i-1} ... R_{j+1} k_j + C_i - C_j,   o_i = sum_{j <= i} softmax_j(scale x_ij) v_j
// scale multiplies the gate, too. Query head h reads key head h / (HQ / H).
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct PathAttnArgs {
  TensorView q;                 // [B, T, HQ, K] F32, F16, BF16 (F64: reference only); K to 256
  TensorView k;                 // [B, T, H, K] as q; HQ is a multiple of H
  TensorView v;                 // [B, T, H, V] as q; V to 256
  TensorView w;                 // [B, T, H, K] F32: directions, of unit length
  TensorView beta;              // [B, T, H] F32: steps, 0 to 2
  TensorView g;                 // [B, T, HQ] F32: natural log gate; absent = 0
  std::optional<double> scale;  // default K^(-1/2)
  TensorView cu_seqlens;        // [N + 1] I32 or I64, B = 1
  TensorView o;                 // [B, T, HQ, V] as q
  TensorView k_cache;           // [B, T, H, K] as q: R_T ... R_{j+1} k_j, keys carried to their sequence's end
};

struct PathAttnBackwardArgs : PathAttnArgs {  // outputs of the forward are not read; k_cache is a constant
  TensorView do_;                             // [B, T, HQ, V]; absent = zeros
  TensorView dq, dk, dv;                      // as q, k, v
  TensorView dw, dbeta, dg;                   // as w, beta, g
};

inline constexpr FunctionId<PathAttnArgs> kParallelPathAttn{"parallel_path_attn"};
inline constexpr FunctionId<PathAttnBackwardArgs> kParallelPathAttnBackward{"parallel_path_attn_backward"};

FLA_API extern const Function<PathAttnArgs> parallel_path_attn;
FLA_API extern const Function<PathAttnBackwardArgs> parallel_path_attn_backward;

}  // namespace fla
