// Shared by the translation units of the delta engine; nothing here is vector code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fla/engine/delta/problem.h"
#include "fla/engine/diag/cpu/internal.h"
#include "fla/kernels/cpu/prefetch.h"
#include "fla/kernels/cpu/rows.h"

namespace fla::cpu {

// What the chunk form's linear system yields: Delta, E = vbar - S^T alpha with one write vector w; General, Z = S^T a
// written by b, beside k_t v_t^T. Everywhere below n is the vector that reads (-alpha or a), s the vector that writes
// the system's solution x (w or b), s1 General's k.
enum class DeltaKind { Delta, General };

inline DeltaKind delta_kind(const DeltaProblem& p) {
  return p.erase == Erase::General ? DeltaKind::General : DeltaKind::Delta;
}

inline KeyGate delta_gate(const DeltaProblem& p) {
  if (p.gk) return KeyGate::Channel;
  return p.g ? KeyGate::Head : KeyGate::None;
}

// n of token t reads the state before t's own decay.
inline bool reads_before_decay(const DeltaProblem& p) {
  return p.erase == Erase::Plain || p.erase == Erase::Other || p.erase == Erase::General;
}

// Tokens of sequence s, head h, in the order of the recurrence; with R > 1, rows.
inline Rows delta_rows(const TensorView& x, const DeltaProblem& p, const Sequence& s, std::int64_t h,
                       std::int64_t R = 1) {
  if (!x || s.length == 0) return {};
  const std::int64_t size = static_cast<std::int64_t>(size_of(x.dtype));
  const std::int64_t first = p.reverse ? (s.begin + s.length) * R - 1 : s.begin * R;
  return {x.at(s.row, first, h), x.dtype, (p.reverse ? -1 : 1) * x.stride[1] * size, x.ndim > 3 ? x.stride[3] : 1};
}

// A separate write key may be per key head or per value head.
inline bool writes_per_value_head(const DeltaProblem& p) { return p.w && p.w.dim(2) != p.H; }
inline std::int64_t write_head(const DeltaProblem& p, std::int64_t hv) {
  return writes_per_value_head(p) ? hv : hv / p.group();
}

// The gate of one value head before and after activation.
struct DeltaGate {
  Rows g, gk;  // raw; both may be present in one problem, then g is the activated one
  GateActivation::Kind kind = GateActivation::Kind::None;
  float multiplier = 1.0F, A_log = 0.0F;  // multiplier: e^{A_log}
  float lower_bound = 0.0F;
  Rows bias;  // one row: [1] for g, [K] for gk
};

// The inputs of one sequence and value head.
struct DeltaInputs {
  Rows q, k, v, beta, p, eb, ew, a, b, w;
  DeltaGate gate;
  bool channel_beta = false;  // beta per value channel: n is then without beta, and x = beta o (v + n^T S)
  std::int64_t length = 0;    // rows: tokens times R

  DeltaInputs() = default;
  DeltaInputs(const DeltaProblem& x, std::int64_t n, std::int64_t hv) {
    const Sequence s = x.sequence(n);
    const std::int64_t h = hv / x.group();
    length = s.length * x.R;
    q = delta_rows(x.q, x, s, h);
    k = delta_rows(x.k, x, s, h, x.R);
    v = delta_rows(x.v, x, s, hv, x.R);
    beta = delta_rows(x.beta, x, s, hv, x.R);
    channel_beta = x.beta && x.beta.ndim > 3;
    if (x.erase == Erase::Other) p = delta_rows(x.p, x, s, h);
    if (x.erase == Erase::Gated) {
      eb = delta_rows(x.eb, x, s, hv);
      ew = delta_rows(x.ew, x, s, hv);
    }
    if (x.erase == Erase::General) {
      a = delta_rows(x.a, x, s, h);
      b = delta_rows(x.b, x, s, h);
    } else {
      w = delta_rows(x.w, x, s, write_head(x, hv));
    }
    gate.g = delta_rows(x.g, x, s, hv);
    gate.gk = delta_rows(x.gk, x, s, hv);
    gate.kind = x.gate.kind;
    gate.lower_bound = static_cast<float>(x.gate.lower_bound);
    if (x.gate.A_log) {
      const Rows A{x.gate.A_log.at(hv), x.gate.A_log.dtype, 0, 1};
      // Finite, as an infinite one times a softplus of 0 is NaN.
      gate.A_log = static_cast<float>(scalar_at(A, 0));
      gate.multiplier = static_cast<float>(std::min(std::exp(scalar_at(A, 0)), 0x1p127));
    }
    if (x.gate.dt_bias) {
      const TensorView& d = x.gate.dt_bias;
      gate.bias = {d.at(hv), d.dtype, 0, d.ndim > 1 ? d.stride[1] : 1};
    }
  }
};

// Value heads that one task interleaves, chunk by chunk, for the reason given at kHeadGroup: as many as leave the
// threads evenly loaded and the states in L2.
inline std::int64_t value_head_group(const DeltaProblem& p, std::int64_t panels, int threads) {
  std::int64_t group = 1;
  for (std::int64_t g = 2; g <= std::min(kHeadGroup, p.HV); g *= 2) {
    const std::int64_t tasks = p.N * ((p.HV + g - 1) / g);
    const bool even = tasks >= std::int64_t{4} * threads || (tasks % threads == 0 && p.HV % g == 0);
    if (even && g * pad_up(p.K) * panels * kBV * 4 <= std::int64_t{512} * 1024) group = g;
  }
  return group;
}

// Adds the next n rows of the value heads [hv, hv + heads) to what is to be prefetched, where they are one piece a row.
inline void prefetch_inputs(Prefetcher& ahead, const DeltaProblem& p, const DeltaInputs& first, std::int64_t hv,
                            std::int64_t heads, std::int64_t t0, std::int64_t n, bool want_q) {
  if (n <= 0) return;
  const auto add = [&](const TensorView& x, const Rows& rows, bool per_value_head) {
    const std::int64_t width = x ? x.shape[3] : 0;
    const std::int64_t count = per_value_head ? heads : (hv + heads - 1) / p.group() - hv / p.group() + 1;
    if (!rows || x.stride[2] != width) return;
    if (count * width * static_cast<std::int64_t>(size_of(x.dtype)) < kPrefetchBytes) return;
    ahead.add(rows, t0, n, 0, count * width);
  };
  add(p.k, first.k, false);
  add(p.v, first.v, true);
  if (p.R > 1) return;  // the others have fewer rows
  if (want_q) add(p.q, first.q, false);
  add(p.p, first.p, false);
  add(p.a, first.a, false);
  add(p.b, first.b, false);
  add(p.w, first.w, writes_per_value_head(p));
  add(p.eb, first.eb, true);
  add(p.ew, first.ew, true);
  add(p.gk, first.gate.gk, true);
}

// Why a problem cannot be served at all; nullptr: it can.
inline const char* delta_refusal(const DeltaProblem& p) {
  if (p.R > 1 && (p.reverse || p.w || (p.erase != Erase::Plain && p.erase != Erase::Decayed))) {
    return "several rows per token need erase Plain or Decayed, forward order and no write key";
  }
  return nullptr;
}

}  // namespace fla::cpu
