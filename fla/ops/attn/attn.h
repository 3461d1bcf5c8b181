// attn: causal softmax attention with an optional gate, window and sink (Vaswani et al., "Attention Is All You Need",
// 2017; sinks: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024).
//   s_ij = scale <q_i, k_j> + sum_{j < t <= i} g_t, p_ij = e^{s_ij} / (sum_j e^{s_ij} + e^{b}), o_i = sum_j p_ij v_j
// over j <= i, and i - j < window_size. Query head h reads key head h / (HQ / H).
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct AttnArgs {
  TensorView q;                             // [B, T, HQ, K] F32, F16, BF16 (F64: reference only)
  TensorView k;                             // [B, T, H, K] as q; HQ is a multiple of H
  TensorView v;                             // [B, T, H, V] as q
  TensorView g;                             // [B, T, HQ] any float type: natural log decay, of any sign; absent = 0
  std::optional<double> scale;              // multiplies <q, k> only; default K^(-1/2)
  std::optional<std::int64_t> window_size;  // keys a query sees, itself included; 0 with a sink only
  TensorView cu_seqlens;                    // [N + 1] I32 or I64, B = 1
  TensorView chunk_indices;                 // [NT, 2] (sequence, tile of 128 rows) of every tile; changes no value
  TensorView sink_bias;                     // [HQ] any float type: a logit without a value
  TensorView o;                             // [B, T, HQ, V] as q
};

struct AttnBackwardArgs : AttnArgs {  // o is not read
  TensorView do_;                     // [B, T, HQ, V]; absent = zeros
  TensorView dq, dk, dv;              // as q, k, v
  TensorView dg;                      // as g
  TensorView dsink_bias;              // as sink_bias
};

// One query for each sequence, its last position, over all of the sequence's keys. An empty sequence gives zeros.
struct AttnDecodeArgs {
  TensorView q;                 // [1, N, HQ, K] F32, F16, BF16 (F64: reference only)
  TensorView k;                 // [1, T, H, K] as q
  TensorView v;                 // [1, T, H, V] as q
  TensorView g;                 // [1, T, HQ] any float type; absent = 0
  std::optional<double> scale;  // default K^(-1/2)
  TensorView cu_seqlens;        // [N + 1] I32 or I64
  bool do_gate_scale = false;   // g is multiplied by scale
  TensorView sink_bias;         // [HQ] any float type
  TensorView o;                 // [1, N, HQ, V] as q
};

// A few queries of each sequence, its last positions, over a cache that has their own keys already. A cache by slots is
// one with pages as long as a sequence may become. A query without any key gives zeros.
struct AttnCacheArgs {
  TensorView q;                             // [B, TQ, HQ, K] F32, F16, BF16 (F64: reference only)
  TensorView k_cache;                       // [P, T, H, K] as q: P pages of T tokens
  TensorView v_cache;                       // [P, T, H, V] as q
  TensorView g_cache;                       // [P, T, HQ] any float type: natural log decay; absent = 0
  std::optional<double> scale;              // multiplies <q, k> only; default K^(-1/2)
  std::optional<std::int64_t> window_size;  // keys a query sees, itself included; at least 1
  TensorView block_table;  // [B, M] I32 or I64: a sequence's pages in order; absent: page n is sequence n
  TensorView lengths;      // [B] I32 or I64: tokens of each sequence; absent: all that there is room for
  TensorView sink_bias;    // [HQ] any float type: a logit without a value
  TensorView o;            // [B, TQ, HQ, V] as q
};

inline constexpr FunctionId<AttnArgs> kParallelAttn{"parallel_attn"};
inline constexpr FunctionId<AttnBackwardArgs> kParallelAttnBackward{"parallel_attn_backward"};
inline constexpr FunctionId<AttnDecodeArgs> kAttnDecodingOneStep{"attn_decoding_one_step"};
inline constexpr FunctionId<AttnCacheArgs> kAttnDecode{"attn_decode"};

FLA_API extern const Function<AttnArgs> parallel_attn;
FLA_API extern const Function<AttnBackwardArgs> parallel_attn_backward;
FLA_API extern const Function<AttnDecodeArgs> attn_decoding_one_step;
FLA_API extern const Function<AttnCacheArgs> attn_decode;

}  // namespace fla
