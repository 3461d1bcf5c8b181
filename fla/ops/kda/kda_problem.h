// What kda asks of the delta engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/ops/kda/kda.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kKdaFunctions{chunk_form(kChunkKda, kChunkKdaBackward),
                                          step_form(kFusedRecurrentKda, kFusedRecurrentKdaBackward),
                                          step_form(kKdaStep), step_form(kFusedRecurrentKdaFwd)};

// All but states and boundaries.
template <typename A>
DeltaProblem kda_problem(const A& a, const TensorView& cu_seqlens) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, cu_seqlens);
  p.erase = Erase::Decayed;
  set_channel_gate(p, a.g, a.use_gate_in_kernel, a.lower_bound, a.A_log, a.dt_bias);
  p.beta = a.beta;
  p.beta_sigmoid = beta_factor(a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval);
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  return p;
}

inline DeltaProblem to_problem(const KdaArgs& a) {
  DeltaProblem p = kda_problem(a, a.cu_seqlens);
  set_states(p, a, a.state_v_first);
  p.h = a.state_v_first ? swap_chunk_state_axes(a.h) : a.h;
  p.h_chunk = a.chunk_size;
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DeltaStepProblem to_problem(const KdaStepArgs& a) {
  DeltaStepProblem p(kda_problem(a, {}));
  set_state_pool(p, a, a.state_v_first);
  return p;
}

inline DeltaStepProblem to_problem(const KdaPoolArgs& a) {
  DeltaStepProblem p(kda_problem(a, a.cu_seqlens));
  const auto by_key = [&a](const TensorView& s) { return a.state_v_first ? swap_state_axes(s) : s; };
  p.h0 = by_key(a.initial_state);
  p.o = a.o;
  p.table = {a.ssm_state_indices, a.num_accepted_tokens, {}};
  if (a.inplace_final_state) {
    p.ht = a.state_pool ? by_key(a.state_pool) : p.h0;
  } else if (!a.ssm_state_indices) {
    p.ht = by_key(a.final_state);
  } else if (a.final_state) {  // [B T, ...] seen as [B, T, ...]
    const TensorView f = by_key(a.final_state);
    TensorView& steps = p.table.steps;
    steps = f;
    steps.ndim = 5;
    steps.shape = {p.B, p.T, f.shape[1], f.shape[2], f.shape[3]};
    steps.stride = {p.T * f.stride[0], f.stride[0], f.stride[1], f.stride[2], f.stride[3]};
  }
  return p;
}

inline DeltaBackwardProblem to_problem(const KdaBackwardArgs& a) {
  DeltaBackwardProblem p(to_problem(static_cast<const KdaArgs&>(a)));
  set_gradients(p, a, a.state_v_first);
  p.dgk = a.dg;
  p.dbeta = a.dbeta;
  p.dA_log = per_head(a.dA_log);
  p.ddt_bias = per_channel(a.ddt_bias, p.K);
  return p;
}

}  // namespace fla
