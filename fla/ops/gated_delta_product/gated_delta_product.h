// gated_delta_product: R delta steps per token, with one decay before them and one read after them (Siems et al.,
// "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products", 2025).
//   S <- e^{g_t} S;   R times: S <- S + k_r [beta_r (v_r - S^T k_r)]^T;   o_t = scale * S^T q_t
// Step r of token t stands in row t R + r of k, v and beta.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct GatedDeltaProductArgs {
  TensorView q;                                 // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView k;                                 // [B, T R, H, K] as q
  TensorView v;                                 // [B, T R, H, V] as q
  TensorView g;                                 // [B, T, H] any float type: log gate; absent = 0
  TensorView beta;                              // [B, T R, H] any float type
  std::optional<std::int64_t> num_householder;  // R, 1 to 1024; required
  std::optional<double> scale;                  // multiplies q; default K^(-1/2)
  TensorView initial_state;                     // [N, H, K, V] any float type; absent = zeros
  bool use_qk_l2norm_in_kernel = false;         // q and k become x / sqrt(sum x^2 + 1e-6)
  TensorView cu_seqlens;                        // [N + 1] I32 or I64, in tokens, B = 1
  TensorView cu_seqlens_cpu;                    // the same in host memory; changes no value
  TensorView o;                                 // [B, T, H, V] as q
  TensorView final_state;                       // [N, H, K, V] F32
};

struct GatedDeltaProductBackwardArgs : GatedDeltaProductArgs {  // o and final_state are not read
  TensorView do_;                                               // [B, T, H, V]; absent = zeros
  TensorView dht;                                               // [N, H, K, V]; absent = zeros
  TensorView dq, dk;                                            // as q, k
  TensorView dv;                                                // as v
  TensorView dg, dbeta;                                         // as g, beta
  TensorView dh0;                                               // as initial_state
};

inline constexpr FunctionId<GatedDeltaProductArgs> kChunkGatedDeltaProduct{"chunk_gated_delta_product"};
inline constexpr FunctionId<GatedDeltaProductBackwardArgs> kChunkGatedDeltaProductBackward{
    "chunk_gated_delta_product_backward"};

// Chunkwise: for training and prefill.
FLA_API extern const Function<GatedDeltaProductArgs> chunk_gated_delta_product;
FLA_API extern const Function<GatedDeltaProductBackwardArgs> chunk_gated_delta_product_backward;

}  // namespace fla
