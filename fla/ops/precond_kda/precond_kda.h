// precond_kda: kda with write keys scaled by their own statistics, on q and k after their L2 norm. A has a value per
// key channel.
//   A_t = e^{g_atk_t} A_{t-1} + beta_atk_t k_t^2,   r = ln(A_t + eps) - log_atk_scale,   w_t = k_t x^{-r / (1 + |r|)}
//   S' = e^{g_t} o S_{t-1},   S_t = S' + w_t [beta_t (v_t - S'^T k_t)]^T,   o_t = scale * S_t^T q_t
// beta_atk must not be negative: the logarithm needs A + eps above 0. In chunk HV = H.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct PrecondKdaArgs {
  TensorView q, k;              // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                 // [B, T, HV, V] as q; HV a multiple of H: value head j reads key head j / (HV / H)
  TensorView g;                 // [B, T, HV, K] any float type: log gate, or raw
  TensorView g_atk;             // [B, T, HV] any float type: log decay of A
  TensorView beta_atk;          // [B, T, HV] any float type: weight of k^2 in A
  TensorView beta;              // [B, T, HV] any float type; fused_recurrent also [B, T, HV, V]
  TensorView A_log;             // [HV] or [1, 1, HV, 1] any float type; with use_gate_in_kernel, which needs it
  TensorView dt_bias;           // [HV K] or [HV, K] any float type; with use_gate_in_kernel only; absent = 0
  std::optional<double> scale;  // multiplies q; default K^(-1/2)
  TensorView initial_state;     // [N, HV, K, V] F32 in chunk, any float type in fused_recurrent; absent = zeros
  TensorView initial_A_state;   // [N, HV, K] any float type; absent = zeros
  bool use_qk_l2norm_in_kernel = true;  // q and k become x / sqrt(sum x^2 + 1e-6); always in chunk
  bool use_gate_in_kernel = false;      // y = g + dt_bias; the log gate is -e^A_log softplus(y), or bounded:
  bool safe_gate = false;               // a promise that log gates are at least -5; changes no value; chunk only
  std::optional<double> lower_bound;    // below 0: lower_bound sigmoid(e^A_log y)
  double x = 1.5;                       // above 0: w is between k / x and k x; 1: no preconditioning
  double eps = 1e-6;                    // above 0
  TensorView log_atk_scale;             // [HV] F32; absent = -0.2
  bool transpose_state_layout = false;  // initial_state, final_state and h have V before K
  bool disable_recompute = false;       // changes no value; chunk only
  TensorView cu_seqlens;                // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;            // the same in host memory; changes no value; chunk only
  TensorView chunk_indices;             // [NT, 2] (sequence, chunk) of every chunk of 64; changes no value; chunk only
  TensorView o;                         // [B, T, HV, V] as q
  TensorView final_state;               // [N, HV, K, V] F32
  TensorView final_A_state;             // [N, HV, K] F32
  TensorView h;  // [B, NT, HV, K, V] as q: the state entering each chunk; not with disable_recompute
};

struct PrecondKdaBackwardArgs : PrecondKdaArgs {  // o, the final states and h are not read
  TensorView do_;                                 // [B, T, HV, V]; absent = zeros
  TensorView dht;                                 // [N, HV, K, V]; absent = zeros
  TensorView dAt;                                 // [N, HV, K]; absent = zeros
  TensorView dq, dk;                              // as q, k
  TensorView dv;                                  // as v
  TensorView dg, dg_atk;                          // as g, g_atk
  TensorView dbeta_atk, dbeta;                    // as beta_atk, beta
  TensorView dA_log, ddt_bias;                    // as A_log, dt_bias
  TensorView dh0;                                 // as initial_state
  TensorView dA0;                                 // as initial_A_state
  TensorView dlog_atk_scale;                      // as log_atk_scale
};

inline constexpr FunctionId<PrecondKdaArgs> kChunkPrecondKda{"chunk_precond_kda"};
inline constexpr FunctionId<PrecondKdaBackwardArgs> kChunkPrecondKdaBackward{"chunk_precond_kda_backward"};
inline constexpr FunctionId<PrecondKdaArgs> kFusedRecurrentPrecondKda{"fused_recurrent_precond_kda"};
inline constexpr FunctionId<PrecondKdaBackwardArgs> kFusedRecurrentPrecondKdaBackward{
    "fused_recurrent_precond_kda_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<PrecondKdaArgs> chunk_precond_kda;
FLA_API extern const Function<PrecondKdaBackwardArgs> chunk_precond_kda_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<PrecondKdaArgs> fused_recurrent_precond_kda;
FLA_API extern const Function<PrecondKdaBackwardArgs> fused_recurrent_precond_kda_backward;

}  // namespace fla
