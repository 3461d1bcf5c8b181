// Chunkwise forward of the diagonal-decay recurrence, and the score matrix of the parallel form.
//   O = scale (q o e^G) S_0 + lower(A) v        S_C = e^{G_C} o S_0 + (k o e^{G_C - G})^T v        linear_common.md
// task     one sequence and a few neighbouring heads, or, when those are few against the threads, a share of the value
//          panels of one head
// scratch  per worker: the state in panels [K, kBV] and one chunk's tiles
// bits     o of a token depends on that token and earlier ones only: neither chunk length, nor anchors, nor tiles look
//          ahead; value panels are independent, so the split does not show
#include <algorithm>
#include <cstdint>

#include "fla/engine/diag/cpu/entry.h"
#include "fla/engine/diag/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/prefetch.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/diag/cpu/chunk.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/diag/cpu/chunk-inl.h"

#ifndef FLA_ENGINE_DIAG_CPU_CHUNK_CC_ONCE
#define FLA_ENGINE_DIAG_CPU_CHUNK_CC_ONCE
namespace fla::cpu {

struct ForwardPlan {
  std::int64_t BT = 0, panels = 0, split = 0, panels_per_task = 0, group = 0, groups = 0, slots = 0;
};

inline ForwardPlan forward_plan(const DiagProblem& p, std::int64_t chunk, int threads) {
  ForwardPlan f;
  // 16 keeps the share of the triangle small; 32 and 64 take 3 and 9 % longer at K = V = 128 with a channel gate.
  f.BT = chunk > 0 ? chunk : 16;
  f.panels = pad_up(p.V, kBV) / kBV;
  const std::int64_t heads = std::max<std::int64_t>(p.N * p.H, 1);
  f.split = std::clamp<std::int64_t>((threads + heads - 1) / heads, 1, std::max<std::int64_t>(f.panels, 1));
  f.panels_per_task = f.panels == 0 ? 0 : (f.panels + f.split - 1) / f.split;
  f.group = head_group(p, pad_up(p.K) * f.panels * kBV, threads, kHeadGroup);
  f.groups = (p.H + f.group - 1) / f.group;
  f.slots = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, p.N * f.groups * f.split));
  return f;
}

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct ForwardTiles {
  ChunkTiles chunk;
  float* state = nullptr;  // [group][panels_per_task] panels
  float* v = nullptr;      // [BT, panels_per_task * kBV]
  float* o = nullptr;      // [BT, kBV]
  float* tmp = nullptr;    // [kPad + 4, pad_up(K)]

  void carve(Arena& arena, const ForwardPlan& f, std::int64_t K, KeyGate gate) {
    const std::int64_t kp = pad_up(K);
    chunk.carve(arena, f.BT, K, gate, false);
    state = arena.floats(f.group * f.panels_per_task * kp * kBV);
    v = arena.floats(token_rows_padded(f.BT) * f.panels_per_task * kBV);
    o = arena.floats(f.BT * kBV);
    tmp = arena.floats((kPad + 4) * kp);
  }
};

template <KeyGate kGate, Read kRead = Read::After>
HWY_NOINLINE void forward_task(const DiagProblem& p, const ForwardPlan& f, ForwardTiles& w, std::int64_t n,
                               std::int64_t h_begin, std::int64_t heads, std::int64_t part) {
  const std::int64_t K = p.K, kp = pad_up(K), lt = token_ld(f.BT);
  const std::int64_t first = part * f.panels_per_task, last = std::min(f.panels, first + f.panels_per_task);
  if (first >= last) return;
  const std::int64_t panels = last - first, state_size = f.panels_per_task * kp * kBV;
  const std::int64_t v_begin = first * kBV, v_count = std::min(p.V, last * kBV) - v_begin,
                     ldv = f.panels_per_task * kBV;
  const Sequence s = p.sequence(n);
  const float scale = static_cast<float>(p.scale);
  const bool want_o = static_cast<bool>(p.o);
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, p.V - (first + i) * kBV); };

  struct Head {
    Rows q, k, v, o;
    ChunkGate gate;
  };
  Head head[kHeadGroup];
  for (std::int64_t j = 0; j < heads; ++j) {
    const std::int64_t h = h_begin + j;
    head[j].q = token_rows(p.q, p, s, h);
    head[j].k = token_rows(p.k, p, s, h);
    head[j].v = token_rows(p.v, p, s, h);
    head[j].o = token_rows(p.o, p, s, h);
    if (kGate == KeyGate::Channel) head[j].gate = {token_rows(p.gk, p, s, h), 0.0, bonus_row(p, h)};
    if (kGate == KeyGate::Head) head[j].gate = {token_rows(p.g, p, s, h), p.g ? 0.0 : p.head.at(h), {}};
    const Rows h0 = state_rows(p.h0, n, h);
    for (std::int64_t i = 0; i < panels; ++i) {
      load_panel(h0, K, (first + i) * kBV, width_of(i), w.state + j * state_size + i * kp * kBV, w.tmp);
    }
  }
  Prefetcher ahead;
  for (std::int64_t t0 = 0; t0 < s.length; t0 += f.BT) {
    const std::int64_t C = std::min(f.BT, s.length - t0);
    // The group's rows of a token are one piece where heads are neighbours.
    const std::int64_t next = t0 + C, next_count = std::min(f.BT, s.length - next);
    ahead.clear();
    if (next_count > 0 && heads * K * static_cast<std::int64_t>(size_of(p.q.dtype)) >= kPrefetchBytes) {
      const auto fetch = [&](const TensorView& x, const Rows& rows, std::int64_t width) {
        if (x.stride[2] == width) ahead.add(rows, next, next_count, 0, heads * width);
      };
      if (want_o) fetch(p.q, head[0].q, K);
      fetch(p.k, head[0].k, K);
      if (kGate == KeyGate::Channel) fetch(p.gk, head[0].gate.rows, K);
      if (v_count == p.V) fetch(p.v, head[0].v, p.V);
    }
    ahead.spread(heads * panels * (K / kMR + 1));
    for (std::int64_t j = 0; j < heads; ++j) {
      const Head& x = head[j];
      if (want_o) load_rows(x.q, t0, C, 0, K, w.chunk.q, kp);
      load_rows(x.k, t0, C, 0, K, w.chunk.k, kp);
      load_rows(x.v, t0, C, v_begin, v_count, w.v, ldv);
      prepare_chunk<kGate, kRead>(w.chunk, f.BT, K, x.gate, t0, C, scale, want_o);
      for (std::int64_t i = 0; i < panels; ++i) {
        float* state = w.state + j * state_size + i * kp * kBV;
        const float* vi = w.v + i * kBV;
        const std::int64_t width = width_of(i);
        if (want_o) {
          gemm<false>(C, pad_up(width), {w.chunk.qe, kp, state, kBV, K}, {w.chunk.a, lt, vi, ldv, 0}, Tri::Lower, {},
                      w.o, kBV);
          store_rows(w.o, kBV, x.o, t0, C, (first + i) * kBV, width);
        }
        gemm<false>(K, pad_up(width), {w.chunk.kt, lt, vi, ldv, C}, {}, Tri::None,
                    {state, kBV, kGate == KeyGate::None ? nullptr : w.chunk.decay}, state, kBV, -1, &ahead);
      }
    }
  }
  for (std::int64_t j = 0; j < heads; ++j) {
    const Rows ht = state_rows(p.ht, n, h_begin + j);
    for (std::int64_t i = 0; i < panels; ++i) {
      store_panel(w.state + j * state_size + i * kp * kBV, ht, K, (first + i) * kBV, width_of(i), w.tmp);
    }
  }
}

std::size_t forward_bytes(const DiagProblem& p, const ForwardPlan& f) {
  Arena arena;
  ForwardTiles w;
  w.carve(arena, f, p.K, key_gate(p));
  return arena.bytes();
}

void forward(const DiagProblem& p, const ForwardPlan& f, ThreadPool& pool, std::byte* workspace) {
  const KeyGate gate = key_gate(p);
  const std::size_t bytes = forward_bytes(p, f);
  run_items(pool, p.N * f.groups * f.split, f.slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    ForwardTiles w;
    w.carve(arena, f, p.K, gate);
    const std::int64_t part = item % f.split, g = item / f.split, n = g / f.groups, h = g % f.groups * f.group;
    const std::int64_t heads = std::min(f.group, p.H - h);
    switch (gate) {
      case KeyGate::None: return forward_task<KeyGate::None>(p, f, w, n, h, heads, part);
      case KeyGate::Head: return forward_task<KeyGate::Head>(p, f, w, n, h, heads, part);
      case KeyGate::Channel:
        if (p.u) return forward_task<KeyGate::Channel, Read::Before>(p, f, w, n, h, heads, part);
        return forward_task<KeyGate::Channel>(p, f, w, n, h, heads, part);
    }
  });
}

// Scores: a task is a block of kScoreRows rows of one batch row and head.
constexpr std::int64_t kScoreRows = 64;

struct ScoreTiles {
  float *q = nullptr, *k = nullptr, *kt = nullptr, *a = nullptr, *m = nullptr;
  double* gsum = nullptr;
  void carve(Arena& arena, const DiagProblem& p) {
    const std::int64_t kp = pad_up(p.K);
    q = arena.floats(token_rows_padded(kScoreRows) * kp);
    k = arena.floats(token_rows_padded(kScoreRows) * kp);
    kt = arena.floats(kp * token_ld(kScoreRows));
    a = arena.floats(kScoreRows * kScoreRows);
    m = arena.floats(kScoreRows);
    if (key_gate(p) == KeyGate::Head) gsum = arena.take<double>(pad_up(p.T, kScoreRows));
  }
};

std::size_t scores_bytes(const DiagProblem& p) {
  Arena arena;
  ScoreTiles w;
  w.carve(arena, p);
  return arena.bytes();
}

HWY_NOINLINE void scores_task(const DiagProblem& p, const TensorView& attn, ScoreTiles& w, std::int64_t b,
                              std::int64_t h, std::int64_t block) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, kp = pad_up(K), lt = token_ld(kScoreRows), T = p.T;
  const Sequence s{b, 0, T};
  const Rows q = token_rows(p.q, p, s, h), k = token_rows(p.k, p, s, h), g = token_rows(p.g, p, s, h);
  const std::int64_t i0 = block * kScoreRows, M = std::min(kScoreRows, T - i0);
  const auto vscale = hn::Set(d, static_cast<float>(p.scale));
  // attn's axes are in the order of the recurrence too.
  const std::int64_t size = static_cast<std::int64_t>(size_of(attn.dtype)), sign = p.reverse ? -1 : 1;
  const std::int64_t origin = p.reverse ? T - 1 : 0;
  const Rows out{attn.at(b, h, origin, origin), attn.dtype, sign * attn.stride[2] * size, sign * attn.stride[3]};
  if (w.gsum != nullptr) {
    const double gamma = p.g ? 0.0 : bounded_gate(p.head.at(h));
    double sum = 0.0;
    for (std::int64_t i = 0; i < i0 + M; ++i) {
      if (g) {
        sum += bounded_gate(scalar_at(g, i));
      } else {
        sum = static_cast<double>(i + 1) * gamma;
      }
      w.gsum[i] = sum;
    }
  }
  load_rows(q, i0, M, 0, K, w.q, kp);
  for (std::int64_t i = 0; i < M; ++i) {
    for (std::int64_t c = 0; c < kp; c += lanes) {
      hn::StoreU(hn::Mul(vscale, hn::LoadU(d, w.q + i * kp + c)), d, w.q + i * kp + c);
    }
  }
  for (std::int64_t j0 = 0; j0 < T; j0 += kScoreRows) {
    const std::int64_t N = std::min(kScoreRows, T - j0);
    if (j0 < i0 + M) {
      load_rows(k, j0, N, 0, K, w.k, kp);
      transpose(w.k, kp, N, K, w.kt, lt);
      gemm<false>(M, N, {w.q, kp, w.kt, lt, K}, {}, Tri::None, {}, w.a, kScoreRows);
      for (std::int64_t i = 0; i < M; ++i) {
        float* a = w.a + i * kScoreRows;
        const std::int64_t live = std::min(N, i0 + i + 1 - j0);
        if (w.gsum != nullptr) {
          for (std::int64_t j = 0; j < kScoreRows; ++j) {
            w.m[j] = j < live ? static_cast<float>(w.gsum[i0 + i] - w.gsum[j0 + j]) : 0.0F;
          }
          for (std::int64_t j = 0; j < live; j += lanes) {
            hn::StoreU(hn::Mul(exp_v(d, hn::LoadU(d, w.m + j)), hn::LoadU(d, a + j)), d, a + j);
          }
        }
        std::fill(a + live, a + kScoreRows, 0.0F);
      }
    } else {
      std::fill(w.a, w.a + kScoreRows * kScoreRows, 0.0F);
    }
    store_rows(w.a, kScoreRows, out, i0, M, j0, N);
  }
}

void scores(const DiagProblem& p, const TensorView& attn, ThreadPool& pool, std::byte* workspace) {
  const std::size_t bytes = scores_bytes(p);
  const std::int64_t blocks = (p.T + kScoreRows - 1) / kScoreRows;
  run_items(pool, p.B * p.H * blocks, pool.size(), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    ScoreTiles w;
    w.carve(arena, p);
    // Later rows are longer: start with them.
    const std::int64_t block = blocks - 1 - item % blocks, bh = item / blocks;
    scores_task(p, attn, w, bh / p.H, bh % p.H, block);
  });
}

const char* isa() { return hwy::TargetName(HWY_TARGET); }

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(forward_bytes);
HWY_EXPORT(forward);
HWY_EXPORT(scores_bytes);
HWY_EXPORT(scores);
HWY_EXPORT(isa);

std::size_t diag_chunk_forward_workspace(const DiagProblem& p, std::int64_t chunk, int threads) {
  const ForwardPlan f = forward_plan(p, chunk, threads);
  return HWY_DYNAMIC_DISPATCH(forward_bytes)(p, f) * static_cast<std::size_t>(f.slots);
}

Status diag_chunk_forward(const DiagProblem& p, std::int64_t chunk, ThreadPool& pool, std::span<std::byte> workspace) {
  if (p.gv) return {Code::Unsupported, "diag_chunk_forward: gv needs the step form"};
  if (p.N == 0 || p.H == 0 || p.V == 0) return {};
  if (workspace.size() < diag_chunk_forward_workspace(p, chunk, pool.size())) {
    return {Code::OutOfMemory, "diag_chunk_forward: workspace too small"};
  }
  HWY_DYNAMIC_DISPATCH(forward)(p, forward_plan(p, chunk, pool.size()), pool, workspace.data());
  return {};
}

std::size_t diag_scores_workspace(const DiagProblem& p, int threads) {
  return HWY_DYNAMIC_DISPATCH(scores_bytes)(p) * static_cast<std::size_t>(std::max(threads, 1));
}

Status diag_scores(const DiagProblem& p, const TensorView& attn, ThreadPool& pool, std::span<std::byte> workspace) {
  if (p.gk || p.gv || p.cu_seqlens) return {Code::Unsupported, "diag_scores: dense problems with a head gate only"};
  if (p.B == 0 || p.H == 0 || p.T == 0) return {};
  if (workspace.size() < diag_scores_workspace(p, pool.size())) {
    return {Code::OutOfMemory, "diag_scores: workspace too small"};
  }
  HWY_DYNAMIC_DISPATCH(scores)(p, attn, pool, workspace.data());
  return {};
}

const char* isa_name() { return HWY_DYNAMIC_DISPATCH(isa)(); }

}  // namespace fla::cpu
#endif
