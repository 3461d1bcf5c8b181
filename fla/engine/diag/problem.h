// The diagonal-decay recurrence (form W), the problem that linear_attn, retention, lightning_attn, simple_gla and gla
// all hand to a backend:
//   S_t = e^{gk_t} (x) e^{gv_t} o S_{t-1} + k_t v_t^T        (1)   o_t = scale * S_t^T q_t        (2)
// or, with a bonus u for the current token, read before the update:
//   o_t = scale * (S_{t-1} + (u o k_t) v_t^T)^T q_t          (2')
// A family's file translates its arguments into a DiagProblem; a backend knows no family.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "fla/core/tensor.h"
#include "fla/engine/common/sequences.h"
#include "fla/engine/common/slots.h"

namespace fla {

// A log gate that depends on the head alone.
struct HeadDecay {
  enum class Kind : std::uint8_t { None, Tensor, Retention, Lightning };
  Kind kind = Kind::None;
  TensorView gamma;    // Tensor: [H] F32 (or F64)
  double slope = 0.0;  // Lightning: -(8 / H)(1 - layer_idx / num_layers), formed in double

  // The gate of head h, rounded to float for the formulas (the contract forms them in fp32).
  double at(std::int64_t h) const {
    switch (kind) {
      case Kind::None: return 0.0;
      case Kind::Tensor:
        return gamma.dtype == DType::F64 ? *reinterpret_cast<const double*>(gamma.at(h))
                                         : static_cast<double>(*reinterpret_cast<const float*>(gamma.at(h)));
      case Kind::Retention: return static_cast<float>(std::log1p(-std::exp2(-5.0 - static_cast<double>(h))));
      case Kind::Lightning: return static_cast<float>(slope) * static_cast<float>(h);
    }
    return 0.0;
  }
};

struct DiagProblem {
  std::int64_t B = 0, T = 0, H = 0, K = 0, V = 0;
  std::int64_t N = 0;     // sequences: B, or the number of packed ones
  TensorView cu_seqlens;  // [N + 1] I32 or I64 on the host; absent: N dense sequences of T tokens
  bool reverse = false;   // the recurrence runs from each sequence's last token to its first
  double scale = 1.0;

  // Inputs, any float dtype, any strides. At most one of g, gk, head is used, alone or beside gv.
  TensorView q, k;  // [B, T, H, K]
  TensorView v;     // [B, T, H, V]
  TensorView g;     // [B, T, H]     log gate per head
  TensorView gk;    // [B, T, H, K]  log gate per key channel
  TensorView gv;    // [B, T, H, V]  log gate per value channel
  HeadDecay head;
  TensorView u;   // [H, K]        (2') instead of (2); with gk, without gv
  TensorView h0;  // [N, H, K, V] by strides (a value-first layout arrives as swapped strides); absent = zeros
  // Step form, forward in time: h0 and ht are pools, and which of their rows are meant.
  const SlotTable* pool = nullptr;

  // Outputs of the forward; an absent one is not computed.
  TensorView o;     // [B, T, H, V]
  TensorView ht;    // [N, H, K, V]; may be exactly h0's memory with h0's strides
  TensorView attn;  // [B, H, T, T] scores; dense problems without gk and gv only

  std::int64_t chunk = 0;  // most tokens a chunk may have: 16, 32, or 0 for the backend's choice

  Sequence sequence(std::int64_t n) const { return sequence_at(cu_seqlens, T, n); }
  const SlotTable& slots() const { return pool != nullptr ? *pool : kNoSlots; }
};

using DiagStepProblem = WithSlots<DiagProblem>;

// Upstream gradients (absent = zeros) and requested gradients (absent = not computed).
struct DiagBackwardProblem : DiagProblem {
  TensorView do_;     // [B, T, H, V]
  TensorView dht;     // [N, H, K, V]
  TensorView dq, dk;  // [B, T, H, K]
  TensorView dv;      // [B, T, H, V]
  TensorView dg;      // [B, T, H]
  TensorView dgk;     // [B, T, H, K]
  TensorView dgv;     // [B, T, H, V]
  TensorView du;      // [H, K]
  TensorView dh0;     // [N, H, K, V]

  DiagBackwardProblem() = default;
  explicit DiagBackwardProblem(const DiagProblem& forward) : DiagProblem(forward) {}
};

// What every family fills in the same way.
inline DiagProblem diag_problem(const TensorView& q, const TensorView& k, const TensorView& v,
                                std::optional<double> scale, const TensorView& cu_seqlens) {
  DiagProblem p;
  p.B = q.dim(0);
  p.T = q.dim(1);
  p.H = q.dim(2);
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

// A chunk_size of 64 or more leaves the choice to the backend; smaller ones bound it, 16 being the least.
inline std::int64_t chunk_limit(std::int64_t chunk_size) {
  return chunk_size >= 64 ? 0 : std::max<std::int64_t>(chunk_size, 16);
}

// [N, H, V, K] seen as [N, H, K, V], whatever stands before the last two axes.
inline TensorView swap_state_axes(TensorView s) {
  if (s) {
    const auto last = static_cast<std::size_t>(s.ndim - 1);
    std::swap(s.shape[last - 1], s.shape[last]);
    std::swap(s.stride[last - 1], s.stride[last]);
  }
  return s;
}

// The pool of a step function's arguments; P is either engine's problem.
template <typename P, typename A>
void set_state_pool(WithSlots<P>& p, const A& a, bool v_first) {
  const auto by_key = [v_first](const TensorView& s) { return v_first ? swap_state_axes(s) : s; };
  p.h0 = by_key(a.state);
  p.ht = a.state_out ? by_key(a.state_out) : p.h0;
  p.table = {a.state_indices, a.num_accepted_tokens, by_key(a.step_states)};
  p.o = a.o;
}

// The gradients that every family's backward args name alike.
template <typename G>
void set_gradients(DiagBackwardProblem& p, const G& a, bool state_v_first) {
  p.do_ = a.do_;
  p.dht = state_v_first ? swap_state_axes(a.dht) : a.dht;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dh0 = state_v_first ? swap_state_axes(a.dh0) : a.dh0;
}

}  // namespace fla
