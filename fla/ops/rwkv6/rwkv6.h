// rwkv6: linear attention with a log decay per token, head and key channel, read before the update, and a bonus for the
// current token (Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024).
//   o_t = scale * (S_{t-1} + (u o k_t) v_t^T)^T r_t,   S_t = diag(e^{w_t}) S_{t-1} + k_t v_t^T
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/ops/spec/state_pool.h"
#include "fla/registry/function.h"

namespace fla {

struct Rwkv6Args {
  TensorView r, k;              // [B, T, H, K] F32, F16, BF16 (F64: reference only); any K and V
  TensorView v;                 // [B, T, H, V] as r
  TensorView w;                 // [B, T, H, K] any float type: log decay (not the decay itself), natural, normally <= 0
  TensorView u;                 // [H, K] any float type: bonus
  std::optional<double> scale;  // multiplies r; default K^(-1/2); RWKV-6 models use 1
  TensorView initial_state;     // [N, H, K, V] any float type; absent = zeros
  bool reverse = false;         // from the last token to the first; fused_recurrent only
  TensorView cu_seqlens;        // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;    // the same in host memory; changes no value; chunk only
  std::int64_t chunk_size = 64;  // a power of two; changes rounding only; chunk only
  TensorView o;                  // [B, T, H, V] as r
  TensorView final_state;        // [N, H, K, V] F32
};

struct Rwkv6BackwardArgs : Rwkv6Args {  // o and final_state are not read
  TensorView do_;                       // [B, T, H, V]; absent = zeros
  TensorView dht;                       // [N, H, K, V]; absent = zeros
  TensorView dr, dk;                    // as r, k
  TensorView dv;                        // as v
  TensorView dw;                        // as w
  TensorView du;                        // as u: the sum over batch and tokens
  TensorView dh0;                       // as initial_state
};

struct Rwkv6StepArgs : StatePoolArgs {  // states are [P, H, K, V]
  TensorView r, k;                      // [B, T, H, K] F32, F16, BF16 (F64: reference only); T is 1 to 8; any K and V
  TensorView v;                         // [B, T, H, V] as r
  TensorView w;                         // [B, T, H, K] any float type: log decay
  TensorView u;                         // [H, K] any float type: bonus
  std::optional<double> scale;          // multiplies r; default K^(-1/2)
  TensorView o;                         // [B, T, H, V] as r
};

inline constexpr FunctionId<Rwkv6Args> kChunkRwkv6{"chunk_rwkv6"};
inline constexpr FunctionId<Rwkv6BackwardArgs> kChunkRwkv6Backward{"chunk_rwkv6_backward"};
inline constexpr FunctionId<Rwkv6Args> kFusedRecurrentRwkv6{"fused_recurrent_rwkv6"};
inline constexpr FunctionId<Rwkv6BackwardArgs> kFusedRecurrentRwkv6Backward{"fused_recurrent_rwkv6_backward"};
inline constexpr FunctionId<Rwkv6StepArgs> kRwkv6Step{"rwkv6_step"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<Rwkv6Args> chunk_rwkv6;
FLA_API extern const Function<Rwkv6BackwardArgs> chunk_rwkv6_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<Rwkv6Args> fused_recurrent_rwkv6;
FLA_API extern const Function<Rwkv6BackwardArgs> fused_recurrent_rwkv6_backward;
// 1 to 8 tokens of each of B sequences whose states lie in a pool, for decoding and for checking drafts.
FLA_API extern const Function<Rwkv6StepArgs> rwkv6_step;

}  // namespace fla
