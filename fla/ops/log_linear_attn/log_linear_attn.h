// log_linear_attn: gated linear attention whose history is kept in buckets of 1, 2, 4, ... tokens, each with a weight
// of its own per reader (Guo et al., "Log-Linear Attention", 2025).
//   o_i = sum_{j <= i} lambda_i[level(i, j)] e^{G_i - G_j} <q_i, k_j> v_j,   level(i, j) = bits of (i xor j)
// with G the running sum of g and i, j counted from the start of the sequence. There is no scale.
#pragma once

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct LogLinearAttnArgs {
  TensorView q, k;  // [B, T, 1, K] F32, F16, BF16 (F64: reference only), shared by all heads; K to 256
  TensorView v;     // [B, T, H, V] as q; any V
  TensorView g;     // [B, T, H] any float type: log gate
  TensorView
      level_scales;  // [B, T, H, L] any float type: lambda of the reading token; a sequence of n > 1 tokens, those of
                     // earlier calls included, needs L >= ceil(log2 n) + 1
  TensorView past_state;   // [N, H, L, K, V] any float type: final_state of the call before; absent = none
  TensorView past_tokens;  // [N] I32 or I64: tokens that past_state stands for; both or none
  TensorView cu_seqlens;   // [N + 1] I32 or I64, B = 1
  TensorView o;            // [B, T, H, V] as q
  TensorView
      final_state;  // [N, H, L, K, V] F32: bucket b holds 2^b tokens where bit b of all tokens is set, else zeros
};

struct LogLinearAttnBackwardArgs : LogLinearAttnArgs {  // o and final_state are not read, and past_state is a constant
  TensorView do_;                                       // [B, T, H, V]; absent = zeros
  TensorView dq, dk, dv, dg, dlevel_scales;             // as q, k, v, g, level_scales
};

inline constexpr FunctionId<LogLinearAttnArgs> kChunkLogLinearAttn{"chunk_log_linear_attn"};
inline constexpr FunctionId<LogLinearAttnBackwardArgs> kChunkLogLinearAttnBackward{"chunk_log_linear_attn_backward"};

// Chunkwise: for training, prefill and, with the state of the call before, any later part of a sequence.
FLA_API extern const Function<LogLinearAttnArgs> chunk_log_linear_attn;
FLA_API extern const Function<LogLinearAttnBackwardArgs> chunk_log_linear_attn_backward;

}  // namespace fla
