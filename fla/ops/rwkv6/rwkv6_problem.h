// What rwkv6 asks of the diagonal-decay engine: reads before the update and the bonus, problem.h (2').
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/diag/problem.h"
#include "fla/ops/rwkv6/rwkv6.h"

namespace fla {

inline constexpr std::tuple kRwkv6Functions{chunk_form(kChunkRwkv6, kChunkRwkv6Backward),
                                            step_form(kFusedRecurrentRwkv6, kFusedRecurrentRwkv6Backward),
                                            step_form(kRwkv6Step)};

inline DiagProblem to_problem(const Rwkv6Args& a) {
  DiagProblem p = diag_problem(a.r, a.k, a.v, a.scale, a.cu_seqlens);
  p.gk = a.w;
  p.u = a.u;
  p.reverse = a.reverse;
  p.chunk = chunk_limit(a.chunk_size);
  p.h0 = a.initial_state;
  p.ht = a.final_state;
  p.o = a.o;
  return p;
}

inline DiagStepProblem to_problem(const Rwkv6StepArgs& a) {
  DiagStepProblem p(diag_problem(a.r, a.k, a.v, a.scale, {}));
  p.gk = a.w;
  p.u = a.u;
  set_state_pool(p, a, false);
  return p;
}

inline DiagBackwardProblem to_problem(const Rwkv6BackwardArgs& a) {
  DiagBackwardProblem p(to_problem(static_cast<const Rwkv6Args&>(a)));
  p.do_ = a.do_;
  p.dht = a.dht;
  p.dq = a.dr;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dgk = a.dw;
  p.du = a.du;
  p.dh0 = a.dh0;
  return p;
}

}  // namespace fla
