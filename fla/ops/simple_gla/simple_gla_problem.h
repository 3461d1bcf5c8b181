// What simple_gla asks of the diagonal-decay engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/diag/problem.h"
#include "fla/ops/simple_gla/simple_gla.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kSimpleGlaFunctions{chunk_form(kChunkSimpleGla, kChunkSimpleGlaBackward),
                                                chunk_form(kFusedChunkSimpleGla, kFusedChunkSimpleGlaBackward),
                                                step_form(kFusedRecurrentSimpleGla, kFusedRecurrentSimpleGlaBackward),
                                                chunk_form(kParallelSimpleGla, kParallelSimpleGlaBackward),
                                                step_form(kSimpleGlaStep)};

// All but states and boundaries.
template <typename A>
DiagProblem simple_gla_problem(const A& a, const TensorView& cu_seqlens) {
  DiagProblem p = diag_problem(a.q, a.k, a.v, a.scale, cu_seqlens);
  p.g = a.g;
  if (a.g_gamma) {
    p.head.kind = HeadDecay::Kind::Tensor;
    p.head.gamma = a.g_gamma;
  }
  return p;
}

inline DiagProblem to_problem(const SimpleGlaArgs& a) {
  DiagProblem p = simple_gla_problem(a, a.cu_seqlens);
  p.reverse = a.reverse;
  p.h0 = a.state_v_first ? swap_state_axes(a.initial_state) : a.initial_state;
  p.ht = a.state_v_first ? swap_state_axes(a.final_state) : a.final_state;
  p.o = a.o;
  p.attn = a.attn;
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DiagStepProblem to_problem(const SimpleGlaStepArgs& a) {
  DiagStepProblem p(simple_gla_problem(a, {}));
  set_state_pool(p, a, a.state_v_first);
  return p;
}

inline DiagBackwardProblem to_problem(const SimpleGlaBackwardArgs& a) {
  DiagBackwardProblem p(to_problem(static_cast<const SimpleGlaArgs&>(a)));
  set_gradients(p, a, a.state_v_first);
  p.dg = a.dg;
  return p;
}

}  // namespace fla
