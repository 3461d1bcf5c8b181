// Where a sequence of a call lies and how many tokens it had before. Shared by the description and the kernels.
#pragma once

#include <cstdint>

#include "fla/core/index_table.h"
#include "fla/engine/common/sequences.h"
#include "fla/ops/log_linear_attn/log_linear_attn.h"

namespace fla {

struct LogLinearSequence : Sequence {
  std::int64_t past = 0;  // tokens before them

  LogLinearSequence(const LogLinearAttnArgs& a, std::int64_t n)
      : Sequence(sequence_at(a.cu_seqlens, a.q.dim(1), n)), past(a.past_tokens ? read_index(a.past_tokens, n) : 0) {}
};

inline std::int64_t log_linear_sequences(const LogLinearAttnArgs& a) {
  return count_sequences(a.cu_seqlens, a.q.dim(0));
}

}  // namespace fla
