// parallax: softmax attention with a first-order correction by a second query ("Parallax: Parameterized Local Linear
// Attention", arXiv 2605.29157, 2026).
//   p_ij = softmax_j(scale <q_i, k_j>),   u_ij = <r_i, k_j>,   ubar_i = sum_j p_ij u_ij
//   o_i = sum_j p_ij (1 + ubar_i - u_ij) v_j over j <= i, i - j < window_size.
// Query head h reads key head h / (HQ / H).
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct ParallaxArgs {
  TensorView q;                             // [B, T, HQ, K] F32, F16, BF16 (F64: reference only)
  TensorView r;                             // [B, T, HQ, K] as q: second queries, never scaled
  TensorView k;                             // [B, T, H, K] as q; HQ is a multiple of H
  TensorView v;                             // [B, T, H, K] as q: values are as wide as keys
  std::optional<double> scale;              // multiplies <q, k> only; default K^(-1/2)
  std::optional<std::int64_t> window_size;  // keys a query sees, itself included; at least 1
  TensorView cu_seqlens;                    // [N + 1] I32 or I64, B = 1
  TensorView o;                             // [B, T, HQ, K] as q
};

struct ParallaxBackwardArgs : ParallaxArgs {  // o is not read
  TensorView do_;                             // [B, T, HQ, K]; absent = zeros
  TensorView dq, dr, dk, dv;                  // as q, r, k, v
};

// The last TQ of T positions. A query without any key gives zeros.
struct ParallaxDecodeArgs {
  TensorView q, r;                          // [B, TQ, HQ, K] F32, F16, BF16 (F64: reference only); TQ = 1 in one_step
  TensorView k, v;                          // [B, T, H, K] as q; T is at least TQ
  std::optional<double> scale;              // default K^(-1/2)
  std::optional<std::int64_t> window_size;  // keys a query sees, itself included; at least 1
  TensorView cache_start;                   // [B] I32 or I64: the first key that counts; absent = 0
  TensorView o;                             // [B, TQ, HQ, K] as q
};

inline constexpr FunctionId<ParallaxArgs> kParallelParallax{"parallel_parallax"};
inline constexpr FunctionId<ParallaxBackwardArgs> kParallelParallaxBackward{"parallel_parallax_backward"};
inline constexpr FunctionId<ParallaxDecodeArgs> kParallaxDecode{"parallax_decode"};
inline constexpr FunctionId<ParallaxDecodeArgs> kParallaxDecodeOneStep{"parallax_decode_one_step"};

FLA_API extern const Function<ParallaxArgs> parallel_parallax;
FLA_API extern const Function<ParallaxBackwardArgs> parallel_parallax_backward;
FLA_API extern const Function<ParallaxDecodeArgs> parallax_decode;
FLA_API extern const Function<ParallaxDecodeArgs> parallax_decode_one_step;

}  // namespace fla
