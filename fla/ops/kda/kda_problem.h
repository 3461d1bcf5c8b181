// What kda asks of the delta engine.
#pragma once

#include "fla/ops/common/delta_problem.h"
#include "fla/ops/kda/kda.h"

namespace fla {

inline DeltaProblem to_problem(const KdaArgs& a) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.erase = Erase::Decayed;
  set_channel_gate(p, a.g, a.use_gate_in_kernel, a.lower_bound, a.A_log, a.dt_bias);
  p.beta = a.beta;
  p.beta_sigmoid = beta_factor(a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval);
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  set_states(p, a, a.state_v_first);
  p.h = a.state_v_first ? swap_chunk_state_axes(a.h) : a.h;
  p.h_chunk = a.chunk_size;
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DeltaProblem to_problem(const KdaBackwardArgs& a) {
  DeltaProblem p = to_problem(static_cast<const KdaArgs&>(a));
  set_gradients(p, a, a.state_v_first);
  p.dgk = a.dg;
  p.dbeta = a.dbeta;
  p.dA_log = per_head(a.dA_log);
  p.ddt_bias = per_channel(a.ddt_bias, p.K);
  return p;
}

}  // namespace fla
