// kda: Kimi Delta Attention, the gated delta rule with a gate per key channel (Kimi Team, "Kimi Linear: An Expressive,
// Efficient Attention Architecture", 2025).
//   S' = e^{g_t} o S_{t-1},   S_t = S' + k_t [beta_t (v_t - S'^T k_t)]^T,   o_t = scale * S_t^T q_t
// Keys should have unit length: with beta |k|^2 above 2 the recurrence may grow without bound.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
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

inline constexpr FunctionId<KdaArgs> kChunkKda{"chunk_kda"};
inline constexpr FunctionId<KdaBackwardArgs> kChunkKdaBackward{"chunk_kda_backward"};
inline constexpr FunctionId<KdaArgs> kFusedRecurrentKda{"fused_recurrent_kda"};
inline constexpr FunctionId<KdaBackwardArgs> kFusedRecurrentKdaBackward{"fused_recurrent_kda_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<KdaArgs> chunk_kda;
FLA_API extern const Function<KdaBackwardArgs> chunk_kda_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<KdaArgs> fused_recurrent_kda;
FLA_API extern const Function<KdaBackwardArgs> fused_recurrent_kda_backward;

}  // namespace fla
