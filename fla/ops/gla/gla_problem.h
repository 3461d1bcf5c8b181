// What gla asks of the diagonal-decay engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/diag/problem.h"
#include "fla/ops/gla/gla.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kGlaFunctions{
    chunk_form(kChunkGla, kChunkGlaBackward), chunk_form(kFusedChunkGla, kFusedChunkGlaBackward),
    step_form(kFusedRecurrentGla, kFusedRecurrentGlaBackward), step_form(kGlaStep)};

inline DiagProblem to_problem(const GlaArgs& a) {
  DiagProblem p = diag_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.gk = a.g;
  p.gv = a.gv;
  p.reverse = a.reverse;
  p.h0 = a.state_v_first ? swap_state_axes(a.initial_state) : a.initial_state;
  p.ht = a.state_v_first ? swap_state_axes(a.final_state) : a.final_state;
  p.o = a.o;
  return p;
}

inline DiagStepProblem to_problem(const GlaStepArgs& a) {
  DiagStepProblem p(diag_problem(a.q, a.k, a.v, a.scale, {}));
  p.gk = a.gk;
  p.gv = a.gv;
  set_state_pool(p, a, a.state_v_first);
  return p;
}

inline DiagBackwardProblem to_problem(const GlaBackwardArgs& a) {
  DiagBackwardProblem p(to_problem(static_cast<const GlaArgs&>(a)));
  set_gradients(p, a, a.state_v_first);
  p.dgk = a.dg;
  p.dgv = a.dgv;
  return p;
}

}  // namespace fla
