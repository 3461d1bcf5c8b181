// wall_attn: softmax attention whose keys decay by channel inside the logit.
//   s_ij = scale sum_c q_ic k_jc e^{sum_{j < t <= i} g_tc} + sum_{j < t <= i} g_scalar_t
//   o_i = sum_j e^{s_ij} v_j / (sum_j e^{s_ij} + e^{b})   over j <= i, i - j < window_size
// Query head h reads key head h / (HQ / H); gates belong to query heads. Training takes natural logarithms, decoding
// base-2 prefixes; the sink is natural in both.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct WallAttnArgs {
  TensorView q;                             // [B, T, HQ, K] F32, F16, BF16 (F64: reference only); K to 256
  TensorView k;                             // [B, T, H, K] as q; HQ is a multiple of H
  TensorView v;                             // [B, T, H, V] as q
  TensorView g;                             // [B, T, HQ, K] any float type: natural log decay, at most 0
  TensorView g_scalar;                      // [B, T, HQ] any float type: added to the logit; absent = 0
  TensorView sink_bias;                     // [HQ] any float type: a logit without a value
  std::optional<double> scale;              // multiplies the decayed product only; default K^(-1/2)
  std::optional<std::int64_t> window_size;  // keys a query sees, itself included; at least 1
  TensorView cu_seqlens;                    // [N + 1] I32 or I64, B = 1
  TensorView o;                             // [B, T, HQ, V] as q
};

struct WallAttnBackwardArgs : WallAttnArgs {  // o is not read
  TensorView do_;                             // [B, T, HQ, V]; absent = zeros
  TensorView dq, dk, dv;                      // as q, k, v
  TensorView dg, dg_scalar, dsink_bias;       // as g, g_scalar, sink_bias
};

// Queries over a cache: every query sees all of it. With P the base-2 prefix of g and c(j) = j / cache_chunk_size:
//   s_ij = scale sum_c q_ic k~_jc 2^{P_ic - R_c(j)c} + ln 2 (C_{T - Q + i} - C_j)
struct WallAttnDecodeArgs {
  TensorView q;                 // [B, Q, HQ, K] F32, F16, BF16 (F64: reference only); K to 256
  TensorView v;                 // [B, T, H, V] as q
  TensorView p_curr;            // [B, Q, HQ, K] any float type: base-2 prefix of the queries
  TensorView k_tilde;           // [B, T, HQ, K] any float type: keys 2^{R - P}
  TensorView r_cache;           // [B, NC, HQ, K] any float type: the prefix at each chunk's first row; NC chunks hold T
  TensorView sink_bias;         // [HQ] any float type, natural; absent: none
  std::optional<double> scale;  // required
  std::int64_t cache_chunk_size = 0;  // required
  TensorView g_scalar_cumsum;         // [B, T, HQ] any float type: C, base 2; the queries are the last Q rows
  TensorView o;                       // [B, Q, HQ, V] as v
  TensorView lse;                     // [B, Q, HQ] F32: base 2, with the sink
};

// The cache of one call: R is the prefix at the first row of each chunk, k~_j = k_j 2^{R_c(j) - P_j}.
struct WallCacheArgs {
  TensorView k;                 // [B, T, H, K] F32, F16, BF16 (F64: reference only)
  TensorView g_cumsum;          // [B, T, HQ, K] any float type: P, base 2
  std::int64_t chunk_size = 0;  // required
  TensorView k_tilde;           // [B, T, HQ, K] as k
  TensorView r_cache;           // [B, NC, HQ, K] as g_cumsum, NC = ceil(T / chunk_size)
};

inline constexpr FunctionId<WallAttnArgs> kParallelWallAttn{"parallel_wall_attn"};
inline constexpr FunctionId<WallAttnBackwardArgs> kParallelWallAttnBackward{"parallel_wall_attn_backward"};
inline constexpr FunctionId<WallAttnDecodeArgs> kParallelWallAttnDecode{"parallel_wall_attn_decode"};
inline constexpr FunctionId<WallCacheArgs> kBuildWallKvCache{"build_wall_kv_cache"};

FLA_API extern const Function<WallAttnArgs> parallel_wall_attn;
FLA_API extern const Function<WallAttnBackwardArgs> parallel_wall_attn_backward;
FLA_API extern const Function<WallAttnDecodeArgs> parallel_wall_attn_decode;
FLA_API extern const Function<WallCacheArgs> build_wall_kv_cache;

}  // namespace fla
