// What generalized_delta_rule asks of the delta engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/ops/generalized_delta_rule/generalized_delta_rule.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kGeneralizedDeltaRuleFunctions{
    chunk_form(kChunkIplrDeltaRule, kChunkIplrDeltaRuleBackward),
    step_form(kFusedRecurrentIplrDeltaRule, kFusedRecurrentIplrDeltaRuleBackward),
    chunk_form(kChunkDplrDeltaRule, kChunkDplrDeltaRuleBackward),
    step_form(kFusedRecurrentDplrDeltaRule, kFusedRecurrentDplrDeltaRuleBackward)};

inline DeltaProblem to_problem(const IplrDeltaRuleArgs& a) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.erase = Erase::General;
  p.a = a.a;
  p.b = a.b;
  set_states(p, a, false);
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DeltaBackwardProblem to_problem(const IplrDeltaRuleBackwardArgs& a) {
  DeltaBackwardProblem p(to_problem(static_cast<const IplrDeltaRuleArgs&>(a)));
  set_gradients(p, a, false);
  p.da = a.da;
  p.db = a.db;
  return p;
}

inline DeltaProblem to_problem(const DplrDeltaRuleArgs& a) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.erase = Erase::General;
  p.a = a.a;
  p.b = a.b;
  p.gk = a.gk;
  p.reverse = a.reverse;
  set_states(p, a, false);
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DeltaBackwardProblem to_problem(const DplrDeltaRuleBackwardArgs& a) {
  DeltaBackwardProblem p(to_problem(static_cast<const DplrDeltaRuleArgs&>(a)));
  set_gradients(p, a, false);
  p.da = a.da;
  p.db = a.db;
  p.dgk = a.dgk;
  return p;
}

}  // namespace fla
