// comba: a gated delta rule whose erase key p differs from the write key, and whose correction reads the state before
// its decay (Hu et al., "Comba: Improving Bilinear RNNs with Closed-loop Control", 2025).
//   e_t = beta_t (v_t - S_{t-1}^T p_t),   S_t = e^{g_t} S_{t-1} + k_t e_t^T,   o_t = scale * S_t^T q_t
// The positions of v and p differ in FLA: chunk (q, k, v, p, g, beta), fused_recurrent (q, k, p, v, g, beta).
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct CombaArgs {
  TensorView q, k;              // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                 // [B, T, HV, V] as q; HV a multiple of H, in chunk H
  TensorView p;                 // [B, T, H, K] as q; absent = k
  TensorView g;                 // [B, T, HV] any float type: log gate
  TensorView beta;              // [B, T, HV] any float type; fused_recurrent also [B, T, HV, V], and absent = ones
  std::optional<double> scale;  // multiplies q; default K^(-1/2)
  TensorView initial_state;     // [N, HV, K, V] any float type; absent = zeros
  bool use_qk_l2norm_in_kernel = false;  // q, k and p become x / sqrt(sum x^2 + 1e-6)
  TensorView cu_seqlens;                 // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;             // the same in host memory; changes no value; chunk only
  TensorView o;                          // [B, T, HV, V] as q
  TensorView final_state;                // [N, HV, K, V] F32
};

struct CombaBackwardArgs : CombaArgs {  // o and final_state are not read
  TensorView do_;                       // [B, T, HV, V]; absent = zeros
  TensorView dht;                       // [N, HV, K, V]; absent = zeros
  TensorView dq, dk, dp;                // as q, k, p
  TensorView dv;                        // as v
  TensorView dg, dbeta;                 // as g, beta
  TensorView dh0;                       // as initial_state
};

inline constexpr FunctionId<CombaArgs> kChunkComba{"chunk_comba"};
inline constexpr FunctionId<CombaBackwardArgs> kChunkCombaBackward{"chunk_comba_backward"};
inline constexpr FunctionId<CombaArgs> kFusedRecurrentComba{"fused_recurrent_comba"};
inline constexpr FunctionId<CombaBackwardArgs> kFusedRecurrentCombaBackward{"fused_recurrent_comba_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<CombaArgs> chunk_comba;
FLA_API extern const Function<CombaBackwardArgs> chunk_comba_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<CombaArgs> fused_recurrent_comba;
FLA_API extern const Function<CombaBackwardArgs> fused_recurrent_comba_backward;

}  // namespace fla
