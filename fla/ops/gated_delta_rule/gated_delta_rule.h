// gated_delta_rule: Gated DeltaNet (Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024).
//   S' = e^{g_t} S_{t-1},   S_t = S' + k_t [beta_t (v_t - S'^T k_t)]^T,   o_t = scale * S_t^T q_t
// fused_recurrent also takes gates per channel: S' = e^{g_t} e^{gk_t} o S_{t-1} o e^{gv_t}.
// Keys should have unit length: with beta |k|^2 above 2 the recurrence may grow without bound.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/ops/spec/state_pool.h"
#include "fla/registry/function.h"

namespace fla {

struct GatedDeltaRuleArgs {
  TensorView q, k;              // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                 // [B, T, HV, V] as q; HV a multiple of H: value head j reads key head j / (HV / H)
  TensorView g;                 // [B, T, HV] any float type: log gate, or raw; absent in fused_recurrent = 0
  TensorView beta;              // [B, T, HV] any float type; fused_recurrent also [B, T, HV, V], and absent = ones
  TensorView gk;                // [B, T, HV, K] any float type: a further log gate; fused_recurrent only
  TensorView gv;                // [B, T, HV, V] any float type: a further log gate; fused_recurrent only
  TensorView A_log, dt_bias;    // [HV] any float type; with use_gate_in_kernel only; dt_bias absent = 0
  std::optional<double> scale;  // multiplies q; default K^(-1/2)
  TensorView initial_state;     // [N, HV, K, V] any float type; absent = zeros
  bool use_qk_l2norm_in_kernel = false;     // q and k become x / sqrt(sum x^2 + 1e-6)
  bool use_gate_in_kernel = false;          // the log gate is -e^A_log softplus(g + dt_bias)
  bool use_beta_sigmoid_in_kernel = false;  // sigmoid(beta) stands for beta
  bool allow_neg_eigval = false;            // 2 sigmoid(beta) stands for beta
  bool state_v_first = false;               // states are [N, HV, V, K]
  TensorView cu_seqlens;                    // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;                // the same in host memory; changes no value; chunk only
  TensorView chunk_indices;                 // [NT, 2] (sequence, chunk) of every chunk; changes no value; chunk only
  std::int64_t chunk_size = 64;             // 16, 32 or 64; most tokens per chunk, changes rounding only; chunk only
  TensorView o;                             // [B, T, HV, V] as q
  TensorView final_state;                   // [N, HV, K, V] F32
};

struct GatedDeltaRuleBackwardArgs : GatedDeltaRuleArgs {  // o and final_state are not read
  TensorView do_;                                         // [B, T, HV, V]; absent = zeros
  TensorView dht;                                         // [N, HV, K, V]; absent = zeros
  TensorView dq, dk;                                      // as q, k
  TensorView dv;                                          // as v
  TensorView dg, dbeta;                                   // as g, beta
  TensorView dgk, dgv;                                    // as gk, gv
  TensorView dA_log, ddt_bias;                            // as A_log, dt_bias
  TensorView dh0;                                         // as initial_state
};

struct GdnStepArgs : StatePoolArgs {     // states are [P, HV, K, V]
  TensorView q, k;                       // [B, T, H, K] F32, F16, BF16 (F64: reference only); T is 1 to 8
  TensorView v;                          // [B, T, HV, V] as q; HV a multiple of H
  TensorView g;                          // [B, T, HV] any float type: log gate, or raw; absent = 0
  TensorView beta;                       // [B, T, HV] or [B, T, HV, V] any float type; absent = ones
  TensorView gk, gv;                     // [B, T, HV, K], [B, T, HV, V] any float type: further log gates
  TensorView A_log, dt_bias;             // [HV] any float type; with use_gate_in_kernel only; dt_bias absent = 0
  std::optional<double> scale;           // multiplies q; default K^(-1/2)
  bool use_qk_l2norm_in_kernel = false;  // these six as above
  bool use_gate_in_kernel = false;
  bool use_beta_sigmoid_in_kernel = false;
  bool allow_neg_eigval = false;
  bool state_v_first = false;
  TensorView o;  // [B, T, HV, V] as q
};

inline constexpr FunctionId<GatedDeltaRuleArgs> kChunkGatedDeltaRule{"chunk_gated_delta_rule"};
inline constexpr FunctionId<GatedDeltaRuleBackwardArgs> kChunkGatedDeltaRuleBackward{"chunk_gated_delta_rule_backward"};
inline constexpr FunctionId<GatedDeltaRuleArgs> kChunkGdn{"chunk_gdn"};
inline constexpr FunctionId<GatedDeltaRuleBackwardArgs> kChunkGdnBackward{"chunk_gdn_backward"};
inline constexpr FunctionId<GatedDeltaRuleArgs> kFusedRecurrentGatedDeltaRule{"fused_recurrent_gated_delta_rule"};
inline constexpr FunctionId<GatedDeltaRuleBackwardArgs> kFusedRecurrentGatedDeltaRuleBackward{
    "fused_recurrent_gated_delta_rule_backward"};
inline constexpr FunctionId<GatedDeltaRuleArgs> kFusedRecurrentGdn{"fused_recurrent_gdn"};
inline constexpr FunctionId<GatedDeltaRuleBackwardArgs> kFusedRecurrentGdnBackward{"fused_recurrent_gdn_backward"};
inline constexpr FunctionId<GdnStepArgs> kGdnStep{"gdn_step"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<GatedDeltaRuleArgs> chunk_gated_delta_rule;
FLA_API extern const Function<GatedDeltaRuleBackwardArgs> chunk_gated_delta_rule_backward;
// chunk_gated_delta_rule under its short name.
FLA_API extern const Function<GatedDeltaRuleArgs> chunk_gdn;
FLA_API extern const Function<GatedDeltaRuleBackwardArgs> chunk_gdn_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<GatedDeltaRuleArgs> fused_recurrent_gated_delta_rule;
FLA_API extern const Function<GatedDeltaRuleBackwardArgs> fused_recurrent_gated_delta_rule_backward;
// fused_recurrent_gated_delta_rule under its short name.
FLA_API extern const Function<GatedDeltaRuleArgs> fused_recurrent_gdn;
FLA_API extern const Function<GatedDeltaRuleBackwardArgs> fused_recurrent_gdn_backward;
// 1 to 8 tokens of each of B sequences whose states lie in a pool, for decoding and for checking drafts.
FLA_API extern const Function<GdnStepArgs> gdn_step;

}  // namespace fla
