// The sequences of a call: rows of a dense batch, or packed into one row with a table of boundaries.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fla/core/index_table.h"
#include "fla/core/tensor.h"

namespace fla {

// The tokens [begin, begin + length) of batch row `row`.
struct Sequence {
  std::int64_t row = 0, begin = 0, length = 0;
};

// cu_seqlens: [N + 1] I32 or I64, absent for N dense sequences of T tokens.
inline std::int64_t count_sequences(const TensorView& cu_seqlens, std::int64_t B) {
  return cu_seqlens ? cu_seqlens.dim(0) - 1 : B;
}

// Sequence n of boundaries in host memory.
inline Sequence sequence_at(const TensorView& cu_seqlens, std::int64_t T, std::int64_t n) {
  if (!cu_seqlens) return {n, 0, T};
  const std::int64_t begin = read_index(cu_seqlens, n);
  return {0, begin, read_index(cu_seqlens, n + 1) - begin};
}

inline std::int64_t longest_sequence(const TensorView& cu_seqlens, std::int64_t T) {
  if (!cu_seqlens) return T;
  std::int64_t longest = 0;
  for (std::int64_t n = 0; n + 1 < cu_seqlens.dim(0); ++n)
    longest = std::max(longest, sequence_at(cu_seqlens, T, n).length);
  return longest;
}

}  // namespace fla
