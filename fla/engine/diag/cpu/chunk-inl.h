// What the chunk form's forward and backward share: the state's way in and out, and the preparation of a chunk.
// Per-target code.
#if defined(FLA_ENGINE_DIAG_CPU_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_ENGINE_DIAG_CPU_CHUNK_INL_H_
#undef FLA_ENGINE_DIAG_CPU_CHUNK_INL_H_
#else
#define FLA_ENGINE_DIAG_CPU_CHUNK_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fla/engine/diag/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/gemm-inl.h"
#include "fla/kernels/cpu/io-inl.h"
#include "fla/kernels/cpu/math-inl.h"
#include "fla/kernels/cpu/rows.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Columns [v0, v0 + width) of a present state into a tile [pad_up(K), ld], columns past width zero to the padding.
// tmp: [kPad + 4, pad_up(K)].
HWY_INLINE void load_state(const Rows& s, std::int64_t K, std::int64_t v0, std::int64_t width, float* tile,
                           std::int64_t ld, float* tmp) {
  const std::int64_t kp = pad_up(K), size = static_cast<std::int64_t>(size_of(s.dtype));
  if (s.last == 1 || s.step != size) {
    load_rows(s, 0, K, v0, width, tile, ld);
    return;
  }
  // Value-first layout: read along k, then transpose.
  const Rows by_v{s.base, s.dtype, s.last * size, 1};
  for (std::int64_t v = 0; v < width; v += kPad) {
    const std::int64_t n = std::min(kPad, width - v);
    load_rows(by_v, v0 + v, n, 0, K, tmp, kp);
    std::fill(tmp + n * kp, tmp + kPad * kp, 0.0F);
    transpose(tmp, kp, kPad, K, tile + v, ld);
  }
}

HWY_INLINE void store_state(const float* tile, std::int64_t ld, const Rows& s, std::int64_t K, std::int64_t v0,
                            std::int64_t width, float* tmp) {
  const std::int64_t kp = pad_up(K), size = static_cast<std::int64_t>(size_of(s.dtype));
  if (s.last == 1 || s.step != size) {
    store_rows(tile, ld, s, 0, K, v0, width);
    return;
  }
  const Rows by_v{s.base, s.dtype, s.last * size, 1};
  for (std::int64_t v = 0; v < width; v += kPad) {
    const std::int64_t n = std::min(kPad, width - v);
    transpose(tile + v, ld, K, n, tmp, kp);
    store_rows(tmp, kp, by_v, v0 + v, n, 0, K);
  }
}

// The same for a panel [pad_up(K), kBV]; an absent state is zero, and is not written.
HWY_INLINE void load_panel(const Rows& s, std::int64_t K, std::int64_t v0, std::int64_t width, float* panel,
                           float* tmp) {
  if (s) return load_state(s, K, v0, width, panel, kBV, tmp);
  std::fill(panel, panel + pad_up(K) * kBV, 0.0F);
}

HWY_INLINE void store_panel(const float* panel, const Rows& s, std::int64_t K, std::int64_t v0, std::int64_t width,
                            float* tmp) {
  if (s) store_state(panel, kBV, s, K, v0, width, tmp);
}

// Scratch of one chunk. Token-major tiles are [token_rows_padded(BT), pad_up(K)], key-major ones
// [pad_up(K), token_ld(BT)]. In the forward qa, qe alias q and ka aliases k; without a channel gate ka is k.
struct ChunkTiles {
  float* q = nullptr;
  float* k = nullptr;
  float* g = nullptr;   // channel gates
  float* qa = nullptr;  // scale q e^{G - anchor of the row's segment}
  float* ka = nullptr;  // k e^{anchor - G}
  float* qe = nullptr;  // scale q e^G
  float* e = nullptr;   // e^{G - anchor}; backward, channel gate
  float* jump =
      nullptr;  // row i: e^{anchor - previous anchor} where a segment starts at i, 1 at 0; channel gate, backward
  float* kt = nullptr;              // k e^{G_C - G}, key-major
  float* a = nullptr;               // [BT, token_ld] A, lower triangle
  float* mask = nullptr;            // [BT, token_ld] e^{G_i - G_j}, j <= i; head gate
  float* decay = nullptr;           // [pad_up(K)] e^{G_C}
  float* ep = nullptr;              // [pad_up(K)] e^{current anchor}
  float* rel = nullptr;             // [2, pad_up(K)] G - anchor of the current row
  float* u = nullptr;               // [pad_up(K)] bonus; Read::Before
  float* ex = nullptr;              // [pad_up(K)] e^{G - anchor} of the row before; Read::Before
  float* own = nullptr;             // [token_ld] scale <q_i, u o k_i>; Read::Before
  float* eg = nullptr;              // [token_ld] e^{G_i}; head gate
  float* ec = nullptr;              // [token_ld] e^{G_C - G_i}; head gate
  double* gsum = nullptr;           // [token_ld] G_i; head gate
  std::int64_t* segment = nullptr;  // [BT + 1] first rows of the segments, then C
  std::int64_t segments = 0;

  void carve(Arena& arena, std::int64_t BT, std::int64_t K, KeyGate gate, bool backward) {
    const std::int64_t kp = pad_up(K), lt = token_ld(BT), token_major = token_rows_padded(BT) * kp;
    q = arena.floats(token_major);
    k = arena.floats(token_major);
    if (gate == KeyGate::Channel) g = arena.floats(token_major);
    qa = backward ? arena.floats(token_major) : q;
    ka = backward && gate == KeyGate::Channel ? arena.floats(token_major) : k;
    qe = backward && gate != KeyGate::None ? arena.floats(token_major) : qa;
    if (backward && gate == KeyGate::Channel) {
      e = arena.floats(token_major);
      jump = arena.floats(token_major);
    }
    kt = arena.floats(kp * lt);
    a = arena.floats(token_rows_padded(BT) * lt);
    if (gate == KeyGate::Head) {
      mask = arena.floats(BT * lt);
      eg = arena.floats(lt);
      ec = arena.floats(lt);
      gsum = arena.take<double>(lt);
    }
    decay = arena.floats(kp);
    ep = arena.floats(kp);
    rel = arena.floats(2 * kp);
    u = arena.floats(kp);
    ex = arena.floats(kp);
    own = arena.floats(lt);
    segment = arena.take<std::int64_t>(BT + 1);
  }
};

struct ChunkGate {
  Rows rows;           // g or gk
  double gamma = 0.0;  // HeadDecay
  Rows u;              // one row: the bonus
};

// gsum, eg, ec of a head gate.
HWY_INLINE void head_decays(ChunkTiles& t, const ChunkGate& gate, std::int64_t t0, std::int64_t C, std::int64_t lt) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  double sum = 0.0;
  for (std::int64_t i = 0; i < C; ++i) {
    if (gate.rows) {
      sum += bounded_gate(scalar_at(gate.rows, t0 + i));
    } else {
      sum = static_cast<double>(i + 1) * bounded_gate(gate.gamma);
    }
    t.gsum[i] = sum;
  }
  for (std::int64_t i = C; i < lt; ++i) t.gsum[i] = sum;
  for (std::int64_t i = 0; i < lt; ++i) {
    t.eg[i] = static_cast<float>(t.gsum[i]);
    t.ec[i] = static_cast<float>(sum - t.gsum[i]);
  }
  for (std::int64_t i = 0; i < lt; i += lanes) {
    hn::StoreU(exp_v(d, hn::LoadU(d, t.eg + i)), d, t.eg + i);
    hn::StoreU(exp_v(d, hn::LoadU(d, t.ec + i)), d, t.ec + i);
  }
}

// ---- the anchors of a gate per channel, which the delta engine's chunks have, too; widths are padded

// The next row's G - anchor, of all channels; whether each stays within `range`.
HWY_INLINE bool within_range(const float* rel, const float* g, std::int64_t kp, float range, float* next) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto most = hn::Set(d, range);
  auto inside = hn::Eq(most, most);
  for (std::int64_t c = 0; c < kp; c += lanes) {
    const auto x = hn::Add(hn::LoadU(d, rel + c), hn::LoadU(d, g + c));
    hn::StoreU(x, d, next + c);
    inside = hn::And(inside, hn::Le(hn::Abs(x), most));
  }
  return hn::AllTrue(d, inside);
}
// Makes that row the anchor: its e^{anchor - previous anchor} into jump, and into ep, which starts at the entry of the
// chunk. jump may be next.
HWY_INLINE void start_anchor(const float* next, std::int64_t kp, float* jump, float* ep, float* rel) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < kp; c += lanes) {
    const auto j = exp_v(d, hn::LoadU(d, next + c));
    hn::StoreU(j, d, jump + c);
    hn::StoreU(hn::Mul(j, hn::LoadU(d, ep + c)), d, ep + c);
    hn::StoreU(hn::Zero(d), d, rel + c);
  }
}
// The first n columns of a key-major tile, times a factor per key channel.
inline HWY_NOINLINE void scale_columns(float* kt, std::int64_t lt, std::int64_t K, std::int64_t n, const float* by) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < K; ++c) {
    const auto s = hn::Set(d, by[c]);
    float* row = kt + c * lt;
    for (std::int64_t j = 0; j < n; j += lanes) hn::StoreU(hn::Mul(s, hn::LoadU(d, row + j)), d, row + j);
  }
}

// Exponents of a segment stay within this, so that k e^{anchor - G} <= e^30 |k| and its product with q e^{G - anchor}
// is in range whatever the gates.
constexpr float kSegmentRange = 30.0F;

// Prepares C tokens from t0 on. In: t.q and t.k loaded (t.q only if want_q). Out: kt, decay; with want_q also qe (and
// qa), and the lower triangle of a.
//
// Channel gate: e^{G_i - G_j} is factored around an anchor. The chunk's entry is the first; a row for which some
// channel has moved further than kSegmentRange from the anchor becomes the next anchor, and keys already seen are
// multiplied by e^{new - old} <= 1, where underflow to 0 is right. So no exponent exceeds the range, sums of gates are
// only ever taken within a segment (differences keep their digits beside gates of -1000), and what row i gets depends
// on rows <= i only.
//
// Read::Before: row i's query has the decay of row i - 1, so it belongs to that row's segment, and its score with its
// own key is the bonus. Row 0 meets no key and has no decay.
template <KeyGate kGate, Read kRead = Read::After>
HWY_INLINE void prepare_chunk(ChunkTiles& t, std::int64_t BT, std::int64_t K, const ChunkGate& gate, std::int64_t t0,
                              std::int64_t C, float scale, bool want_q) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t kp = pad_up(K), lt = token_ld(BT);
  const auto vscale = hn::Set(d, scale);
  t.segments = 0;

  if constexpr (kGate != KeyGate::Channel) {
    transpose(t.k, kp, C, K, t.kt, lt);
    if constexpr (kGate == KeyGate::Head) {
      head_decays(t, gate, t0, C, lt);
      std::fill(t.decay, t.decay + kp, t.eg[C - 1]);
    }
    t.segment[0] = 0;
    t.segment[1] = C;
    t.segments = 1;
    if (want_q) {
      for (std::int64_t i = 0; i < C; ++i) {
        for (std::int64_t c = 0; c < kp; c += lanes) {
          hn::StoreU(hn::Mul(vscale, hn::LoadU(d, t.q + i * kp + c)), d, t.qa + i * kp + c);
        }
      }
      gemm<false>(C, C, {t.qa, kp, t.kt, lt, K}, {}, Tri::None, {}, t.a, lt, 0);
      if constexpr (kGate == KeyGate::Head) {
        for (std::int64_t i = 0; i < C; ++i) {
          float* m = t.mask + i * lt;
          float* a = t.a + i * lt;
          // Clamped above the diagonal, where the difference is positive and nobody reads the result.
          const std::int64_t n = pad_up(i + 1);
          for (std::int64_t j = 0; j < n; ++j) m[j] = j <= i ? static_cast<float>(t.gsum[i] - t.gsum[j]) : 0.0F;
          for (std::int64_t j = 0; j < n; j += lanes) {
            const auto x = exp_v(d, hn::LoadU(d, m + j));
            hn::StoreU(x, d, m + j);
            hn::StoreU(hn::Mul(x, hn::LoadU(d, a + j)), d, a + j);
          }
        }
      }
      for (std::int64_t i = 0; i < C; ++i) {
        const auto s = kGate == KeyGate::Head ? hn::Set(d, t.eg[i]) : hn::Set(d, 1.0F);
        if (kGate == KeyGate::None && t.qe == t.qa) break;
        for (std::int64_t c = 0; c < kp; c += lanes) {
          hn::StoreU(hn::Mul(s, hn::LoadU(d, t.qa + i * kp + c)), d, t.qe + i * kp + c);
        }
      }
    }
    if constexpr (kGate == KeyGate::Head) {
      for (std::int64_t c = 0; c < K; ++c) {
        float* row = t.kt + c * lt;
        for (std::int64_t j = 0; j < C; j += lanes) {
          hn::StoreU(hn::Mul(hn::LoadU(d, t.ec + j), hn::LoadU(d, row + j)), d, row + j);
        }
      }
    }
    return;
  } else {
    load_rows(gate.rows, t0, C, 0, K, t.g, kp);
    const auto one = hn::Set(d, 1.0F);
    float* rel = t.rel;
    float* next = t.rel + kp;
    std::fill(t.ep, t.ep + kp, 1.0F);
    std::fill(rel, rel + kp, 0.0F);
    if (t.jump != nullptr) std::fill(t.jump, t.jump + kp, 1.0F);
    bool entry = true;
    std::int64_t start = 0;
    if constexpr (kRead == Read::Before) {
      load_rows(gate.u, 0, 1, 0, K, t.u, kp);
      std::fill(t.ex, t.ex + kp, 1.0F);
    }

    const auto close = [&](std::int64_t end) HWY_ATTR {
      if (end == start) return;
      t.segment[t.segments++] = start;
      transpose(t.ka + start * kp, kp, end - start, K, t.kt + start, lt);
      if (!want_q) return;
      const std::int64_t first = kRead == Read::Before ? start + 1 : start;
      const std::int64_t last = kRead == Read::Before ? std::min(end + 1, C) : end;
      gemm<false>(last - first, end, {t.qa + first * kp, kp, t.kt, lt, K}, {}, Tri::None, {}, t.a + first * lt, lt,
                  start);
      if (entry && t.qe == t.qa) return;
      for (std::int64_t i = first; i < last; ++i) {
        for (std::int64_t c = 0; c < kp; c += lanes) {
          hn::StoreU(hn::Mul(hn::LoadU(d, t.ep + c), hn::LoadU(d, t.qa + i * kp + c)), d, t.qe + i * kp + c);
        }
      }
    };

    for (std::int64_t i = 0; i < C; ++i) {
      if constexpr (kRead == Read::Before) {
        auto sum = hn::Zero(d);
        for (std::int64_t c = 0; want_q && c < kp; c += lanes) {
          const auto q = hn::Mul(vscale, hn::LoadU(d, t.q + i * kp + c));
          sum = hn::MulAdd(hn::Mul(hn::LoadU(d, t.u + c), hn::LoadU(d, t.k + i * kp + c)), q, sum);
          const auto decayed = hn::Mul(q, hn::LoadU(d, t.ex + c));
          hn::StoreU(decayed, d, t.qa + i * kp + c);
          if (i == 0) hn::StoreU(decayed, d, t.qe + c);
        }
        t.own[i] = hn::GetLane(hn::SumOfLanes(d, sum));
      }
      float* e = t.e != nullptr ? t.e + i * kp : nullptr;
      if (within_range(rel, t.g + i * kp, kp, kSegmentRange, next)) {
        for (std::int64_t c = 0; c < kp; c += lanes) {
          const auto x = hn::LoadU(d, next + c);
          const auto ex = exp_v(d, x);
          hn::StoreU(x, d, rel + c);
          if (e != nullptr) hn::StoreU(ex, d, e + c);
          if (i == C - 1) hn::StoreU(ex, d, t.decay + c);
          if (kRead == Read::Before) hn::StoreU(ex, d, t.ex + c);
          if (kRead == Read::After && want_q)
            hn::StoreU(hn::Mul(hn::Mul(vscale, hn::LoadU(d, t.q + i * kp + c)), ex), d, t.qa + i * kp + c);
          hn::StoreU(hn::Div(hn::LoadU(d, t.k + i * kp + c), ex), d, t.ka + i * kp + c);
        }
        continue;
      }
      close(i);
      float* jump = t.jump != nullptr ? t.jump + i * kp : next;
      start_anchor(next, kp, jump, t.ep, rel);
      for (std::int64_t c = 0; c < kp; c += lanes) {
        if (e != nullptr) hn::StoreU(one, d, e + c);
        if (i == C - 1) hn::StoreU(one, d, t.decay + c);
        if (kRead == Read::Before) hn::StoreU(one, d, t.ex + c);
        if (kRead == Read::After && want_q)
          hn::StoreU(hn::Mul(vscale, hn::LoadU(d, t.q + i * kp + c)), d, t.qa + i * kp + c);
        if (t.ka != t.k) hn::StoreU(hn::LoadU(d, t.k + i * kp + c), d, t.ka + i * kp + c);
      }
      scale_columns(t.kt, lt, K, i, jump);
      start = i;
      entry = false;
    }
    close(C);
    t.segment[t.segments] = C;
    scale_columns(t.kt, lt, K, C, t.decay);
    for (std::int64_t c = 0; c < kp; c += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, t.ep + c), hn::LoadU(d, t.decay + c)), d, t.decay + c);
    }
    for (std::int64_t i = 0; kRead == Read::Before && want_q && i < C; ++i) t.a[i * lt + i] = t.own[i];
  }
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
