// linear_attn: linear attention, optionally normalised (Katharopoulos et al., "Transformers are RNNs: Fast
// Autoregressive Transformers with Linear Attention", 2020).
//   S_t = S_{t-1} + k_t v_t^T,   y_t = scale * S_t^T q_t
//   normalize:  z_t = z_{t-1} + k_t,   o_t = y_t / (scale * <q_t, z_t> + 1e-10);   otherwise o_t = y_t
#pragma once

#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct LinearAttnArgs {
  TensorView q, k;                // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                   // [B, T, H, V] as q
  std::optional<double> scale;    // multiplies q; default K^(-1/2)
  TensorView initial_state;       // [N, H, K, V] any float type; absent = zeros
  TensorView initial_z;           // [N, 1, H, K] any float type: running sum of past keys; normalize only
  bool reverse = false;           // from the last token to the first; fused_recurrent only
  std::optional<bool> normalize;  // default true in chunk and fused_chunk, false in fused_recurrent
  TensorView cu_seqlens;          // [N + 1] I32 or I64, B = 1
  TensorView o;                   // [B, T, H, V] as q
  TensorView final_state;         // [N, H, K, V] F32
  TensorView final_z;             // [N, 1, H, K] F32; normalize only
};

struct LinearAttnBackwardArgs : LinearAttnArgs {  // o, final_state and final_z are not read
  TensorView do_;                                 // [B, T, H, V]; absent = zeros
  TensorView dht;                                 // [N, H, K, V]; absent = zeros
  TensorView dzt;                                 // [N, 1, H, K]; absent = zeros
  TensorView dq, dk;
  TensorView dv;
  TensorView dh0;
  TensorView dz0;
};

inline constexpr FunctionId<LinearAttnArgs> kChunkLinearAttn{"chunk_linear_attn"};
inline constexpr FunctionId<LinearAttnBackwardArgs> kChunkLinearAttnBackward{"chunk_linear_attn_backward"};
inline constexpr FunctionId<LinearAttnArgs> kFusedChunkLinearAttn{"fused_chunk_linear_attn"};
inline constexpr FunctionId<LinearAttnBackwardArgs> kFusedChunkLinearAttnBackward{"fused_chunk_linear_attn_backward"};
inline constexpr FunctionId<LinearAttnArgs> kFusedRecurrentLinearAttn{"fused_recurrent_linear_attn"};
inline constexpr FunctionId<LinearAttnBackwardArgs> kFusedRecurrentLinearAttnBackward{
    "fused_recurrent_linear_attn_backward"};

FLA_API extern const Function<LinearAttnArgs> chunk_linear_attn;
FLA_API extern const Function<LinearAttnBackwardArgs> chunk_linear_attn_backward;
FLA_API extern const Function<LinearAttnArgs> fused_chunk_linear_attn;
FLA_API extern const Function<LinearAttnBackwardArgs> fused_chunk_linear_attn_backward;
FLA_API extern const Function<LinearAttnArgs> fused_recurrent_linear_attn;
FLA_API extern const Function<LinearAttnBackwardArgs> fused_recurrent_linear_attn_backward;

}  // namespace fla
