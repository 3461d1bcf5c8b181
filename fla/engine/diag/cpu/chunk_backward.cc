// Chunkwise backward of the diagonal-decay recurrence; linear_common.md, "Chunk of C tokens, key gate".
//   dA = lower(dO v^T)   dv = A^T dO + (k o e^{G_C - G}) D     D_prev = e^{G_C} o D + scale (q o e^G)^T dO
//   dq_i = scale e^{G_i} o (S_0 do_i) + scale sum_{j<=i} dA_ij e^{G_i - G_j} o k_j
//   dk_j = e^{G_C - G_j} o (D v_j)    + scale sum_{i>=j} dA_ij e^{G_i - G_j} o q_i
// task     one sequence and a few neighbouring heads: pass A keeps the state at every chunk's start, pass B walks the
//          chunks backwards
// layout   S and D are kept transposed, in panels [V, kBV] of key channels: then everything per key channel is
//          token-major, as the inputs and the gates are, and sums over V run down a panel. Only v, k and dv are
//          transposed
// gates    dg_t is the sum over all pairs (source before t, use at or after t). The diagonal pairs (i, i) and the
//          sources at or after t are left out of the sums from the start: with strong gates dg is far smaller than
//          they are, and their difference would be rounding noise. With a bonus (Read::Before) the pairs (i, i - 1)
//          have no decay between them either and are left out as well
#include <algorithm>
#include <cstdint>
#include <span>

#include "fla/engine/diag/cpu/entry.h"
#include "fla/engine/diag/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/prefetch.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/diag/cpu/chunk_backward.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/diag/cpu/chunk-inl.h"

#ifndef FLA_ENGINE_DIAG_CPU_CHUNK_BACKWARD_CC_ONCE
#define FLA_ENGINE_DIAG_CPU_CHUNK_BACKWARD_CC_ONCE
namespace fla::cpu {

inline constexpr std::int64_t kBackwardGroup = 8;

struct BackwardPlan {
  std::int64_t BT = 0, chunks = 0, group = 0, groups = 0, slots = 0;
  std::int64_t panels = 0, ldp = 0, panel_size = 0, state_size = 0;  // of a state: [panels][pad_up(V), ldp]
};

// A state is kept per chunk, so short chunks cost memory and long ones work: 32 tokens keep it below the inputs up to
// 256 channels (2 KB a token against 2.3 KB of bf16 at 128), 64 beyond.
inline BackwardPlan backward_plan(const DiagBackwardProblem& p, std::int64_t chunk, int threads) {
  BackwardPlan b;
  b.BT = chunk > 32 || std::max(p.K, p.V) > 256 ? 64 : 32;
  b.ldp = std::min(kBV, pad_up(p.K));
  b.panels = pad_up(p.K, b.ldp) / b.ldp;
  b.panel_size = pad_up(p.V) * b.ldp;
  b.state_size = b.panels * b.panel_size;
  b.chunks = std::max<std::int64_t>(1, (longest_sequence(p.cu_seqlens, p.T) + b.BT - 1) / b.BT);
  b.group = head_group(p, b.state_size, threads, kBackwardGroup);
  b.groups = (p.H + b.group - 1) / b.group;
  // Every slot has room for the longest sequence; in a batch of uneven ones all threads together may not need more than
  // one state per chunk that exists.
  std::int64_t existing = 0;
  for (std::int64_t n = 0; n < p.N; ++n) existing += (p.sequence(n).length + b.BT - 1) / b.BT;
  const std::int64_t affordable = existing * b.groups / b.chunks;
  b.slots = std::max<std::int64_t>(1, std::min({static_cast<std::int64_t>(threads), p.N * b.groups, affordable}));
  return b;
}

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct BackwardTiles {
  ChunkTiles chunk;
  float* states = nullptr;  // [group][chunks][panels][pad_up(V), ldp]
  float* d = nullptr;       // [group][panels][pad_up(V), ldp] D
  float* v = nullptr;       // [BT, ldv], then dv
  float* do_ = nullptr;     // [BT, ldv]
  float* vt = nullptr;      // [ldv, lt], then D^T (k o e^{G_C - G})^T
  float* da = nullptr;      // [BT, lt] dA strictly below the diagonal, times e^{G_i - G_j} for a head gate
  float* dq = nullptr;      // [BT, kp] dq_i / (scale e^{G_i - anchor}) without the diagonal
  float* u = nullptr;       // [BT, kp] dk_j / e^{anchor - G_j} without the diagonal and D
  float* tau = nullptr;     // [BT, kp] D v_j
  float* ke = nullptr;      // [BT, kp] k e^{G_C - G}; pass A
  float* gates = nullptr;   // [BT, kp] sum_{j<t} k_j tau_j, then dgk
  float* row = nullptr;     // [5, kp]
  float* delta = nullptr;   // [BT] <do_i, v_i>
  float* near = nullptr;    // [BT + 1] <do_i, v_{i-1}>, 0 at both ends; Read::Before
  float* tmp = nullptr;     // [kPad + 4, pad_up(V)]

  // Few tiles, so that L2 has room for a state, D and the next inputs: results take the memory of what is used up.
  void carve(Arena& arena, const BackwardPlan& b, std::int64_t K, std::int64_t V, KeyGate gate) {
    const std::int64_t kp = pad_up(K), lt = token_ld(b.BT), ldv = pad_up(V), rows = token_rows_padded(b.BT);
    chunk.carve(arena, b.BT, K, gate, true);
    states = arena.floats(b.group * b.chunks * b.state_size);
    d = arena.floats(b.group * b.state_size);
    v = arena.floats(rows * ldv);
    do_ = arena.floats(rows * ldv);
    vt = arena.floats(ldv * lt);
    da = arena.floats(rows * lt);
    dq = gate == KeyGate::Channel ? chunk.g : arena.floats(rows * kp);
    u = gate == KeyGate::Channel ? chunk.ka : arena.floats(rows * kp);
    tau = arena.floats(rows * kp);
    ke = gate == KeyGate::None ? chunk.k : chunk.qe;
    gates = chunk.qe;
    row = arena.floats(5 * kp);
    delta = arena.floats(b.BT);
    near = arena.floats(b.BT + 1);
    tmp = arena.floats((kPad + 4) * ldv);
  }
};

HWY_INLINE float sum_row(const float* x, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto s = hn::Zero(d);
  for (std::int64_t c = 0; c < n; c += lanes) s = hn::Add(s, hn::LoadU(d, x + c));
  return hn::GetLane(hn::SumOfLanes(d, s));
}

struct BackwardHead {
  Rows q, k, v, do_, dq, dk, dv, dg;
  ChunkGate gate;
  float* states = nullptr;  // [chunks][panels][pad_up(V), ldp]
  float* d = nullptr;       // [panels][pad_up(V), ldp]
  double* du = nullptr;     // [K] of this sequence; absent: not wanted
  bool dh0 = false;         // whether D's last value is wanted
};

// sum[c] = sum_j x[j, c] y[j, c]
HWY_INLINE void sum_products(const float* x, const float* y, std::int64_t ld, std::int64_t rows, std::int64_t columns,
                             float* sum) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < columns; c += lanes) {
    const auto add = [&](std::int64_t j, auto s)
                         HWY_ATTR { return hn::MulAdd(hn::LoadU(d, x + j * ld + c), hn::LoadU(d, y + j * ld + c), s); };
    auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
    std::int64_t j = 0;
    for (; j + 4 <= rows; j += 4) {
      s0 = add(j, s0);
      s1 = add(j + 1, s1);
      s2 = add(j + 2, s2);
      s3 = add(j + 3, s3);
    }
    for (; j < rows; ++j) s0 = add(j, s0);
    hn::StoreU(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), d, sum + c);
  }
}

// Rows [first, last) of x, of kp floats, times the row `by`.
HWY_INLINE void scale_by_row(float* x, std::int64_t kp, std::int64_t first, std::int64_t last, const float* by) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = first; i < last; ++i) {
    for (std::int64_t c = 0; c < kp; c += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, by + c), hn::LoadU(d, x + i * kp + c)), d, x + i * kp + c);
    }
  }
}

// ke and decay of C tokens, t.k being loaded. Sums of gates run from the chunk's end, so no exponent is positive and no
// anchor is needed. sum: [kp].
template <KeyGate kGate>
HWY_INLINE void keys_to_end(ChunkTiles& t, std::int64_t BT, std::int64_t K, const ChunkGate& gate, std::int64_t t0,
                            std::int64_t C, float* ke, float* sum) {
  if constexpr (kGate == KeyGate::None) return;
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), kp = pad_up(K);
  if constexpr (kGate == KeyGate::Head) {
    head_decays(t, gate, t0, C, token_ld(BT));
    std::fill(t.decay, t.decay + kp, t.eg[C - 1]);
    for (std::int64_t i = 0; i < C; ++i) {
      const auto s = hn::Set(d, t.ec[i]);
      for (std::int64_t c = 0; c < kp; c += lanes) {
        hn::StoreU(hn::Mul(s, hn::LoadU(d, t.k + i * kp + c)), d, ke + i * kp + c);
      }
    }
  } else {
    load_rows(gate.rows, t0, C, 0, K, t.g, kp);
    std::fill(sum, sum + kp, 0.0F);
    for (std::int64_t i = C - 1; i >= 0; --i) {
      for (std::int64_t c = 0; c < kp; c += lanes) {
        const auto x = hn::LoadU(d, sum + c);
        hn::StoreU(hn::Mul(exp_v(d, x), hn::LoadU(d, t.k + i * kp + c)), d, ke + i * kp + c);
        hn::StoreU(hn::Add(x, hn::LoadU(d, t.g + i * kp + c)), d, sum + c);
      }
    }
    for (std::int64_t c = 0; c < kp; c += lanes) hn::StoreU(exp_v(d, hn::LoadU(d, sum + c)), d, t.decay + c);
  }
}

// Pass A: the state at the start of chunk c + 1 from that of chunk c.
template <KeyGate kGate>
HWY_NOINLINE void backward_advance(const DiagBackwardProblem& p, const BackwardPlan& b, BackwardTiles& w,
                                   const BackwardHead& x, std::int64_t c, Prefetcher& ahead) {
  const std::int64_t K = p.K, V = p.V, kp = pad_up(K), ldv = pad_up(V), BT = b.BT;
  ChunkTiles& t = w.chunk;
  load_rows(x.k, c * BT, BT, 0, K, t.k, kp);
  load_rows(x.v, c * BT, BT, 0, V, w.v, ldv);
  keys_to_end<kGate>(t, BT, K, x.gate, c * BT, BT, w.ke, w.row);
  for (std::int64_t i = 0; i < b.panels; ++i) {
    const std::int64_t k0 = i * b.ldp;
    const float* state = x.states + c * b.state_size + i * b.panel_size;
    gemm<true>(V, pad_up(std::min(b.ldp, K - k0)), {w.v, ldv, w.ke + k0, kp, BT}, {}, Tri::None,
               {state, b.ldp, nullptr, kGate == KeyGate::None ? nullptr : t.decay + k0},
               x.states + (c + 1) * b.state_size + i * b.panel_size, b.ldp, -1, &ahead);
  }
}

// dq and u from dA, segment by segment; dq holds the part of S_0, before e^{anchor}. The queries of a segment's keys
// are their own rows or, with Read::Before, one row later each: row 0 then has no keys and no anchor.
template <KeyGate kGate, Read kRead>
HWY_NOINLINE void backward_scores(const BackwardTiles& w, ChunkTiles& t, std::int64_t C, std::int64_t K,
                                  std::int64_t lt, float* anchor, bool want_dq, bool want_dk) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), kp = pad_up(K);
  constexpr std::int64_t kLater = kRead == Read::Before ? 1 : 0;
  const auto end_of = [C](std::int64_t last) { return std::min(last + kLater, C); };
  const auto keys = [&](std::int64_t first, std::int64_t last) HWY_ATTR {
    const std::int64_t row = first + kLater;
    const float* da = w.da + row * lt;
    float* dq = w.dq + row * kp;
    gemm<false>(end_of(last) - row, kp, {da, lt, t.ka, kp, first}, {da + first, lt, t.ka + first * kp, kp, 0},
                Tri::Lower, {dq, kp, kGate == KeyGate::Head ? t.eg : nullptr}, dq, kp);
  };
  const auto queries = [&](std::int64_t first, std::int64_t last, bool newest) HWY_ATTR {
    const std::int64_t row = first + kLater, rows = end_of(last) - row;
    const float* da = w.da + row * lt;
    const float* qa = t.qa + row * kp;
    if (first > 0) {
      gemm<true>(first, kp, {da, lt, qa, kp, rows}, {}, Tri::None, {newest ? nullptr : w.u, kp}, w.u, kp);
    }
    gemm<true>(last - first, kp, {}, {da + first, lt, qa, kp, rows}, Tri::Upper,
               {newest ? nullptr : w.u + first * kp, kp}, w.u + first * kp, kp);
  };
  if constexpr (kGate != KeyGate::Channel) {
    if (want_dq) keys(0, t.segment[1]);
    if (want_dk) queries(0, t.segment[1], true);
    return;
  }
  std::fill(anchor, anchor + kp, 1.0F);
  for (std::int64_t g = 0; want_dq && g < t.segments; ++g) {
    const std::int64_t first = t.segment[g], last = t.segment[g + 1];
    const float* jump = t.jump + first * kp;
    for (std::int64_t c = 0; c < kp; c += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, jump + c), hn::LoadU(d, anchor + c)), d, anchor + c);
    }
    if (g > 0) scale_by_row(t.ka, kp, 0, first, jump);
    scale_by_row(w.dq, kp, first + kLater, end_of(last), anchor);
    keys(first, last);
  }
  for (std::int64_t g = t.segments - 1; want_dk && g >= 0; --g) {
    const std::int64_t last = t.segment[g + 1];
    const bool newest = g == t.segments - 1;
    if (!newest) scale_by_row(w.u, kp, 0, last, t.jump + last * kp);
    queries(t.segment[g], last, newest);
  }
}

// Pass B: chunk [t0, t0 + C) of one head, with the state that enters it; D is carried to the chunk before.
template <KeyGate kGate, Read kRead>
HWY_NOINLINE void backward_chunk(const DiagBackwardProblem& p, const BackwardPlan& b, BackwardTiles& w,
                                 const BackwardHead& x, std::int64_t t0, std::int64_t C, const float* states,
                                 Prefetcher& ahead) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, V = p.V, kp = pad_up(K), lt = token_ld(b.BT), ldv = pad_up(V), BT = b.BT;
  const float scale = static_cast<float>(p.scale);
  constexpr bool kBefore = kRead == Read::Before;
  const bool want_dg = static_cast<bool>(x.dg), want_du = kBefore && x.du != nullptr;
  const bool want_dq = x.dq || want_dg || want_du, want_dk = x.dk || want_dg;
  ChunkTiles& t = w.chunk;
  load_rows(x.q, t0, C, 0, K, t.q, kp);
  load_rows(x.k, t0, C, 0, K, t.k, kp);
  load_rows(x.v, t0, C, 0, V, w.v, ldv);
  if (x.do_) {
    load_rows(x.do_, t0, C, 0, V, w.do_, ldv);
  } else {
    std::fill(w.do_, w.do_ + C * ldv, 0.0F);
  }
  // Queries alone need neither scores nor D.
  const bool want_sources = want_dk || x.dv || x.dh0;
  prepare_chunk<kGate, kRead>(t, BT, K, x.gate, t0, C, scale, want_sources || kGate != KeyGate::Channel);
  for (std::int64_t i = 0; i < C; ++i) std::fill(t.a + i * lt + i + 1, t.a + (i + 1) * lt, 0.0F);

  if (want_dq || want_dk) {
    transpose(w.v, ldv, C, V, w.vt, lt);
    gemm<false>(C, C, {w.do_, ldv, w.vt, lt, V}, {}, Tri::None, {}, w.da, lt, 0);
    for (std::int64_t i = 0; i < C; ++i) {
      float* da = w.da + i * lt;
      w.delta[i] = da[i];
      for (std::int64_t j = 0; kGate == KeyGate::Head && j < i; j += lanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, t.mask + i * lt + j), hn::LoadU(d, da + j)), d, da + j);
      }
      if (kBefore) w.near[i] = i > 0 ? da[i - 1] : 0.0F;
      std::fill(da + (kBefore && i > 0 ? i - 1 : i), da + lt, 0.0F);
    }
    if (kBefore) w.near[C] = 0.0F;
  }
  float* rowsum = w.row;  // rowsum_v(S_0 o D)
  for (std::int64_t i = 0; i < b.panels; ++i) {
    const std::int64_t k0 = i * b.ldp, width = std::min(b.ldp, K - k0), padded = pad_up(width);
    const float* state = states + i * b.panel_size;
    float* D = x.d + i * b.panel_size;
    if (want_dq) gemm<false>(C, padded, {w.do_, ldv, state, b.ldp, V}, {}, Tri::None, {}, w.dq + k0, kp);
    if (want_dg) sum_products(state, D, b.ldp, V, padded, rowsum + k0);
    if (want_dk) gemm<false>(C, padded, {w.v, ldv, D, b.ldp, V}, {}, Tri::None, {}, w.tau + k0, kp);
    if (x.dv) {
      gemm<false>(V, C, {D, b.ldp, t.kt + k0 * lt, lt, width}, {}, Tri::None, {i == 0 ? nullptr : w.vt, lt}, w.vt, lt);
    }
    if (!want_sources) continue;
    gemm<true>(V, padded, {w.do_, ldv, t.qe + k0, kp, C}, {}, Tri::None,
               {D, b.ldp, nullptr, kGate == KeyGate::None ? nullptr : t.decay + k0}, D, b.ldp, -1, &ahead);
  }
  if (x.dv) {
    transpose(w.vt, lt, V, C, w.v, ldv);
    gemm<true>(C, V, {}, {t.a, lt, w.do_, ldv, C}, Tri::Upper, {w.v, ldv}, w.v, ldv);
    store_rows(w.v, ldv, x.dv, t0, C, 0, V);
  }
  if (!want_dq && !want_dk) return;
  backward_scores<kGate, kRead>(w, t, C, K, lt, w.row + kp, want_dq, want_dk);

  // Token by token: finish dq and dk in place, keep what the gate needs. Before the loop body of row i:
  //   carry = sum_{j>i} (q_j dq'_j - k_j dk'_j),  move = e^{G_C - anchor of i's segment}
  // With Read::Before q_i dq'_i joins carry behind row i, whose gate its query does not see.
  // The sum over earlier sources needs the other direction first.
  float* move = w.row + kp;
  float* carry = w.row + 2 * kp;
  float* prefix = w.row + 3 * kp;
  float* du = w.row + 4 * kp;
  if (want_du) std::fill(du, du + kp, 0.0F);
  const auto vscale = hn::Set(d, scale);
  std::fill(carry, carry + kp, 0.0F);
  if (kGate == KeyGate::Channel && C > 0) {
    // e^{G_C - anchor} of the last segment is e of the last row.
    std::copy(t.e + (C - 1) * kp, t.e + C * kp, move);
  }
  std::int64_t seg = t.segments - 1;
  for (std::int64_t i = C - 1; i >= 0; --i) {
    if (kGate == KeyGate::Channel && i < t.segment[seg]) {
      const float* jump = t.jump + t.segment[seg] * kp;
      for (std::int64_t c = 0; c < kp; c += lanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, jump + c), hn::LoadU(d, move + c)), d, move + c);
      }
      --seg;
    }
    const float* qi = t.q + i * kp;
    const float* ki = t.k + i * kp;
    float* dqi = w.dq + i * kp;
    float* ui = w.u + i * kp;
    float* taui = w.tau + i * kp;
    const auto diag = hn::Set(d, scale * w.delta[i]);
    // Read::Before: the query has the decay of the row before, which row 0 has not.
    const bool inner = !kBefore || i > 0;
    const float* eq = t.e + (kBefore && inner ? i - 1 : i) * kp;
    const auto from_before = hn::Set(d, kBefore ? scale * w.near[i] : 0.0F),
               to_after = hn::Set(d, kBefore ? scale * w.near[i + 1] : 0.0F);
    auto used = hn::Zero(d), made = hn::Zero(d);
    for (std::int64_t c = 0; c < K; c += lanes) {
      const auto qv = hn::LoadU(d, qi + c), kv = hn::LoadU(d, ki + c);
      auto gq = want_dq ? hn::Mul(vscale, hn::LoadU(d, dqi + c)) : hn::Zero(d);
      auto gk = want_dk ? hn::LoadU(d, ui + c) : hn::Zero(d);
      auto tau = want_dk ? hn::LoadU(d, taui + c) : hn::Zero(d);
      if constexpr (kGate == KeyGate::Channel) {
        const auto e = hn::LoadU(d, t.e + i * kp + c);
        const auto inverse = hn::Div(hn::Set(d, 1.0F), e);
        if (inner) gq = hn::Mul(gq, kBefore ? hn::LoadU(d, eq + c) : e);
        gk = hn::Mul(gk, inverse);
        tau = hn::Mul(tau, hn::Mul(hn::LoadU(d, move + c), inverse));
      }
      if constexpr (kGate == KeyGate::Head) tau = hn::Mul(tau, hn::Set(d, t.ec[i]));
      if constexpr (kBefore) {
        const auto bonus = hn::Mul(diag, hn::LoadU(d, t.u + c));
        if (want_dq) {
          const auto before = inner ? hn::LoadU(d, ki - kp + c) : hn::Zero(d);
          hn::StoreU(hn::MulAdd(bonus, kv, hn::MulAdd(from_before, before, gq)), d, dqi + c);
        }
        if (want_dk) {
          const auto after = i + 1 < C ? hn::LoadU(d, qi + kp + c) : hn::Zero(d);
          hn::StoreU(hn::MulAdd(bonus, qv, hn::MulAdd(to_after, after, hn::Add(gk, tau))), d, ui + c);
        }
        if (want_du) hn::StoreU(hn::MulAdd(hn::Mul(diag, qv), kv, hn::LoadU(d, du + c)), d, du + c);
      } else {
        if (want_dq) hn::StoreU(hn::MulAdd(diag, kv, gq), d, dqi + c);
        if (want_dk) hn::StoreU(hn::MulAdd(diag, qv, hn::Add(gk, tau)), d, ui + c);
      }
      if (want_dg) {
        const auto net = hn::Sub(hn::Mul(qv, gq), hn::Mul(kv, gk));
        const auto y = hn::Mul(kv, tau);
        if constexpr (kBefore) {
          const auto sum = hn::NegMulAdd(kv, gk, hn::LoadU(d, carry + c));
          hn::StoreU(hn::MulAdd(qv, gq, sum), d, carry + c);
          hn::StoreU(sum, d, w.gates + i * kp + c);
          hn::StoreU(y, d, taui + c);
        } else if constexpr (kGate == KeyGate::Channel) {
          const auto sum = hn::Add(hn::LoadU(d, carry + c), net);
          hn::StoreU(sum, d, carry + c);
          hn::StoreU(sum, d, w.gates + i * kp + c);
          hn::StoreU(y, d, taui + c);
        } else {
          used = hn::Add(used, net);
          made = hn::Add(made, y);
        }
      }
    }
    if (want_dg && kGate == KeyGate::Head) {
      carry[0] += hn::GetLane(hn::SumOfLanes(d, used));
      w.gates[i * kp] = carry[0];
      taui[0] = hn::GetLane(hn::SumOfLanes(d, made));
    }
  }
  for (std::int64_t c = 0; want_du && c < K; ++c) x.du[c] += static_cast<double>(du[c]);
  if (x.dq) store_rows(w.dq, kp, x.dq, t0, C, 0, K);
  if (x.dk) store_rows(w.u, kp, x.dk, t0, C, 0, K);
  if (want_dg && kGate == KeyGate::Channel) {
    for (std::int64_t c = 0; c < K; c += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, t.decay + c), hn::LoadU(d, rowsum + c)), d, prefix + c);
    }
    for (std::int64_t i = 0; i < C; ++i) {
      for (std::int64_t c = 0; c < K; c += lanes) {
        const auto before = hn::LoadU(d, prefix + c);
        hn::StoreU(hn::Add(before, hn::LoadU(d, w.gates + i * kp + c)), d, w.gates + i * kp + c);
        hn::StoreU(hn::Add(before, hn::LoadU(d, w.tau + i * kp + c)), d, prefix + c);
      }
    }
    store_rows(w.gates, kp, x.dg, t0, C, 0, K);
  }
  if (want_dg && kGate == KeyGate::Head) {
    float before = t.decay[0] * sum_row(rowsum, kp);
    for (std::int64_t i = 0; i < C; ++i) {
      const float sum = w.gates[i * kp] + before;
      store_row(&sum, x.dg.at(t0 + i, 0), x.dg.dtype, 1, 1);
      before += w.tau[i * kp];
    }
  }
}

template <KeyGate kGate, Read kRead = Read::After>
HWY_NOINLINE void backward_task(const DiagBackwardProblem& p, const BackwardPlan& b, BackwardTiles& w, std::int64_t n,
                                std::int64_t h_begin, std::int64_t heads, double* du) {
  const std::int64_t K = p.K, V = p.V, BT = b.BT;
  const Sequence s = p.sequence(n);
  const std::int64_t chunks = (s.length + BT - 1) / BT;
  const TensorView& dgate = kGate == KeyGate::Channel ? p.dgk : p.dg;
  const bool want_dg = kGate != KeyGate::None && dgate, want_states = p.dq || want_dg || du != nullptr;
  const auto width_of = [&](std::int64_t i) { return std::min(b.ldp, K - i * b.ldp); };

  const bool stream = beyond_caches({&p.dq, &p.dk, &p.dv, &p.dgk});
  BackwardHead head[kBackwardGroup];
  for (std::int64_t j = 0; j < heads; ++j) {
    const std::int64_t h = h_begin + j;
    BackwardHead& x = head[j];
    x.q = token_rows(p.q, p, s, h);
    x.k = token_rows(p.k, p, s, h);
    x.v = token_rows(p.v, p, s, h);
    x.do_ = token_rows(p.do_, p, s, h);
    x.dq = token_rows(p.dq, p, s, h);
    x.dk = token_rows(p.dk, p, s, h);
    x.dv = token_rows(p.dv, p, s, h);
    x.dh0 = static_cast<bool>(p.dh0);
    if (want_dg) x.dg = token_rows(dgate, p, s, h);
    for (Rows* r : {&x.dq, &x.dk, &x.dv, &x.dg}) r->stream = stream;
    if (kGate == KeyGate::Channel) x.gate = {token_rows(p.gk, p, s, h), 0.0, bonus_row(p, h)};
    if (kGate == KeyGate::Head) x.gate = {token_rows(p.g, p, s, h), p.g ? 0.0 : p.head.at(h), {}};
    if (du != nullptr) {
      x.du = du + (n * p.H + h) * K;
      std::fill(x.du, x.du + K, 0.0);
    }
    x.states = w.states + j * b.chunks * b.state_size;
    x.d = w.d + j * b.state_size;
    const auto load = [&](const Rows& from, std::int64_t i, float* to) HWY_ATTR {
      if (from) return load_state(from, V, i * b.ldp, width_of(i), to + i * b.panel_size, b.ldp, w.tmp);
      std::fill(to + i * b.panel_size, to + (i + 1) * b.panel_size, 0.0F);
    };
    for (std::int64_t i = 0; i < b.panels; ++i) {
      load(transposed_state_rows(p.dht, n, h), i, x.d);
      if (chunks > 0 && want_states) load(transposed_state_rows(p.h0, n, h), i, x.states);
    }
  }

  Prefetcher ahead;
  const auto fetch = [&](const TensorView& x, const Rows& rows, std::int64_t t0, std::int64_t width) {
    const std::int64_t bytes = heads * width * static_cast<std::int64_t>(size_of(x.dtype));
    if (rows && x.stride[2] == width && bytes >= kPrefetchBytes) {
      ahead.add(rows, t0, std::min(BT, s.length - t0), 0, heads * width);
    }
  };
  for (std::int64_t c = 0; want_states && c + 1 < chunks; ++c) {
    const std::int64_t next = (c + 1) * BT;
    ahead.clear();
    fetch(p.k, head[0].k, next, K);
    fetch(p.v, head[0].v, next, V);
    if (kGate == KeyGate::Channel) fetch(p.gk, head[0].gate.rows, next, K);
    ahead.spread(heads * b.panels * (V / kMR + 1));
    for (std::int64_t j = 0; j < heads; ++j) backward_advance<kGate>(p, b, w, head[j], c, ahead);
  }
  for (std::int64_t c = chunks - 1; c >= 0; --c) {
    const std::int64_t t0 = c * BT, C = std::min(BT, s.length - t0), next = t0 - BT;
    ahead.clear();
    if (next >= 0) {
      fetch(p.q, head[0].q, next, K);
      fetch(p.k, head[0].k, next, K);
      fetch(p.v, head[0].v, next, V);
      fetch(p.do_, head[0].do_, next, V);
      if (kGate == KeyGate::Channel) fetch(p.gk, head[0].gate.rows, next, K);
    }
    ahead.spread(heads * b.panels * (V / kMR + 1));
    for (std::int64_t j = 0; j < heads; ++j) {
      backward_chunk<kGate, kRead>(p, b, w, head[j], t0, C, head[j].states + c * b.state_size, ahead);
    }
  }
  for (std::int64_t j = 0; j < heads; ++j) {
    const Rows dh0 = transposed_state_rows(p.dh0, n, h_begin + j);
    for (std::int64_t i = 0; dh0 && i < b.panels; ++i) {
      store_state(head[j].d + i * b.panel_size, b.ldp, dh0, V, i * b.ldp, width_of(i), w.tmp);
    }
  }
  hwy::FlushStream();
}

std::size_t backward_bytes(const DiagBackwardProblem& p, const BackwardPlan& b) {
  Arena arena;
  BackwardTiles w;
  w.carve(arena, b, p.K, p.V, key_gate(p));
  return arena.bytes();
}

// du: [N, H, K]
void backward(const DiagBackwardProblem& p, const BackwardPlan& b, ThreadPool& pool, double* du, std::byte* workspace) {
  const KeyGate gate = key_gate(p);
  const std::size_t bytes = backward_bytes(p, b);
  run_items(pool, p.N * b.groups, b.slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    BackwardTiles w;
    w.carve(arena, b, p.K, p.V, gate);
    const std::int64_t n = item / b.groups, h = item % b.groups * b.group, heads = std::min(b.group, p.H - h);
    switch (gate) {
      case KeyGate::None: return backward_task<KeyGate::None>(p, b, w, n, h, heads, nullptr);
      case KeyGate::Head: return backward_task<KeyGate::Head>(p, b, w, n, h, heads, nullptr);
      case KeyGate::Channel:
        if (p.u) return backward_task<KeyGate::Channel, Read::Before>(p, b, w, n, h, heads, du);
        return backward_task<KeyGate::Channel>(p, b, w, n, h, heads, nullptr);
    }
  });
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(backward_bytes);
HWY_EXPORT(backward);

namespace {

// The bonus' gradient by sequences, before the tiles.
double* place_du(const DiagBackwardProblem& p, Arena& arena) {
  return p.du ? arena.take<double>(p.N * p.H * p.K) : nullptr;
}

// du: [sequences, H, K].
void sum_du(const DiagBackwardProblem& p, std::span<const double> du) {
  const auto sequence = static_cast<std::size_t>(p.H * p.K);
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (std::int64_t c = 0; c < p.K; ++c) {
      double sum = 0.0;
      for (auto at = static_cast<std::size_t>(h * p.K + c); at < du.size(); at += sequence) sum += du[at];
      store_element(p.du.at(h, c), p.du.dtype, sum);
    }
  }
}

}  // namespace

std::size_t diag_chunk_backward_workspace(const DiagBackwardProblem& p, std::int64_t chunk, int threads) {
  const BackwardPlan b = backward_plan(p, chunk, threads);
  Arena arena;
  place_du(p, arena);
  return arena.bytes() + HWY_DYNAMIC_DISPATCH(backward_bytes)(p, b) * static_cast<std::size_t>(b.slots);
}

Status diag_chunk_backward(const DiagBackwardProblem& p, std::int64_t chunk, ThreadPool& pool,
                           std::span<std::byte> workspace) {
  if (p.gv) return {Code::Unsupported, "diag_chunk_backward: gv needs the step form"};
  if (p.N == 0 || p.H == 0) {
    if (p.du) sum_du(p, {});
    return {};
  }
  if (workspace.size() < diag_chunk_backward_workspace(p, chunk, pool.size())) {
    return {Code::OutOfMemory, "diag_chunk_backward: workspace too small"};
  }
  Arena arena(workspace.data());
  double* du = place_du(p, arena);
  HWY_DYNAMIC_DISPATCH(backward)(p, backward_plan(p, chunk, pool.size()), pool, du, arena.take<std::byte>(0));
  if (p.du) sum_du(p, {du, static_cast<std::size_t>(p.N * p.H * p.K)});
  return {};
}

}  // namespace fla::cpu
#endif
