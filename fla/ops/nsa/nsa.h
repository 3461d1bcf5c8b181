// nsa: native sparse attention, a compressed, a selected and a sliding branch (Yuan et al., "Native Sparse Attention:
// Hardware-Aligned and Natively Trainable Sparse Attention", 2025).
//   o_i = g_cmp o_cmp + g_slc o_slc + g_swa o_swa;   query head h reads key head h / (HQ / H)
// Queries are the last TQ of T tokens of their sequence; blocks are numbered from its first token on.
#pragma once

#include <cstdint>
#include <optional>

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct NsaArgs {
  TensorView q;      // [B, TQ, HQ, K] F32, F16, BF16 (F64: reference only); K to 256
  TensorView k;      // [B, T, H, K] as q; HQ is a multiple of H
  TensorView v;      // [B, T, H, V] as q
  TensorView g_cmp;  // [B, TQ, HQ] any float type; absent: no compressed branch
  TensorView g_slc;  // [B, TQ, HQ] any float type; absent = 1
  TensorView g_swa;  // [B, TQ, HQ] any float type; required with a window
  TensorView
      block_indices;  // [B, TQ, H, S] I32 or I64: blocks that a query reads, -1 = none; absent: chosen, with g_cmp
  TensorView block_counts;        // [B, TQ, H] I32 or I64: entries that count; absent: all
  std::int64_t block_count = 16;  // S
  std::int64_t block_size = 64;   // tokens of a block
  std::int64_t window_size = 0;   // keys of the sliding branch, the query's own included; 0: no such branch
  std::optional<double> scale;    // of the compressed and the selected branch; default K^(-1/2), as the sliding one has
  TensorView cu_seqlens;          // [N + 1] I32 or I64, B = 1, TQ = T
  TensorView cu_seqlens_q;  // [N + 1] I32 or I64, B = 1: the pair, for queries that are the last of their sequence
  TensorView cu_seqlens_k;
  TensorView o;  // [B, TQ, HQ, V] as q
};

// TQ = T. No gradient goes through the choice of blocks.
struct NsaBackwardArgs : NsaArgs {    // o is not read
  TensorView do_;                     // [B, TQ, HQ, V]; absent = zeros
  TensorView dq, dk, dv;              // as q, k, v
  TensorView dg_cmp, dg_slc, dg_swa;  // as g_cmp, g_slc, g_swa
};

// The compressed branch alone, over keys and values that are pooled already.
struct NsaCompressionArgs {
  TensorView q;      // [B, T, HQ, K] F32, F16, BF16 (F64: reference only)
  TensorView k_cmp;  // [B, C, H, K] as q: C = ceil(TK / block_size), of packed sequences the sum over them
  TensorView v_cmp;  // [B, C, H, V] as q
  std::optional<std::int64_t> TK;  // tokens of a dense sequence, T of which are queries; default T
  std::int64_t block_size = 64;
  std::optional<double> scale;  // default K^(-1/2)
  TensorView cu_seqlens;        // [N + 1] I32 or I64, B = 1, in tokens
  TensorView o;                 // [B, T, HQ, V] as q; zeros where no block has passed
  TensorView lse;               // [B, T, HQ] F32: natural; 0 where no block has passed
};

struct NsaCompressionBackwardArgs : NsaCompressionArgs {  // outputs are not read; lse is a constant
  TensorView do_;                                         // [B, T, HQ, V]; absent = zeros
  TensorView dq, dk_cmp, dv_cmp;                          // as q, k_cmp, v_cmp
};

// The choice of blocks alone, over keys that are pooled already. Blocks 0, the query's own and the one before it are in
// every list; the best others fill it.
struct NsaTopkArgs {
  TensorView q;                    // [B, T, HQ, K] F32, F16, BF16 (F64: reference only)
  TensorView k_cmp;                // [B, C, H, K] as q; C as in NsaCompressionArgs
  std::optional<std::int64_t> TK;  // as in NsaCompressionArgs
  std::int64_t block_count = 16;   // S
  std::int64_t block_size = 64;
  std::optional<double> scale;  // default K^(-1/2)
  TensorView cu_seqlens;        // [N + 1] I32 or I64, B = 1, in tokens
  TensorView block_indices;     // [B, T, H, S] I32 or I64: in increasing order, then -1
};

inline constexpr FunctionId<NsaArgs> kParallelNsa{"parallel_nsa"};
inline constexpr FunctionId<NsaBackwardArgs> kParallelNsaBackward{"parallel_nsa_backward"};
inline constexpr FunctionId<NsaCompressionArgs> kParallelNsaCompression{"parallel_nsa_compression"};
inline constexpr FunctionId<NsaCompressionBackwardArgs> kParallelNsaCompressionBackward{
    "parallel_nsa_compression_backward"};
inline constexpr FunctionId<NsaTopkArgs> kParallelNsaTopk{"parallel_nsa_topk"};

FLA_API extern const Function<NsaArgs> parallel_nsa;
FLA_API extern const Function<NsaBackwardArgs> parallel_nsa_backward;
FLA_API extern const Function<NsaCompressionArgs> parallel_nsa_compression;
FLA_API extern const Function<NsaCompressionBackwardArgs> parallel_nsa_compression_backward;
FLA_API extern const Function<NsaTopkArgs> parallel_nsa_topk;

}  // namespace fla
