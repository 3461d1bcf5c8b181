// The delta-rule recurrences, the problem that the delta families hand to a backend. Per token, one value head:
//   general  S_t = e^{g_t} o S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T                                    (1)
//   delta    S_t = e^{g_t} o S_{t-1} + w_t e_t^T,   e_t = vbar_t - S_{t-1}^T alpha_t                      (2)
//            o_t = scale * S_t^T q_t                                                                      (3)
// (2) is (1) with a = alpha, b = -w, k = w, v = vbar; a backend may use that e = vbar - a^T S. What alpha, w and vbar
// are is the erase policy below. The gate is absent, per value head, or per key channel; the step form adds a gate per
// value channel. A family's file translates its arguments into a DeltaProblem; a backend knows no family.
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

// beta_t multiplies both alpha and vbar (vbar = beta v) in all but Gated and General.
enum class Erase : std::uint8_t {
  Plain,    // alpha = beta k               delta_rule; gated ones below read the decayed state, so alpha carries e^g
  Decayed,  // alpha = beta e^g o k         gated_delta_rule, kda, preconditioned forms
  Other,    // alpha = beta p               comba: reads the undecayed state through its own vector
  Gated,    // alpha = e^g o eb o k, vbar = ew o v          gdn2: gates per channel instead of beta
  General,  // (1) with a and b             iplr, dplr, rwkv7
};

// How a raw gate becomes a log gate. y = raw + dt_bias.
struct GateActivation {
  enum class Kind : std::uint8_t { None, Softplus, Bounded };
  Kind kind = Kind::None;
  double lower_bound = 0.0;  // Bounded: g = lower_bound * sigmoid(e^{A_log} y); Softplus: g = -e^{A_log} softplus(y)
  TensorView A_log;          // [HV], any float type; absent in Bounded: multiplier 1
  TensorView dt_bias;        // [HV] for g, [HV, K] (as a view) for gk; absent = 0
};

struct DeltaProblem {
  std::int64_t B = 0, T = 0, H = 0, HV = 0, K = 0, V = 0;  // value head j reads key head j / (HV / H)
  std::int64_t N = 0;
  std::int64_t R = 1;     // rows per token: k, v, beta have T * R rows; decay before row 0, read after row R - 1
  TensorView cu_seqlens;  // [N + 1] in tokens, on the host; absent: N dense sequences of T tokens
  bool reverse = false;
  double scale = 1.0;
  Erase erase = Erase::Plain;

  TensorView q;              // [B, T, H, K]
  TensorView k;              // [B, T R, H, K]
  TensorView v;              // [B, T R, HV, V]
  TensorView beta;           // [B, T R, HV]; step form also [B, T R, HV, V]; absent = ones
  TensorView p;              // [B, T, H, K]   Other; absent = k
  TensorView eb;             // [B, T, HV, K]  Gated
  TensorView ew;             // [B, T, HV, V]  Gated
  TensorView a, b;           // [B, T, H, K]   General
  TensorView w;              // [B, T, H, K] or [B, T, HV, K]   write key instead of k (preconditioned, F32); absent = k
  TensorView g;              // [B, T, HV]
  TensorView gk;             // [B, T, HV, K]
  TensorView gv;             // [B, T, HV, V]  step form only
  GateActivation gate;       // of g where it is given, else of gk; g, gk and gv may come together in the step form
  bool normalize_q = false;  // x / sqrt(sum x^2 + 1e-6), in the operator
  bool normalize_k = false;  // also p
  double beta_sigmoid = 0.0;  // 0: beta as given; c > 0: c * sigmoid(beta)
  TensorView h0;              // [N, HV, K, V] by strides
  // Step form, forward in time: h0 and ht are pools, and which of their rows are meant.
  const SlotTable* pool = nullptr;

  TensorView o;   // [B, T, HV, V]
  TensorView ht;  // [N, HV, K, V]; may be exactly h0's memory
  TensorView h;   // [B, NT, HV, K, V] entering state of every h_chunk tokens, NT counted over all sequences when packed
  std::int64_t h_chunk = 64;  // a multiple of 16; sequences start a new one

  std::int64_t chunk = 0;  // most tokens a chunk may have: 16, 32, or 0 for the backend's choice

  std::int64_t group() const { return HV / H; }
  Sequence sequence(std::int64_t n) const { return sequence_at(cu_seqlens, T, n); }
  const SlotTable& slots() const { return pool != nullptr ? *pool : kNoSlots; }
};

using DeltaStepProblem = WithSlots<DeltaProblem>;

// Upstream gradients (absent = zeros) and requested gradients (absent = not computed).
struct DeltaBackwardProblem : DeltaProblem {
  TensorView do_, dht;
  TensorView dq, dk, dv, dbeta, dp, deb, dew, da, db, dw, dg, dgk, dgv, dh0;  // each shaped as its input
  TensorView backward_o;  // as o: the chunk form's backward gives it too, from the states that it has at hand
  TensorView dA_log;      // [HV]
  TensorView ddt_bias;    // as dt_bias; both may be of any float type and are sums over all tokens in one fixed order

  DeltaBackwardProblem() = default;
  explicit DeltaBackwardProblem(const DeltaProblem& forward) : DeltaProblem(forward) {}
};

}  // namespace fla
