// What comba asks of the delta engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/ops/comba/comba.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kCombaFunctions{chunk_form(kChunkComba, kChunkCombaBackward),
                                            step_form(kFusedRecurrentComba, kFusedRecurrentCombaBackward)};

inline DeltaProblem to_problem(const CombaArgs& a) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.erase = Erase::Other;
  p.p = a.p;
  p.g = a.g;
  p.beta = a.beta;
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  set_states(p, a, false);
  return p;
}

inline DeltaBackwardProblem to_problem(const CombaBackwardArgs& a) {
  DeltaBackwardProblem p(to_problem(static_cast<const CombaArgs&>(a)));
  set_gradients(p, a, false);
  p.dp = a.dp;
  p.dg = a.dg;
  p.dbeta = a.dbeta;
  return p;
}

}  // namespace fla
