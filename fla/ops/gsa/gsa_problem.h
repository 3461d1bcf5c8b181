// What gsa asks of the attention over slots.
#pragma once

#include <cmath>
#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/diag/problem.h"
#include "fla/engine/slot/problem.h"
#include "fla/ops/gsa/gsa.h"

namespace fla {

inline constexpr std::tuple kGsaFunctions{chunk_form(kChunkGsa, kChunkGsaBackward),
                                          step_form(kFusedRecurrentGsa, kFusedRecurrentGsaBackward)};

inline SlotProblem to_problem(const GsaArgs& a) {
  SlotProblem p;
  p.B = a.q.dim(0);
  p.T = a.q.dim(1);
  p.H = a.k.dim(2);
  p.G = a.q.dim(2) / p.H;
  p.K = a.q.dim(3);
  p.V = a.v.dim(3);
  p.M = a.s.dim(3);
  p.cu_seqlens = a.cu_seqlens;
  p.N = count_sequences(a.cu_seqlens, p.B);
  p.reverse = a.reverse;
  p.scale = a.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.K)));
  p.chunk = chunk_limit(a.chunk_size);
  p.q = a.q;
  p.k = a.k;
  p.v = a.v;
  p.s = a.s;
  p.g = a.g;
  p.hk0 = a.initial_state;
  p.hv0 = a.initial_values;
  p.o = a.o;
  p.hkt = a.final_state;
  p.hvt = a.final_values;
  return p;
}

inline SlotBackwardProblem to_problem(const GsaBackwardArgs& a) {
  SlotBackwardProblem p(to_problem(static_cast<const GsaArgs&>(a)));
  p.do_ = a.do_;
  p.dhkt = a.dht;
  p.dhvt = a.dht_values;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  p.ds = a.ds;
  p.dg = a.dg;
  p.dhk0 = a.dh0;
  p.dhv0 = a.dh0_values;
  return p;
}

}  // namespace fla
