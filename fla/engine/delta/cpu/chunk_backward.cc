// Chunkwise backward of the delta-rule recurrences; delta_common.md, forms D and G in the notation of
// chunk.cc (n reads, s writes x, s1 writes v; D = gradient of S_C).
//   y = (I - N)^{-T} (P^T dO + (s o e^{G_C-G}) D)         Delta: y is the gradient of vbar
//   dP = lower(dO x^T)   dN = strict(y x^T)   dP1 = lower(dO v^T)   dN1 = strict(y v^T)
//   dq_i = scale e^{G_i} o (S_0 do_i) + scale sum_j e^{G_i-G_j} o (dP_ij s_j + dP1_ij s1_j)      dn_i likewise with y,
//   dN ds_j = e^{G_C-G_j} o (D x_j) + sum_i e^{..} o (dP_ij scale q_i + dN_ij n_i)                   ds1_j with v, dP1,
//   dN1 D_prev = e^{G_C} o D + q^^T dO + n^^T y
// task     one sequence and some key heads; the value heads of a key head go in turn, so that the sums over them are
//          fp32 and in one order
// states   pass A keeps the state of every segment of one chunk, or two where that were too much memory, and x where
//          the workspace allows; pass B walks the segments backwards, makes a segment's other state (and x) again, and
//          walks its chunks
// layout   sums over V leave [K, C] tiles, as S and D are used as they lie; everything else is token-major
// gates    dg_t is the sum over pairs (source before t, use at or after t). Pairs without a gate between them and the
//          uses of sources at or after t are left out of the sums from the start, as in diag's chunk_backward.cc. Without
//          a gate between them are the diagonal of dP, where n reads before its decay the row beside the diagonal of
//          dN, and all rows of a token that has several
#include <algorithm>
#include <cstdint>

#include "fla/engine/delta/cpu/entry.h"
#include "fla/engine/delta/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/prefetch.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/delta/cpu/chunk_backward.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/delta/cpu/rows-inl.h"

#ifndef FLA_ENGINE_DELTA_CPU_CHUNK_BACKWARD_CC_ONCE
#define FLA_ENGINE_DELTA_CPU_CHUNK_BACKWARD_CC_ONCE
namespace fla::cpu {

inline constexpr std::int64_t kBackwardBT = 32;
// At 64 rows a kept state costs K V / 64 floats a row, below the inputs and outputs up to 256 channels. At 32 no state
// is made twice.
inline constexpr std::int64_t kSegmentChunks = 2;
inline constexpr std::int64_t kSegmentRows = kSegmentChunks * kBackwardBT;  // at most

// Key heads that one task interleaves at most, segment by segment, for the reason given at kHeadGroup.
inline constexpr std::int64_t kBackwardHeads = 8;

struct DeltaBackwardPlan {
  std::int64_t panels = 0, segment_rows = 0, segments = 0, group = 1, groups = 0,
               slots = 0;  // group: key heads per task
  // Between rows of values. Were it a power of two, strips of the update of D would share a few sets of L1, which took
  // a seventh longer.
  std::int64_t ldv = 0;
  bool keep_x = false;
};

inline DeltaBackwardPlan delta_backward_plan(const DeltaBackwardProblem& p, int threads, std::int64_t segment_rows) {
  DeltaBackwardPlan b;
  b.segment_rows = segment_rows;
  b.panels = pad_up(p.V, kBV) / kBV;
  b.ldv = b.panels * kBV + kPad;
  const auto segments_of = [&](std::int64_t tokens) { return (tokens * p.R + segment_rows - 1) / segment_rows; };
  b.segments = std::max<std::int64_t>(1, segments_of(longest_sequence(p.cu_seqlens, p.T)));
  std::int64_t existing = 0;
  for (std::int64_t n = 0; n < p.N; ++n) existing += segments_of(p.sequence(n).length);
  // Every slot has room for the longest sequence; in a batch of uneven ones all threads together may not need more than
  // one state per segment that exists.
  const auto divide = [&](std::int64_t group) {
    b.group = group;
    b.groups = (p.H + group - 1) / group;
    b.slots = std::max<std::int64_t>(
        1, std::min({static_cast<std::int64_t>(threads), p.N * b.groups, existing * b.groups / b.segments}));
  };
  // States and x together must stay below q, k, v, do and the gradients of the first three.
  const auto fits = [&](bool x) {
    const std::int64_t kept = b.slots * b.group * p.group() * b.segments * 4;
    const std::int64_t floats = b.panels * kBV * pad_up(p.K) + (x ? segment_rows * b.ldv : 0);
    const std::int64_t row = static_cast<std::int64_t>(size_of(p.q.dtype)) * (4 * p.H * p.K + 3 * p.HV * p.V);
    return kept * floats <= p.B * p.T * p.R * row;
  };
  divide(1);
  b.keep_x = fits(true);
  for (std::int64_t g = 2; g <= std::min<std::int64_t>(kBackwardHeads, p.H); g *= 2) {
    const DeltaBackwardPlan smaller = b;
    divide(g);
    const std::int64_t tasks = p.N * b.groups;
    const bool even = tasks >= std::int64_t{4} * threads || (tasks % threads == 0 && p.H % g == 0);
    if (even && fits(b.keep_x)) continue;
    b = smaller;
    break;
  }
  return b;
}

inline DeltaBackwardPlan delta_backward_plan(const DeltaBackwardProblem& p, int threads) {
  const DeltaBackwardPlan one = delta_backward_plan(p, threads, kBackwardBT),
                          two = delta_backward_plan(p, threads, kSegmentRows);
  return one.keep_x && one.group == two.group ? one : two;
}

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whether a source and a later row that uses it, which are not the same row, can be without a gate between them.
inline bool gates_skip_pairs(const DeltaProblem& p) {
  return delta_gate(p) != KeyGate::None && (p.R > 1 || reads_before_decay(p));
}

// Two groups of token columns side by side.
constexpr std::int64_t kPairLd = 2 * kBackwardBT + kPad;

struct DeltaBackwardTiles {
  DeltaTiles chunk[kSegmentChunks];
  GroupSums sums;           // kSegmentRows rows
  float* kept = nullptr;    // [value heads][segments][panels][pad_up(K), kBV]
  float* kept_x = nullptr;  // [value heads][segments - 1][segment_rows, ldv]; keep_x
  float* states = nullptr;  // [kSegmentChunks - 1][panels][...], states of a segment after its first chunk
  float* d = nullptr;       // [value heads][panels][...] D
  float* x = nullptr;       // [kSegmentChunks][rows, ldv]
  float* v = nullptr;       // the same; General
  float* do_ = nullptr;     // [rows, ldv]
  float* y = nullptr;       // [rows, ldv]
  float* dv = nullptr;      // [rows, ldv]; General
  float* xt = nullptr;      // [ldv, lt]
  float* vt = nullptr;      // [ldv, lt]; General
  float* dyt = nullptr;     // [ldv, kPairLd] dO | y
  float *dP = nullptr, *dN = nullptr, *dP1 = nullptr,
        *dN1 = nullptr;  // squares, off the diagonal, with decay (head gate)
  float* sdy = nullptr;  // [pad_up(K), kPairLd] S_0 do_i | S_0 y_i
  float* dx = nullptr;   // [pad_up(K), lt] D x_j
  float* dx1 = nullptr;  // [pad_up(K), lt] D v_j; General
  float *dq = nullptr, *dn = nullptr, *tau = nullptr, *tau1 = nullptr, *u = nullptr, *u1 = nullptr;  // [lt, pad_up(K)]
  float* gates = nullptr;                                       // [BT, pad_up(K)]; Head
  float* row = nullptr;                                         // [4, pad_up(K)]
  float* partial = nullptr;                                     // [K, kPad] rowsum_v(S_0 o D) by lanes
  float *delta = nullptr, *delta1 = nullptr, *dbeta = nullptr;  // [BT] <do_i, x_i>, <do_i, v_i>
  // [rows, lt] what is left out of dP, dN, dP1, dN1 besides the diagonal; only where gates_skip_pairs
  float *near_q = nullptr, *near_n = nullptr, *near_q1 = nullptr, *near_n1 = nullptr;
  float* values = nullptr;  // [2, ldv]
  float* o = nullptr;       // [BT, kBV]
  float* tmp = nullptr;     // [kPad + 4, pad_up(max(K, V))]

  void carve(Arena& arena, const DeltaProblem& p, const DeltaBackwardPlan& b) {
    const std::int64_t kp = pad_up(p.K), lt = token_ld(kBackwardBT), rows = token_rows_padded(kBackwardBT);
    const std::int64_t ldv = b.ldv, state = b.panels * kp * kBV;
    const bool general = p.erase == Erase::General;
    for (DeltaTiles& t : chunk) t.carve(arena, p, kBackwardBT, true);
    sums.carve(arena, p, kSegmentRows);
    kept = arena.floats(b.group * p.group() * b.segments * state);
    if (b.keep_x) kept_x = arena.floats(b.group * p.group() * (b.segments - 1) * b.segment_rows * ldv);
    states = arena.floats((kSegmentChunks - 1) * state);
    d = arena.floats(b.group * p.group() * state);
    x = arena.floats(kSegmentChunks * rows * ldv);
    if (general) v = arena.floats(kSegmentChunks * rows * ldv);
    do_ = arena.floats(rows * ldv);
    y = arena.floats(rows * ldv);
    if (general) dv = arena.floats(rows * ldv);
    xt = arena.floats(ldv * lt);
    if (general) vt = arena.floats(ldv * lt);
    dyt = arena.floats(ldv * kPairLd);
    for (float** q : {&dP, &dN}) *q = arena.floats(rows * lt);
    if (general) {
      for (float** q : {&dP1, &dN1}) *q = arena.floats(rows * lt);
    }
    sdy = arena.floats(kp * kPairLd);
    dx = arena.floats(kp * lt);
    if (general) dx1 = arena.floats(kp * lt);
    for (float** q : {&dq, &dn, &tau, &u}) *q = arena.floats(lt * kp);
    if (general) {
      for (float** q : {&tau1, &u1}) *q = arena.floats(lt * kp);
    }
    if (delta_gate(p) == KeyGate::Head) gates = arena.floats(kBackwardBT * kp);
    row = arena.floats(4 * kp);
    partial = arena.floats(kp * kPad);
    for (float** q : {&delta, &delta1, &dbeta}) *q = arena.floats(kBackwardBT);
    if (gates_skip_pairs(p)) {
      for (float** q : {&near_q, &near_n}) *q = arena.floats(rows * lt);
      if (general) {
        for (float** q : {&near_q1, &near_n1}) *q = arena.floats(rows * lt);
      }
    }
    values = arena.floats(2 * ldv);
    o = arena.floats(kBackwardBT * kBV);
    tmp = arena.floats((kPad + 4) * pad_up(std::max(p.K, p.V)));
  }
  // A group of one value head has its sums where the vectors' gradients are, one chunk at a time.
  GroupSums group_sums(const DeltaProblem& p) const {
    GroupSums s = sums;
    if (p.group() > 1) return s;
    s.dq = dq;
    if (p.erase == Erase::General) {
      s.dr = dn;
      s.dw = u;
      s.dk = u1;
    } else {
      if (p.erase == Erase::Other) s.dr = dn;
      (p.w ? s.dw : s.dk) = u;
    }
    return s;
  }
};

// The first source of row i that has no gate between them, i itself where there is none: row i reads at the level of row
// i - shift, whose token begins there.
HWY_INLINE std::int64_t first_near(std::int64_t i, std::int64_t shift, std::int64_t t0, std::int64_t R) {
  return i == 0 ? 0 : std::clamp<std::int64_t>(i - shift - (t0 + i - shift) % R, 0, i);
}

// Off the diagonal of a square of score gradients: the diagonal goes to `diagonal` (or nowhere), what lies above
// becomes zero, and a head gate's decay is applied, from `shift` rows above. With `near` the
// pairs without a gate between them move there.
template <KeyGate kGate>
HWY_NOINLINE void strict_scores(float* a, std::int64_t lt, std::int64_t C, const float* mask, std::int64_t shift,
                                float* diagonal, float* near, std::int64_t t0, std::int64_t R) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < C; ++i) {
    float* r = a + i * lt;
    if (diagonal != nullptr) diagonal[i] = r[i];
    if (kGate == KeyGate::Head && i > 0) {
      const float* m = mask + (i - shift) * lt;
      for (std::int64_t j = 0; j < i; j += lanes)
        hn::StoreU(hn::Mul(hn::LoadU(d, m + j), hn::LoadU(d, r + j)), d, r + j);
    }
    const std::int64_t end = near != nullptr ? first_near(i, shift, t0, R) : i;
    if (near != nullptr) std::copy(r + end, r + i, near + i * lt + end);
    std::fill(r + end, r + lt, 0.0F);
  }
}

// rowsum_v(x o y) of a panel: a channel gate's per row into sum, else, as only their total counts, into one vector.
template <KeyGate kGate>
HWY_NOINLINE void add_products(const float* x, const float* y, std::int64_t K, std::int64_t columns, float* partial) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto total = hn::Zero(d);
  for (std::int64_t c = 0; c < K; ++c) {
    auto sum = hn::Zero(d);
    for (std::int64_t j = 0; j < columns; j += lanes) {
      sum = hn::MulAdd(hn::LoadU(d, x + c * kBV + j), hn::LoadU(d, y + c * kBV + j), sum);
    }
    if constexpr (kGate == KeyGate::Channel) {
      hn::StoreU(hn::Add(sum, hn::LoadU(d, partial + c * kPad)), d, partial + c * kPad);
    } else {
      total = hn::Add(total, sum);
    }
  }
  if (kGate != KeyGate::Channel) hn::StoreU(hn::Add(total, hn::LoadU(d, partial)), d, partial);
}

// Rows [lo, hi) times the row `by`, in place.
inline HWY_NOINLINE void scale_by_row(float* x, std::int64_t ld, std::int64_t lo, std::int64_t hi, const float* by) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = lo; i < hi; ++i) {
    for (std::int64_t c = 0; c < ld; c += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, by + c), hn::LoadU(d, x + i * ld + c)), d, x + i * ld + c);
    }
  }
}

// dq, dn (before the factors scale and e of their own row) and u, u1 (before 1 / e) from the scores' gradients.
template <DeltaKind kKind, KeyGate kGate>
HWY_NOINLINE void chunk_vectors(DeltaBackwardTiles& w, DeltaTiles& t, std::int64_t K, std::int64_t C,
                                std::int64_t shift) {
  constexpr bool kGeneral = kKind == DeltaKind::General;
  const std::int64_t kp = pad_up(K), lt = token_ld(kBackwardBT);
  float* ep = w.row;
  std::fill(ep, ep + kp, 1.0F);
  // Rows [lo, hi) += a's lower triangle times the rows of s.
  const auto lower = [&](const float* a, const float* rows, std::int64_t lo, std::int64_t hi, const float* scale,
                         float* to) HWY_ATTR {
    gemm<false>(hi - lo, K, {a + lo * lt, lt, rows, kp, lo}, {a + lo * lt + lo, lt, rows + lo * kp, kp, 0}, Tri::Lower,
                {to + lo * kp, kp, scale}, to + lo * kp, kp);
  };
  for (std::int64_t g = 0; g < t.segments; ++g) {
    const std::int64_t first = t.segment[g], last = t.segment[g + 1];
    std::int64_t lo = first + shift, hi = std::min(last + shift, C);
    if constexpr (kGate == KeyGate::Channel) {
      const float* jump = t.jump + first * kp;
      if (g > 0) {
        scale_by_row(t.sa, kp, 0, first, jump);
        if (kGeneral) scale_by_row(t.sa1, kp, 0, first, jump);
      }
      if (g > 0 || t.entry_jump) {
        scale_by_row(ep, kp, 0, 1, jump);
        scale_by_row(w.dq, kp, first, last, ep);
        scale_by_row(w.dn, kp, lo, hi, ep);
      }
    } else {
      lo = 0;
      hi = C;
    }
    lower(w.dP, t.sa, first, last, kGate == KeyGate::Head ? t.eg : nullptr, w.dq);
    if (kGeneral) lower(w.dP1, t.sa1, first, last, nullptr, w.dq);
    if (hi <= lo) continue;
    lower(w.dN, t.sa, lo, hi, kGate == KeyGate::Head ? t.en : nullptr, w.dn);
    if (kGeneral) lower(w.dN1, t.sa1, lo, hi, nullptr, w.dn);
  }
  for (std::int64_t g = t.segments - 1; g >= 0; --g) {
    const std::int64_t first = t.segment[g], last = t.segment[g + 1];
    std::int64_t lo = first + shift, hi = std::min(last + shift, C);
    if (kGate != KeyGate::Channel) {
      lo = 0;
      hi = C;
    }
    const bool newest = g == t.segments - 1;
    const std::int64_t users = std::max<std::int64_t>(hi - lo, 0);
    const auto from = [&](const float* dp, const float* dn, float* u) HWY_ATTR {
      if (!newest) scale_by_row(u, kp, 0, last, t.jump + last * kp);
      const float* qa = t.qa + first * kp;
      const float* na = t.na + lo * kp;
      if (first > 0) {
        gemm<true>(first, K, {dp + first * lt, lt, qa, kp, last - first}, {dn + lo * lt, lt, na, kp, users}, Tri::None,
                   {newest ? nullptr : u, kp}, u, kp);
      }
      float* own = u + first * kp;
      const Operand by_q{dp + first * lt + first, lt, qa, kp, last - first};
      const Operand by_n{dn + lo * lt + first, lt, na, kp, users};
      const Start begin{newest ? nullptr : own, kp};
      if (users == last - first && lo == first) {
        gemm<true>(last - first, K, by_q, by_n, Tri::UpperPair, begin, own, kp);
      } else {
        gemm<true>(last - first, K, {}, by_q, Tri::Upper, begin, own, kp);
        gemm<true>(std::min(last - first, users), K, {}, by_n, Tri::Upper, {own, kp}, own, kp);
      }
    };
    from(w.dP, w.dN, w.u);
    if (kGeneral) from(w.dP1, w.dN1, w.u1);
  }
}

// What the pairs in near_q .. near_n1 give: no decay, hence as they are.
template <DeltaKind kKind>
HWY_NOINLINE void add_near_pairs(DeltaBackwardTiles& w, const DeltaTiles& t, std::int64_t K, std::int64_t C,
                                 std::int64_t shift, std::int64_t t0, std::int64_t R, float scale) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), kp = pad_up(K), lt = token_ld(kBackwardBT);
  // user's gradient += a source, source's gradient += a user
  const auto pair = [&](float by, const float* user, float* duser, const float* source, float* dsource) HWY_ATTR {
    const auto f = hn::Set(d, by);
    for (std::int64_t c = 0; c < kp; c += lanes) {
      hn::StoreU(hn::MulAdd(f, hn::LoadU(d, source + c), hn::LoadU(d, duser + c)), d, duser + c);
      hn::StoreU(hn::MulAdd(f, hn::LoadU(d, user + c), hn::LoadU(d, dsource + c)), d, dsource + c);
    }
  };
  for (std::int64_t i = 1; i < C; ++i) {
    const float *q = t.q + i * kp, *n = t.n + i * kp;
    float *dq = w.dq + i * kp, *dn = w.dn + i * kp;
    for (std::int64_t j = first_near(i, 0, t0, R); j < i; ++j) {
      const std::int64_t at = i * lt + j;
      pair(scale * w.near_q[at], q, dq, t.s + j * kp, w.u + j * kp);
      if (kKind == DeltaKind::General) pair(scale * w.near_q1[at], q, dq, t.s1 + j * kp, w.u1 + j * kp);
    }
    for (std::int64_t j = first_near(i, shift, t0, R); j < i; ++j) {
      const std::int64_t at = i * lt + j;
      pair(w.near_n[at], n, dn, t.s + j * kp, w.u + j * kp);
      if (kKind == DeltaKind::General) pair(w.near_n1[at], n, dn, t.s1 + j * kp, w.u1 + j * kp);
    }
  }
}

// The gradients of one chunk's rows; D moves to the chunk's entry. states: S_0; x, v: of the chunk; sum_row: its first
// row in the group sums, which begin with the group's first value head.
template <DeltaKind kKind, KeyGate kGate>
HWY_NOINLINE void delta_backward_chunk(const DeltaBackwardProblem& p, const DeltaBackwardPlan& b, DeltaBackwardTiles& w,
                                       DeltaTiles& t, const DeltaInputs& in, const DeltaGradients& grad,
                                       const Rows& do_, const Rows& o, std::int64_t t0, std::int64_t C,
                                       const float* states, float* D_all, const float* x, const float* v,
                                       const GroupSums& sums, std::int64_t sum_row, bool begin,
                                       const GateSums& gate_sums, Prefetcher* ahead) {
  constexpr bool kGeneral = kKind == DeltaKind::General;
  constexpr std::int64_t BT = kBackwardBT;
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, V = p.V, R = p.R, kp = pad_up(K), lt = token_ld(BT), ldv = b.ldv;
  const std::int64_t panel_size = kp * kBV, shift = reads_before_decay(p) ? 1 : 0;
  const bool want_gate = grad.gate();
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, V - i * kBV); };

  if (do_) {
    load_token_rows(do_, R, R - 1, t0, C, V, w.do_, ldv);
  } else {
    std::fill(w.do_, w.do_ + C * ldv, 0.0F);
  }
  for (std::int64_t i = 0; o && i < b.panels; ++i) {
    const std::int64_t padded = pad_up(width_of(i)), at = i * kBV;
    gemm<false>(C, padded, {t.q0, kp, states + i * panel_size, kBV, K}, {t.P, lt, x + at, ldv, 0}, Tri::Lower, {}, w.o,
                kBV);
    if (kGeneral) gemm<false>(C, padded, {}, {t.P1, lt, v + at, ldv, 0}, Tri::Lower, {w.o, kBV}, w.o, kBV);
    store_token_rows(w.o, kBV, o, R, R - 1, t0, C, at, width_of(i));
  }
  for (std::int64_t i = 0; i < b.panels; ++i) {
    const float* D = D_all + i * panel_size;
    const std::int64_t padded = pad_up(width_of(i));
    gemm<true>(C, padded, {t.st, lt, D, kBV, K}, {t.P, lt, w.do_ + i * kBV, ldv, C}, Tri::Upper, {}, w.y + i * kBV,
               ldv);
    if (kGeneral) {
      gemm<true>(C, padded, {t.st1, lt, D, kBV, K}, {t.P1, lt, w.do_ + i * kBV, ldv, C}, Tri::Upper, {}, w.dv + i * kBV,
                 ldv);
    }
  }
  solve_upper(t.N, lt, C, w.y, ldv, pad_up(V));
  if (kGeneral && grad.dv) {
    gemm<true>(C, pad_up(V), {}, {t.N1, lt, w.y, ldv, C}, Tri::Upper, {w.dv, ldv, nullptr}, w.dv, ldv);
    store_rows(w.dv, ldv, grad.dv, t0, C, 0, V);
  }

  transpose(x, ldv, C, V, w.xt, lt);
  transpose(w.do_, ldv, C, V, w.dyt, kPairLd);
  transpose(w.y, ldv, C, V, w.dyt + BT, kPairLd);
  gemm<false>(C, C, {w.do_, ldv, w.xt, lt, V}, {}, Tri::None, {}, w.dP, lt, 0);
  gemm<false>(C, C, {w.y, ldv, w.xt, lt, V}, {}, Tri::None, {}, w.dN, lt, 0);
  strict_scores<kGate>(w.dP, lt, C, t.mask, 0, w.delta, w.near_q, t0, R);
  strict_scores<kGate>(w.dN, lt, C, t.mask, shift, nullptr, w.near_n, t0, R);
  if (kGeneral) {
    transpose(v, ldv, C, V, w.vt, lt);
    gemm<false>(C, C, {w.do_, ldv, w.vt, lt, V}, {}, Tri::None, {}, w.dP1, lt, 0);
    gemm<false>(C, C, {w.y, ldv, w.vt, lt, V}, {}, Tri::None, {}, w.dN1, lt, 0);
    strict_scores<kGate>(w.dP1, lt, C, t.mask, 0, w.delta1, w.near_q1, t0, R);
    strict_scores<kGate>(w.dN1, lt, C, t.mask, shift, nullptr, w.near_n1, t0, R);
  }

  const bool want_sum = want_gate && kGate != KeyGate::None;
  if (want_sum) std::fill(w.partial, w.partial + (kGate == KeyGate::Channel ? K : 1) * kPad, 0.0F);
  const auto over_values = [&](const float* panels, const float* columns, std::int64_t ld, std::int64_t count,
                               float* to) HWY_ATTR {
    gemm_panels(K, count, {panels, kBV, kBV, panel_size, columns, ld, V}, to, ld);
  };
  over_values(states, w.dyt, kPairLd, BT + C, w.sdy);
  over_values(D_all, w.xt, lt, C, w.dx);
  if (kGeneral) over_values(D_all, w.vt, lt, C, w.dx1);
  for (std::int64_t i = 0; i < b.panels; ++i) {
    const std::int64_t padded = pad_up(width_of(i));
    float* D = D_all + i * panel_size;
    if (want_sum) add_products<kGate>(states + i * panel_size, D, K, padded, w.partial);
    gemm<true>(K, padded, {t.q0, kp, w.do_ + i * kBV, ldv, C}, {t.n0, kp, w.y + i * kBV, ldv, C}, Tri::None,
               {D, kBV, kGate == KeyGate::None ? nullptr : t.decay}, D, kBV, -1, ahead);
  }
  transpose(w.sdy, kPairLd, K, C, w.dq, kp);
  transpose(w.sdy + BT, kPairLd, K, C, w.dn, kp);
  transpose(w.dx, lt, K, C, w.tau, kp);
  if (kGeneral) transpose(w.dx1, lt, K, C, w.tau1, kp);
  chunk_vectors<kKind, kGate>(w, t, K, C, shift);

  // From the last row on: finish the vectors in place, keep what the gate needs.
  //   carry = sum over the rows done of q o dq' - s o ds' + n o dn, without diagonal pairs and D
  //   move  = e^{G_C - anchor of the row's segment}
  float* move = w.row + kp;
  float* carry = w.row + 2 * kp;
  float* scratch = w.row + 3 * kp;
  float* gates = kGate == KeyGate::Channel ? t.sa : w.gates;  // nobody reads sa any more
  const auto vscale = hn::Set(d, static_cast<float>(p.scale)), one = hn::Set(d, 1.0F);
  std::fill(carry, carry + kp, 0.0F);
  if (kGate == KeyGate::Channel) std::copy(t.e + (C - 1) * kp, t.e + C * kp, move);
  std::int64_t seg = t.segments - 1;
  for (std::int64_t i = C - 1; i >= 0; --i) {
    if (kGate == KeyGate::Channel && i < t.segment[seg]) {
      scale_by_row(move, kp, 0, 1, t.jump + t.segment[seg] * kp);
      --seg;
    }
    const std::int64_t at = i * kp;
    const auto diag = hn::Set(d, static_cast<float>(p.scale) * w.delta[i]);
    const auto diag1 = kGeneral ? hn::Set(d, static_cast<float>(p.scale) * w.delta1[i]) : diag;
    const auto ec = kGate == KeyGate::Head ? hn::Set(d, t.ec[i]) : one;
    for (std::int64_t c = 0; c < kp; c += lanes) {
      const auto q = hn::LoadU(d, t.q + at + c), s = hn::LoadU(d, t.s + at + c), n = hn::LoadU(d, t.n + at + c);
      auto gq = hn::Mul(vscale, hn::LoadU(d, w.dq + at + c)), gn = hn::LoadU(d, w.dn + at + c);
      auto gs = hn::LoadU(d, w.u + at + c), tau = hn::LoadU(d, w.tau + at + c);
      auto inv = one, to_end = ec;
      if constexpr (kGate == KeyGate::Channel) {
        const auto e = hn::LoadU(d, t.e + at + c);
        inv = hn::Div(one, e);
        to_end = hn::Mul(inv, hn::LoadU(d, move + c));
        gq = hn::Mul(gq, e);
        gs = hn::Mul(gs, inv);
        if (i >= shift) gn = hn::Mul(gn, hn::LoadU(d, t.e + at - shift * kp + c));
        hn::StoreU(gn, d, w.dn + at + c);
      }
      if constexpr (kGate != KeyGate::None) tau = hn::Mul(tau, to_end);
      auto dq = hn::MulAdd(diag, s, gq);
      hn::StoreU(hn::MulAdd(diag, q, hn::Add(gs, tau)), d, w.u + at + c);
      auto change = hn::Sub(hn::Mul(q, gq), hn::Mul(s, gs));
      auto source = hn::Mul(s, tau);
      if constexpr (kGeneral) {
        const auto s1 = hn::LoadU(d, t.s1 + at + c);
        const auto gs1 = hn::Mul(inv, hn::LoadU(d, w.u1 + at + c)),
                   tau1 = hn::Mul(to_end, hn::LoadU(d, w.tau1 + at + c));
        dq = hn::MulAdd(diag1, s1, dq);
        hn::StoreU(hn::MulAdd(diag1, q, hn::Add(gs1, tau1)), d, w.u1 + at + c);
        change = hn::NegMulAdd(s1, gs1, change);
        source = hn::MulAdd(s1, tau1, source);
      }
      hn::StoreU(dq, d, w.dq + at + c);
      if constexpr (kGate != KeyGate::None) {
        // n counts from its own row on, or, where it reads before the decay, from the row before.
        const auto own = hn::Mul(n, gn);
        const auto sum = hn::Add(hn::LoadU(d, carry + c), shift != 0 ? change : hn::Add(change, own));
        hn::StoreU(sum, d, gates + at + c);
        hn::StoreU(shift != 0 ? hn::Add(sum, own) : sum, d, carry + c);
        hn::StoreU(source, d, w.tau + at + c);
      }
    }
  }

  if (w.near_n != nullptr) add_near_pairs<kKind>(w, t, K, C, shift, t0, R, static_cast<float>(p.scale));

  const bool values = !kGeneral && (grad.dv || grad.dbeta || grad.dew), plain = values && !in.ew;
  float* v_raw = w.do_;  // nobody reads do_ any more
  if (plain) load_rows(in.v, t0, C, 0, V, v_raw, ldv);
  for (std::int64_t i = 0; i < C; ++i) {
    const std::int64_t at = i * kp;
    if (grad.dq) accumulate_row(begin, w.dq + at, sums.dq + (sum_row + i) * kp, kp);
    w.dbeta[i] = add_group_row<kKind>(p, grad, sums, begin, sum_row + i, t0 + i, t.beta[i], t.k + at,
                                      t.p != nullptr ? t.p + at : nullptr, t.eb != nullptr ? t.eb + at : nullptr,
                                      w.dn + at, w.u + at, kGeneral ? w.u1 + at : nullptr, scratch);
    if (grad.dw && writes_per_value_head(p)) {
      store_row(sums.dw + (sum_row + i) * kp, grad.dw.at(t0 + i, 0), grad.dw.dtype, grad.dw.last, K);
    }
    if (plain) {
      w.dbeta[i] += dot_rows(w.y + i * ldv, v_raw + i * ldv, pad_up(V));
    } else if (values) {
      store_value_row(in, grad, t0 + i, 0, V, t.beta[i], w.y + i * ldv, w.values, w.values + ldv, &w.dbeta[i]);
    }
    if (values && grad.dbeta) store_scalar(grad.dbeta, t0 + i, beta_chain(p, t.beta[i], w.dbeta[i]));
  }
  if (plain && grad.dv) {
    scale_rows(w.y, ldv, C, t.beta, w.y);
    store_rows(w.y, ldv, grad.dv, t0, C, 0, V);
  }

  if constexpr (kGate != KeyGate::None) {
    if (!want_gate) return;
    float* before = carry;  // what earlier sources and S_0 contribute through D; a head gate's in its first lanes
    std::fill(before, before + kp, 0.0F);
    if constexpr (kGate == KeyGate::Channel) {
      for (std::int64_t c = 0; c < K; ++c) {
        before[c] = t.decay[c] * hn::GetLane(hn::SumOfLanes(d, hn::LoadU(d, w.partial + c * kPad)));
      }
    } else {
      hn::StoreU(hn::Mul(hn::LoadU(d, t.decay), hn::LoadU(d, w.partial)), d, before);
    }
    for (std::int64_t i = 0; i < C; ++i) {
      float* dg = gates + i * kp;
      for (std::int64_t c = 0; c < kp; c += lanes) {
        const auto x0 = hn::LoadU(d, before + c);
        hn::StoreU(hn::Add(x0, hn::LoadU(d, dg + c)), d, dg + c);
        hn::StoreU(hn::Add(x0, hn::LoadU(d, w.tau + i * kp + c)), d, before + c);
      }
      if ((t0 + i) % R != 0) continue;
      const std::int64_t token = (t0 + i) / R;
      if (in.gate.g) store_head_gate(in, grad, gate_sums, token, t.hg[i], t.hy[i], sum_of_row(dg, kp));
      if (kGate == KeyGate::Channel) {
        store_channel_gate(in, grad, gate_sums, K, token, t.g + i * kp, t.y + i * kp, dg);
      }
    }
  }
}

template <DeltaKind kKind, KeyGate kGate>
HWY_NOINLINE void delta_backward_task(const DeltaBackwardProblem& p, const DeltaBackwardPlan& b, DeltaBackwardTiles& w,
                                      std::int64_t n, std::int64_t h, std::int64_t heads, double* gate_partial) {
  constexpr std::int64_t BT = kBackwardBT;
  const std::int64_t K = p.K, V = p.V, kp = pad_up(K), lt = token_ld(BT), ldv = b.ldv, group = p.group();
  const std::int64_t rows = token_rows_padded(BT), panel_size = kp * kBV, state_size = b.panels * panel_size;
  const bool before = reads_before_decay(p);
  const float scale = static_cast<float>(p.scale);
  const std::int64_t values = heads * group;
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, V - i * kBV); };
  const std::int64_t length = p.sequence(n).length * p.R;
  const std::int64_t segments = (length + b.segment_rows - 1) / b.segment_rows;

  // Padding channels take part in whole-vector arithmetic and must be finite; nothing below writes them.
  std::fill(w.sdy + K * kPairLd, w.sdy + kp * kPairLd, 0.0F);
  for (float* x : {w.dx, w.dx1}) {
    if (x != nullptr) std::fill(x + K * lt, x + kp * lt, 0.0F);
  }
  for (float* x : {w.dq, w.dn, w.tau, w.tau1, w.u, w.u1}) {
    if (x != nullptr) std::fill(x, x + lt * kp, 0.0F);
  }

  // x of one chunk from its entering state unless it is known, and the state after it if `to` is given.
  const auto run_chunk = [&](const DeltaInputs& in, DeltaTiles& t, std::int64_t t0, std::int64_t C, const float* from,
                             bool known, float* x, float* v, float* to, Prefetcher* ahead) HWY_ATTR {
    float* vbar = kKind == DeltaKind::General ? v : x;
    if (kKind == DeltaKind::General || !known) load_values<kKind>(in, t, t0, C, 0, V, vbar, ldv, w.tmp);
    for (std::int64_t i = 0; i < b.panels; ++i) {
      const std::int64_t padded = pad_up(width_of(i));
      const float* state = from + i * panel_size;
      if (!known) solve_panel<kKind>(t, BT, K, C, padded, state, vbar + i * kBV, x + i * kBV, ldv);
      if (to != nullptr) {
        advance_panel<kKind, kGate>(t, BT, K, C, padded, state, vbar + i * kBV, x + i * kBV, ldv, to + i * panel_size,
                                    ahead);
      }
    }
  };
  const auto kept_state = [&](std::int64_t j, std::int64_t segment) {
    return w.kept + (j * b.segments + segment) * state_size;
  };
  const GroupSums sums = w.group_sums(p);
  const auto store_sums =
      [&](const DeltaGradients& grad, const DeltaTiles& t, std::int64_t row, std::int64_t t0, std::int64_t C)
          HWY_ATTR { store_group_rows(p, grad, sums, row, t0, C, t.q, t.k, t.p, t.rq, t.rk, t.rp); };
  Prefetcher ahead;
  const auto kept_x = [&](std::int64_t j, std::int64_t t0) {
    return w.kept_x + (j * (b.segments - 1) * b.segment_rows + t0) * ldv;
  };

  for (std::int64_t j = 0; j < values; ++j) {
    const std::int64_t hv = h * group + j;
    if (gate_partial != nullptr) {
      const std::int64_t size = gate_sums_size(p);
      std::fill_n(gate_partial + (n * p.HV + hv) * size, size, 0.0);
    }
    for (std::int64_t i = 0; i < b.panels; ++i) {
      load_panel(state_rows(p.dht, n, hv), K, i * kBV, width_of(i), w.d + j * state_size + i * panel_size, w.tmp);
      load_panel(state_rows(p.h0, n, hv), K, i * kBV, width_of(i), kept_state(j, 0) + i * panel_size, w.tmp);
    }
  }
  for (std::int64_t t0 = 0; t0 < (segments - 1) * b.segment_rows; t0 += BT) {
    ahead.clear();
    prefetch_inputs(ahead, p, DeltaInputs(p, n, h * group), h * group, values, t0 + BT, std::min(BT, length - t0 - BT),
                    false);
    ahead.spread(values * b.panels * (K / kMR + 1));
    const std::int64_t segment = t0 / b.segment_rows;
    for (std::int64_t j = 0; j < values; ++j) {
      const DeltaInputs in(p, n, h * group + j);
      DeltaTiles& t = w.chunk[0];
      load_gate_bias(in.gate, kGate, K, t.bias);
      load_chunk<kKind, kGate>(p, in, t, BT, t0, BT, false);
      prepare_delta_chunk<kKind, kGate>(t, BT, K, BT, scale, before, false, false);
      run_chunk(in, t, t0, BT, kept_state(j, t0 % b.segment_rows == 0 ? segment : segment + 1), false,
                b.keep_x ? kept_x(j, t0) : w.x, w.v, kept_state(j, segment + 1), &ahead);
    }
  }

  for (std::int64_t segment = segments - 1; segment >= 0; --segment) {
    const std::int64_t begin = segment * b.segment_rows, count = std::min(b.segment_rows, length - begin);
    const std::int64_t chunks = (count + BT - 1) / BT;
    for (std::int64_t j = 0; j < values; ++j) {
      const std::int64_t hv = h * group + j;
      const DeltaInputs in(p, n, hv);
      const DeltaGradients grad(p, n, hv);
      const Rows do_ = delta_rows(p.do_, p, p.sequence(n), hv);
      Rows o = delta_rows(p.backward_o, p, p.sequence(n), hv);
      o.stream = grad.dk.stream;
      GateSums gate_sums;
      if (gate_partial != nullptr) {
        gate_sums.dA_log = gate_partial + (n * p.HV + hv) * gate_sums_size(p);
        gate_sums.ddt_bias = gate_sums.dA_log + 1;
      }
      const float* first = kept_state(j, segment);
      const bool known = b.keep_x && segment + 1 < segments;
      const auto x_of = [&](std::int64_t c) { return known ? kept_x(j, begin + c * BT) : w.x + c * rows * ldv; };
      const auto state_of = [&](std::int64_t c) { return c == 0 ? first : w.states + (c - 1) * state_size; };
      for (std::int64_t c = 0; c < chunks; ++c) {
        const std::int64_t t0 = begin + c * BT, C = std::min(BT, length - t0);
        DeltaTiles& t = w.chunk[c];
        load_gate_bias(in.gate, kGate, K, t.bias);
        load_chunk<kKind, kGate>(p, in, t, BT, t0, C, true);
        prepare_delta_chunk<kKind, kGate>(t, BT, K, C, scale, before, true, true);
        run_chunk(in, t, t0, C, state_of(c), known, x_of(c), w.v != nullptr ? w.v + c * rows * ldv : nullptr,
                  c + 1 < chunks ? w.states + c * state_size : nullptr, nullptr);
      }
      // What the next segment wants of x lies in one piece. Its rows of the inputs do not: asked for here, they hold up
      // the products by as much as they gain.
      ahead.clear();
      const std::int64_t then = j + 1 < values ? segment : segment - 1;
      if (b.keep_x && then >= 0 && then + 1 < segments) {
        float* rows_of_x = kept_x((j + 1) % values, then * b.segment_rows);
        ahead.add({reinterpret_cast<std::byte*>(rows_of_x), DType::F32, 0, 1}, 0, 1, 0, b.segment_rows * ldv);
      }
      ahead.spread(chunks * b.panels * (kBV / 16) * (K / kMR + 1));
      for (std::int64_t c = chunks - 1; c >= 0; --c) {
        const std::int64_t t0 = begin + c * BT, C = std::min(BT, length - t0);
        delta_backward_chunk<kKind, kGate>(p, b, w, w.chunk[c], in, grad, do_, o, t0, C, state_of(c),
                                           w.d + j * state_size, x_of(c),
                                           w.v != nullptr ? w.v + c * rows * ldv : nullptr, sums,
                                           group == 1 ? 0 : c * BT, j % group == 0, gate_sums, &ahead);
        if (group == 1) store_sums(grad, w.chunk[c], 0, t0, C);
      }
      for (std::int64_t c = 0; group > 1 && (j + 1) % group == 0 && c < chunks; ++c) {
        const std::int64_t t0 = begin + c * BT, C = std::min(BT, length - t0);
        store_sums(grad, w.chunk[c], c * BT, t0, C);
      }
    }
  }
  for (std::int64_t j = 0; j < values; ++j) {
    const Rows dh0 = state_rows(p.dh0, n, h * group + j);
    for (std::int64_t i = 0; i < b.panels; ++i) {
      store_panel(w.d + j * state_size + i * panel_size, dh0, K, i * kBV, width_of(i), w.tmp);
    }
  }
  hwy::FlushStream();
}

std::size_t delta_backward_bytes(const DeltaBackwardProblem& p, const DeltaBackwardPlan& b) {
  Arena arena;
  DeltaBackwardTiles w;
  w.carve(arena, p, b);
  return arena.bytes();
}

// The gate's parameter sums come first in the workspace: [N, HV, gate_sums_size].
std::size_t delta_backward_sums_bytes(const DeltaBackwardProblem& p) {
  if (!p.dA_log && !p.ddt_bias) return 0;
  Arena arena;
  arena.take<double>(p.N * p.HV * gate_sums_size(p));
  return arena.bytes();
}

template <DeltaKind kKind>
HWY_INLINE void delta_backward_gate(const DeltaBackwardProblem& p, const DeltaBackwardPlan& b, DeltaBackwardTiles& w,
                                    std::int64_t n, std::int64_t h, std::int64_t heads, double* sums) {
  switch (delta_gate(p)) {
    case KeyGate::None: return delta_backward_task<kKind, KeyGate::None>(p, b, w, n, h, heads, sums);
    case KeyGate::Head: return delta_backward_task<kKind, KeyGate::Head>(p, b, w, n, h, heads, sums);
    case KeyGate::Channel: return delta_backward_task<kKind, KeyGate::Channel>(p, b, w, n, h, heads, sums);
  }
}

void delta_backward(const DeltaBackwardProblem& p, const DeltaBackwardPlan& b, ThreadPool& pool, std::byte* workspace) {
  const std::size_t bytes = delta_backward_bytes(p, b), sums_bytes = delta_backward_sums_bytes(p);
  double* sums = nullptr;
  if (sums_bytes != 0) {
    Arena arena(workspace);
    sums = arena.take<double>(p.N * p.HV * gate_sums_size(p));
    workspace += sums_bytes;
  }
  run_items(pool, p.N * b.groups, b.slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    DeltaBackwardTiles w;
    w.carve(arena, p, b);
    const std::int64_t n = item / b.groups, h = item % b.groups * b.group, heads = std::min(b.group, p.H - h);
    if (delta_kind(p) == DeltaKind::General) return delta_backward_gate<DeltaKind::General>(p, b, w, n, h, heads, sums);
    return delta_backward_gate<DeltaKind::Delta>(p, b, w, n, h, heads, sums);
  });
  if (sums != nullptr) store_gate_sums(p, sums, gate_sums_size(p));
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(delta_backward_bytes);
HWY_EXPORT(delta_backward_sums_bytes);
HWY_EXPORT(delta_backward);

std::size_t delta_chunk_backward_workspace(const DeltaBackwardProblem& p, int threads) {
  const DeltaBackwardPlan b = delta_backward_plan(p, threads);
  return HWY_DYNAMIC_DISPATCH(delta_backward_sums_bytes)(p) +
         HWY_DYNAMIC_DISPATCH(delta_backward_bytes)(p, b) * static_cast<std::size_t>(b.slots);
}

Status delta_chunk_backward(const DeltaBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (p.gv || (p.beta && p.beta.ndim > 3)) {
    return {Code::Unsupported, "delta_chunk_backward: gv and beta per channel need the step form"};
  }
  if (const char* why = delta_refusal(p)) return {Code::Unsupported, std::string("delta_chunk_backward: ") + why};
  if (p.H == 0) return {};
  if (workspace.size() < delta_chunk_backward_workspace(p, pool.size())) {
    return {Code::OutOfMemory, "delta_chunk_backward: workspace too small"};
  }
  HWY_DYNAMIC_DISPATCH(delta_backward)(p, delta_backward_plan(p, pool.size()), pool, workspace.data());
  return {};
}

}  // namespace fla::cpu
#endif
