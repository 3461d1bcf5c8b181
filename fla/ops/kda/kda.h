// kda: Kimi Delta Attention, the gated delta rule with a gate per key channel (Kimi Team, "Kimi Linear: An Expressive,
// Efficient Attention Architecture", 2025).
//   S' = e^{g_t} o S_{t-1},   S_t = S' + k_t [beta_t (v_t - S'^T k_t)]^T,   o_t = scale * S_t^T q_t
// Keys should have unit length: with beta |k|^2 above 2 the recurrence may grow without bound.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/ops/spec/state_pool.h"
#include "fla/registry/function.h"

namespace fla {

struct KdaArgs {
  TensorView q, k;              // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                 // [B, T, HV, V] as q; HV a multiple of H: value head j reads key head j / (HV / H)
  TensorView g;                 // [B, T, HV, K] any float type: log gate, or raw
  TensorView beta;              // [B, T, HV] any float type; fused_recurrent also [B, T, HV, V]
  TensorView A_log;             // [HV] or [1, 1, HV, 1] any float type; with use_gate_in_kernel only
  TensorView dt_bias;           // [HV K] or [HV, K] any float type; with use_gate_in_kernel only; absent = 0
  std::optional<double> scale;  // multiplies q; default K^(-1/2)
  TensorView initial_state;     // [N, HV, K, V] F32 in chunk, any float type in fused_recurrent; absent = zeros
  bool use_qk_l2norm_in_kernel = false;     // q and k become x / sqrt(sum x^2 + 1e-6)
  bool use_gate_in_kernel = false;          // y = g + dt_bias; the log gate is -e^A_log softplus(y), or bounded:
  std::optional<double> lower_bound;        // below 0: lower_bound sigmoid(e^A_log y), without A_log sigmoid(y)
  bool use_beta_sigmoid_in_kernel = false;  // sigmoid(beta) stands for beta
  bool allow_neg_eigval = false;            // 2 sigmoid(beta) stands for beta
  bool safe_gate = false;                   // a promise that log gates are at least -5; changes no value; chunk only
  bool disable_recompute = false;           // changes no value; chunk only
  bool state_v_first = false;               // states are [N, HV, V, K]
  TensorView cu_seqlens;                    // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;                // the same in host memory; changes no value; chunk only
  std::int64_t chunk_size = 64;  // 32 or 64; most tokens per chunk, and tokens between two states of h; chunk only
  TensorView o;                  // [B, T, HV, V] as q
  TensorView final_state;        // [N, HV, K, V] F32
  TensorView h;                  // [B, NT, HV, K, V] as q: the state entering each chunk; not with disable_recompute
};

struct KdaBackwardArgs : KdaArgs {  // o, final_state and h are not read
  TensorView do_;                   // [B, T, HV, V]; absent = zeros
  TensorView dht;                   // [N, HV, K, V]; absent = zeros
  TensorView dq, dk;                // as q, k
  TensorView dv;                    // as v
  TensorView dg, dbeta;             // as g, beta
  TensorView dA_log, ddt_bias;      // as A_log, dt_bias
  TensorView dh0;                   // as initial_state
};

struct KdaStepArgs : StatePoolArgs {     // states are [P, HV, K, V]
  TensorView q, k;                       // [B, T, H, K] F32, F16, BF16 (F64: reference only); T is 1 to 8
  TensorView v;                          // [B, T, HV, V] as q; HV a multiple of H
  TensorView g;                          // [B, T, HV, K] any float type: log gate, or raw
  TensorView beta;                       // [B, T, HV] or [B, T, HV, V] any float type
  TensorView A_log, dt_bias;             // as above; with use_gate_in_kernel only
  std::optional<double> scale;           // multiplies q; default K^(-1/2)
  bool use_qk_l2norm_in_kernel = false;  // these as above
  bool use_gate_in_kernel = false;
  std::optional<double> lower_bound;
  bool use_beta_sigmoid_in_kernel = false;
  bool allow_neg_eigval = false;
  bool state_v_first = false;
  TensorView o;  // [B, T, HV, V] as q
};

struct KdaPoolArgs {
  TensorView q, k, v, g, beta, A_log, dt_bias;  // as fused_recurrent_kda, any T
  std::optional<double> scale;                  // multiplies q; default K^(-1/2)
  TensorView initial_state;                     // [P, HV, K, V] F32: P slots; without ssm_state_indices P = N
  bool inplace_final_state = true;              // states go back into the pool, that is into initial_state
  TensorView ssm_state_indices;                 // [N] (a token each) or [N, S] I32 or I64: slots; -1 first: padding
  TensorView num_accepted_tokens;  // [N] I32 or I64, with [N, S] only: start from column accepted_n - 1, not 0
  bool use_qk_l2norm_in_kernel = false;
  bool use_gate_in_kernel = false;
  std::optional<double> lower_bound;
  bool use_beta_sigmoid_in_kernel = false;
  bool allow_neg_eigval = false;
  bool state_v_first = false;
  TensorView cu_seqlens;  // [N + 1] I32 or I64, B = 1
  TensorView o;           // [B, T, HV, V] as q
  TensorView
      final_state;  // without inplace_final_state: [N, HV, K, V] F32; with slots [B T, HV, K, V], after each token
  TensorView state_pool;  // with it: the pool after the call, instead of initial_state's own memory; starts as a copy
};

inline constexpr FunctionId<KdaArgs> kChunkKda{"chunk_kda"};
inline constexpr FunctionId<KdaBackwardArgs> kChunkKdaBackward{"chunk_kda_backward"};
inline constexpr FunctionId<KdaArgs> kFusedRecurrentKda{"fused_recurrent_kda"};
inline constexpr FunctionId<KdaBackwardArgs> kFusedRecurrentKdaBackward{"fused_recurrent_kda_backward"};
inline constexpr FunctionId<KdaStepArgs> kKdaStep{"kda_step"};
inline constexpr FunctionId<KdaPoolArgs> kFusedRecurrentKdaFwd{"fused_recurrent_kda_fwd"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<KdaArgs> chunk_kda;
FLA_API extern const Function<KdaBackwardArgs> chunk_kda_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<KdaArgs> fused_recurrent_kda;
FLA_API extern const Function<KdaBackwardArgs> fused_recurrent_kda_backward;
// 1 to 8 tokens of each of B sequences whose states lie in a pool, for decoding and for checking drafts.
FLA_API extern const Function<KdaStepArgs> kda_step;
// fused_recurrent_kda over a pool of states, under the name and with the arguments that serving stacks call.
FLA_API extern const Function<KdaPoolArgs> fused_recurrent_kda_fwd;

}  // namespace fla
