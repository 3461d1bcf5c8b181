// delta_rule: DeltaNet (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
// 2024).
//   e_t = beta_t (v_t - S_{t-1}^T k_t),   S_t = S_{t-1} + k_t e_t^T,   o_t = scale * S_t^T q_t
// Keys should have unit length: with beta |k|^2 above 2 the recurrence grows without bound.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/ops/spec/state_pool.h"
#include "fla/registry/function.h"

namespace fla {

struct DeltaRuleArgs {
  TensorView q, k;              // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                 // [B, T, H, V] as q
  TensorView beta;              // [B, T, H] any float type; fused_recurrent also [B, T, H, V], and absent = ones
  std::optional<double> scale;  // multiplies q; default K^(-1/2); above 0 in fused_recurrent
  TensorView initial_state;     // [N, H, K, V] any float type; absent = zeros
  bool use_qk_l2norm_in_kernel = false;  // q and k become x / sqrt(sum x^2 + 1e-6)
  TensorView cu_seqlens;                 // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;             // the same in host memory; changes no value; chunk only
  std::int64_t chunk_size = 64;          // 16, 32 or 64; most tokens per chunk, changes rounding only; chunk only
  TensorView o;                          // [B, T, H, V] as q
  TensorView final_state;                // [N, H, K, V] F32
};

struct DeltaRuleBackwardArgs : DeltaRuleArgs {  // o and final_state are not read
  TensorView do_;                               // [B, T, H, V]; absent = zeros
  TensorView dht;                               // [N, H, K, V]; absent = zeros
  TensorView dq, dk;                            // as q, k
  TensorView dv;                                // as v
  TensorView dbeta;                             // as beta
  TensorView dh0;                               // as initial_state
};

struct DeltaStepArgs : StatePoolArgs {   // states are [P, H, K, V]
  TensorView q, k;                       // [B, T, H, K] F32, F16, BF16 (F64: reference only); T is 1 to 8
  TensorView v;                          // [B, T, H, V] as q
  TensorView beta;                       // [B, T, H] or [B, T, H, V] any float type; absent = ones
  std::optional<double> scale;           // multiplies q; default K^(-1/2); above 0
  bool use_qk_l2norm_in_kernel = false;  // q and k become x / sqrt(sum x^2 + 1e-6)
  TensorView o;                          // [B, T, H, V] as q
};

inline constexpr FunctionId<DeltaRuleArgs> kChunkDeltaRule{"chunk_delta_rule"};
inline constexpr FunctionId<DeltaRuleBackwardArgs> kChunkDeltaRuleBackward{"chunk_delta_rule_backward"};
inline constexpr FunctionId<DeltaRuleArgs> kFusedRecurrentDeltaRule{"fused_recurrent_delta_rule"};
inline constexpr FunctionId<DeltaRuleBackwardArgs> kFusedRecurrentDeltaRuleBackward{
    "fused_recurrent_delta_rule_backward"};
inline constexpr FunctionId<DeltaRuleArgs> kFusedChunkDeltaRule{"fused_chunk_delta_rule"};
inline constexpr FunctionId<DeltaRuleBackwardArgs> kFusedChunkDeltaRuleBackward{"fused_chunk_delta_rule_backward"};
inline constexpr FunctionId<DeltaStepArgs> kDeltaRuleStep{"delta_step"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<DeltaRuleArgs> chunk_delta_rule;
FLA_API extern const Function<DeltaRuleBackwardArgs> chunk_delta_rule_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<DeltaRuleArgs> fused_recurrent_delta_rule;
FLA_API extern const Function<DeltaRuleBackwardArgs> fused_recurrent_delta_rule_backward;
// Deprecated name of chunk_delta_rule.
FLA_API extern const Function<DeltaRuleArgs> fused_chunk_delta_rule;
FLA_API extern const Function<DeltaRuleBackwardArgs> fused_chunk_delta_rule_backward;
// 1 to 8 tokens of each of B sequences whose states lie in a pool, for decoding and for checking drafts.
FLA_API extern const Function<DeltaStepArgs> delta_step;

}  // namespace fla
