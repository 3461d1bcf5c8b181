// Native sparse attention, forward and backward. The compressed and the sliding branch are dense attention problems of
// their own, the first over pooled keys and values; the selected branch is here.
// task     selected forward: some queries of one key head of one sequence, its G query heads being the rows of a tile;
//          selected backward: one key head of one sequence, queries in order
// scratch  pooled keys and values, branch outputs and gradients in fp32: linear in T
// bits     a query's slots go in the order of its list, which is taken or chosen from earlier tokens alone
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fla/engine/attn/cpu/entry.h"
#include "fla/engine/attn/cpu/internal.h"
#include "fla/engine/attn/nsa.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/attn/cpu/nsa.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/attn/cpu/forward-inl.h"

#ifndef FLA_ENGINE_ATTN_CPU_NSA_CC_ONCE
#define FLA_ENGINE_ATTN_CPU_NSA_CC_ONCE
namespace fla::cpu {

// The selected branch's problem with its list; statistics by query head and row.
struct Selected {
  const NsaProblem& p;
  const std::int64_t* list;  // [B, TQ, H, slots], chosen here; nullptr: p.indices
  TensorView o;              // [B, TQ, HQ, V]
  RowStats st;
  TensorView dq, dk, dv;

  std::int64_t slot(const AttnSpan& s, std::int64_t i, std::int64_t kv, std::int64_t at) const {
    if (list == nullptr) return p.entry(p.indices, s.row, s.q_begin + i, kv, at);
    return list[((s.row * p.TQ + s.q_begin + i) * p.H + kv) * p.slots + at];
  }
  // Calls fn(j0, N) for each tile of keys that query i reads.
  template <typename Fn>
  void tiles(const AttnSpan& s, std::int64_t i, std::int64_t kv, const Fn& fn) const {
    const std::int64_t t = i + s.offset;
    for (std::int64_t at = 0; at < p.count(s, i, kv); ++at) {
      const std::int64_t block = slot(s, i, kv, at);
      if (block < 0 || block > t / p.block || block * p.block >= s.k_length) continue;
      const std::int64_t end = std::min({(block + 1) * p.block, t + 1, s.k_length});
      for (std::int64_t j0 = block * p.block; j0 < end; j0 += kKeys) fn(j0, std::min(kKeys, end - j0));
    }
  }
};

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Query heads [h, h + M) of token i, as rows.
HWY_INLINE Rows token_heads(const TensorView& x, std::int64_t row, std::int64_t at, std::int64_t h) {
  if (!x) return {};
  return {x.at(row, at, h), x.dtype, x.stride[2] * static_cast<std::int64_t>(size_of(x.dtype)),
          x.ndim > 3 ? x.stride[3] : 1};
}

template <bool kStats>
HWY_NOINLINE void selected_forward(const Selected& x, ForwardTiles& w, const AttnSpan& s, std::int64_t kv,
                                   std::int64_t i) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const NsaProblem& p = x.p;
  const std::int64_t K = p.K, kp = pad_up(K), vp = pad_up(p.V), G = p.group(), at = s.q_begin + i;
  const Rows k = head_rows(p.k, s.row, s.k_begin, s.k_length, kv), v = head_rows(p.v, s.row, s.k_begin, s.k_length, kv);
  for (std::int64_t h = kv * G; h < (kv + 1) * G; h += kForwardRows) {
    const std::int64_t M = std::min(kForwardRows, (kv + 1) * G - h);
    load_rows(token_heads(p.q, s.row, at, h), 0, M, 0, K, w.q, kp);
    std::fill(w.m, w.m + M, -std::numeric_limits<float>::infinity());
    std::fill(w.l, w.l + M, 0.0F);
    if constexpr (kStats) {
      start_sums(w, token_heads(p.do_, s.row, at, h), 0, M, p.V, false);
    } else {
      std::fill(w.o, w.o + M * vp, 0.0F);
    }
    x.tiles(s, i, kv, [&](std::int64_t j0, std::int64_t N) HWY_ATTR {
      const auto columns = [&](std::int64_t) { return KeyRange{0, N}; };
      load_rows(k, j0, N, 0, K, w.k, kp);
      load_rows(v, j0, N, 0, p.V, w.v, vp);
      transpose(w.k, kp, N, K, w.kt, kKeysLd);
      gemm<false>(M, N, {w.q, kp, w.kt, kKeysLd, K}, {}, Tri::None, {}, w.s, kKeysLd);
      online_softmax<false, false>(w, 0, M, N, static_cast<float>(p.scale), nullptr, nullptr, columns);
      if constexpr (kStats) {
        add_sums<false>(w, 0, M, N, p.V, columns);
      } else {
        add_values(w, w.s, 0, M, N, vp, false, w.o, columns);
      }
    });
    if constexpr (kStats) {
      const Rows weight = token_heads(p.g_slc, s.row, at, h);
      for (std::int64_t r = 0; r < M; ++r)
        keep_row<false>(w, r, x.st, x.st.at(p, s, h + r, i), weight ? scalar_at(weight, r) : 1.0);
      continue;
    }
    for (std::int64_t r = 0; r < M; ++r) {
      float* o = w.o + r * vp;
      const float norm = w.l[r] == 0.0F ? 0.0F : 1.0F / w.l[r];
      for (std::int64_t c = 0; c < vp; c += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, o + c), hn::Set(d, norm)), d, o + c);
    }
    store_rows(w.o, vp, token_heads(x.o, s.row, at, h), 0, M, 0, p.V);
  }
}

struct SelectedGradients {
  float *q = nullptr, *dq = nullptr;   // [kForwardRows + 4, kp]
  float* dout = nullptr;               // [kForwardRows, vp]
  float *k = nullptr, *kt = nullptr;   // [kKeys + 4, kp], [kp, kKeysLd]
  float *v = nullptr, *vt = nullptr;   // [kKeys + 4, vp], [vp, kKeysLd]
  float *s = nullptr, *a = nullptr;    // [kForwardRows, kKeysLd]
  float *dk = nullptr, *dv = nullptr;  // [TK, kp], [TK, vp]

  void carve(Arena& arena, const NsaProblem& p) {
    const std::int64_t kp = pad_up(p.K), vp = pad_up(p.V), M = kForwardRows;
    q = arena.floats((M + 4) * kp);
    dq = arena.floats(M * kp);
    dout = arena.floats(M * vp);
    k = arena.floats((kKeys + 4) * kp);
    kt = arena.floats(kp * kKeysLd);
    v = arena.floats((kKeys + 4) * vp);
    vt = arena.floats(vp * kKeysLd);
    s = arena.floats(M * kKeysLd);
    a = arena.floats(M * kKeysLd);
    dk = arena.floats(p.TK * kp);
    dv = arena.floats(p.TK * vp);
  }
};

HWY_NOINLINE void selected_backward(const Selected& x, SelectedGradients& w, const AttnSpan& s, std::int64_t kv) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const NsaProblem& p = x.p;
  const std::int64_t K = p.K, kp = pad_up(K), vp = pad_up(p.V), G = p.group();
  const float scale = static_cast<float>(p.scale);
  const Rows k = head_rows(p.k, s.row, s.k_begin, s.k_length, kv), v = head_rows(p.v, s.row, s.k_begin, s.k_length, kv);
  std::fill(w.dk, w.dk + s.k_length * kp, 0.0F);
  std::fill(w.dv, w.dv + s.k_length * vp, 0.0F);
  for (std::int64_t i = 0; i < s.q_length; ++i) {
    const std::int64_t at = s.q_begin + i;
    for (std::int64_t h = kv * G; h < (kv + 1) * G; h += kForwardRows) {
      const std::int64_t M = std::min(kForwardRows, (kv + 1) * G - h);
      load_rows(token_heads(p.q, s.row, at, h), 0, M, 0, K, w.q, kp);
      if (const Rows dout = token_heads(p.do_, s.row, at, h); dout) {
        load_rows(dout, 0, M, 0, p.V, w.dout, vp);
      } else {
        std::fill(w.dout, w.dout + M * vp, 0.0F);
      }
      std::fill(w.dq, w.dq + M * kp, 0.0F);
      x.tiles(s, i, kv, [&](std::int64_t j0, std::int64_t N) HWY_ATTR {
        const std::int64_t end = pad_up(N);
        load_rows(k, j0, N, 0, K, w.k, kp);
        load_rows(v, j0, N, 0, p.V, w.v, vp);
        transpose(w.k, kp, N, K, w.kt, kKeysLd);
        transpose(w.v, vp, N, p.V, w.vt, kKeysLd);
        gemm<false>(M, N, {w.q, kp, w.kt, kKeysLd, K}, {}, Tri::None, {}, w.s, kKeysLd);
        gemm<false>(M, N, {w.dout, vp, w.vt, kKeysLd, p.V}, {}, Tri::None, {}, w.a, kKeysLd);
        for (std::int64_t r = 0; r < M; ++r) {
          const std::int64_t of = x.st.at(p, s, h + r, i);
          const auto m = hn::Set(d, x.st.m[of]), norm = hn::Set(d, x.st.norm[of]), t = hn::Set(d, x.st.t[of]);
          float *sr = w.s + r * kKeysLd, *ar = w.a + r * kKeysLd;
          logits<false>(sr, 0, N, end, scale, nullptr);
          for (std::int64_t c = 0; c < end; c += lanes) {
            const auto in = lanes_in(d, c, 0, N);
            const auto prob = hn::Mul(exp_down(d, hn::Sub(hn::LoadU(d, sr + c), m)), norm);
            const auto D = hn::Mul(hn::Mul(hn::Set(d, scale), prob), hn::Sub(hn::LoadU(d, ar + c), t));
            hn::StoreU(hn::IfThenElseZero(in, prob), d, ar + c);
            hn::StoreU(hn::IfThenElseZero(in, D), d, sr + c);
          }
        }
        float *dk = w.dk + j0 * kp, *dv = w.dv + j0 * vp;
        gemm<true>(N, vp, {w.a, kKeysLd, w.dout, vp, M}, {}, Tri::None, {dv, vp}, dv, vp);
        gemm<true>(N, kp, {w.s, kKeysLd, w.q, kp, M}, {}, Tri::None, {dk, kp}, dk, kp);
        gemm<false>(M, kp, {w.s, kKeysLd, w.k, kp, N}, {}, Tri::None, {w.dq, kp}, w.dq, kp);
      });
      store_rows(w.dq, kp, token_heads(x.dq, s.row, at, h), 0, M, 0, K);
    }
  }
  store_rows(w.dk, kp, head_rows(x.dk, s.row, s.k_begin, s.k_length, kv), 0, s.k_length, 0, K);
  store_rows(w.dv, vp, head_rows(x.dv, s.row, s.k_begin, s.k_length, kv), 0, s.k_length, 0, p.V);
}

// Means of blocks, of one key head of one sequence.
HWY_NOINLINE void pool_rows(const Rows& x, std::int64_t length, std::int64_t n, std::int64_t width, const Rows& out,
                            float* row, float* sum) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), padded = pad_up(width);
  for (std::int64_t block = 0; block * n < length; ++block) {
    const std::int64_t end = std::min(length, (block + 1) * n);
    std::fill(sum, sum + padded, 0.0F);
    for (std::int64_t j = block * n; j < end; ++j) {
      load_rows(x, j, 1, 0, width, row, padded);
      for (std::int64_t c = 0; c < padded; c += lanes)
        hn::StoreU(hn::Add(hn::LoadU(d, sum + c), hn::LoadU(d, row + c)), d, sum + c);
    }
    const auto share = hn::Set(d, 1.0F / static_cast<float>(end - block * n));
    for (std::int64_t c = 0; c < padded; c += lanes) hn::StoreU(hn::Mul(share, hn::LoadU(d, sum + c)), d, sum + c);
    store_rows(sum, padded, out, block, 1, 0, width);
  }
}

// (2) of nsa.h for one query of one key head: `share` [blocks] and `score` [blocks] are scratch, `list` [slots] the
// result, in increasing order, empty slots last.
HWY_NOINLINE void choose(const NsaProblem& p, const AttnSpan& s, std::int64_t kv, std::int64_t i, const Rows& kc,
                         float* q, float* row, float* share, float* score, std::int64_t* list) {
  const std::int64_t K = p.K, kp = pad_up(K), G = p.group(), t = i + s.offset, own = t / p.block,
                     passed = (t + 1) / p.block;
  std::fill(score, score + own + 1, 0.0F);
  for (std::int64_t h = kv * G; h < (kv + 1) * G; ++h) {
    load_rows(token_heads(p.q, s.row, s.q_begin + i, h), 0, 1, 0, K, q, kp);
    float most = -std::numeric_limits<float>::infinity(), Z = 0.0F;
    for (std::int64_t j = 0; j < passed; ++j) {
      load_rows(kc, j, 1, 0, K, row, kp);
      share[j] = static_cast<float>(p.scale) * dot(q, row, kp);
      most = std::max(most, share[j]);
    }
    for (std::int64_t j = 0; j < passed; ++j) Z += share[j] = std::exp(share[j] - most);
    for (std::int64_t j = 0; j < passed; ++j) score[j] += share[j] / Z;
  }
  for (const std::int64_t forced : {std::int64_t{0}, own - 1, own})
    if (forced >= 0) score[forced] = static_cast<float>(2 * G);  // shares sum to at most G
  const std::int64_t found = std::min(p.slots, own + 1);
  for (std::int64_t at = 0; at < p.slots; ++at) {
    list[at] = -1;
    if (at >= found) continue;
    std::int64_t best = 0;
    for (std::int64_t j = 1; j <= own; ++j)
      if (score[j] > score[best]) best = j;
    list[at] = best;
    score[best] = -1.0F;
  }
  std::sort(list, list + found);
}

// y = gate x by rows of V, or y += gate x.
HWY_INLINE void gated_rows(const Rows& x, const Rows& gate, double absent, std::int64_t rows, std::int64_t width,
                           float* row, float* to, bool add) {
  const std::int64_t padded = pad_up(width);
  for (std::int64_t i = 0; i < rows; ++i) {
    load_rows(x, i, 1, 0, width, row, padded);
    const hn::ScalableTag<float> d;
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
    const auto g = hn::Set(d, static_cast<float>(gate ? scalar_at(gate, i) : absent));
    float* y = to + i * padded;
    for (std::int64_t c = 0; c < padded; c += lanes) {
      const auto gx = hn::Mul(g, hn::LoadU(d, row + c));
      hn::StoreU(add ? hn::Add(hn::LoadU(d, y + c), gx) : gx, d, y + c);
    }
  }
}

// What the choice of one head takes.
struct Choice {
  float *q = nullptr, *row = nullptr;        // [kp]
  float *share = nullptr, *score = nullptr;  // [blocks]
  std::int64_t* list = nullptr;              // [slots]

  void carve(Arena& arena, const NsaProblem& p) {
    for (float** x : {&q, &row}) *x = arena.floats(pad_up(p.K));
    for (float** x : {&share, &score}) *x = arena.floats(p.TK / p.block + 2);
    list = arena.take<std::int64_t>(p.slots);
  }
};

std::size_t choose_bytes(const NsaProblem& p) {
  Arena arena;
  Choice x;
  x.carve(arena, p);
  return arena.bytes();
}

std::size_t tile_bytes(const NsaProblem& p) {
  Arena forward, stats, backward, choice;
  ForwardTiles w;
  w.carve(forward, p.K, p.V, false, false, false);
  w.carve(stats, p.K, p.V, false, false, true);
  SelectedGradients g;
  g.carve(backward, p);
  choice.floats(4 * pad_up(std::max(p.K, p.V)) + p.HQ * pad_up(p.V));
  return std::max({forward.bytes(), stats.bytes(), backward.bytes(), choice.bytes(), choose_bytes(p)});
}

void pool(const NsaProblem& p, const TensorView& kc, const TensorView& vc, ThreadPool& threads, std::byte* scratch,
          std::size_t bytes) {
  run_items(threads, p.N * p.H, std::max<std::int64_t>(threads.size(), 1), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    const std::int64_t width = pad_up(std::max(p.K, p.V)), n = item / p.H, kv = item % p.H;
    float *row = arena.floats(width), *sum = arena.floats(width);
    const AttnSpan s = p.sequence(n);
    const std::int64_t begin = p.first_block(n);
    const std::int64_t blocks = (s.k_length + p.block - 1) / p.block;
    pool_rows(head_rows(p.k, s.row, s.k_begin, s.k_length, kv), s.k_length, p.block, p.K,
              head_rows(kc, s.row, begin, blocks, kv), row, sum);
    pool_rows(head_rows(p.v, s.row, s.k_begin, s.k_length, kv), s.k_length, p.block, p.V,
              head_rows(vc, s.row, begin, blocks, kv), row, sum);
  });
}

// Into p.chosen, or, where that is absent, into list [B, TQ, H, slots].
void select(const NsaProblem& p, const TensorView& kc, std::int64_t* list, ThreadPool& threads, std::byte* scratch,
            std::size_t bytes) {
  run_items(threads, p.N * p.H, std::max<std::int64_t>(threads.size(), 1), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    const std::int64_t n = item / p.H, kv = item % p.H;
    Choice x;
    x.carve(arena, p);
    const AttnSpan s = p.sequence(n);
    const Rows rows = head_rows(kc, s.row, p.first_block(n), s.k_length, kv);
    for (std::int64_t i = 0; i < s.q_length; ++i) {
      const std::int64_t at = s.q_begin + i;
      std::int64_t* to = list == nullptr ? x.list : list + ((s.row * p.TQ + at) * p.H + kv) * p.slots;
      choose(p, s, kv, i, rows, x.q, x.row, x.share, x.score, to);
      for (std::int64_t e = 0; list == nullptr && e < p.slots; ++e) p.choose(s.row, at, kv, e, to[e]);
    }
  });
}

void selected(const Selected& x, bool gradients, ThreadPool& threads, std::byte* scratch, std::size_t bytes) {
  const NsaProblem& p = x.p;
  const std::int64_t heads = std::max<std::int64_t>(p.N * p.H, 1), workers = std::max<std::int64_t>(threads.size(), 1);
  const std::int64_t parts =
      std::clamp<std::int64_t>((8 * workers + heads - 1) / heads, 1, std::max<std::int64_t>(p.TQ, 1));
  run_items(threads, p.N * p.H * parts, workers, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    ForwardTiles w;
    w.carve(arena, p.K, p.V, false, false, gradients);
    const AttnSpan s = p.sequence(item / parts / p.H);
    for (std::int64_t i = item % parts; i < s.q_length; i += parts)
      gradients ? selected_forward<true>(x, w, s, item / parts % p.H, i)
                : selected_forward<false>(x, w, s, item / parts % p.H, i);
  });
  if (!gradients) return;
  run_items(threads, p.N * p.H, workers, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    SelectedGradients w;
    w.carve(arena, p);
    const AttnSpan s = p.sequence(item / p.H);
    if (s.k_length > 0) selected_backward(x, w, s, item % p.H);
  });
}

// Token by token: `to` = gate x, or += gate x, [B, TQ, HQ, V] in fp32.
void gate(const NsaProblem& p, const TensorView& x, const TensorView& g, double absent, const TensorView& to, bool add,
          ThreadPool& threads, std::byte* scratch, std::size_t bytes) {
  run_items(threads, p.B * p.TQ, std::max<std::int64_t>(threads.size(), 1), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    const std::int64_t vp = pad_up(p.V), b = item / p.TQ, i = item % p.TQ;
    float* row = arena.floats(vp + p.HQ * vp);
    float* y = row + vp;
    const Rows out = token_heads(to, b, i, 0);
    if (add) load_rows(out, 0, p.HQ, 0, p.V, y, vp);
    gated_rows(token_heads(x, b, i, 0), token_heads(g, b, i, 0), absent, p.HQ, p.V, row, y, add);
    store_rows(y, vp, out, 0, p.HQ, 0, p.V);
  });
}

void add_buffers(float* to, const float* x, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < n; c += lanes) hn::StoreU(hn::Add(hn::LoadU(d, to + c), hn::LoadU(d, x + c)), d, to + c);
}

// dk_j += dkc of its block / its length.
void spread(const NsaProblem& p, const TensorView& pooled, const TensorView& to, std::int64_t width) {
  for (std::int64_t n = 0; n < p.N; ++n) {
    const AttnSpan s = p.sequence(n);
    const std::int64_t begin = p.first_block(n);
    for (std::int64_t kv = 0; kv < p.H; ++kv) {
      for (std::int64_t j = 0; j < s.k_length; ++j) {
        const std::int64_t block = j / p.block, length = std::min(p.block, s.k_length - block * p.block);
        const float share = 1.0F / static_cast<float>(length);
        const float* from = reinterpret_cast<const float*>(pooled.at(s.row, begin + block, kv));
        float* out = reinterpret_cast<float*>(to.at(s.row, s.k_begin + j, kv));
        for (std::int64_t c = 0; c < width; ++c) out[c] += share * from[c];
      }
    }
  }
}

// Rows of fp32 into a gradient's own type and strides.
void store_gradient(const TensorView& from, const TensorView& to) {
  if (!to) return;
  for (std::int64_t b = 0; b < to.dim(0); ++b)
    for (std::int64_t h = 0; h < to.dim(2); ++h) {
      const Rows x = head_rows(from, b, 0, to.dim(1), h), y = head_rows(to, b, 0, to.dim(1), h);
      for (std::int64_t t = 0; t < to.dim(1); ++t)
        store_row(reinterpret_cast<const float*>(x.at(t, 0)), y.at(t, 0), y.dtype, y.last, to.dim(3));
    }
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(tile_bytes);
HWY_EXPORT(pool);
HWY_EXPORT(select);
HWY_EXPORT(choose_bytes);
HWY_EXPORT(gate);
HWY_EXPORT(add_buffers);
HWY_EXPORT(selected);
HWY_EXPORT(spread);
HWY_EXPORT(store_gradient);

namespace {

// Every buffer of a call, cut from its workspace, and the dense branches' problems.
struct NsaPlan {
  const NsaProblem& p;
  float *kc = nullptr, *vc = nullptr;  // pooled
  std::int64_t* list = nullptr;
  float* o = nullptr;                                 // a branch's output
  float* total = nullptr;                             // the forward's sum
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;  // a branch's gradients
  float *sum_q = nullptr, *sum_k = nullptr, *sum_v = nullptr;
  RowStats st;
  std::size_t tiles = 0, branch = 0, kept = 0;
  std::int64_t q_size, k_size, v_size;

  NsaPlan(const NsaProblem& problem, std::byte* memory, int threads, bool backward) : p(problem) {
    Arena arena = memory == nullptr ? Arena() : Arena(memory);
    const std::int64_t C = p.most_blocks();
    q_size = pad_up(p.B * p.TQ * p.HQ * p.K);
    k_size = pad_up(p.B * std::max(p.TK, C) * p.H * p.K);
    v_size = pad_up(p.B * std::max(p.TK, C) * p.H * p.V);
    const bool pooled = p.has_cmp() || !p.indices;
    if (pooled) {
      kc = arena.floats(p.B * C * p.H * p.K);
      vc = arena.floats(p.B * C * p.H * p.V);
    }
    if (!p.indices) list = arena.take<std::int64_t>(p.B * p.TQ * p.H * p.slots);
    if (!backward) o = arena.floats(p.B * p.TQ * p.HQ * p.V);
    if (!backward) total = arena.floats(p.B * p.TQ * p.HQ * p.V);
    if (backward) {
      dq = arena.floats(q_size);
      dk = arena.floats(k_size);
      dv = arena.floats(v_size);
      sum_q = arena.floats(q_size);
      sum_k = arena.floats(k_size);
      sum_v = arena.floats(v_size);
      st.carve(arena, p);
    }
    // As measured: what an address takes for alignment is in there.
    kept = memory == nullptr ? arena.bytes() : NsaPlan(p, nullptr, threads, backward).kept;
    tiles = HWY_DYNAMIC_DISPATCH(tile_bytes)(p);
    for (const AttnProblem& a : {compressed(), sliding()})
      branch = std::max(branch, backward ? attn_backward_workspace(a, threads) : attn_forward_workspace(a, threads));
    branch = std::max(branch, tiles * static_cast<std::size_t>(std::max(threads, 1)));
  }
  std::size_t bytes() const { return kept + branch; }

  TensorView view(float* x, std::int64_t T, std::int64_t H, std::int64_t width) const {
    return {x, {p.B, T, H, width}};
  }
  TensorView rows(float* x) const { return view(x, p.TQ, p.HQ, p.V); }

  AttnProblem dense() const {
    AttnProblem a = p;
    if (sum_q == nullptr) {
      a.o = rows(o);
      return a;
    }
    a.dq = view(dq, p.TQ, p.HQ, p.K);
    a.dk = view(dk, p.TK, p.H, p.K);
    a.dv = view(dv, p.TK, p.H, p.V);
    return a;
  }
  AttnProblem sliding() const {
    AttnProblem a = dense();
    a.window = std::max<std::int64_t>(p.swa, 1);
    a.scale = 1.0 / std::sqrt(static_cast<double>(p.K));
    a.weight = p.g_swa;
    a.dweight = p.dg_swa;
    return a;
  }
  AttnProblem compressed() const {
    AttnProblem a = dense();
    const std::int64_t C = p.most_blocks();
    a.pool = p.block;
    a.tokens = p.TK;
    a.TK = C;
    a.k = view(kc, C, p.H, p.K);
    a.v = view(vc, C, p.H, p.V);
    a.weight = p.g_cmp;
    a.dweight = p.dg_cmp;
    if (sum_q != nullptr) {
      a.dk = view(dk, C, p.H, p.K);
      a.dv = view(dv, C, p.H, p.V);
    }
    return a;
  }
};

// What both directions begin with.
void prepare(const NsaPlan& x, ThreadPool& threads, std::byte* scratch) {
  const NsaProblem& p = x.p;
  if (x.kc == nullptr) return;
  const TensorView kc = x.view(x.kc, p.most_blocks(), p.H, p.K), vc = x.view(x.vc, p.most_blocks(), p.H, p.V);
  HWY_DYNAMIC_DISPATCH(pool)(p, kc, vc, threads, scratch, x.tiles);
  if (x.list != nullptr) HWY_DYNAMIC_DISPATCH(select)(p, kc, x.list, threads, scratch, x.tiles);
}

Selected selection(const NsaPlan& x) {
  Selected s{x.p, x.list, x.o != nullptr ? x.rows(x.o) : TensorView(), x.st, {}, {}, {}};
  if (x.sum_q == nullptr) return s;
  s.dq = x.view(x.dq, x.p.TQ, x.p.HQ, x.p.K);
  s.dk = x.view(x.dk, x.p.TK, x.p.H, x.p.K);
  s.dv = x.view(x.dv, x.p.TK, x.p.H, x.p.V);
  return s;
}

}  // namespace

std::size_t nsa_forward_workspace(const NsaProblem& p, int threads) {
  return NsaPlan(p, nullptr, threads, false).bytes();
}

Status nsa_forward(const NsaProblem& p, ThreadPool& threads, std::span<std::byte> workspace) {
  if (workspace.size() < nsa_forward_workspace(p, threads.size()))
    return {Code::OutOfMemory, "nsa_forward: workspace too small"};
  if (!p.o || p.N == 0 || p.TQ == 0) return {};
  const NsaPlan x(p, workspace.data(), threads.size(), false);
  const std::span<std::byte> scratch = workspace.subspan(x.kept);
  prepare(x, threads, scratch.data());
  const auto take = [&](const TensorView& g, double absent, bool add) {
    HWY_DYNAMIC_DISPATCH(gate)(p, x.rows(x.o), g, absent, x.rows(x.total), add, threads, scratch.data(), x.tiles);
  };
  HWY_DYNAMIC_DISPATCH(selected)(selection(x), false, threads, scratch.data(), x.tiles);
  take(p.g_slc, 1.0, false);
  if (p.has_cmp()) {
    if (Status s = attn_forward(x.compressed(), threads, scratch); !s) return s;
    take(p.g_cmp, 0.0, true);
  }
  if (p.has_swa()) {
    if (Status s = attn_forward(x.sliding(), threads, scratch); !s) return s;
    take(p.g_swa, 0.0, true);
  }
  HWY_DYNAMIC_DISPATCH(store_gradient)(x.rows(x.total), p.o);
  return {};
}

std::size_t nsa_backward_workspace(const NsaProblem& p, int threads) {
  return NsaPlan(p, nullptr, threads, true).bytes();
}

Status nsa_backward(const NsaProblem& p, ThreadPool& threads, std::span<std::byte> workspace) {
  if (workspace.size() < nsa_backward_workspace(p, threads.size()))
    return {Code::OutOfMemory, "nsa_backward: workspace too small"};
  if (p.N == 0 || p.TQ == 0) return {};
  const NsaPlan x(p, workspace.data(), threads.size(), true);
  const std::span<std::byte> scratch = workspace.subspan(x.kept);
  prepare(x, threads, scratch.data());
  const std::int64_t q = p.B * p.TQ * p.HQ * p.K, k = p.B * p.TK * p.H * p.K, v = p.B * p.TK * p.H * p.V;
  HWY_DYNAMIC_DISPATCH(selected)(selection(x), true, threads, scratch.data(), x.tiles);
  for (std::int64_t i = 0; p.dg_slc && i < x.st.rows * p.HQ; ++i) {  // <do, o> of the branch
    const std::int64_t h = i / x.st.rows, t = i % x.st.rows;
    store_element(p.dg_slc.at(t / p.TQ, t % p.TQ, h), p.dg_slc.dtype, static_cast<double>(x.st.t[i]));
  }
  std::copy(x.dq, x.dq + q, x.sum_q);
  std::copy(x.dk, x.dk + k, x.sum_k);
  std::copy(x.dv, x.dv + v, x.sum_v);
  if (p.has_cmp()) {
    const AttnProblem a = x.compressed();
    if (Status s = attn_backward(a, threads, scratch); !s) return s;
    HWY_DYNAMIC_DISPATCH(add_buffers)(x.sum_q, x.dq, q);
    HWY_DYNAMIC_DISPATCH(spread)(p, a.dk, x.view(x.sum_k, p.TK, p.H, p.K), p.K);
    HWY_DYNAMIC_DISPATCH(spread)(p, a.dv, x.view(x.sum_v, p.TK, p.H, p.V), p.V);
  }
  if (p.has_swa()) {
    if (Status s = attn_backward(x.sliding(), threads, scratch); !s) return s;
    HWY_DYNAMIC_DISPATCH(add_buffers)(x.sum_q, x.dq, q);
    HWY_DYNAMIC_DISPATCH(add_buffers)(x.sum_k, x.dk, k);
    HWY_DYNAMIC_DISPATCH(add_buffers)(x.sum_v, x.dv, v);
  } else if (p.dg_swa) {  // a weight of nothing
    for (std::int64_t i = 0; i < p.B * p.TQ * p.HQ; ++i)
      store_element(p.dg_swa.at(i / p.HQ / p.TQ, i / p.HQ % p.TQ, i % p.HQ), p.dg_swa.dtype, 0.0);
  }
  HWY_DYNAMIC_DISPATCH(store_gradient)(x.view(x.sum_q, p.TQ, p.HQ, p.K), p.dq);
  HWY_DYNAMIC_DISPATCH(store_gradient)(x.view(x.sum_k, p.TK, p.H, p.K), p.dk);
  HWY_DYNAMIC_DISPATCH(store_gradient)(x.view(x.sum_v, p.TK, p.H, p.V), p.dv);
  return {};
}

std::size_t nsa_choose_workspace(const NsaProblem& p, int threads) {
  return HWY_DYNAMIC_DISPATCH(choose_bytes)(p) * static_cast<std::size_t>(std::max(threads, 1));
}

Status nsa_choose(const NsaProblem& p, ThreadPool& threads, std::span<std::byte> workspace) {
  if (workspace.size() < nsa_choose_workspace(p, threads.size()))
    return {Code::OutOfMemory, "nsa_choose: workspace too small"};
  if (p.chosen)
    HWY_DYNAMIC_DISPATCH(select)(p, p.k, nullptr, threads, workspace.data(), HWY_DYNAMIC_DISPATCH(choose_bytes)(p));
  return {};
}

}  // namespace fla::cpu
#endif
