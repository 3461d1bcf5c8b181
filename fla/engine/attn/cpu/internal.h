// Shared by the translation units of the CPU engine; nothing here is vector code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fla/core/threads.h"
#include "fla/engine/attn/problem.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/rows.h"

namespace fla::cpu {

// The families, as what differs between their kernels.
template <bool GATE, bool CHANNEL, bool SECOND>
struct AttnPolicy {
  static constexpr bool kGate = GATE, kChannel = CHANNEL, kSecond = SECOND;
};
using Plain = AttnPolicy<false, false, false>;       // attn, nsa's dense branches
using Gated = AttnPolicy<true, false, false>;        // attn with g, forgetting_attn
using Channel = AttnPolicy<false, true, false>;      // wall_attn
using ChannelGated = AttnPolicy<true, true, false>;  // wall_attn with g_scalar
using Second = AttnPolicy<false, false, true>;       // parallax

template <typename Fn>
auto with_policy(const AttnProblem& p, Fn&& fn) {
  if (p.r) return fn(Second());
  if (p.gk) return p.g ? fn(ChannelGated()) : fn(Channel());
  return p.g ? fn(Gated()) : fn(Plain());
}

// Keys of a tile. Tiles start at multiples of it in their sequence, whatever the queries are: the order of a row's sums
// depends on the row alone.
inline constexpr std::int64_t kKeys = 64;
// Queries of a tile: in the forward a tile of keys is brought in for twice as many rows.
inline constexpr std::int64_t kForwardRows = 128, kBackwardRows = 64;
// Rows that share an anchor of a channel gate beside their own keys.
inline constexpr std::int64_t kSub = 16;
// A tile whose columns are keys: room for a transpose's overhang, and no power of two between rows.
inline constexpr std::int64_t kKeysLd = kKeys + kPad;

inline Rows head_rows(const TensorView& x, std::int64_t row, std::int64_t begin, std::int64_t length, std::int64_t h) {
  if (!x || length <= 0) return {};
  return {x.at(row, begin, h), x.dtype, x.stride[1] * static_cast<std::int64_t>(size_of(x.dtype)),
          x.ndim > 3 ? x.stride[3] : 1};
}

// What the backward keeps of the forward for every query head and row: p_ij = e^{s_ij - m_i} norm_i.
struct RowStats {
  std::int64_t rows = 0;  // of a head
  float* m = nullptr;
  float* norm = nullptr;  // weight_i / sum of e^{s - m}, 0 for a row without keys
  float* t = nullptr;     // <do_i, o_i>
  float* ubar = nullptr;  // with r
  float* vbar = nullptr;  // <do_i, sum_j p_ij v_j>, with r

  void carve(Arena& arena, const AttnProblem& p) {
    rows = p.B * p.TQ;
    m = arena.floats(p.HQ * rows);
    norm = arena.floats(p.HQ * rows);
    t = arena.floats(p.HQ * rows);
    if (p.r) {
      ubar = arena.floats(p.HQ * rows);
      vbar = arena.floats(p.HQ * rows);
    }
  }
  std::int64_t at(const AttnProblem& p, const AttnSpan& s, std::int64_t h, std::int64_t i) const {
    return h * rows + s.row * p.TQ + s.q_begin + i;
  }
};

// Running sums of the gates, in double as only their differences enter an exponential: [HQ][B * TK] of g, and
// [HQ][B * TK][pad_up(K)] of gk. A sequence starts again.
struct GateSums {
  double* c = nullptr;
  double* p = nullptr;

  void carve(Arena& arena, const AttnProblem& a) {
    if (a.g) c = arena.take<double>(a.HQ * a.B * a.TK);
    if (a.gk) p = arena.take<double>(a.HQ * a.B * a.TK * pad_up(a.K));
  }
  const double* head(const AttnProblem& a, const AttnSpan& s, std::int64_t h) const {
    return c == nullptr ? nullptr : c + h * a.B * a.TK + s.row * a.TK + s.k_begin;
  }
  const double* channels(const AttnProblem& a, const AttnSpan& s, std::int64_t h) const {
    return p == nullptr ? nullptr : p + (h * a.B * a.TK + s.row * a.TK + s.k_begin) * pad_up(a.K);
  }
};

// e^g is 0 in fp32 below this, down to -inf, which masks use; a sum with a smaller gate in it would lose the digits of
// the gates beside it, or become NaN in a difference. A NaN stays one.
inline double attn_gate(double g) { return g < -1024.0 ? -1024.0 : g; }

inline void sum_gates(const AttnProblem& p, const GateSums& sums, ThreadPool& pool) {
  if (!p.g && !p.gk) return;
  pool.run(p.N * p.HQ, [&](std::int64_t task, int) {
    const std::int64_t h = task % p.HQ, kp = pad_up(p.K);
    const AttnSpan s = p.sequence(task / p.HQ);
    if (s.k_length <= 0) return;
    if (p.g) {
      double* c = const_cast<double*>(sums.head(p, s, h));
      double sum = 0.0;
      p.runs(s, task / p.HQ, 0, s.k_length, [&](std::int64_t row, std::int64_t at, std::int64_t n, std::int64_t j) {
        const Rows g = head_rows(p.g, row, at, n, h);
        for (std::int64_t i = 0; i < n; ++i) c[j + i] = sum += attn_gate(p.gate_scale * scalar_at(g, i));
      });
    }
    if (p.gk) {
      const Rows g = head_rows(p.gk, s.row, s.k_begin, s.k_length, h);
      double* c = const_cast<double*>(sums.channels(p, s, h));
      for (std::int64_t j = 0; j < s.k_length; ++j) {
        for (std::int64_t i = 0; i < kp; ++i) {
          const double before = j > 0 ? c[(j - 1) * kp + i] : 0.0;
          c[j * kp + i] = i < p.K ? before + attn_gate(scalar_at(g, j, i)) : 0.0;
        }
      }
    }
  });
}

// The forward's tiles of all rows: outputs, or, where `st` is given, what a backward needs of every row. `scratch` has
// attn_rows_bytes(p, st != nullptr) for each thread.
std::size_t attn_rows_bytes(const AttnProblem& p, bool stats);
void attn_rows(const AttnProblem& p, const GateSums& sums, const RowStats* st, ThreadPool& pool, std::byte* scratch);

// The keys that some of the queries [i0, i0 + M) see: both ends move upwards with the query.
inline KeyRange tile_range(const AttnProblem& p, const AttnSpan& s, std::int64_t n, std::int64_t i0, std::int64_t M) {
  return {p.visible(s, n, i0).lo, p.visible(s, n, i0 + M - 1).hi};
}

}  // namespace fla::cpu
