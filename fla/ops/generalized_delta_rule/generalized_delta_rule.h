// generalized_delta_rule: transitions of identity plus rank one (IPLR) and of diagonal plus rank one (DPLR; RWKV-7 runs
// on it). a reads the state before its decay, b writes what was read; the sign is the caller's: a delta rule has
// b = -beta a.
//   S_t = e^{gk_t} o S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,   o_t = scale * S_t^T q_t     (IPLR: gk = 0)
// With |<a, b>| above 1 the recurrence may grow without bound.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct IplrDeltaRuleArgs {
  TensorView q, k;               // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                  // [B, T, H, V] as q
  TensorView a, b;               // [B, T, H, K] as q
  std::optional<double> scale;   // multiplies q; default K^(-1/2); above 0 in fused_recurrent
  TensorView initial_state;      // [N, H, K, V] any float type; absent = zeros
  TensorView cu_seqlens;         // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;     // the same in host memory; changes no value; chunk only
  std::int64_t chunk_size = 64;  // power of two; most tokens per chunk, changes rounding only; chunk only
  TensorView o;                  // [B, T, H, V] as q
  TensorView final_state;        // [N, H, K, V] F32
};

struct IplrDeltaRuleBackwardArgs : IplrDeltaRuleArgs {  // o and final_state are not read
  TensorView do_;                                       // [B, T, H, V]; absent = zeros
  TensorView dht;                                       // [N, H, K, V]; absent = zeros
  TensorView dq, dk, da, db;                            // as q, k, a, b
  TensorView dv;                                        // as v
  TensorView dh0;                                       // as initial_state
};

struct DplrDeltaRuleArgs {
  TensorView q, k;              // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                 // [B, T, H, V] as q
  TensorView a, b;              // [B, T, H, K] as q
  TensorView gk;                // [B, T, H, K] any float type: log gate
  std::optional<double> scale;  // multiplies q; default K^(-1/2)
  TensorView initial_state;     // [N, H, K, V] any float type; absent = zeros; enters at the last token if reverse
  bool reverse = false;         // from the last token to the first; fused_recurrent only
  bool safe_gate = false;       // a promise that gk is at least -5; changes no value; chunk only
  std::optional<double> lower_bound;  // below 0: the same promise with a number; changes no value; chunk only
  bool disable_recompute = false;     // changes no value; chunk only
  TensorView cu_seqlens;              // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;          // the same in host memory; changes no value; chunk only
  std::int64_t chunk_size = 16;       // 16, 32 or 64; most tokens per chunk, changes rounding only; chunk only
  TensorView o;                       // [B, T, H, V] as q
  TensorView final_state;             // [N, H, K, V] F32
};

struct DplrDeltaRuleBackwardArgs : DplrDeltaRuleArgs {  // o and final_state are not read
  TensorView do_;                                       // [B, T, H, V]; absent = zeros
  TensorView dht;                                       // [N, H, K, V]; absent = zeros
  TensorView dq, dk, da, db;                            // as q, k, a, b
  TensorView dv;                                        // as v
  TensorView dgk;                                       // as gk
  TensorView dh0;                                       // as initial_state
};

inline constexpr FunctionId<IplrDeltaRuleArgs> kChunkIplrDeltaRule{"chunk_iplr_delta_rule"};
inline constexpr FunctionId<IplrDeltaRuleBackwardArgs> kChunkIplrDeltaRuleBackward{"chunk_iplr_delta_rule_backward"};
inline constexpr FunctionId<IplrDeltaRuleArgs> kFusedRecurrentIplrDeltaRule{"fused_recurrent_iplr_delta_rule"};
inline constexpr FunctionId<IplrDeltaRuleBackwardArgs> kFusedRecurrentIplrDeltaRuleBackward{
    "fused_recurrent_iplr_delta_rule_backward"};
inline constexpr FunctionId<DplrDeltaRuleArgs> kChunkDplrDeltaRule{"chunk_dplr_delta_rule"};
inline constexpr FunctionId<DplrDeltaRuleBackwardArgs> kChunkDplrDeltaRuleBackward{"chunk_dplr_delta_rule_backward"};
inline constexpr FunctionId<DplrDeltaRuleArgs> kFusedRecurrentDplrDeltaRule{"fused_recurrent_dplr_delta_rule"};
inline constexpr FunctionId<DplrDeltaRuleBackwardArgs> kFusedRecurrentDplrDeltaRuleBackward{
    "fused_recurrent_dplr_delta_rule_backward"};

// IPLR, chunkwise: for training and prefill.
FLA_API extern const Function<IplrDeltaRuleArgs> chunk_iplr_delta_rule;
FLA_API extern const Function<IplrDeltaRuleBackwardArgs> chunk_iplr_delta_rule_backward;
// IPLR, token by token: for decoding and short sequences.
FLA_API extern const Function<IplrDeltaRuleArgs> fused_recurrent_iplr_delta_rule;
FLA_API extern const Function<IplrDeltaRuleBackwardArgs> fused_recurrent_iplr_delta_rule_backward;
// DPLR, chunkwise: for training and prefill.
FLA_API extern const Function<DplrDeltaRuleArgs> chunk_dplr_delta_rule;
FLA_API extern const Function<DplrDeltaRuleBackwardArgs> chunk_dplr_delta_rule_backward;
// DPLR, token by token: for decoding and short sequences.
FLA_API extern const Function<DplrDeltaRuleArgs> fused_recurrent_dplr_delta_rule;
FLA_API extern const Function<DplrDeltaRuleBackwardArgs> fused_recurrent_dplr_delta_rule_backward;

}  // namespace fla
