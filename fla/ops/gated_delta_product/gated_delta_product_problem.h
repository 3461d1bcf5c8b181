// What gated_delta_product asks of the delta engine.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/ops/gated_delta_product/gated_delta_product.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kGatedDeltaProductFunctions{
    chunk_form(kChunkGatedDeltaProduct, kChunkGatedDeltaProductBackward)};

inline DeltaProblem to_problem(const GatedDeltaProductArgs& a) {
  DeltaProblem p = delta_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.erase = Erase::Decayed;
  p.R = *a.num_householder;
  p.g = a.g;
  p.beta = a.beta;
  p.normalize_q = p.normalize_k = a.use_qk_l2norm_in_kernel;
  set_states(p, a, false);
  return p;
}

inline DeltaBackwardProblem to_problem(const GatedDeltaProductBackwardArgs& a) {
  DeltaBackwardProblem p(to_problem(static_cast<const GatedDeltaProductArgs&>(a)));
  set_gradients(p, a, false);
  p.dg = a.dg;
  p.dbeta = a.dbeta;
  return p;
}

}  // namespace fla
