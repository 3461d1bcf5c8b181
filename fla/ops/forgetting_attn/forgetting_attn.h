// forgetting_attn: softmax attention whose weights decay by a forget gate (Lin et al., "Forgetting Transformer: Softmax
// Attention with a Forget Gate", 2025).
//   s_ij = scale <q_i, k_j> + sum_{j < t <= i} g_t, o_i = sum_j softmax_j(s_ij) v_j over j <= i, i - j < window_size
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct ForgettingAttnArgs {
  TensorView q;                             // [B, T, HQ, K] F32, F16, BF16 (F64: reference only)
  TensorView k;                             // [B, T, H, K] as q; HQ is a multiple of H
  TensorView v;                             // [B, T, H, V] as q
  TensorView g;                             // [B, T, HQ] any float type: natural log forget gate
  std::optional<double> scale;              // multiplies <q, k> only; default K^(-1/2)
  std::optional<std::int64_t> window_size;  // keys a query sees, itself included; at least 1
  TensorView cu_seqlens;                    // [N + 1] I32 or I64, B = 1
  TensorView o;                             // [B, T, HQ, V] as q
};

struct ForgettingAttnBackwardArgs : ForgettingAttnArgs {  // o is not read
  TensorView do_;                                         // [B, T, HQ, V]; absent = zeros
  TensorView dq, dk, dv;                                  // as q, k, v
  TensorView dg;                                          // as g
};

inline constexpr FunctionId<ForgettingAttnArgs> kParallelForgettingAttn{"parallel_forgetting_attn"};
inline constexpr FunctionId<ForgettingAttnBackwardArgs> kParallelForgettingAttnBackward{
    "parallel_forgetting_attn_backward"};

FLA_API extern const Function<ForgettingAttnArgs> parallel_forgetting_attn;
FLA_API extern const Function<ForgettingAttnBackwardArgs> parallel_forgetting_attn_backward;

}  // namespace fla
