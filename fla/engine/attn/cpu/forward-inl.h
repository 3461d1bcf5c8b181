// One tile of queries against all keys that it sees: an online softmax over tiles of keys. Per-target code.
//   m' = max(m, max_j s_j),   f = e^{m - m'},   l' = f l + sum_j e^{s_j - m'},   O' = f O + sum_j e^{s_j - m'} v_j
// scratch  one tile each of queries, keys, values, logits and output; nothing grows with T
// bits     keys are taken in tiles that start at multiples of kKeys in their sequence, and every sum runs over keys in
//          order, so a row's result depends on its own keys alone, not on the rows beside it, nor on later tokens
#if defined(FLA_ENGINE_ATTN_CPU_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_ENGINE_ATTN_CPU_FORWARD_INL_H_
#undef FLA_ENGINE_ATTN_CPU_FORWARD_INL_H_
#else
#define FLA_ENGINE_ATTN_CPU_FORWARD_INL_H_
#endif

#include <cmath>

#include "fla/engine/attn/cpu/tile-inl.h"
#include "fla/kernels/cpu/arena.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct ForwardTiles {
  float* q = nullptr;     // [kForwardRows + 4, kp]
  float* r = nullptr;     // [kForwardRows + 4, kp]; second query
  float* k = nullptr;     // [kKeys + 4, kp]
  float* kt = nullptr;    // [kp, kKeysLd]
  float* v = nullptr;     // [kKeys + 4, vp]
  float* s = nullptr;     // [kForwardRows, kKeysLd] logits, then e^{s - m}
  float* u = nullptr;     // [kForwardRows, kKeysLd] <r, k>, then times e^{s - m}; second query
  float* o = nullptr;     // [kForwardRows, vp]
  float* o2 = nullptr;    // [kForwardRows, vp] sum of e^{s - m} u v; second query
  float* m = nullptr;     // [kForwardRows]
  float* l = nullptr;     // [kForwardRows]
  float* f = nullptr;     // [kForwardRows]
  float* next = nullptr;  // [kForwardRows] m'
  float* d2 = nullptr;    // [kForwardRows] sum of e^{s - m} u; second query
  float* gate = nullptr;  // [kKeysLd]
  // Of a first pass of a backward, which needs sums of <do, v> and no output.
  float* dout = nullptr;  // [kForwardRows, vp]
  float* vt = nullptr;    // [vp, kKeysLd]
  float* a = nullptr;     // [kForwardRows, kKeysLd] <do_i, v_j>
  double *den = nullptr, *ea = nullptr, *eu = nullptr,
         *eua = nullptr;  // [kForwardRows] of e^{s - m} times 1, a, u, u a
  float* qd = nullptr;    // [kForwardRows + 4, kp] q e^{P_t - P_first}; channel gate
  float* qs = nullptr;    // [kSub + 4, kp] the same for rows of a sub-block and its first row
  float* kd = nullptr;    // [kKeys + 4, kp] k e^{P_anchor - P_j}
  float* e = nullptr;     // [kp]

  void carve(Arena& arena, std::int64_t K, std::int64_t V, bool channel, bool second, bool stats) {
    const std::int64_t kp = pad_up(K), vp = pad_up(V), M = kForwardRows;
    q = arena.floats((M + 4) * kp);
    k = arena.floats((kKeys + 4) * kp);
    kt = arena.floats(kp * kKeysLd);
    v = arena.floats((kKeys + 4) * vp);
    s = arena.floats(M * kKeysLd);
    if (!stats) o = arena.floats(M * vp);
    for (float** x : {&m, &l, &f, &next, &d2}) *x = arena.floats(M);
    gate = arena.floats(kKeysLd);
    if (second) {
      r = arena.floats((M + 4) * kp);
      u = arena.floats(M * kKeysLd);
      if (!stats) o2 = arena.floats(M * vp);
    }
    if (stats) {
      dout = arena.floats(M * vp);
      vt = arena.floats(vp * kKeysLd);
      a = arena.floats(M * kKeysLd);
      for (double** x : {&den, &ea, &eu, &eua}) *x = arena.take<double>(M);
    }
    if (channel) {
      qd = arena.floats((M + 4) * kp);
      qs = arena.floats((kSub + 4) * kp);
      kd = arena.floats((kKeys + 4) * kp);
      e = arena.floats(kp);
    }
  }
};

// x_j e^{P_anchor - P_j} for rows [0, n) into `out`.
HWY_INLINE void decay_keys(const float* x, const double* P, const double* anchor, std::int64_t n, std::int64_t kp,
                           float* out, float* e) {
  for (std::int64_t j = 0; j < n; ++j) {
    decays(anchor, P + j * kp, kp, e);
    multiply(e, x + j * kp, kp, out + j * kp);
  }
}
HWY_INLINE void decay_queries(const float* x, const double* P, const double* anchor, std::int64_t n, std::int64_t kp,
                              float* out, float* e) {
  for (std::int64_t i = 0; i < n; ++i) {
    decays(P + i * kp, anchor, kp, e);
    multiply(e, x + i * kp, kp, out + i * kp);
  }
}

// Products of a query tile with a key tile under a channel gate, sum_c q_c k_c e^{P_tc - P_jc}, for rows [ra, rb) and
// keys [j0, j0 + N). No exponent is positive while gates are not: keys before the tile of queries meet it at its first
// row, keys inside it meet sub-blocks of kSub rows at theirs, and what shares a sub-block is formed pair by pair.
//   q  [.., kp] with row 0 at key position t0,  P  sums from the sequence's first key on,  k  the tile's keys
HWY_INLINE void channel_products(const float* q, const float* qd, std::int64_t t0, std::int64_t ra, std::int64_t rb,
                                 const float* k, std::int64_t j0, std::int64_t N, const double* P, std::int64_t K,
                                 float* qs, float* kd, float* kt, float* e, float* s) {
  const std::int64_t kp = pad_up(K);
  if (j0 + N <= t0) {
    decay_keys(k, P + j0 * kp, P + t0 * kp, N, kp, kd, e);
    transpose(kd, kp, N, K, kt, kKeysLd);
    gemm<false>(rb - ra, N, {qd + ra * kp, kp, kt, kKeysLd, K}, {}, Tri::None, {}, s + ra * kKeysLd, kKeysLd);
    return;
  }
  for (std::int64_t r0 = ra / kSub * kSub; r0 < rb; r0 += kSub) {
    const std::int64_t first = std::max(r0, ra), last = std::min(r0 + kSub, rb), t = t0 + r0;
    const std::int64_t before = std::clamp<std::int64_t>(t - j0, 0, N);
    if (before > 0) {
      decay_queries(q + first * kp, P + (t0 + first) * kp, P + t * kp, last - first, kp, qs, e);
      decay_keys(k, P + j0 * kp, P + t * kp, before, kp, kd, e);
      transpose(kd, kp, before, K, kt, kKeysLd);
      gemm<false>(last - first, before, {qs, kp, kt, kKeysLd, K}, {}, Tri::None, {}, s + first * kKeysLd, kKeysLd);
    }
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t end = std::clamp<std::int64_t>(t0 + i + 1 - j0, before, N);
      for (std::int64_t j = before; j < end; ++j) {
        decays(P + (t0 + i) * kp, P + (j0 + j) * kp, kp, e);
        multiply(e, k + j * kp, kp, e);
        s[i * kKeysLd + j] = dot(q + i * kp, e, kp);
      }
    }
  }
}

// One tile of keys goes into the running softmax of rows [ra, rb): s becomes e^{s - m'}, u becomes u e^{s - m'}, and m,
// l and f are the rows' new ones. row_c and key_c: running sums of the gate at the rows and at the keys. Whether a mask
// hides any key of these rows.
template <bool kGate, bool kSecond, class Columns>
HWY_INLINE bool online_softmax(ForwardTiles& w, std::int64_t ra, std::int64_t rb, std::int64_t N, float scale,
                               const double* row_c, const double* key_c, const Columns& columns) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), end = pad_up(N);
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  bool partial = false;
  for (std::int64_t i = ra; i < rb; ++i) {
    const KeyRange c = columns(i);
    partial = partial || c.lo > 0 || c.hi < N;
    if constexpr (kGate) differences(row_c[i], key_c, N, w.gate);
    w.next[i] = std::max(w.m[i], logits<kGate>(w.s + i * kKeysLd, c.lo, c.hi, end, scale, w.gate));
  }
  // A row that has seen nothing yet has m = -inf: its pivot is any finite number.
  for (std::int64_t i = ra; i < rb; ++i) w.f[i] = w.m[i] - (w.next[i] == kNothing ? 0.0F : w.next[i]);
  for (std::int64_t i = ra; i < rb; i += lanes) {
    const auto mask = hn::FirstN(d, static_cast<std::size_t>(std::min(lanes, rb - i)));
    hn::BlendedStore(exp_down(d, hn::MaskedLoad(mask, d, w.f + i)), mask, d, w.f + i);
  }
  for (std::int64_t i = ra; i < rb; ++i) {
    const KeyRange c = columns(i);
    w.m[i] = w.next[i];
    const auto pivot = hn::Set(d, w.m[i] == kNothing ? 0.0F : w.m[i]);
    float* s = w.s + i * kKeysLd;
    auto sum = hn::Zero(d), sum_u = hn::Zero(d);
    for (std::int64_t x = 0; x < end; x += lanes) {
      const auto e = exp_down(d, hn::Sub(hn::LoadU(d, s + x), pivot));
      hn::StoreU(e, d, s + x);
      sum = hn::Add(sum, e);
      if constexpr (kSecond) {
        float* u = w.u + i * kKeysLd + x;
        const auto eu = hn::IfThenElseZero(lanes_in(d, x, c.lo, c.hi), hn::Mul(e, hn::LoadU(d, u)));
        hn::StoreU(eu, d, u);
        sum_u = hn::Add(sum_u, eu);
      }
    }
    w.l[i] = w.f[i] * w.l[i] + hn::GetLane(hn::SumOfLanes(d, sum));
    if constexpr (kSecond) w.d2[i] = w.f[i] * w.d2[i] + hn::GetLane(hn::SumOfLanes(d, sum_u));
  }
  return partial;
}

// o = f o + weights v.
template <class Columns>
HWY_INLINE void add_values(const ForwardTiles& w, const float* weights, std::int64_t ra, std::int64_t rb,
                           std::int64_t N, std::int64_t vp, bool by_rows, float* o, const Columns& columns) {
  const Operand x{weights + ra * kKeysLd, kKeysLd, w.v, vp, N};
  const Start from_o{o + ra * vp, vp, w.f + ra};
  if (by_rows) {
    product_by_rows<false>(rb - ra, vp, x, from_o, o + ra * vp, vp, [&](std::int64_t i) { return columns(ra + i); });
  } else {
    gemm<false>(rb - ra, vp, x, {}, Tri::None, from_o, o + ra * vp, vp);
  }
}

// sum_j x_j y_j over [lo, hi) in double: floats' products are exact there. Without y the sum of x.
HWY_INLINE double sum_in_double(const float* x, const float* y, std::int64_t lo, std::int64_t hi) {
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, decltype(dd)> df;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(dd));
  auto sum = hn::Zero(dd);
  std::int64_t j = lo;
  for (; j + lanes <= hi; j += lanes) {
    const auto xj = hn::PromoteTo(dd, hn::LoadU(df, x + j));
    sum = y == nullptr ? hn::Add(sum, xj) : hn::MulAdd(xj, hn::PromoteTo(dd, hn::LoadU(df, y + j)), sum);
  }
  double total = hn::GetLane(hn::SumOfLanes(dd, sum));
  for (; j < hi; ++j) total += static_cast<double>(x[j]) * (y == nullptr ? 1.0 : static_cast<double>(y[j]));
  return total;
}

// The first pass of a backward: upstream gradients, and sums that start from a sink or nothing.
HWY_INLINE void start_sums(ForwardTiles& w, const Rows& dout, std::int64_t i0, std::int64_t M, std::int64_t V,
                           bool sink) {
  const std::int64_t vp = pad_up(V);
  if (dout) {
    load_rows(dout, i0, M, 0, V, w.dout, vp);
  } else {
    std::fill(w.dout, w.dout + M * vp, 0.0F);
  }
  std::fill(w.den, w.den + M, sink ? 1.0 : 0.0);
  for (double* x : {w.ea, w.eu, w.eua}) std::fill(x, x + M, 0.0);
}

// s holds e^{s - m'}, u times that. <do, o> is taken from the same products <do, v> as the second pass subtracts it
// from, and in double: where all of them are equal the differences are zeros, as they should be.
template <bool kSecond, class Columns>
HWY_INLINE void add_sums(ForwardTiles& w, std::int64_t ra, std::int64_t rb, std::int64_t N, std::int64_t V,
                         const Columns& columns) {
  const std::int64_t vp = pad_up(V);
  transpose(w.v, vp, N, V, w.vt, kKeysLd);
  gemm<false>(rb - ra, N, {w.dout + ra * vp, vp, w.vt, kKeysLd, V}, {}, Tri::None, {}, w.a + ra * kKeysLd, kKeysLd);
  for (std::int64_t i = ra; i < rb; ++i) {
    const KeyRange c = columns(i);
    const float *e = w.s + i * kKeysLd, *a = w.a + i * kKeysLd;
    const double f = static_cast<double>(w.f[i]);
    w.den[i] = f * w.den[i] + sum_in_double(e, nullptr, c.lo, c.hi);
    w.ea[i] = f * w.ea[i] + sum_in_double(e, a, c.lo, c.hi);
    if constexpr (kSecond) {
      const float* eu = w.u + i * kKeysLd;
      w.eu[i] = f * w.eu[i] + sum_in_double(eu, nullptr, c.lo, c.hi);
      w.eua[i] = f * w.eua[i] + sum_in_double(eu, a, c.lo, c.hi);
    }
  }
}

// Row i of the tile into place `to`. `weight` multiplies the row's gradients.
template <bool kSecond>
HWY_INLINE void keep_row(const ForwardTiles& w, std::int64_t i, const RowStats& st, std::int64_t to, double weight) {
  const bool none = w.den[i] == 0.0;
  const double norm = none ? 0.0 : 1.0 / w.den[i], vbar = none ? 0.0 : w.ea[i] / w.den[i];
  st.m[to] = none ? 0.0F : w.m[i];
  st.norm[to] = static_cast<float>(weight * norm);
  double t = vbar;
  if constexpr (kSecond) {
    const double ubar = w.eu[i] * norm;
    t = vbar * (1.0 + ubar) - w.eua[i] * norm;
    st.ubar[to] = static_cast<float>(ubar);
    st.vbar[to] = static_cast<float>(vbar);
  }
  st.t[to] = static_cast<float>(t);
}

// Outputs, or, with kStats, what a backward needs of the rows.
template <class Policy, bool kStats>
HWY_NOINLINE void forward_tile(const AttnProblem& p, ForwardTiles& w, const GateSums& sums, const RowStats* st,
                               std::int64_t n, const AttnSpan& span, std::int64_t h, std::int64_t i0, std::int64_t M) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, kp = pad_up(K), vp = pad_up(p.V), kv = h / p.group(), t0 = i0 + span.offset;
  const float scale = static_cast<float>(p.scale);
  const Rows q = head_rows(p.q, span.row, span.q_begin, span.q_length, h);
  const double* C = Policy::kGate ? sums.head(p, span, h) : nullptr;
  const double* P = Policy::kChannel ? sums.channels(p, span, h) : nullptr;

  load_rows(q, i0, M, 0, K, w.q, kp);
  if constexpr (Policy::kSecond)
    load_rows(head_rows(p.r, span.row, span.q_begin, span.q_length, h), i0, M, 0, K, w.r, kp);
  if constexpr (Policy::kChannel) decay_queries(w.q, P + t0 * kp, P + t0 * kp, M, kp, w.qd, w.e);
  const bool sink = p.sink.present();
  const float b = sink ? static_cast<float>(scalar_at({p.sink.at(h), p.sink.dtype, 0, 1}, 0)) : 0.0F;
  std::fill(w.m, w.m + M, sink ? b : -std::numeric_limits<float>::infinity());
  std::fill(w.l, w.l + M, sink ? 1.0F : 0.0F);
  if constexpr (kStats) {
    start_sums(w, head_rows(p.do_, span.row, span.q_begin, span.q_length, h), i0, M, p.V, sink);
  } else {
    std::fill(w.o, w.o + M * vp, 0.0F);
    if constexpr (Policy::kSecond) std::fill(w.o2, w.o2 + M * vp, 0.0F);
  }
  if constexpr (Policy::kSecond) std::fill(w.d2, w.d2 + M, 0.0F);
  const auto seen = [&](std::int64_t i) { return p.visible(span, n, i0 + i); };

  const KeyRange all = tile_range(p, span, n, i0, M);
  for (std::int64_t j0 = all.lo / kKeys * kKeys; j0 < all.hi; j0 += kKeys) {
    const std::int64_t from = std::max(j0, all.lo), to = std::min(j0 + kKeys, all.hi), N = to - j0;
    std::int64_t ra = 0, rb = M;  // rows that see keys of this tile
    while (ra < rb && (seen(ra).hi <= j0 || seen(ra).empty())) ++ra;
    while (rb > ra && (seen(rb - 1).lo >= to || seen(rb - 1).empty())) --rb;
    if (ra == rb) continue;
    load_keys(p, p.k, span, n, kv, j0, from, to, N, K, w.k, kp);
    load_keys(p, p.v, span, n, kv, j0, from, to, N, p.V, w.v, vp);
    if constexpr (Policy::kChannel) {
      channel_products(w.q, w.qd, t0, ra, rb, w.k, j0, N, P, K, w.qs, w.kd, w.kt, w.e, w.s);
    } else {
      transpose(w.k, kp, N, K, w.kt, kKeysLd);
      gemm<false>(rb - ra, N, {w.q + ra * kp, kp, w.kt, kKeysLd, K}, {}, Tri::None, {}, w.s + ra * kKeysLd, kKeysLd);
    }
    if constexpr (Policy::kSecond)
      gemm<false>(rb - ra, N, {w.r + ra * kp, kp, w.kt, kKeysLd, K}, {}, Tri::None, {}, w.u + ra * kKeysLd, kKeysLd);

    const auto columns = [&](std::int64_t i) {
      const KeyRange x = seen(i);
      return KeyRange{std::clamp<std::int64_t>(x.lo - j0, 0, N), std::clamp<std::int64_t>(x.hi - j0, 0, N)};
    };
    const bool partial = online_softmax<Policy::kGate, Policy::kSecond>(w, ra, rb, N, scale, C == nullptr ? C : C + t0,
                                                                        C == nullptr ? C : C + j0, columns);
    if constexpr (kStats) {
      add_sums<Policy::kSecond>(w, ra, rb, N, p.V, columns);
    } else {
      const bool by_rows = partial && !all_finite(w.v, N * vp);
      add_values(w, w.s, ra, rb, N, vp, by_rows, w.o, columns);
      if constexpr (Policy::kSecond) add_values(w, w.u, ra, rb, N, vp, by_rows, w.o2, columns);
    }
  }

  if constexpr (kStats) {
    const Rows weight = head_rows(p.weight, span.row, span.q_begin, span.q_length, h);
    for (std::int64_t i = 0; i < M; ++i)
      keep_row<Policy::kSecond>(w, i, *st, st->at(p, span, h, i0 + i), weight ? scalar_at(weight, i0 + i) : 1.0);
  } else {
    const Rows o = head_rows(p.o, span.row, span.q_begin, span.q_length, h),
               lse = head_rows(p.lse, span.row, span.q_begin, span.q_length, h);
    for (std::int64_t i = 0; i < M; ++i) {
      float* x = w.o + i * vp;
      const bool none = w.l[i] == 0.0F;
      const float norm = none ? 0.0F : 1.0F / w.l[i];
      for (std::int64_t c = 0; c < vp; c += lanes) {
        auto y = hn::Mul(hn::LoadU(d, x + c), hn::Set(d, norm));
        if constexpr (Policy::kSecond) {
          const auto z = hn::Mul(hn::LoadU(d, w.o2 + i * vp + c), hn::Set(d, norm));
          y = hn::Sub(hn::MulAdd(y, hn::Set(d, w.d2[i] * norm), y), z);
        }
        hn::StoreU(none ? hn::Zero(d) : y, d, x + c);
      }
      if (lse) {
        const float value = none ? 0.0F : w.m[i] + std::log(w.l[i]);
        store_row(&value, lse.at(i0 + i, 0), lse.dtype, 1, 1);
      }
    }
    if (o) store_rows(w.o, vp, o, i0, M, 0, p.V);
  }
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
