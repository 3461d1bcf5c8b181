// What linear_attn asks of the diagonal-decay engine: no gate. The normalised form replaces o, do and some gradients by
// memory of its own before it hands the problem on.
#pragma once

#include "fla/engine/diag/problem.h"
#include "fla/ops/linear_attn/linear_attn.h"

namespace fla {

// Added to the denominator as it is; no clamp.
inline constexpr double kLinearAttnEpsilon = 1e-10;

inline DiagProblem to_problem(const LinearAttnArgs& a) {
  DiagProblem p = diag_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.reverse = a.reverse;
  p.h0 = a.initial_state;
  p.ht = a.final_state;
  p.o = a.o;
  return p;
}

inline DiagBackwardProblem to_problem(const LinearAttnBackwardArgs& a) {
  DiagBackwardProblem p(to_problem(static_cast<const LinearAttnArgs&>(a)));
  set_gradients(p, a, false);
  return p;
}

}  // namespace fla
