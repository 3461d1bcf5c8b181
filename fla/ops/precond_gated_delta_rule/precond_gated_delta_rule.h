// precond_gated_delta_rule: the gated delta rule with write keys scaled by their own statistics, on q and k after their
// L2 norm. A has a value per key channel.
//   A_t = e^{g_atk_t} A_{t-1} + beta_atk_t k_t^2,   r = ln(A_t + eps) - log_atk_scale,   w_t = k_t x^{-r / (1 + |r|)}
//   S' = e^{g_t} S_{t-1},   S_t = S' + w_t [beta_t (v_t - S'^T k_t)]^T,   o_t = scale * S_t^T q_t
// beta_atk must not be negative: the logarithm needs A + eps above 0.
// Positions in FLA: chunk (q, k, v, g_atk, g, beta_atk, beta), fused_recurrent (q, k, v, g, gk, gv, beta, g_atk,
// beta_atk).
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct PrecondGatedDeltaRuleArgs {
  TensorView q, k;              // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                 // [B, T, HV, V] as q; HV a multiple of H: value head j reads key head j / (HV / H)
  TensorView g_atk;             // [B, T, H] any float type: log decay of A
  TensorView g;                 // [B, T, HV] any float type: log gate; absent in fused_recurrent = 0
  TensorView beta_atk;          // [B, T, H] any float type: weight of k^2 in A
  TensorView beta;              // [B, T, HV] any float type; fused_recurrent also [B, T, HV, V], and absent = ones
  TensorView gk;                // [B, T, HV, K] any float type: a further log gate; fused_recurrent only
  TensorView gv;                // [B, T, HV, V] any float type: a further log gate; fused_recurrent only
  std::optional<double> scale;  // multiplies q; default K^(-1/2)
  TensorView initial_state;     // [N, HV, K, V] any float type; absent = zeros
  TensorView initial_A_state;   // [N, H, K] any float type; absent = zeros
  bool use_qk_l2norm_in_kernel = true;  // q and k become x / sqrt(sum x^2 + 1e-6)
  double x = 1.5;                       // above 0: w is between k / x and k x; 1: no preconditioning
  double eps = 1e-6;                    // above 0
  TensorView log_atk_scale;             // [H] F32; absent = -0.2
  bool transpose_state_layout = false;  // initial_state and final_state are [N, HV, V, K]
  TensorView cu_seqlens;                // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;            // the same in host memory; changes no value; chunk only
  TensorView o;                         // [B, T, HV, V] as q
  TensorView final_state;               // [N, HV, K, V] F32
  TensorView final_A_state;             // [N, H, K] F32
};

struct PrecondGatedDeltaRuleBackwardArgs : PrecondGatedDeltaRuleArgs {  // o and the final states are not read
  TensorView do_;                                                       // [B, T, HV, V]; absent = zeros
  TensorView dht;                                                       // [N, HV, K, V]; absent = zeros
  TensorView dAt;                                                       // [N, H, K]; absent = zeros
  TensorView dq, dk;                                                    // as q, k
  TensorView dv;                                                        // as v
  TensorView dg_atk, dg;                                                // as g_atk, g
  TensorView dbeta_atk, dbeta;                                          // as beta_atk, beta
  TensorView dgk, dgv;                                                  // as gk, gv
  TensorView dh0;                                                       // as initial_state
  TensorView dA0;                                                       // as initial_A_state
  TensorView dlog_atk_scale;                                            // as log_atk_scale
};

inline constexpr FunctionId<PrecondGatedDeltaRuleArgs> kChunkPrecondGatedDeltaRule{"chunk_precond_gated_delta_rule"};
inline constexpr FunctionId<PrecondGatedDeltaRuleBackwardArgs> kChunkPrecondGatedDeltaRuleBackward{
    "chunk_precond_gated_delta_rule_backward"};
inline constexpr FunctionId<PrecondGatedDeltaRuleArgs> kFusedRecurrentPrecondGatedDeltaRule{
    "fused_recurrent_precond_gated_delta_rule"};
inline constexpr FunctionId<PrecondGatedDeltaRuleBackwardArgs> kFusedRecurrentPrecondGatedDeltaRuleBackward{
    "fused_recurrent_precond_gated_delta_rule_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<PrecondGatedDeltaRuleArgs> chunk_precond_gated_delta_rule;
FLA_API extern const Function<PrecondGatedDeltaRuleBackwardArgs> chunk_precond_gated_delta_rule_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<PrecondGatedDeltaRuleArgs> fused_recurrent_precond_gated_delta_rule;
FLA_API extern const Function<PrecondGatedDeltaRuleBackwardArgs> fused_recurrent_precond_gated_delta_rule_backward;

}  // namespace fla
