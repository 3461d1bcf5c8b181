// What precond_kda asks of the preconditioner and of the delta engine.
#pragma once

#include "fla/ops/common/delta_problem.h"
#include "fla/ops/common/precond_kernels.h"
#include "fla/ops/precond_kda/precond_kda.h"

namespace fla {

inline PrecondCall to_problem(const PrecondKdaArgs& a) {
  PrecondCall c;
  DeltaProblem& p = c.delta;
  p = delta_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.erase = Erase::Decayed;
  set_channel_gate(p, a.g, a.use_gate_in_kernel, a.lower_bound, a.A_log, a.dt_bias);
  p.h = a.transpose_state_layout ? swap_chunk_state_axes(a.h) : a.h;
  p.beta = a.beta;
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  set_states(p, a, a.transpose_state_layout);

  PrecondProblem& s = c.stage;
  s.B = p.B;
  s.T = p.T;
  s.H = p.H;
  s.HA = a.g_atk.dim(2);
  s.K = p.K;
  s.N = p.N;
  s.cu_seqlens = a.cu_seqlens;
  s.normalize = a.use_qk_l2norm_in_kernel;
  s.x = a.x;
  s.eps = a.eps;
  s.k = a.k;
  s.g_atk = a.g_atk;
  s.beta_atk = a.beta_atk;
  s.log_atk_scale = a.log_atk_scale;
  s.a0 = a.initial_A_state;
  s.at = a.final_A_state;
  return c;
}

inline PrecondCall to_problem(const PrecondKdaBackwardArgs& a) {
  PrecondCall c = to_problem(static_cast<const PrecondKdaArgs&>(a));
  DeltaProblem& p = c.delta;
  set_gradients(p, a, a.transpose_state_layout);
  p.dgk = a.dg;
  p.dA_log = per_head(a.dA_log);
  p.ddt_bias = per_channel(a.ddt_bias, p.K);
  p.dbeta = a.dbeta;
  PrecondProblem& s = c.stage;
  s.dat = a.dAt;
  s.dk = a.dk;
  s.dg_atk = a.dg_atk;
  s.dbeta_atk = a.dbeta_atk;
  s.dlog_atk_scale = a.dlog_atk_scale;
  s.da0 = a.dA0;
  return c;
}

}  // namespace fla
