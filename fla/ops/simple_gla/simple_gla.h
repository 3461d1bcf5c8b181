// simple_gla: linear attention with one log gate per token and head; Mamba-2's SSD with q = C, k = B, v = x dt, g = A
// dt, scale = 1 (Dao and Gu, "Transformers are SSMs", 2024; Yang et al., "Gated Linear Attention Transformers with
// Hardware-Efficient Training", 2024).
//   S_t = e^{g_t} S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/ops/spec/state_pool.h"
#include "fla/registry/function.h"

namespace fla {

struct SimpleGlaArgs {
  TensorView q, k;               // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                  // [B, T, H, V] as q
  TensorView g;                  // [B, T, H] any float type: log gate; absent = 0
  TensorView g_gamma;            // [H] F32: constant log gate, instead of g; no gradient; not parallel
  std::optional<double> scale;   // multiplies q; default K^(-1/2)
  TensorView initial_state;      // [N, H, K, V] any float type; absent = zeros; not parallel
  bool reverse = false;          // from the last token to the first; fused_recurrent only
  bool state_v_first = false;    // states are [N, H, V, K]; chunk and fused_recurrent
  TensorView cu_seqlens;         // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;     // the same in host memory; changes no value; chunk and parallel
  std::int64_t chunk_size = 64;  // power of two; most tokens per chunk, changes rounding only; chunk only
  TensorView o;                  // [B, T, H, V] as q
  TensorView final_state;        // [N, H, K, V] F32; not parallel
  TensorView attn;               // [B, H, T, T] as q; parallel only, not with cu_seqlens
};

struct SimpleGlaBackwardArgs : SimpleGlaArgs {  // o, final_state and attn are not read
  TensorView do_;                               // [B, T, H, V]; absent = zeros
  TensorView dht;                               // [N, H, K, V]; absent = zeros
  TensorView dq, dk;                            // as q, k
  TensorView dv;                                // as v
  TensorView dg;                                // as g
  TensorView dh0;                               // as initial_state
};

struct SimpleGlaStepArgs : StatePoolArgs {  // states are [P, H, K, V]
  TensorView q, k;                          // [B, T, H, K] F32, F16, BF16 (F64: reference only); T is 1 to 8
  TensorView v;                             // [B, T, H, V] as q
  TensorView g;                             // [B, T, H] any float type: log gate; absent = 0
  TensorView g_gamma;                       // [H] F32: constant log gate, instead of g
  std::optional<double> scale;              // multiplies q; default K^(-1/2)
  bool state_v_first = false;               // states are [P, H, V, K]
  TensorView o;                             // [B, T, H, V] as q
};

inline constexpr FunctionId<SimpleGlaArgs> kChunkSimpleGla{"chunk_simple_gla"};
inline constexpr FunctionId<SimpleGlaBackwardArgs> kChunkSimpleGlaBackward{"chunk_simple_gla_backward"};
inline constexpr FunctionId<SimpleGlaArgs> kFusedChunkSimpleGla{"fused_chunk_simple_gla"};
inline constexpr FunctionId<SimpleGlaBackwardArgs> kFusedChunkSimpleGlaBackward{"fused_chunk_simple_gla_backward"};
inline constexpr FunctionId<SimpleGlaArgs> kFusedRecurrentSimpleGla{"fused_recurrent_simple_gla"};
inline constexpr FunctionId<SimpleGlaBackwardArgs> kFusedRecurrentSimpleGlaBackward{
    "fused_recurrent_simple_gla_backward"};
inline constexpr FunctionId<SimpleGlaArgs> kParallelSimpleGla{"parallel_simple_gla"};
inline constexpr FunctionId<SimpleGlaBackwardArgs> kParallelSimpleGlaBackward{"parallel_simple_gla_backward"};
inline constexpr FunctionId<SimpleGlaStepArgs> kSimpleGlaStep{"simple_gla_step"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<SimpleGlaArgs> chunk_simple_gla;
FLA_API extern const Function<SimpleGlaBackwardArgs> chunk_simple_gla_backward;
// The chunk form under the name that callers of the fused kernel use.
FLA_API extern const Function<SimpleGlaArgs> fused_chunk_simple_gla;
FLA_API extern const Function<SimpleGlaBackwardArgs> fused_chunk_simple_gla_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<SimpleGlaArgs> fused_recurrent_simple_gla;
FLA_API extern const Function<SimpleGlaBackwardArgs> fused_recurrent_simple_gla_backward;
// No states; can write the attention scores.
FLA_API extern const Function<SimpleGlaArgs> parallel_simple_gla;
FLA_API extern const Function<SimpleGlaBackwardArgs> parallel_simple_gla_backward;
// 1 to 8 tokens of each of B sequences whose states lie in a pool, for decoding and for checking drafts.
FLA_API extern const Function<SimpleGlaStepArgs> simple_gla_step;

}  // namespace fla
