// gsa: gated slot attention (Zhang et al., "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", 2024).
//   Hk_t = Hk_{t-1} diag(e^{g_t}) + k_t s_t^T,   p_t = softmax(scale * Hk_t^T q_t)
//   Hv_t = diag(e^{g_t}) Hv_{t-1} + s_t v_t^T,   o_t = Hv_t^T p_t
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct GsaArgs {
  TensorView q;                       // [B, T, HQ, K] F32, F16, BF16 (F64: reference only); query head i reads head
                                      // i / (HQ / H)
  TensorView k;                       // [B, T, H, K] as q; K to 256
  TensorView v;                       // [B, T, H, V] as q; any V
  TensorView s;                       // [B, T, H, M] as q: how strongly each of M slots is written; any M
  TensorView g;                       // [B, T, H, M] any float type: log gate of the slots
  std::optional<double> scale;        // multiplies q; default K^(-1/2)
  TensorView initial_state;           // [N, H, K, M] any float type: Hk; absent = zeros
  TensorView initial_values;          // [N, H, M, V] any float type: Hv, "initial_state.1" by name; absent = zeros
  std::int64_t checkpoint_level = 2;  // 0 to 2; changes no value: a backward here always recomputes; chunk only
  bool reverse = false;               // from the last token to the first; fused_recurrent only
  TensorView cu_seqlens;              // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;          // the same in host memory; changes no value; chunk only
  std::int64_t chunk_size = 64;       // a power of two; changes rounding only; chunk only
  TensorView o;                       // [B, T, HQ, V] as q
  TensorView final_state;             // [N, H, K, M] F32
  TensorView final_values;            // [N, H, M, V] F32
};

struct GsaBackwardArgs : GsaArgs {  // o and the final states are not read
  TensorView do_;                   // [B, T, HQ, V]; absent = zeros
  TensorView dht, dht_values;       // [N, H, K, M], [N, H, M, V]; absent = zeros
  TensorView dq, dk, dv, ds, dg;    // as q, k, v, s, g
  TensorView dh0, dh0_values;       // as initial_state, initial_values
};

inline constexpr FunctionId<GsaArgs> kChunkGsa{"chunk_gsa"};
inline constexpr FunctionId<GsaBackwardArgs> kChunkGsaBackward{"chunk_gsa_backward"};
inline constexpr FunctionId<GsaArgs> kFusedRecurrentGsa{"fused_recurrent_gsa"};
inline constexpr FunctionId<GsaBackwardArgs> kFusedRecurrentGsaBackward{"fused_recurrent_gsa_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<GsaArgs> chunk_gsa;
FLA_API extern const Function<GsaBackwardArgs> chunk_gsa_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<GsaArgs> fused_recurrent_gsa;
FLA_API extern const Function<GsaBackwardArgs> fused_recurrent_gsa_backward;

}  // namespace fla
