// gla: gated linear attention, one log gate per token, head and key channel (Yang et al., "Gated Linear Attention
// Transformers with Hardware-Efficient Training", 2024).
//   S_t = diag(e^{g_t}) S_{t-1} diag(e^{gv_t}) + k_t v_t^T,   o_t = scale * S_t^T q_t
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/ops/spec/state_pool.h"
#include "fla/registry/function.h"

namespace fla {

struct GlaArgs {
  TensorView q, k;              // [B, T, H, K] F32, F16, BF16 (F64: reference only); any K and V
  TensorView v;                 // [B, T, H, V] as q
  TensorView g;                 // [B, T, H, K] any float type: log gate of the key channels ("gk" in fused_recurrent,
                                // where it may be absent = 0)
  TensorView gv;                // [B, T, H, V] any float type: log gate of the value channels; fused_recurrent only
  std::optional<double> scale;  // multiplies q; default K^(-1/2)
  TensorView initial_state;     // [N, H, K, V] any float type; absent = zeros
  bool reverse = false;         // from the last token to the first; fused_recurrent only
  bool state_v_first = false;   // states are [N, H, V, K]
  TensorView cu_seqlens;        // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;    // the same in host memory; changes no value; chunk only
  TensorView o;                 // [B, T, H, V] as q
  TensorView final_state;       // [N, H, K, V] F32
};

struct GlaBackwardArgs : GlaArgs {  // o and final_state are not read
  TensorView do_;                   // [B, T, H, V]; absent = zeros
  TensorView dht;                   // [N, H, K, V]; absent = zeros
  TensorView dq, dk;                // as q, k
  TensorView dv;                    // as v
  TensorView dg;                    // as g
  TensorView dgv;                   // as gv
  TensorView dh0;                   // as initial_state
};

struct GlaStepArgs : StatePoolArgs {  // states are [P, H, K, V]
  TensorView q, k;                    // [B, T, H, K] F32, F16, BF16 (F64: reference only); T is 1 to 8; any K and V
  TensorView v;                       // [B, T, H, V] as q
  TensorView gk, gv;                  // [B, T, H, K], [B, T, H, V] any float type: log gates; absent = 0
  std::optional<double> scale;        // multiplies q; default K^(-1/2)
  bool state_v_first = false;         // states are [P, H, V, K]
  TensorView o;                       // [B, T, H, V] as q
};

inline constexpr FunctionId<GlaArgs> kChunkGla{"chunk_gla"};
inline constexpr FunctionId<GlaBackwardArgs> kChunkGlaBackward{"chunk_gla_backward"};
inline constexpr FunctionId<GlaArgs> kFusedChunkGla{"fused_chunk_gla"};
inline constexpr FunctionId<GlaBackwardArgs> kFusedChunkGlaBackward{"fused_chunk_gla_backward"};
inline constexpr FunctionId<GlaArgs> kFusedRecurrentGla{"fused_recurrent_gla"};
inline constexpr FunctionId<GlaBackwardArgs> kFusedRecurrentGlaBackward{"fused_recurrent_gla_backward"};
inline constexpr FunctionId<GlaStepArgs> kGlaStep{"gla_step"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<GlaArgs> chunk_gla;
FLA_API extern const Function<GlaBackwardArgs> chunk_gla_backward;
// Deprecated name of chunk_gla.
FLA_API extern const Function<GlaArgs> fused_chunk_gla;
FLA_API extern const Function<GlaBackwardArgs> fused_chunk_gla_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<GlaArgs> fused_recurrent_gla;
FLA_API extern const Function<GlaBackwardArgs> fused_recurrent_gla_backward;
// 1 to 8 tokens of each of B sequences whose states lie in a pool, for decoding and for checking drafts.
FLA_API extern const Function<GlaStepArgs> gla_step;

}  // namespace fla
