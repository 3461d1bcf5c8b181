// gdn2: Gated DeltaNet 2, kda with an erase gate per key channel and a write gate per value channel in place of beta.
//   S' = e^{g_t} o S_{t-1},   S_t = S' + k_t [w_t o v_t - S'^T (b_t o k_t)]^T,   o_t = scale * S_t^T q_t
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct Gdn2Args {
  TensorView q, k;                       // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView v;                          // [B, T, H, V] as q
  TensorView g;                          // [B, T, H, K] any float type: log gate, or raw
  TensorView b;                          // [B, T, H, K] any float type: erase gate, 0 to 2
  TensorView w;                          // [B, T, H, V] any float type: write gate, 0 to 1
  TensorView A_log;                      // [H] or [1, 1, H, 1] any float type; with use_gate_in_kernel only
  TensorView dt_bias;                    // [H K] or [H, K] any float type; with use_gate_in_kernel only; absent = 0
  std::optional<double> scale;           // multiplies q; default K^(-1/2)
  TensorView initial_state;              // [N, H, K, V] F32 in chunk, any float type in fused_recurrent; absent = zeros
  bool use_qk_l2norm_in_kernel = false;  // q and k become x / sqrt(sum x^2 + 1e-6)
  bool use_gate_in_kernel = false;       // y = g + dt_bias; the log gate is -e^A_log softplus(y), or bounded:
  std::optional<double> lower_bound;     // below 0: lower_bound sigmoid(e^A_log y), without A_log sigmoid(y)
  bool safe_gate = false;                // a promise that log gates are at least -5; changes no value; chunk only
  bool disable_recompute = false;        // changes no value; chunk only
  bool state_v_first = false;            // states are [N, H, V, K]
  TensorView cu_seqlens;                 // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;             // the same in host memory; changes no value; chunk only
  std::int64_t chunk_size = 64;          // 64; chunk only
  TensorView o;                          // [B, T, H, V] as q
  TensorView final_state;                // [N, H, K, V] F32
  TensorView h;  // [B, NT, H, K, V] as q: the state entering each chunk; not with disable_recompute
};

struct Gdn2BackwardArgs : Gdn2Args {  // o, final_state and h are not read
  TensorView do_;                     // [B, T, H, V]; absent = zeros
  TensorView dht;                     // [N, H, K, V]; absent = zeros
  TensorView dq, dk;                  // as q, k
  TensorView dv;                      // as v
  TensorView dg, db, dw;              // as g, b, w
  TensorView dA_log, ddt_bias;        // as A_log, dt_bias
  TensorView dh0;                     // as initial_state
};

inline constexpr FunctionId<Gdn2Args> kChunkGdn2{"chunk_gdn2"};
inline constexpr FunctionId<Gdn2BackwardArgs> kChunkGdn2Backward{"chunk_gdn2_backward"};
inline constexpr FunctionId<Gdn2Args> kFusedRecurrentGdn2{"fused_recurrent_gdn2"};
inline constexpr FunctionId<Gdn2BackwardArgs> kFusedRecurrentGdn2Backward{"fused_recurrent_gdn2_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<Gdn2Args> chunk_gdn2;
FLA_API extern const Function<Gdn2BackwardArgs> chunk_gdn2_backward;
// Token by token: for decoding and short sequences.
FLA_API extern const Function<Gdn2Args> fused_recurrent_gdn2;
FLA_API extern const Function<Gdn2BackwardArgs> fused_recurrent_gdn2_backward;

}  // namespace fla
