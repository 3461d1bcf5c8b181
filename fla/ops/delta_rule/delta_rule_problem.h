// What delta_rule asks of the delta engine.
#pragma once

#include "fla/ops/common/delta_problem.h"
#include "fla/ops/delta_rule/delta_rule.h"

namespace fla {

inline DeltaProblem to_problem(const DeltaRuleArgs& a) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.erase = Erase::Plain;
  p.beta = a.beta;
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  set_states(p, a, false);
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DeltaProblem to_problem(const DeltaRuleBackwardArgs& a) {
  DeltaProblem p = to_problem(static_cast<const DeltaRuleArgs&>(a));
  set_gradients(p, a, false);
  p.dbeta = a.dbeta;
  return p;
}

}  // namespace fla
