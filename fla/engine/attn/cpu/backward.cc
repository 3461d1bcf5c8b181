// Gradients of softmax-like attention. First the forward's tiles once more, for m, 1 / l and <do, o> of every row, but
// no output; then, with
// p_ij = e^{s_ij - m_i} / l_i formed again tile by tile and D_ij = p_ij (<do_i, v_j> - <do_i, o_i>):
//   dq_i = scale sum_j D_ij k_j, dk_j = scale sum_i D_ij q_i, dv_j = sum_i p_ij do_i, dg_m = sum_{i >= m > j} D_ij
// gates    the sums of dg leave out from the start the pairs without gate m between them. Behind a strong gate they are
//          as small as its decay: a difference of sums over all pairs would have none of their digits
// task     one key head of one sequence with its query heads in order: keys outside, queries inside
// scratch  dq of one head, dk and dv in fp32, tiles: linear in T. No array is [T, T]
// bits     every sum has one order; what masks hide is skipped or a true zero
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fla/engine/attn/cpu/entry.h"
#include "fla/engine/attn/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/attn/cpu/backward.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/attn/cpu/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct BackwardTiles {
  float* dq = nullptr;       // [TQ, kp] of the head at work
  float* dr = nullptr;       // [TQ, kp]; second query
  float* dk = nullptr;       // [TK, kp] over the group
  float* dkh = nullptr;      // [TK, kp] of the head alone; channel gate
  float* dv = nullptr;       // [TK, vp] over the group
  double* before = nullptr;  // [TQ] sums of the rows over earlier tiles of keys; gate
  double* dg = nullptr;      // [kKeys]; gate
  float* q = nullptr;        // [kBackwardRows + 4, kp]
  float* r = nullptr;        // second query
  float* dout = nullptr;     // [kBackwardRows, vp]
  float* k = nullptr;        // [kKeys + 4, kp]
  float* kt = nullptr;       // [kp, kKeysLd]
  float* v = nullptr;        // [kKeys + 4, vp]
  float* vt = nullptr;       // [vp, kKeysLd]
  float* s = nullptr;        // [kBackwardRows, kKeysLd] logits, p, then D
  float* a = nullptr;        // [kBackwardRows, kKeysLd] <do, v>
  float* u = nullptr;        // [kBackwardRows, kKeysLd] <r, k>, then U; second query
  float* w = nullptr;        // [kBackwardRows, kKeysLd] weights of v; second query
  float* gate = nullptr;     // [kKeysLd]
  float* qd = nullptr;       // [kBackwardRows + 4, kp] q e^{P_t - P_anchor}; channel gate
  float* qs = nullptr;       // [kSub + 4, kp]
  float* kd = nullptr;       // [kKeys + 4, kp]
  float* kdt = nullptr;      // [kp, kKeysLd]
  float* tmp = nullptr;      // [kKeys, kp]
  float* e = nullptr;        // [kp]
  float* dkt = nullptr;      // [kKeys, kp] of the tile, from queries behind it; channel gate
  float* dgk = nullptr;      // [kKeys, kp] from the tile's own queries; channel gate
  float* run = nullptr;      // [kp]; channel gate
  double* sum = nullptr;     // [kp]; channel gate

  void carve(Arena& arena, const AttnProblem& p) {
    const std::int64_t kp = pad_up(p.K), vp = pad_up(p.V), M = kBackwardRows;
    const bool channel = p.gk.present(), second = p.r.present();
    dq = arena.floats(p.TQ * kp);
    if (second) dr = arena.floats(p.TQ * kp);
    dk = arena.floats(p.TK * kp);
    dkh = channel ? arena.floats(p.TK * kp) : dk;
    dv = arena.floats(p.TK * vp);
    if (p.g) {
      before = arena.take<double>(p.TQ);
      dg = arena.take<double>(kKeys);
    }
    q = arena.floats((M + 4) * kp);
    dout = arena.floats(M * vp);
    k = arena.floats((kKeys + 4) * kp);
    kt = arena.floats(kp * kKeysLd);
    v = arena.floats((kKeys + 4) * vp);
    vt = arena.floats(vp * kKeysLd);
    s = arena.floats(M * kKeysLd);
    a = arena.floats(M * kKeysLd);
    if (second) {
      r = arena.floats((M + 4) * kp);
      u = arena.floats(M * kKeysLd);
      w = arena.floats(M * kKeysLd);
    }
    gate = arena.floats(kKeysLd);
    if (channel) {
      qd = arena.floats((M + 4) * kp);
      qs = arena.floats((kSub + 4) * kp);
      kd = arena.floats((kKeys + 4) * kp);
      kdt = arena.floats(kp * kKeysLd);
      tmp = arena.floats(kKeys * kp);
      e = arena.floats(kp);
      dkt = arena.floats(kKeys * kp);
      dgk = arena.floats(kKeys * kp);
      run = arena.floats(kp);
      sum = arena.take<double>(kp);
    }
  }
};

HWY_INLINE void add_to_row(const float* x, std::int64_t width, float* out) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < width; c += lanes)
    hn::StoreU(hn::Add(hn::LoadU(d, x + c), hn::LoadU(d, out + c)), d, out + c);
}

// dq += D k and dk += D^T q through the decays: as channel_products pairs queries and keys. `dq` and `dk` are the
// tiles' rows, D [.., kKeysLd] holds true zeros where a mask hides. Where the rows stand at the keys themselves, w.dgk
// gets what these pairs give the gates between them: from the keys before gate m, and from the rows at m and behind it.
HWY_INLINE void channel_gradients(const BackwardTiles& w, std::int64_t t0, std::int64_t M, std::int64_t j0,
                                  std::int64_t N, const double* P, std::int64_t K, float* dq, float* dk) {
  const std::int64_t kp = pad_up(K);
  const bool own = j0 + N > t0;
  const auto pair = [&](std::int64_t first, std::int64_t last, std::int64_t keys, std::int64_t anchor) HWY_ATTR {
    const float* D = w.s + first * kKeysLd;
    const std::int64_t rows = last - first;
    decay_queries(w.q + first * kp, P + (t0 + first) * kp, P + anchor * kp, rows, kp, w.qd, w.e);
    decay_keys(w.k, P + j0 * kp, P + anchor * kp, keys, kp, w.kd, w.e);
    gemm<false>(rows, kp, {D, kKeysLd, w.kd, kp, keys}, {}, Tri::None, {}, w.tmp, kp);
    if (own) std::fill(w.run, w.run + kp, 0.0F);
    for (std::int64_t i = rows - 1; i >= 0; --i) {
      decays(P + (t0 + first + i) * kp, P + anchor * kp, kp, w.e);
      multiply_add(w.e, w.tmp + i * kp, kp, dq + (first + i) * kp);
      if (!own) continue;
      multiply(w.e, w.tmp + i * kp, kp, w.e);
      multiply_add(w.e, w.q + (first + i) * kp, kp, w.run);
      add_to_row(w.run, kp, w.dgk + (t0 + first + i - j0) * kp);
    }
    gemm<true>(keys, kp, {D, kKeysLd, w.qd, kp, rows}, {}, Tri::None, {}, w.tmp, kp);
    if (own) std::fill(w.run, w.run + kp, 0.0F);
    for (std::int64_t j = 0; j < keys; ++j) {
      decays(P + anchor * kp, P + (j0 + j) * kp, kp, w.e);
      multiply_add(w.e, w.tmp + j * kp, kp, dk + j * kp);
      if (!own) continue;
      add_to_row(w.run, kp, w.dgk + j * kp);
      multiply(w.e, w.tmp + j * kp, kp, w.e);
      multiply_add(w.e, w.k + j * kp, kp, w.run);
    }
  };
  if (!own) return pair(0, M, N, t0);
  for (std::int64_t r0 = 0; r0 < M; r0 += kSub) {
    const std::int64_t last = std::min(r0 + kSub, M), t = t0 + r0, before = std::clamp<std::int64_t>(t - j0, 0, N);
    if (before > 0) pair(r0, last, before, t);
    for (std::int64_t i = r0; i < last; ++i) {
      const std::int64_t end = std::clamp<std::int64_t>(t0 + i + 1 - j0, before, N);
      std::fill(w.run, w.run + kp, 0.0F);
      for (std::int64_t j = before; j < end; ++j) {
        const hn::ScalableTag<float> d;
        const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
        decays(P + (t0 + i) * kp, P + (j0 + j) * kp, kp, w.e);
        const auto D = hn::Set(d, w.s[i * kKeysLd + j]);
        for (std::int64_t c = 0; c < kp; c += lanes) {
          const auto De = hn::Mul(D, hn::LoadU(d, w.e + c)), qi = hn::LoadU(d, w.q + i * kp + c);
          const auto Dk = hn::Mul(De, hn::LoadU(d, w.k + j * kp + c)), run = hn::LoadU(d, w.run + c);
          float *dqi = dq + i * kp + c, *dkj = dk + j * kp + c, *dgj = w.dgk + j * kp + c;
          hn::StoreU(hn::Add(run, hn::LoadU(d, dgj)), d, dgj);
          hn::StoreU(hn::MulAdd(Dk, qi, run), d, w.run + c);
          hn::StoreU(hn::Add(Dk, hn::LoadU(d, dqi)), d, dqi);
          hn::StoreU(hn::MulAdd(De, qi, hn::LoadU(d, dkj)), d, dkj);
        }
      }
    }
  }
}

template <class Policy>
HWY_NOINLINE void backward_head(const AttnProblem& p, BackwardTiles& w, const GateSums& sums, const RowStats& st,
                                std::int64_t n, const AttnSpan& span, std::int64_t h) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, kp = pad_up(K), vp = pad_up(p.V), kv = h / p.group(), Lq = span.q_length,
                     Lk = span.k_length;
  const float scale = static_cast<float>(p.scale);
  const Rows q = head_rows(p.q, span.row, span.q_begin, Lq, h), r = head_rows(p.r, span.row, span.q_begin, Lq, h),
             dout = head_rows(p.do_, span.row, span.q_begin, Lq, h), k = head_rows(p.k, span.row, span.k_begin, Lk, kv),
             v = head_rows(p.v, span.row, span.k_begin, Lk, kv);
  const double* C = Policy::kGate ? sums.head(p, span, h) : nullptr;
  const double* P = Policy::kChannel ? sums.channels(p, span, h) : nullptr;
  std::fill(w.dq, w.dq + Lq * kp, 0.0F);
  if constexpr (Policy::kSecond) std::fill(w.dr, w.dr + Lq * kp, 0.0F);
  if constexpr (Policy::kGate) std::fill(w.before, w.before + Lq, 0.0);
  if constexpr (Policy::kChannel) std::fill(w.dkh, w.dkh + Lk * kp, 0.0F);

  for (std::int64_t j0 = 0; j0 < Lk; j0 += kKeys) {
    const std::int64_t N = std::min(kKeys, Lk - j0), end = pad_up(N);
    load_tile(k, j0, j0, j0 + N, N, K, w.k, kp);
    load_tile(v, j0, j0, j0 + N, N, p.V, w.v, vp);
    transpose(w.v, vp, N, p.V, w.vt, kKeysLd);
    if constexpr (!Policy::kChannel) transpose(w.k, kp, N, K, w.kt, kKeysLd);
    const bool k_finite = all_finite(w.k, N * kp);
    float *dk = w.dkh + j0 * kp, *dv = w.dv + j0 * vp;
    if constexpr (Policy::kGate) std::fill(w.dg, w.dg + N, 0.0);
    if constexpr (Policy::kChannel) {
      std::fill(w.dkt, w.dkt + N * kp, 0.0F);
      std::fill(w.dgk, w.dgk + N * kp, 0.0F);
      std::fill(w.sum, w.sum + kp, 0.0);
    }
    for (std::int64_t i0 = 0; i0 < Lq; i0 += kBackwardRows) {
      const std::int64_t M = std::min(kBackwardRows, Lq - i0), t0 = i0 + span.offset;
      const KeyRange all = tile_range(p, span, n, i0, M);
      if (all.empty() || all.hi <= j0) continue;
      if (all.lo >= j0 + N) break;
      load_rows(q, i0, M, 0, K, w.q, kp);
      if (dout) {
        load_rows(dout, i0, M, 0, p.V, w.dout, vp);
      } else {
        std::fill(w.dout, w.dout + M * vp, 0.0F);
      }
      if constexpr (Policy::kChannel) {
        decay_queries(w.q, P + t0 * kp, P + t0 * kp, M, kp, w.qd, w.e);
        channel_products(w.q, w.qd, t0, 0, M, w.k, j0, N, P, K, w.qs, w.kd, w.kdt, w.e, w.s);
      } else {
        gemm<false>(M, N, {w.q, kp, w.kt, kKeysLd, K}, {}, Tri::None, {}, w.s, kKeysLd);
      }
      if constexpr (Policy::kSecond) {
        load_rows(r, i0, M, 0, K, w.r, kp);
        gemm<false>(M, N, {w.r, kp, w.kt, kKeysLd, K}, {}, Tri::None, {}, w.u, kKeysLd);
      }
      gemm<false>(M, N, {w.dout, vp, w.vt, kKeysLd, p.V}, {}, Tri::None, {}, w.a, kKeysLd);

      bool partial = false;
      const auto columns = [&](std::int64_t i) {
        const KeyRange x = p.visible(span, n, i0 + i);
        return KeyRange{std::clamp<std::int64_t>(x.lo - j0, 0, N), std::clamp<std::int64_t>(x.hi - j0, 0, N)};
      };
      for (std::int64_t i = 0; i < M; ++i) {
        const KeyRange c = columns(i);
        partial = partial || c.lo > 0 || c.hi < N;
        const std::int64_t at = st.at(p, span, h, i0 + i);
        if constexpr (Policy::kGate) differences(C[t0 + i], C + j0, N, w.gate);
        float *s = w.s + i * kKeysLd, *a = w.a + i * kKeysLd;
        logits<Policy::kGate>(s, c.lo, c.hi, end, scale, w.gate);
        const auto m = hn::Set(d, st.m[at]), norm = hn::Set(d, st.norm[at]), t = hn::Set(d, st.t[at]);
        for (std::int64_t x = 0; x < end; x += lanes) {
          const auto in = lanes_in(d, x, c.lo, c.hi);
          const auto prob = hn::Mul(exp_down(d, hn::Sub(hn::LoadU(d, s + x), m)), norm);
          const auto ax = hn::LoadU(d, a + x);
          auto D = hn::Mul(prob, hn::Sub(ax, t));
          auto weight = prob;
          if constexpr (Policy::kSecond) {
            float* u = w.u + i * kKeysLd + x;
            const auto du = hn::Sub(hn::Set(d, st.ubar[at]), hn::LoadU(d, u)),
                       av = hn::Sub(ax, hn::Set(d, st.vbar[at]));
            D = hn::Mul(prob, hn::MulAdd(du, av, hn::Sub(ax, t)));
            weight = hn::MulAdd(prob, du, prob);
            hn::StoreU(hn::IfThenElseZero(in, hn::Neg(hn::Mul(prob, av))), d, u);
          }
          // p into a's place, D into s's.
          hn::StoreU(hn::IfThenElseZero(in, weight), d, a + x);
          hn::StoreU(hn::IfThenElseZero(in, D), d, s + x);
        }
      }
      if constexpr (Policy::kGate) gate_gradients(w.s, M, N, t0, j0, w.before + i0, w.gate, w.dg);
      // The queries that see key j of the tile.
      const auto rows = [&](std::int64_t j) {
        KeyRange x{M, M};
        for (std::int64_t i = 0; i < M; ++i) {
          const KeyRange c = columns(i);
          if (c.lo > j || c.hi <= j) continue;
          x.lo = std::min(x.lo, i);
          x.hi = i + 1;
        }
        return x.lo < M ? x : KeyRange{0, 0};
      };
      const auto over_queries = [&](const float* D, const float* x, std::int64_t width, float* out) HWY_ATTR {
        const Operand operand{D, kKeysLd, x, width, M};
        if (partial && !all_finite(x, M * width)) {
          product_by_rows<true>(N, width, operand, {out, width}, out, width, rows);
        } else {
          gemm<true>(N, width, operand, {}, Tri::None, {out, width}, out, width);
        }
      };
      const auto over_keys = [&](const float* D, float* out) HWY_ATTR {
        const Operand operand{D, kKeysLd, w.k, kp, N};
        if (partial && !k_finite) {
          product_by_rows<false>(M, kp, operand, {out, kp}, out, kp, columns);
        } else {
          gemm<false>(M, kp, operand, {}, Tri::None, {out, kp}, out, kp);
        }
      };
      over_queries(w.a, w.dout, vp, dv);
      if constexpr (Policy::kChannel) {
        // q o dq of a row so far is what its keys before this tile give every gate between.
        float* dq = w.dq + i0 * kp;
        if (t0 >= j0 + N) {
          for (std::int64_t i = 0; i < M; ++i)
            for (std::int64_t c = 0; c < kp; ++c)
              w.sum[c] += static_cast<double>(w.q[i * kp + c]) * static_cast<double>(dq[i * kp + c]);
          channel_gradients(w, t0, M, j0, N, P, K, dq, w.dkt);
        } else {
          std::fill(w.run, w.run + kp, 0.0F);
          for (std::int64_t i = M - 1; i >= 0; --i) {
            multiply_add(w.q + i * kp, dq + i * kp, kp, w.run);
            add_to_row(w.run, kp, w.dgk + (t0 + i - j0) * kp);
          }
          channel_gradients(w, t0, M, j0, N, P, K, dq, dk);
        }
      } else {
        // scale belongs to D, but r's gradients have none: it is put on where they meet in dk.
        if constexpr (Policy::kSecond) {
          over_queries(w.u, w.r, kp, dk);
          over_keys(w.u, w.dr + i0 * kp);
          for (std::int64_t i = 0; i < M; ++i) {
            float* s = w.s + i * kKeysLd;
            for (std::int64_t x = 0; x < end; x += lanes)
              hn::StoreU(hn::Mul(hn::Set(d, scale), hn::LoadU(d, s + x)), d, s + x);
          }
        }
        over_queries(w.s, w.q, kp, dk);
        over_keys(w.s, w.dq + i0 * kp);
      }
    }
    // Every pair that a gate of the tile is between has been here: its keys are in this tile or an earlier one.
    if constexpr (Policy::kGate) {
      if (const Rows dg = head_rows(p.dg, span.row, span.k_begin, Lk, h); dg) {
        for (std::int64_t j = 0; j < N; ++j) {
          const float x = static_cast<float>(p.gate_scale * w.dg[j]);
          store_row(&x, dg.at(j0 + j, 0), dg.dtype, 1, 1);
        }
      }
    }
    if constexpr (Policy::kChannel) {
      if (const Rows dg = head_rows(p.dgk, span.row, span.k_begin, Lk, h); dg) {
        for (std::int64_t j = 0; j < N; ++j) {
          for (std::int64_t c = 0; c < kp; ++c) {
            w.e[c] = scale * static_cast<float>(w.sum[c] + static_cast<double>(w.dgk[j * kp + c]));
            w.sum[c] += static_cast<double>(w.k[j * kp + c]) * static_cast<double>(w.dkt[j * kp + c]);
          }
          store_row(w.e, dg.at(j0 + j, 0), dg.dtype, dg.last, K);
        }
      }
      for (std::int64_t j = 0; j < N; ++j) add_to_row(w.dkt + j * kp, kp, dk + j * kp);
    }
  }

  const float dq_scale = Policy::kSecond ? 1.0F : scale;
  const auto scaled = [&](float* x, std::int64_t count) HWY_ATTR {
    for (std::int64_t c = 0; c < count; c += lanes)
      hn::StoreU(hn::Mul(hn::Set(d, dq_scale), hn::LoadU(d, x + c)), d, x + c);
  };
  if (dq_scale != 1.0F) scaled(w.dq, Lq * kp);
  if constexpr (Policy::kChannel) {
    scaled(w.dkh, Lk * kp);
    for (std::int64_t c = 0; c < Lk * kp; c += lanes)
      hn::StoreU(hn::Add(hn::LoadU(d, w.dk + c), hn::LoadU(d, w.dkh + c)), d, w.dk + c);
  }
  if (const Rows dq = head_rows(p.dq, span.row, span.q_begin, Lq, h); dq) store_rows(w.dq, kp, dq, 0, Lq, 0, K);
  if constexpr (Policy::kSecond) {
    if (const Rows dr = head_rows(p.dr, span.row, span.q_begin, Lq, h); dr) store_rows(w.dr, kp, dr, 0, Lq, 0, K);
  }
}

std::size_t backward_bytes(const AttnProblem& p) {
  Arena arena;
  BackwardTiles w;
  w.carve(arena, p);
  return arena.bytes();
}

template <class Policy>
HWY_NOINLINE void backward_items(const AttnProblem& p, const GateSums& sums, const RowStats& st, ThreadPool& pool,
                                 std::byte* scratch) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::size_t bytes = backward_bytes(p);
  const std::int64_t kp = pad_up(p.K), vp = pad_up(p.V), G = p.group();
  run_items(pool, p.N * p.H, std::max<std::int64_t>(pool.size(), 1),
            [&](std::int64_t item, std::int64_t slot) HWY_ATTR {
              Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
              BackwardTiles w;
              w.carve(arena, p);
              const std::int64_t n = item / p.H, kv = item % p.H;
              const AttnSpan s = p.sequence(n);
              if (s.q_length <= 0 && s.k_length <= 0) return;
              std::fill(w.dk, w.dk + s.k_length * kp, 0.0F);
              std::fill(w.dv, w.dv + s.k_length * vp, 0.0F);
              for (std::int64_t h = kv * G; h < (kv + 1) * G; ++h) backward_head<Policy>(p, w, sums, st, n, s, h);
              if constexpr (!Policy::kSecond && !Policy::kChannel) {
                const auto scale = hn::Set(d, static_cast<float>(p.scale));
                for (std::int64_t c = 0; c < s.k_length * kp; c += lanes)
                  hn::StoreU(hn::Mul(scale, hn::LoadU(d, w.dk + c)), d, w.dk + c);
              }
              if (const Rows dk = head_rows(p.dk, s.row, s.k_begin, s.k_length, kv); dk)
                store_rows(w.dk, kp, dk, 0, s.k_length, 0, p.K);
              if (const Rows dv = head_rows(p.dv, s.row, s.k_begin, s.k_length, kv); dv)
                store_rows(w.dv, vp, dv, 0, s.k_length, 0, p.V);
            });
}

void backward(const AttnProblem& p, const GateSums& sums, const RowStats& st, ThreadPool& pool, std::byte* scratch) {
  with_policy(p, [&](auto policy) { backward_items<decltype(policy)>(p, sums, st, pool, scratch); });
}

// db_h = -sum_i p_sink,i <do_i, o_i>, over all rows in order.
void sink_gradient(const AttnProblem& p, const RowStats& st) {
  for (std::int64_t h = 0; h < p.HQ; ++h) {
    const float b = static_cast<float>(scalar_at({p.sink.at(h), p.sink.dtype, 0, 1}, 0));
    double sum = 0.0;
    for (std::int64_t i = h * st.rows; i < (h + 1) * st.rows; ++i)
      sum -= std::exp(static_cast<double>(b) - static_cast<double>(st.m[i])) * static_cast<double>(st.norm[i]) *
             static_cast<double>(st.t[i]);
    const float x = static_cast<float>(sum);
    store_row(&x, p.dsink.at(h), p.dsink.dtype, 1, 1);
  }
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(backward_bytes);
HWY_EXPORT(backward);
HWY_EXPORT(sink_gradient);

namespace {

std::size_t kept_bytes(const AttnProblem& p) {
  Arena arena;
  GateSums sums;
  RowStats st;
  sums.carve(arena, p);
  st.carve(arena, p);
  return arena.bytes();
}

// A branch's weight multiplies o, so its gradient is <do, o>.
void store_weight_gradients(const AttnProblem& p, const RowStats& st) {
  for (std::int64_t h = 0; h < p.HQ; ++h)
    for (std::int64_t i = 0; i < st.rows; ++i)
      store_element(p.dweight.at(i / p.TQ, i % p.TQ, h), p.dweight.dtype, static_cast<double>(st.t[h * st.rows + i]));
}

// Both passes use the same scratch, one after the other.
std::size_t scratch_bytes(const AttnProblem& p) {
  return std::max(attn_rows_bytes(p, true), HWY_DYNAMIC_DISPATCH(backward_bytes)(p));
}

}  // namespace

std::size_t attn_backward_workspace(const AttnProblem& p, int threads) {
  return kept_bytes(p) + scratch_bytes(p) * static_cast<std::size_t>(std::max(threads, 1));
}

Status attn_backward(const AttnProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (workspace.size() < attn_backward_workspace(p, pool.size()))
    return {Code::OutOfMemory, "attn_backward: workspace too small"};
  Arena arena(workspace.data());
  GateSums sums;
  RowStats st;
  sums.carve(arena, p);
  st.carve(arena, p);
  std::byte* scratch = workspace.data() + kept_bytes(p);
  sum_gates(p, sums, pool);
  if (p.N > 0) attn_rows(p, sums, &st, pool, scratch);
  if (p.dweight) store_weight_gradients(p, st);
  if (p.dsink) HWY_DYNAMIC_DISPATCH(sink_gradient)(p, st);
  if (p.N > 0 && (p.dq || p.dr || p.dk || p.dv || p.dg || p.dgk))
    HWY_DYNAMIC_DISPATCH(backward)(p, sums, st, pool, scratch);
  return {};
}

}  // namespace fla::cpu
#endif
