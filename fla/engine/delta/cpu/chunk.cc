// Chunkwise forward of the delta-rule recurrences; delta_common.md, forms D and G.
//   x = (I - N)^{-1} (vbar + n^ S_0)  or, General, (I - N)^{-1} (n^ S_0 + N1 v)
//   O = q^ S_0 + P x [+ P1 v]        S_C = e^{G_C} o S_0 + (s o e^{G_C - G})^T x [+ (s1 o e^{G_C - G})^T v]
// with n = -alpha, s = w, x = E (Delta); n = a, s = b, x = Z, s1 = k (General); ^ marks the decay from the chunk's entry.
// task     one sequence and some value heads chunk by chunk, or, when heads are few against the threads, a share of one
//          head's value panels
// scratch  per worker: the heads' states in panels [K, kBV] and one chunk's tiles
// bits     o of a token depends on that token and earlier ones only; value panels are independent, so the split of a
//          head does not show
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
#define HWY_TARGET_INCLUDE "fla/engine/delta/cpu/chunk.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/delta/cpu/chunk-inl.h"

#ifndef FLA_ENGINE_DELTA_CPU_CHUNK_CC_ONCE
#define FLA_ENGINE_DELTA_CPU_CHUNK_CC_ONCE
namespace fla::cpu {

// Rows per chunk: the work inside a chunk grows with it, and 16 is the smallest that fills the registers.
inline constexpr std::int64_t kDeltaBT = 16;

struct DeltaForwardPlan {
  std::int64_t panels = 0, split = 0, panels_per_task = 0, group = 0, groups = 0, slots = 0;
};

inline DeltaForwardPlan delta_forward_plan(const DeltaProblem& p, int threads) {
  DeltaForwardPlan f;
  f.panels = pad_up(p.V, kBV) / kBV;
  const std::int64_t heads = std::max<std::int64_t>(p.N * p.HV, 1);
  f.split = std::clamp<std::int64_t>((threads + heads - 1) / heads, 1, std::max<std::int64_t>(f.panels, 1));
  f.panels_per_task = f.panels == 0 ? 0 : (f.panels + f.split - 1) / f.split;
  f.group = value_head_group(p, f.panels_per_task, threads);
  f.groups = (p.HV + f.group - 1) / f.group;
  f.slots = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, p.N * f.groups * f.split));
  return f;
}

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct DeltaForwardTiles {
  DeltaTiles chunk;
  float* state = nullptr;  // panels
  float* x = nullptr;      // [BT, panels_per_task * kBV] vbar, then E; General: Z
  float* v = nullptr;      // the same shape; General
  float* o = nullptr;      // [BT, kBV]
  float* tmp = nullptr;    // [kPad + 4, pad_up(max(K, V))]

  void carve(Arena& arena, const DeltaProblem& p, const DeltaForwardPlan& f) {
    const std::int64_t kp = pad_up(p.K), values = token_rows_padded(kDeltaBT) * f.panels_per_task * kBV;
    chunk.carve(arena, p, kDeltaBT, false);
    state = arena.floats(f.group * f.panels_per_task * kp * kBV);
    x = arena.floats(values);
    v = p.erase == Erase::General ? arena.floats(values) : x;
    o = arena.floats(kDeltaBT * kBV);
    tmp = arena.floats((kPad + 4) * pad_up(std::max(p.K, p.V)));
  }
};

template <DeltaKind kKind, KeyGate kGate>
HWY_NOINLINE void delta_forward_task(const DeltaProblem& p, const DeltaForwardPlan& f, DeltaForwardTiles& w,
                                     std::int64_t n, std::int64_t hv, std::int64_t heads, std::int64_t part) {
  constexpr std::int64_t BT = kDeltaBT;
  const std::int64_t K = p.K, R = p.R, kp = pad_up(K), lt = token_ld(BT);
  const std::int64_t first = part * f.panels_per_task, last = std::min(f.panels, first + f.panels_per_task);
  if (first >= last) return;
  const std::int64_t panels = last - first, panel_size = kp * kBV, state_size = f.panels_per_task * panel_size;
  const std::int64_t v_begin = first * kBV, v_count = std::min(p.V, last * kBV) - v_begin,
                     ldv = f.panels_per_task * kBV;
  const Sequence s = p.sequence(n);
  const std::int64_t length = s.length * R;
  const float scale = static_cast<float>(p.scale);
  const bool want_o = static_cast<bool>(p.o), before = reads_before_decay(p);
  // Entering states every `every` rows; those of earlier sequences of the same batch row come first.
  const std::int64_t every = p.h_chunk * R;
  std::int64_t nt = 0;
  for (std::int64_t m = 0; p.h && p.cu_seqlens && m < n; ++m) nt += (p.sequence(m).length * R + every - 1) / every;

  const auto width_of = [&](std::int64_t i) { return std::min(kBV, p.V - (first + i) * kBV); };
  DeltaInputs head[kHeadGroup];
  Rows out[kHeadGroup];
  for (std::int64_t j = 0; j < heads; ++j) {
    head[j] = DeltaInputs(p, n, hv + j);
    out[j] = delta_rows(p.o, p, s, hv + j);
    const Rows h0 = state_rows(p.h0, n, hv + j);
    for (std::int64_t i = 0; i < panels; ++i) {
      load_panel(h0, K, (first + i) * kBV, width_of(i), w.state + j * state_size + i * panel_size, w.tmp);
    }
  }
  Prefetcher ahead;
  for (std::int64_t t0 = 0; t0 < length; t0 += BT) {
    const std::int64_t C = std::min(BT, length - t0);
    ahead.clear();
    prefetch_inputs(ahead, p, head[0], hv, heads, t0 + C, std::min(BT, length - t0 - C), want_o);
    ahead.spread(heads * panels * (K / kMR + 1));
    for (std::int64_t j = 0; j < heads; ++j) {
      const DeltaInputs& x = head[j];
      float* states = w.state + j * state_size;
      if (p.h && t0 % every == 0) {
        const TensorView& h = p.h;
        const Rows rows{h.at(s.row, nt + t0 / every, hv + j), h.dtype,
                        h.stride[3] * static_cast<std::int64_t>(size_of(h.dtype)), h.stride[4]};
        for (std::int64_t i = 0; i < panels; ++i) {
          store_panel(states + i * panel_size, rows, K, (first + i) * kBV, width_of(i), w.tmp);
        }
      }
      load_gate_bias(x.gate, kGate, K, w.chunk.bias);
      load_chunk<kKind, kGate>(p, x, w.chunk, BT, t0, C, want_o);
      load_values<kKind>(x, w.chunk, t0, C, v_begin, v_count, w.v, ldv, w.tmp);
      prepare_delta_chunk<kKind, kGate>(w.chunk, BT, K, C, scale, before, want_o, false);
      for (std::int64_t i = 0; i < panels; ++i) {
        float* state = states + i * panel_size;
        float* xi = w.x + i * kBV;
        const float* vi = w.v + i * kBV;
        const std::int64_t width = width_of(i), padded = pad_up(width);
        solve_panel<kKind>(w.chunk, BT, K, C, padded, state, vi, xi, ldv);
        if (want_o) {
          const Operand read{w.chunk.q0, kp, state, kBV, K};
          gemm<false>(C, padded, read, {w.chunk.P, lt, xi, ldv, 0}, Tri::Lower, {}, w.o, kBV);
          if (kKind == DeltaKind::General) {
            gemm<false>(C, padded, {}, {w.chunk.P1, lt, vi, ldv, 0}, Tri::Lower, {w.o, kBV, nullptr}, w.o, kBV);
          }
          store_token_rows(w.o, kBV, out[j], R, R - 1, t0, C, (first + i) * kBV, width);
        }
        advance_panel<kKind, kGate>(w.chunk, BT, K, C, padded, state, vi, xi, ldv, state, &ahead);
      }
    }
  }
  for (std::int64_t j = 0; j < heads; ++j) {
    const Rows ht = state_rows(p.ht, n, hv + j);
    for (std::int64_t i = 0; i < panels; ++i) {
      store_panel(w.state + j * state_size + i * panel_size, ht, K, (first + i) * kBV, width_of(i), w.tmp);
    }
  }
}

std::size_t delta_forward_bytes(const DeltaProblem& p, const DeltaForwardPlan& f) {
  Arena arena;
  DeltaForwardTiles w;
  w.carve(arena, p, f);
  return arena.bytes();
}

template <DeltaKind kKind>
HWY_INLINE void delta_forward_gate(const DeltaProblem& p, const DeltaForwardPlan& f, DeltaForwardTiles& w,
                                   std::int64_t n, std::int64_t hv, std::int64_t heads, std::int64_t part) {
  switch (delta_gate(p)) {
    case KeyGate::None: return delta_forward_task<kKind, KeyGate::None>(p, f, w, n, hv, heads, part);
    case KeyGate::Head: return delta_forward_task<kKind, KeyGate::Head>(p, f, w, n, hv, heads, part);
    case KeyGate::Channel: return delta_forward_task<kKind, KeyGate::Channel>(p, f, w, n, hv, heads, part);
  }
}

void delta_forward(const DeltaProblem& p, const DeltaForwardPlan& f, ThreadPool& pool, std::byte* workspace) {
  const std::size_t bytes = delta_forward_bytes(p, f);
  run_items(pool, p.N * f.groups * f.split, f.slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    DeltaForwardTiles w;
    w.carve(arena, p, f);
    const std::int64_t part = item % f.split, g = item / f.split, n = g / f.groups, hv = g % f.groups * f.group;
    const std::int64_t heads = std::min(f.group, p.HV - hv);
    if (delta_kind(p) == DeltaKind::General) return delta_forward_gate<DeltaKind::General>(p, f, w, n, hv, heads, part);
    return delta_forward_gate<DeltaKind::Delta>(p, f, w, n, hv, heads, part);
  });
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(delta_forward_bytes);
HWY_EXPORT(delta_forward);

std::size_t delta_chunk_forward_workspace(const DeltaProblem& p, int threads) {
  const DeltaForwardPlan f = delta_forward_plan(p, threads);
  return HWY_DYNAMIC_DISPATCH(delta_forward_bytes)(p, f) * static_cast<std::size_t>(f.slots);
}

Status delta_chunk_forward(const DeltaProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (p.gv || (p.beta && p.beta.ndim > 3)) {
    return {Code::Unsupported, "delta_chunk_forward: gv and beta per channel need the step form"};
  }
  if (const char* why = delta_refusal(p)) return {Code::Unsupported, std::string("delta_chunk_forward: ") + why};
  if (p.N == 0 || p.HV == 0 || p.V == 0) return {};
  if (workspace.size() < delta_chunk_forward_workspace(p, pool.size())) {
    return {Code::OutOfMemory, "delta_chunk_forward: workspace too small"};
  }
  HWY_DYNAMIC_DISPATCH(delta_forward)(p, delta_forward_plan(p, pool.size()), pool, workspace.data());
  return {};
}

}  // namespace fla::cpu
#endif
