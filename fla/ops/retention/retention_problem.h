// What retention asks of the diagonal-decay engine: simple_gla with a constant gate computed from the head's index.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/diag/problem.h"
#include "fla/ops/retention/retention.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kRetentionFunctions{chunk_form(kChunkRetention, kChunkRetentionBackward),
                                                chunk_form(kFusedChunkRetention, kFusedChunkRetentionBackward),
                                                step_form(kFusedRecurrentRetention, kFusedRecurrentRetentionBackward),
                                                chunk_form(kParallelRetention, kParallelRetentionBackward)};

inline DiagProblem to_problem(const RetentionArgs& a) {
  DiagProblem p = diag_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.head.kind = HeadDecay::Kind::Retention;
  p.reverse = a.reverse;
  p.h0 = a.state_v_first ? swap_state_axes(a.initial_state) : a.initial_state;
  p.ht = a.state_v_first ? swap_state_axes(a.final_state) : a.final_state;
  p.o = a.o;
  p.attn = a.attn;
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DiagBackwardProblem to_problem(const RetentionBackwardArgs& a) {
  DiagBackwardProblem p(to_problem(static_cast<const RetentionArgs&>(a)));
  set_gradients(p, a, a.state_v_first);
  return p;
}

}  // namespace fla
