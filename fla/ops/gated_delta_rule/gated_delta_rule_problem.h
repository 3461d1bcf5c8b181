// What gated_delta_rule asks of the delta engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/ops/gated_delta_rule/gated_delta_rule.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kGatedDeltaRuleFunctions{
    chunk_form(kChunkGatedDeltaRule, kChunkGatedDeltaRuleBackward), chunk_form(kChunkGdn, kChunkGdnBackward),
    step_form(kFusedRecurrentGatedDeltaRule, kFusedRecurrentGatedDeltaRuleBackward),
    step_form(kFusedRecurrentGdn, kFusedRecurrentGdnBackward), step_form(kGdnStep)};

// All but states and boundaries.
template <typename A>
DeltaProblem gated_delta_rule_problem(const A& a, const TensorView& cu_seqlens) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, cu_seqlens);
  p.erase = Erase::Decayed;
  p.g = a.g;
  p.gk = a.gk;
  p.gv = a.gv;
  if (a.use_gate_in_kernel) {
    p.gate.kind = GateActivation::Kind::Softplus;
    p.gate.A_log = a.A_log;
    p.gate.dt_bias = a.dt_bias;
  }
  p.beta = a.beta;
  p.beta_sigmoid = beta_factor(a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval);
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  return p;
}

inline DeltaProblem to_problem(const GatedDeltaRuleArgs& a) {
  DeltaProblem p = gated_delta_rule_problem(a, a.cu_seqlens);
  set_states(p, a, a.state_v_first);
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DeltaStepProblem to_problem(const GdnStepArgs& a) {
  DeltaStepProblem p(gated_delta_rule_problem(a, {}));
  set_state_pool(p, a, a.state_v_first);
  return p;
}

inline DeltaBackwardProblem to_problem(const GatedDeltaRuleBackwardArgs& a) {
  DeltaBackwardProblem p(to_problem(static_cast<const GatedDeltaRuleArgs&>(a)));
  set_gradients(p, a, a.state_v_first);
  p.dg = a.dg;
  p.dgk = a.dgk;
  p.dgv = a.dgv;
  p.dbeta = a.dbeta;
  p.dA_log = a.dA_log;
  p.ddt_bias = a.ddt_bias;
  return p;
}

}  // namespace fla
