// based: linear attention whose score is the second-order Taylor polynomial of the exponential (Arora et al., "Simple
// linear attention language models balance the recall-throughput tradeoff", 2024).
//   P_ij = 1 + a_ij + a_ij^2 / 2,  a_ij = scale <q_i, k_j>, j <= i;   o_i = sum_j P_ij v_j / (sum_j P_ij + 1e-6)
#pragma once

#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct BasedArgs {
  TensorView q, k;  // [B, T, H, K] F32, F16, BF16 (F64: reference only); K to 16 (fused_chunk), 128 (parallel)
  TensorView v;     // [B, T, H, V] as q; any V
  std::optional<double> scale;  // multiplies q; default K^(-1/2)
  bool use_norm = true;         // divide by the sum of scores
  TensorView o;                 // [B, T, H, V] as q
};

struct BasedBackwardArgs : BasedArgs {  // o is not read
  TensorView do_;                       // [B, T, H, V]; absent = zeros
  TensorView dq, dk;                    // as q, k
  TensorView dv;                        // as v
};

inline constexpr FunctionId<BasedArgs> kFusedChunkBased{"fused_chunk_based"};
inline constexpr FunctionId<BasedBackwardArgs> kFusedChunkBasedBackward{"fused_chunk_based_backward"};
inline constexpr FunctionId<BasedArgs> kParallelBased{"parallel_based"};
inline constexpr FunctionId<BasedBackwardArgs> kParallelBasedBackward{"parallel_based_backward"};

// With a state of 1 + K + K (K + 1) / 2 rows: time linear in T.
FLA_API extern const Function<BasedArgs> fused_chunk_based;
FLA_API extern const Function<BasedBackwardArgs> fused_chunk_based_backward;
// The same function for wider keys; above 16 every query meets every key before it.
FLA_API extern const Function<BasedArgs> parallel_based;
FLA_API extern const Function<BasedBackwardArgs> parallel_based_backward;

}  // namespace fla
