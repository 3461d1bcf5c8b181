// Pieces of the translation of a family's arguments into a DeltaProblem.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "fla/engine/delta/problem.h"
#include "fla/engine/diag/problem.h"

namespace fla {

// q, k, v in their layout; rows: of k and v per token. HV is v's head count.
inline DeltaProblem delta_problem(const TensorView& q, const TensorView& k, const TensorView& v,
                                  std::optional<double> scale, const TensorView& cu_seqlens) {
  DeltaProblem p;
  p.B = q.dim(0);
  p.T = q.dim(1);
  p.H = q.dim(2);
  p.HV = v.dim(2);
  p.K = q.dim(3);
  p.V = v.dim(3);
  p.cu_seqlens = cu_seqlens;
  p.N = count_sequences(cu_seqlens, p.B);
  p.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(p.K)));
  p.q = q;
  p.k = k;
  p.v = v;
  return p;
}

// The states and the outputs that every family names alike.
template <typename A>
void set_states(DeltaProblem& p, const A& a, bool v_first) {
  p.h0 = v_first ? swap_state_axes(a.initial_state) : a.initial_state;
  p.ht = v_first ? swap_state_axes(a.final_state) : a.final_state;
  p.o = a.o;
}

// [B, NT, HV, V, K] seen as [B, NT, HV, K, V].
inline TensorView swap_chunk_state_axes(TensorView h) {
  if (h) {
    std::swap(h.shape[3], h.shape[4]);
    std::swap(h.stride[3], h.stride[4]);
  }
  return h;
}

template <typename G>
void set_gradients(DeltaBackwardProblem& p, const G& a, bool v_first) {
  p.do_ = a.do_;
  p.dht = v_first ? swap_state_axes(a.dht) : a.dht;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dh0 = v_first ? swap_state_axes(a.dh0) : a.dh0;
}

// A head's constants as [HV], from [HV] or [1, 1, HV, 1].
inline TensorView per_head(TensorView x) {
  if (x && x.ndim == 4) {
    x.shape[0] = x.shape[2];
    x.stride[0] = x.stride[2];
    x.ndim = 1;
  }
  return x;
}

// A head's and channel's constants as [HV, K], from [HV, K] or [HV K].
inline TensorView per_channel(TensorView x, std::int64_t K) {
  if (x && x.ndim == 1) {
    x.shape[0] /= K;
    x.shape[1] = K;
    x.stride[1] = x.stride[0];
    x.stride[0] *= K;
    x.ndim = 2;
  }
  return x;
}

// 0: beta as given.
inline double beta_factor(bool sigmoid, bool allow_neg_eigval) { return !sigmoid ? 0.0 : allow_neg_eigval ? 2.0 : 1.0; }

// The gate of the kda families: per channel, -e^{A_log} softplus(y) or, with a bound, bound * sigmoid(e^{A_log} y).
inline void set_channel_gate(DeltaProblem& p, const TensorView& gk, bool in_kernel, std::optional<double> lower_bound,
                             const TensorView& A_log, const TensorView& dt_bias) {
  p.gk = gk;
  if (!in_kernel) return;
  p.gate.kind = lower_bound ? GateActivation::Kind::Bounded : GateActivation::Kind::Softplus;
  p.gate.lower_bound = lower_bound.value_or(0.0);
  p.gate.A_log = per_head(A_log);
  p.gate.dt_bias = per_channel(dt_bias, p.K);
}

}  // namespace fla
