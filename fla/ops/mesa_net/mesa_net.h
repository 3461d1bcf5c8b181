// mesa_net: two decaying second moments, read through a regularised linear solve (von Oswald et al., "MesaNet: Sequence
// Modeling by Locally Optimal Test-Time Training", 2025).
//   A_t = e^{g_t} A_{t-1} + beta_t k_t k_t^T,   C_t = e^{g_t} C_{t-1} + beta_t k_t v_t^T
//   o_t = C_t^T z_t,   (A_t + diag(lamb)) z_t = q_t
// The solve is max_CG_iteration steps of conjugate gradients (README.md); the gradient is that of the exact solve.
#pragma once

#include <cstdint>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct MesaNetArgs {
  TensorView q, k;       // [B, T, H, K] F32, F16, BF16 (F64: reference only); K to 128; not scaled
  TensorView v;          // [B, T, H, K] as q: values are as wide as keys
  TensorView g;          // [B, T, H] any float type: log decay
  TensorView beta;       // [B, T, H] any float type: weight of a token
  TensorView lamb;       // [H, K] any float type: regulariser, above 0
  TensorView h_kk_init;  // [N, H, K, K] F32: A before the first token, symmetric and positive semidefinite; absent = 0
  TensorView h_kv_init;  // [N, H, K, K] F32: C before the first token; absent = 0
  std::int64_t max_CG_iteration = 30;    // 1 to 4096
  bool use_qk_l2norm_in_kernel = false;  // q and k become x / sqrt(sum x^2 + 1e-6)
  TensorView cu_seqlens;                 // [N + 1] I32 or I64, B = 1
  TensorView cu_seqlens_cpu;             // the same in host memory; changes no value
  TensorView o;                          // [B, T, H, K] as q
  TensorView h_kk_final, h_kv_final;     // [N, H, K, K] F32
  TensorView cg_iterations;              // [B, T, H] F32: steps with a residual to reduce; 0 for a zero query, else all
  TensorView cg_residual;                // [B, T, H] F32: |r| after the last step
};

struct MesaNetBackwardArgs : MesaNetArgs {  // outputs of the forward are not read
  TensorView do_;                           // [B, T, H, K]; absent = zeros
  TensorView dh_kkt, dh_kvt;                // [N, H, K, K], of h_kk_final and h_kv_final; absent = zeros
  TensorView dq, dk, dv;                    // as q, k, v
  TensorView dg, dbeta, dlamb;              // as g, beta, lamb
  TensorView dh_kk0, dh_kv0;                // as h_kk_init, h_kv_init
};

// One token; starts from q / (diag(A) + lamb + 1e-5) instead of 0. No norm inside, no gradient.
struct MesaNetStepArgs {
  TensorView q, k;                     // [B, H, K] F32, F16, BF16 (F64: reference only); K to 128
  TensorView v;                        // [B, H, V] as q; V to 128
  TensorView g;                        // [B, H] any float type: log decay
  TensorView lamb;                     // [H, K] any float type: regulariser, above 0
  TensorView beta;                     // [B, H] any float type: weight of the token
  TensorView prev_h_kk;                // [B, H, K, K] F32
  TensorView prev_h_kv;                // [B, H, K, V] F32
  std::int64_t max_CG_iteration = 30;  // 1 to 4096
  TensorView o;                        // [B, H, V] as q
  TensorView h_kk;                     // [B, H, K, K] F32; may be exactly prev_h_kk's memory
  TensorView h_kv;                     // [B, H, K, V] F32; may be exactly prev_h_kv's memory
  TensorView cg_iterations;            // [B, H] F32, as above
  TensorView cg_residual;              // [B, H] F32
};

inline constexpr FunctionId<MesaNetArgs> kChunkMesaNet{"chunk_mesa_net"};
inline constexpr FunctionId<MesaNetBackwardArgs> kChunkMesaNetBackward{"chunk_mesa_net_backward"};
inline constexpr FunctionId<MesaNetStepArgs> kMesaNetDecodingOneStep{"mesa_net_decoding_one_step"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<MesaNetArgs> chunk_mesa_net;
FLA_API extern const Function<MesaNetBackwardArgs> chunk_mesa_net_backward;
// One token per call: for decoding.
FLA_API extern const Function<MesaNetStepArgs> mesa_net_decoding_one_step;

}  // namespace fla
