// lightning_attn: linear attention with a fixed decay per head and layer (Qin et al., "Lightning Attention-2: A Free
// Lunch for Handling Unlimited Sequence Lengths in Large Language Models", 2024).
//   g_h = -(8 / H)(1 - layer_idx / num_layers) h,   S_t = e^{g_h} S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t
// The decay depends on H and h: whoever splits heads over devices must use the global ones.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/ops/spec/state_pool.h"
#include "fla/registry/function.h"

namespace fla {

struct LightningAttnArgs {
  TensorView q, k;                         // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                            // [B, T, H, V] as q
  std::optional<std::int64_t> layer_idx;   // required; 0 (strongest decay) to num_layers (none)
  std::optional<std::int64_t> num_layers;  // required; at least 1
  std::optional<double> scale;             // multiplies q; default K^(-1/2)
  TensorView initial_state;                // [N, H, K, V] any float type; absent = zeros
  bool reverse = false;                    // from the last token to the first; fused_recurrent only
  TensorView cu_seqlens;                   // [N + 1] I32 or I64, B = 1
  std::int64_t chunk_size = 64;            // power of two; most tokens per chunk, changes rounding only; chunk only
  TensorView o;                            // [B, T, H, V] as q
  TensorView final_state;                  // [N, H, K, V] F32
};

struct LightningAttnBackwardArgs : LightningAttnArgs {  // o and final_state are not read
  TensorView do_;                                       // [B, T, H, V]; absent = zeros
  TensorView dht;                                       // [N, H, K, V]; absent = zeros
  TensorView dq, dk;                                    // as q, k
  TensorView dv;                                        // as v
  TensorView dh0;                                       // as initial_state
};

struct LightningStepArgs : StatePoolArgs {  // states are [P, H, K, V]
  TensorView q, k;                          // [B, T, H, K] F32, F16, BF16 (F64: reference only); T is 1 to 8
  TensorView v;                             // [B, T, H, V] as q
  std::optional<std::int64_t> layer_idx;    // this layer's index, from 0 to num_layers; required
  std::optional<std::int64_t> num_layers;   // layers of the model; required
  std::optional<double> scale;              // multiplies q; default K^(-1/2)
  TensorView o;                             // [B, T, H, V] as q
};

inline constexpr FunctionId<LightningAttnArgs> kChunkLightningAttn{"chunk_lightning_attn"};
inline constexpr FunctionId<LightningAttnBackwardArgs> kChunkLightningAttnBackward{"chunk_lightning_attn_backward"};
inline constexpr FunctionId<LightningAttnArgs> kFusedRecurrentLightningAttn{"fused_recurrent_lightning_attn"};
inline constexpr FunctionId<LightningAttnBackwardArgs> kFusedRecurrentLightningAttnBackward{
    "fused_recurrent_lightning_attn_backward"};
inline constexpr FunctionId<LightningStepArgs> kLightningStep{"lightning_step"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<LightningAttnArgs> chunk_lightning_attn;
FLA_API extern const Function<LightningAttnBackwardArgs> chunk_lightning_attn_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<LightningAttnArgs> fused_recurrent_lightning_attn;
FLA_API extern const Function<LightningAttnBackwardArgs> fused_recurrent_lightning_attn_backward;
// 1 to 8 tokens of each of B sequences whose states lie in a pool, for decoding and for checking drafts.
FLA_API extern const Function<LightningStepArgs> lightning_step;

}  // namespace fla
