// What gdn2 asks of the delta engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/ops/gdn2/gdn2.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kGdn2Functions{chunk_form(kChunkGdn2, kChunkGdn2Backward),
                                           step_form(kFusedRecurrentGdn2, kFusedRecurrentGdn2Backward)};

inline DeltaProblem to_problem(const Gdn2Args& a) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.erase = Erase::Gated;
  set_channel_gate(p, a.g, a.use_gate_in_kernel, a.lower_bound, a.A_log, a.dt_bias);
  p.eb = a.b;
  p.ew = a.w;
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  set_states(p, a, a.state_v_first);
  p.h = a.state_v_first ? swap_chunk_state_axes(a.h) : a.h;
  p.h_chunk = a.chunk_size;
  return p;
}

inline DeltaBackwardProblem to_problem(const Gdn2BackwardArgs& a) {
  DeltaBackwardProblem p(to_problem(static_cast<const Gdn2Args&>(a)));
  set_gradients(p, a, a.state_v_first);
  p.dgk = a.dg;
  p.deb = a.db;
  p.dew = a.dw;
  p.dA_log = per_head(a.dA_log);
  p.ddt_bias = per_channel(a.ddt_bias, p.K);
  return p;
}

}  // namespace fla
