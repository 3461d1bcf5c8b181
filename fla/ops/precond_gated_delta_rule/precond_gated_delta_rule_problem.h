// What precond_gated_delta_rule asks of the preconditioner and of the delta engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/engine/precond/engine.h"
#include "fla/ops/precond_gated_delta_rule/precond_gated_delta_rule.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kPrecondGatedDeltaRuleFunctions{
    chunk_form(kChunkPrecondGatedDeltaRule, kChunkPrecondGatedDeltaRuleBackward),
    step_form(kFusedRecurrentPrecondGatedDeltaRule, kFusedRecurrentPrecondGatedDeltaRuleBackward)};

inline PrecondCall to_problem(const PrecondGatedDeltaRuleArgs& a) {
  PrecondCall c;
  DeltaProblem& p = c.delta;
  p = delta_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.erase = Erase::Decayed;
  p.g = a.g;
  p.gk = a.gk;
  p.gv = a.gv;
  p.beta = a.beta;
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  set_states(p, a, a.transpose_state_layout);
  c.stage = precond_stage(p, a);
  return c;
}

inline PrecondBackwardCall to_problem(const PrecondGatedDeltaRuleBackwardArgs& a) {
  PrecondBackwardCall c(to_problem(static_cast<const PrecondGatedDeltaRuleArgs&>(a)));
  DeltaBackwardProblem& p = c.delta;
  set_gradients(p, a, a.transpose_state_layout);
  p.dg = a.dg;
  p.dgk = a.dgk;
  p.dgv = a.dgv;
  p.dbeta = a.dbeta;
  set_stage_gradients(c.stage, a);
  return c;
}

}  // namespace fla
