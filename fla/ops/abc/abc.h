// abc: attention with bounded memory control (Peng et al., "ABC: Attention with Bounded-memory Control", 2022). gsa
// whose gate and write strength come from one tensor of slot logits by a running softmax over time:
//   z_t = ln sum_{j <= t} e^{s_j},   w_t = e^{s_t - z_t},   g_t = z_{t-1} - z_t,   g_0 = 0
//   Hk_t = Hk_{t-1} diag(e^{g_t}) + k_t w_t^T,   p_t = softmax(K^(-1/2) Hk_t^T q_t)
//   Hv_t = diag(e^{g_t}) Hv_{t-1} + w_t v_t^T,   o_t = Hv_t^T p_t
#pragma once

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

// z starts afresh in every call and is no part of the states: the first token has weight 1 beside them, and a sequence
// in two calls is not the sequence in one.
struct AbcArgs {
  TensorView q, k;            // [B, T, H, K] F32, F16, BF16 (F64: reference only); K to 256
  TensorView v;               // [B, T, H, V] as q; any V
  TensorView s;               // [B, T, H, M] as q: slot logits, finite; any M
  TensorView initial_state;   // [B, H, K, M] any float type: Hk; absent = zeros
  TensorView initial_values;  // [B, H, M, V] any float type: Hv, "initial_state.1" by name; absent = zeros
  TensorView o;               // [B, T, H, V] as q
  TensorView final_state;     // [B, H, K, M] F32
  TensorView final_values;    // [B, H, M, V] F32
};

struct AbcBackwardArgs : AbcArgs {  // o and the final states are not read
  TensorView do_;                   // [B, T, H, V]; absent = zeros
  TensorView dht, dht_values;       // [B, H, K, M], [B, H, M, V]; absent = zeros
  TensorView dq, dk, dv, ds;        // as q, k, v, s
  TensorView dh0, dh0_values;       // as initial_state, initial_values
};

inline constexpr FunctionId<AbcArgs> kChunkAbc{"chunk_abc"};
inline constexpr FunctionId<AbcBackwardArgs> kChunkAbcBackward{"chunk_abc_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<AbcArgs> chunk_abc;
FLA_API extern const Function<AbcBackwardArgs> chunk_abc_backward;

}  // namespace fla
