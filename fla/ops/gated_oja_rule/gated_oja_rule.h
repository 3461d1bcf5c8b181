// gated_oja_rule: the delta rule with keys and values exchanged. The state decays along V and predicts k from v.
//   S' = S_{t-1} o e^{gv_t},   S_t = S' + beta_t (k_t - S' v_t) v_t^T,   o_t = scale * S_t^T q_t
// v should have unit length: with beta |v|^2 above 2 the recurrence may grow without bound.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct GatedOjaRuleArgs {
  TensorView q, k;               // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                  // [B, T, HV, V] as q; HV a multiple of H, in chunk H
  TensorView gv;                 // [B, T, HV, V] any float type: log gate; absent in fused_recurrent = 0
  TensorView beta;               // [B, T, HV] any float type; absent in fused_recurrent = ones
  std::optional<double> scale;   // multiplies q; default K^(-1/2)
  TensorView initial_state;      // [N, HV, K, V] any float type; absent = zeros
  bool use_q_l2norm = false;     // q becomes x / sqrt(sum x^2 + 1e-6)
  bool use_k_l2norm = false;     // so does k
  TensorView cu_seqlens;         // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;     // the same in host memory; changes no value; chunk only
  std::int64_t chunk_size = 64;  // 16, 32 or 64; most tokens per chunk, changes rounding only; chunk only
  TensorView o;                  // [B, T, HV, V] as q
  TensorView final_state;        // [N, HV, K, V] F32
};

struct GatedOjaRuleBackwardArgs : GatedOjaRuleArgs {  // o and final_state are not read
  TensorView do_;                                     // [B, T, HV, V]; absent = zeros
  TensorView dht;                                     // [N, HV, K, V]; absent = zeros
  TensorView dq, dk;                                  // as q, k
  TensorView dv;                                      // as v
  TensorView dgv, dbeta;                              // as gv, beta
  TensorView dh0;                                     // as initial_state
};

inline constexpr FunctionId<GatedOjaRuleArgs> kChunkGatedOjaRule{"chunk_gated_oja_rule"};
inline constexpr FunctionId<GatedOjaRuleBackwardArgs> kChunkGatedOjaRuleBackward{"chunk_gated_oja_rule_backward"};
inline constexpr FunctionId<GatedOjaRuleArgs> kFusedRecurrentGatedOjaRule{"fused_recurrent_gated_oja_rule"};
inline constexpr FunctionId<GatedOjaRuleBackwardArgs> kFusedRecurrentGatedOjaRuleBackward{
    "fused_recurrent_gated_oja_rule_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<GatedOjaRuleArgs> chunk_gated_oja_rule;
FLA_API extern const Function<GatedOjaRuleBackwardArgs> chunk_gated_oja_rule_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<GatedOjaRuleArgs> fused_recurrent_gated_oja_rule;
FLA_API extern const Function<GatedOjaRuleBackwardArgs> fused_recurrent_gated_oja_rule_backward;

}  // namespace fla
