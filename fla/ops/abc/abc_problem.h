// What abc asks of the attention over slots, given its weights and gates.
#pragma once

#include <cmath>

#include "fla/engine/slot/problem.h"
#include "fla/ops/abc/abc.h"

namespace fla {

// w, g: [B, T, H, M]
inline SlotProblem abc_problem(const AbcArgs& a, const TensorView& w, const TensorView& g) {
  SlotProblem p;
  p.B = p.N = a.q.dim(0);
  p.T = a.q.dim(1);
  p.H = a.q.dim(2);
  p.K = a.q.dim(3);
  p.V = a.v.dim(3);
  p.M = a.s.dim(3);
  p.scale = 1.0 / std::sqrt(static_cast<double>(p.K));
  p.q = a.q;
  p.k = a.k;
  p.v = a.v;
  p.s = w;
  p.g = g;
  p.hk0 = a.initial_state;
  p.hv0 = a.initial_values;
  p.o = a.o;
  p.hkt = a.final_state;
  p.hvt = a.final_values;
  return p;
}

// All but ds and the states' gradients, which the family finishes.
inline SlotBackwardProblem abc_problem(const AbcBackwardArgs& a, const TensorView& w, const TensorView& g) {
  SlotBackwardProblem p(abc_problem(static_cast<const AbcArgs&>(a), w, g));
  p.do_ = a.do_;
  p.dhkt = a.dht;
  p.dhvt = a.dht_values;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  return p;
}

}  // namespace fla
