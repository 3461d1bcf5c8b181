// What precond_kda asks of the preconditioner and of the delta engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/engine/precond/engine.h"
#include "fla/ops/precond_kda/precond_kda.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kPrecondKdaFunctions{
    chunk_form(kChunkPrecondKda, kChunkPrecondKdaBackward),
    step_form(kFusedRecurrentPrecondKda, kFusedRecurrentPrecondKdaBackward)};

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
  c.stage = precond_stage(p, a);
  return c;
}

inline PrecondBackwardCall to_problem(const PrecondKdaBackwardArgs& a) {
  PrecondBackwardCall c(to_problem(static_cast<const PrecondKdaArgs&>(a)));
  DeltaBackwardProblem& p = c.delta;
  set_gradients(p, a, a.transpose_state_layout);
  p.dgk = a.dg;
  p.dA_log = per_head(a.dA_log);
  p.ddt_bias = per_channel(a.ddt_bias, p.K);
  p.dbeta = a.dbeta;
  set_stage_gradients(c.stage, a);
  return c;
}

}  // namespace fla
