// What delta_rule asks of the delta engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/ops/delta_rule/delta_rule.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kDeltaRuleFunctions{chunk_form(kChunkDeltaRule, kChunkDeltaRuleBackward),
                                                step_form(kFusedRecurrentDeltaRule, kFusedRecurrentDeltaRuleBackward),
                                                chunk_form(kFusedChunkDeltaRule, kFusedChunkDeltaRuleBackward),
                                                step_form(kDeltaRuleStep)};

// All but states and boundaries.
template <typename A>
DeltaProblem delta_rule_problem(const A& a, const TensorView& cu_seqlens) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, cu_seqlens);
  p.erase = Erase::Plain;
  p.beta = a.beta;
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  return p;
}

inline DeltaProblem to_problem(const DeltaRuleArgs& a) {
  DeltaProblem p = delta_rule_problem(a, a.cu_seqlens);
  set_states(p, a, false);
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DeltaStepProblem to_problem(const DeltaStepArgs& a) {
  DeltaStepProblem p(delta_rule_problem(a, {}));
  set_state_pool(p, a, false);
  return p;
}

inline DeltaBackwardProblem to_problem(const DeltaRuleBackwardArgs& a) {
  DeltaBackwardProblem p(to_problem(static_cast<const DeltaRuleArgs&>(a)));
  set_gradients(p, a, false);
  p.dbeta = a.dbeta;
  return p;
}

}  // namespace fla
