// retention: linear attention with a fixed decay per head (Sun et al., "Retentive Network: A Successor to Transformer
// for Large Language Models", 2023).
//   gamma_h = 1 - 2^(-5-h),   S_t = gamma_h S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t
// The decay depends on the head's index alone: whoever splits heads over devices must pass all of them in order.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct RetentionArgs {
  TensorView q, k;               // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                  // [B, T, H, V] as q
  std::optional<double> scale;   // multiplies q; default K^(-1/2)
  TensorView initial_state;      // [N, H, K, V] any float type; absent = zeros; not parallel
  bool reverse = false;          // from the last token to the first; fused_recurrent only
  bool state_v_first = false;    // states are [N, H, V, K]; fused_recurrent only
  TensorView cu_seqlens;         // [N + 1] I32 or I64, B = 1
  std::int64_t chunk_size = 64;  // power of two; most tokens per chunk, changes rounding only; chunk only
  TensorView o;                  // [B, T, H, V] as q
  TensorView final_state;        // [N, H, K, V] F32; not parallel
  TensorView attn;               // [B, H, T, T] as q; parallel only, not with cu_seqlens
};

struct RetentionBackwardArgs : RetentionArgs {  // o, final_state and attn are not read
  TensorView do_;                               // [B, T, H, V]; absent = zeros
  TensorView dht;                               // [N, H, K, V]; absent = zeros
  TensorView dq, dk;                            // as q, k
  TensorView dv;                                // as v
  TensorView dh0;                               // as initial_state
};

inline constexpr FunctionId<RetentionArgs> kChunkRetention{"chunk_retention"};
inline constexpr FunctionId<RetentionBackwardArgs> kChunkRetentionBackward{"chunk_retention_backward"};
inline constexpr FunctionId<RetentionArgs> kFusedChunkRetention{"fused_chunk_retention"};
inline constexpr FunctionId<RetentionBackwardArgs> kFusedChunkRetentionBackward{"fused_chunk_retention_backward"};
inline constexpr FunctionId<RetentionArgs> kFusedRecurrentRetention{"fused_recurrent_retention"};
inline constexpr FunctionId<RetentionBackwardArgs> kFusedRecurrentRetentionBackward{
    "fused_recurrent_retention_backward"};
inline constexpr FunctionId<RetentionArgs> kParallelRetention{"parallel_retention"};
inline constexpr FunctionId<RetentionBackwardArgs> kParallelRetentionBackward{"parallel_retention_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<RetentionArgs> chunk_retention;
FLA_API extern const Function<RetentionBackwardArgs> chunk_retention_backward;
// The chunk form under the name that callers of the fused kernel use.
FLA_API extern const Function<RetentionArgs> fused_chunk_retention;
FLA_API extern const Function<RetentionBackwardArgs> fused_chunk_retention_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<RetentionArgs> fused_recurrent_retention;
FLA_API extern const Function<RetentionBackwardArgs> fused_recurrent_retention_backward;
// No states; can write the attention scores.
FLA_API extern const Function<RetentionArgs> parallel_retention;
FLA_API extern const Function<RetentionBackwardArgs> parallel_retention_backward;

}  // namespace fla
