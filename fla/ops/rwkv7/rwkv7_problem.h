// What rwkv7 asks of the delta engine: generalized_delta_rule with r for q and w for gk.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/delta/translate.h"
#include "fla/ops/rwkv7/rwkv7.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kRwkv7Functions{chunk_form(kChunkRwkv7, kChunkRwkv7Backward),
                                            step_form(kFusedRecurrentRwkv7, kFusedRecurrentRwkv7Backward),
                                            step_form(kRwkv7Step)};

// What all forms share; a, b and states are left to the form.
template <typename A>
DeltaProblem rwkv7_problem(const A& x, const TensorView& cu_seqlens) {
  DeltaProblem p = delta_problem(x.r, x.k, x.v, x.scale, cu_seqlens);
  p.erase = Erase::General;
  p.gk = x.w;
  return p;
}
template <typename A>
DeltaProblem rwkv7_problem(const A& x) {
  DeltaProblem p = rwkv7_problem(x, x.cu_seqlens);
  set_states(p, x, false);
  return p;
}

template <typename G>
void set_rwkv7_gradients(DeltaBackwardProblem& p, const G& x) {
  p.do_ = x.do_;
  p.dht = x.dht;
  p.dq = x.dr;
  p.dgk = x.dw;
  p.dk = x.dk;
  p.dv = x.dv;
  p.dh0 = x.dh0;
}

inline DeltaProblem to_problem(const Rwkv7Args& x) {
  DeltaProblem p = rwkv7_problem(x);
  p.a = x.a;
  p.b = x.b;
  p.chunk = chunk_limit(x.chunk_size);
  return p;
}

inline DeltaBackwardProblem to_problem(const Rwkv7BackwardArgs& x) {
  DeltaBackwardProblem p(to_problem(static_cast<const Rwkv7Args&>(x)));
  set_rwkv7_gradients(p, x);
  p.da = x.da;
  p.db = x.db;
  return p;
}

inline DeltaProblem to_problem(const RecurrentRwkv7Args& x) {
  DeltaProblem p = rwkv7_problem(x);
  p.a = x.a;
  p.b = x.b;
  return p;
}

inline DeltaStepProblem to_problem(const Rwkv7StepArgs& x) {
  DeltaStepProblem p(rwkv7_problem(x, {}));
  p.a = x.a;
  p.b = x.b;
  set_state_pool(p, x, false);
  return p;
}

inline DeltaBackwardProblem to_problem(const RecurrentRwkv7BackwardArgs& x) {
  DeltaBackwardProblem p(to_problem(static_cast<const RecurrentRwkv7Args&>(x)));
  set_rwkv7_gradients(p, x);
  p.da = x.da;
  p.db = x.db;
  return p;
}

// a and b of these two are made in the workspace (rwkv7_mul.h).
inline DeltaProblem to_problem(const FusedMulRwkv7Args& x) {
  DeltaProblem p = rwkv7_problem(x);
  p.reverse = x.reverse;
  return p;
}

inline DeltaBackwardProblem to_problem(const FusedMulRwkv7BackwardArgs& x) {
  DeltaBackwardProblem p(to_problem(static_cast<const FusedMulRwkv7Args&>(x)));
  set_rwkv7_gradients(p, x);
  return p;
}

}  // namespace fla
