// rwkv7: the DPLR recurrence under RWKV-7's names (Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution",
// 2025). r is the query, w the log decay of key channels, a reads the state before its decay, b writes what was read.
//   S_t = e^{w_t} o S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,   o_t = scale * S_t^T r_t
// In the model a = -kk and b = kk o eta with kk of unit length; other a and b may make it grow without bound.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/ops/spec/state_pool.h"
#include "fla/registry/function.h"

namespace fla {

struct Rwkv7Args {
  TensorView r;                       // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView w;                       // [B, T, H, K] any float type: log decay
  TensorView k;                       // [B, T, H, K] as r
  TensorView v;                       // [B, T, H, V] as r
  TensorView a, b;                    // [B, T, H, K] as r
  std::optional<double> scale = 1.0;  // multiplies r; nullopt = K^(-1/2)
  TensorView initial_state;           // [N, H, K, V] any float type; absent = zeros
  TensorView cu_seqlens;              // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;          // the same in host memory; changes no value
  bool safe_gate = false;             // a promise that w is at least -5; changes no value
  std::int64_t chunk_size = 16;       // 16, 32 or 64; most tokens per chunk, changes rounding only
  bool disable_recompute = false;     // changes no value
  std::optional<double> lower_bound;  // below 0: a promise about w with a number; changes no value
  TensorView o;                       // [B, T, H, V] as r
  TensorView final_state;             // [N, H, K, V] F32
};

struct Rwkv7BackwardArgs : Rwkv7Args {  // o and final_state are not read
  TensorView do_;                       // [B, T, H, V]; absent = zeros
  TensorView dht;                       // [N, H, K, V]; absent = zeros
  TensorView dr, dk, da, db;            // as r, k, a, b
  TensorView dw;                        // as w
  TensorView dv;                        // as v
  TensorView dh0;                       // as initial_state
};

struct RecurrentRwkv7Args {
  TensorView r;                 // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView w;                 // [B, T, H, K] any float type: log decay
  TensorView k;                 // [B, T, H, K] as r
  TensorView v;                 // [B, T, H, V] as r
  TensorView a, b;              // [B, T, H, K] as r
  std::optional<double> scale;  // multiplies r; default K^(-1/2)
  TensorView initial_state;     // [N, H, K, V] any float type; absent = zeros
  TensorView cu_seqlens;        // [N + 1] I32 or I64, B = 1
  TensorView o;                 // [B, T, H, V] as r
  TensorView final_state;       // [N, H, K, V] F32; callers by name get it unless output_final_state is false
};

struct RecurrentRwkv7BackwardArgs : RecurrentRwkv7Args {  // o and final_state are not read
  TensorView do_;                                         // [B, T, H, V]; absent = zeros
  TensorView dht;                                         // [N, H, K, V]; absent = zeros
  TensorView dr, dk, da, db;                              // as r, k, a, b
  TensorView dw;                                          // as w
  TensorView dv;                                          // as v
  TensorView dh0;                                         // as initial_state
};

struct FusedMulRwkv7Args {
  TensorView r;                       // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView w;                       // [B, T, H, K] any float type: log decay
  TensorView k;                       // [B, T, H, K] as r
  TensorView v;                       // [B, T, H, V] as r
  TensorView kk, a;                   // [B, T, H, K] as r: -kk reads the state, kk o a writes what was read
  std::optional<double> scale = 1.0;  // multiplies r; nullopt = K^(-1/2)
  TensorView initial_state;           // [N, H, K, V] any float type; absent = zeros
  bool reverse = false;               // from the last token to the first
  TensorView cu_seqlens;              // [N + 1] I32 or I64, B = 1
  TensorView o;                       // [B, T, H, V] as r
  TensorView final_state;             // [N, H, K, V] F32
};

struct FusedMulRwkv7BackwardArgs : FusedMulRwkv7Args {  // o and final_state are not read
  TensorView do_;                                       // [B, T, H, V]; absent = zeros
  TensorView dht;                                       // [N, H, K, V]; absent = zeros
  TensorView dr, dk, dkk, da;                           // as r, k, kk, a
  TensorView dw;                                        // as w
  TensorView dv;                                        // as v
  TensorView dh0;                                       // as initial_state
};

struct Rwkv7StepArgs : StatePoolArgs {  // states are [P, H, K, V]
  TensorView r;                         // [B, T, H, K] F32, F16, BF16 (F64: reference only); T is 1 to 8
  TensorView w;                         // [B, T, H, K] any float type: log decay
  TensorView k;                         // [B, T, H, K] as r
  TensorView v;                         // [B, T, H, V] as r
  TensorView a, b;                      // [B, T, H, K] as r
  std::optional<double> scale;          // multiplies r; default K^(-1/2)
  TensorView o;                         // [B, T, H, V] as r
};

inline constexpr FunctionId<Rwkv7Args> kChunkRwkv7{"chunk_rwkv7"};
inline constexpr FunctionId<Rwkv7BackwardArgs> kChunkRwkv7Backward{"chunk_rwkv7_backward"};
inline constexpr FunctionId<RecurrentRwkv7Args> kFusedRecurrentRwkv7{"fused_recurrent_rwkv7"};
inline constexpr FunctionId<RecurrentRwkv7BackwardArgs> kFusedRecurrentRwkv7Backward{"fused_recurrent_rwkv7_backward"};
inline constexpr FunctionId<FusedMulRwkv7Args> kFusedMulRecurrentRwkv7{"fused_mul_recurrent_rwkv7"};
inline constexpr FunctionId<FusedMulRwkv7BackwardArgs> kFusedMulRecurrentRwkv7Backward{
    "fused_mul_recurrent_rwkv7_backward"};
inline constexpr FunctionId<Rwkv7StepArgs> kRwkv7Step{"rwkv7_step"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<Rwkv7Args> chunk_rwkv7;
FLA_API extern const Function<Rwkv7BackwardArgs> chunk_rwkv7_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<RecurrentRwkv7Args> fused_recurrent_rwkv7;
FLA_API extern const Function<RecurrentRwkv7BackwardArgs> fused_recurrent_rwkv7_backward;
// Token by token, with a and b of the other forms made inside.
FLA_API extern const Function<FusedMulRwkv7Args> fused_mul_recurrent_rwkv7;
FLA_API extern const Function<FusedMulRwkv7BackwardArgs> fused_mul_recurrent_rwkv7_backward;
// 1 to 8 tokens of each of B sequences whose states lie in a pool, for decoding and for checking drafts.
FLA_API extern const Function<Rwkv7StepArgs> rwkv7_step;

}  // namespace fla
