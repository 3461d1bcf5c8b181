// The CPU kernels of gated_oja_rule. Transposed, the state R = S^T [V, K] obeys the delta rule with v for its keys and
// k for its values,
//   R_t = e^{gv_t} o R_{t-1} + v_t e_t^T,   e_t = beta_t (k_t - (e^{gv_t} o R_{t-1})^T v_t),
// and is read the other way round, o_t = scale R_t q_t. As <do_t, scale R_t q_t> is symmetric in the two vectors, this
// is the delta engine's problem with do in q's place and q in do's: o is what the engine calls dq, the gradients of v,
// k, gv, beta and the states are its dk, dv, dgk, dbeta, and dq is its o.
//
// chunk    o_i = scale [ e^{G_i} o (R_0 q_i) + sum_{j <= i} <q_i, e_j> e^{G_i - G_j} o v_j ], e_j and R by the engine's
//          chunk; task: one sequence and some heads
// step     token by token, one pass over the state a token, row by row of S; task: one sequence and value head
// backward the engine's, once per value head of a group; norms before and after it
// bits     o of a token depends on that token and earlier ones only
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/engine/delta/cpu/internal.h"
#include "fla/engine/delta/engine.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/prefetch.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"
#include "fla/ops/gated_oja_rule/gated_oja_rule.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/ops/gated_oja_rule/gated_oja_rule_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/delta/cpu/rows-inl.h"

#ifndef FLA_OPS_GATED_OJA_RULE_CPU_CC_ONCE
#define FLA_OPS_GATED_OJA_RULE_CPU_CC_ONCE
namespace fla::cpu {

inline constexpr std::int64_t kOjaBT = 16;

// In the engine's names: K is V, V is K; v keeps k's head count, which may be smaller than HV.
struct OjaProblem {
  DeltaProblem delta;
  TensorView q, o;  // [B, T, HQ, V], [B, T, HV, K]
  bool unit_q = false, unit_k = false;
};

inline OjaProblem oja_problem(const GatedOjaRuleArgs& a) {
  OjaProblem x;
  DeltaProblem& p = x.delta;
  p.B = a.q.dim(0);
  p.T = a.q.dim(1);
  p.H = p.HV = a.v.dim(2);
  p.K = a.v.dim(3);
  p.V = a.q.dim(3);
  p.cu_seqlens = a.cu_seqlens;
  p.N = count_sequences(a.cu_seqlens, p.B);
  p.scale = a.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.V)));
  p.erase = Erase::Decayed;
  p.k = a.v;
  p.v = a.k;
  p.gk = a.gv;
  p.beta = a.beta;
  p.h0 = swap_state_axes(a.initial_state);
  p.ht = swap_state_axes(a.final_state);
  x.q = a.q;
  x.o = a.o;
  x.unit_q = a.use_q_l2norm;
  x.unit_k = a.use_k_l2norm;
  return x;
}

struct OjaPlan {
  std::int64_t panels = 0, group = 1, groups = 0, slots = 0;
};

inline OjaPlan oja_plan(const DeltaProblem& p, int threads) {
  OjaPlan f;
  f.panels = pad_up(p.V, kBV) / kBV;
  f.group = value_head_group(p, f.panels, threads);
  f.groups = (p.HV + f.group - 1) / f.group;
  f.slots = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, p.N * f.groups));
  return f;
}

struct OjaStepTiles {
  float *S = nullptr, *q = nullptr, *k = nullptr, *v = nullptr, *decay = nullptr, *o = nullptr;

  void carve(Arena& arena, const DeltaProblem& p) {
    S = arena.floats(p.V * pad_up(p.K));
    for (float** x : {&q, &k}) *x = arena.floats(pad_up(p.V));
    for (float** x : {&v, &decay, &o}) *x = arena.floats(pad_up(p.K));
  }
  static std::size_t bytes(const DeltaProblem& p) {
    Arena arena;
    OjaStepTiles().carve(arena, p);
    return arena.bytes();
  }
};

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct OjaTiles {
  DeltaTiles chunk;
  float* state = nullptr;                                          // panels
  float *x = nullptr, *q = nullptr, *xt = nullptr, *qt = nullptr;  // e and scale q: [rows, pad_up(V)], and transposed
  float *scores = nullptr, *read = nullptr, *o = nullptr;          // <q_i, e_j>; R_0 q, transposed; o
  float* norm = nullptr;                                           // [token_ld]
  float* tmp = nullptr;                                            // [kPad + 4, pad_up(max(K, V))]

  void carve(Arena& arena, const DeltaProblem& p, const OjaPlan& f) {
    const std::int64_t kp = pad_up(p.K), vp = pad_up(p.V), lt = token_ld(kOjaBT), rows = token_rows_padded(kOjaBT);
    chunk.carve(arena, p, kOjaBT, true);
    state = arena.floats(f.group * f.panels * kp * kBV);
    for (float** t : {&x, &q}) *t = arena.floats(rows * vp);
    for (float** t : {&xt, &qt}) *t = arena.floats(vp * lt);
    scores = arena.floats(rows * lt);
    read = arena.floats(kp * lt);
    o = arena.floats(lt * kp);
    norm = arena.floats(lt);
    tmp = arena.floats((kPad + 4) * pad_up(std::max(p.K, p.V)));
  }
};

// o of one chunk, which enters with `state` and has e in w.x and scale q in w.q.
HWY_NOINLINE void oja_read(const DeltaProblem& p, const OjaPlan& f, OjaTiles& w, const float* state, std::int64_t C) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, kp = pad_up(K), vp = pad_up(p.V), lt = token_ld(kOjaBT);
  DeltaTiles& t = w.chunk;
  transpose(w.x, vp, C, p.V, w.xt, lt);
  transpose(w.q, vp, C, p.V, w.qt, lt);
  gemm<false>(C, C, {w.q, vp, w.xt, lt, p.V}, {}, Tri::None, {}, w.scores, lt, 0);
  for (std::int64_t i = 0; i < f.panels; ++i) {
    gemm<false>(K, C, {state + i * kp * kBV, kBV, w.qt + i * kBV * lt, lt, std::min(kBV, p.V - i * kBV)}, {}, Tri::None,
                {i == 0 ? nullptr : w.read, lt, nullptr}, w.read, lt);
  }
  transpose(w.read, lt, kp, C, w.o, kp);
  float* ep = t.ep;
  std::fill(ep, ep + kp, 1.0F);
  const auto scale_by = [&](float* rows, std::int64_t lo, std::int64_t hi, const float* by) HWY_ATTR {
    for (std::int64_t i = lo; i < hi; ++i) {
      for (std::int64_t c = 0; c < kp; c += lanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, by + c), hn::LoadU(d, rows + i * kp + c)), d, rows + i * kp + c);
      }
    }
  };
  // Rows of a segment are read relative to its anchor, from its own keys and from earlier ones moved there.
  for (std::int64_t g = 0; g < t.segments; ++g) {
    const std::int64_t first = t.segment[g], last = t.segment[g + 1];
    const float* jump = t.jump + first * kp;
    scale_by(ep, 0, 1, jump);
    if (g > 0) scale_by(t.sa, 0, first, jump);
    scale_by(w.o, first, last, ep);
    float* o = w.o + first * kp;
    const float* a = w.scores + first * lt;
    gemm<false>(last - first, K, {a, lt, t.sa, kp, first}, {a + first, lt, t.sa + first * kp, kp, 0}, Tri::Lower,
                {o, kp, nullptr}, o, kp);
  }
  for (std::int64_t i = 0; i < C; ++i) scale_by(w.o + i * kp, 0, 1, t.e + i * kp);
}

HWY_NOINLINE void oja_chunk_task(const OjaProblem& x, const OjaPlan& f, OjaTiles& w, std::int64_t n, std::int64_t hv,
                                 std::int64_t heads) {
  constexpr std::int64_t BT = kOjaBT;
  const DeltaProblem& p = x.delta;
  const std::int64_t K = p.K, V = p.V, kp = pad_up(K), vp = pad_up(V), lt = token_ld(BT);
  const std::int64_t panel_size = kp * kBV, state_size = f.panels * panel_size;
  const Sequence s = p.sequence(n);
  const bool want_o = static_cast<bool>(x.o);
  const float scale = static_cast<float>(p.scale);
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, V - i * kBV); };

  // Padding channels take part in whole-vector arithmetic and must be finite; nothing below writes them.
  std::fill(w.read + K * lt, w.read + kp * lt, 0.0F);
  DeltaInputs head[kHeadGroup];
  for (std::int64_t j = 0; j < heads; ++j) {
    head[j] = DeltaInputs(p, n, hv + j);
    const Rows h0 = state_rows(p.h0, n, hv + j);
    for (std::int64_t i = 0; i < f.panels; ++i)
      load_panel(h0, K, i * kBV, width_of(i), w.state + j * state_size + i * panel_size, w.tmp);
  }
  Prefetcher ahead;
  for (std::int64_t t0 = 0; t0 < s.length; t0 += BT) {
    const std::int64_t C = std::min(BT, s.length - t0);
    ahead.clear();
    prefetch_inputs(ahead, p, head[0], hv, heads, t0 + C, std::min(BT, s.length - t0 - C), false);
    ahead.spread(heads * f.panels * (K / kMR + 1));
    for (std::int64_t j = 0; j < heads; ++j) {
      DeltaTiles& t = w.chunk;
      float* state = w.state + j * state_size;
      load_chunk<DeltaKind::Delta, KeyGate::Channel>(p, head[j], t, BT, t0, C, false);
      load_rows(head[j].v, t0, C, 0, V, w.x, vp);
      if (x.unit_k) normalize_rows(w.x, vp, C, w.norm);
      scale_rows(w.x, vp, C, t.beta, w.x);
      prepare_delta_chunk<DeltaKind::Delta, KeyGate::Channel>(t, BT, K, C, scale, false, false, false);
      for (std::int64_t i = 0; i < f.panels; ++i) {
        solve_panel<DeltaKind::Delta>(t, BT, K, C, pad_up(width_of(i)), state + i * panel_size, nullptr, w.x + i * kBV,
                                      vp);
      }
      if (want_o) {
        load_rows(delta_rows(x.q, p, s, hv + j), t0, C, 0, V, w.q, vp);
        if (x.unit_q) normalize_rows(w.q, vp, C, w.norm);
        std::fill(w.norm, w.norm + lt, scale);
        scale_rows(w.q, vp, C, w.norm, w.q);
        oja_read(p, f, w, state, C);
        store_rows(w.o, kp, delta_rows(x.o, p, s, hv + j), t0, C, 0, K);
      }
      for (std::int64_t i = 0; i < f.panels; ++i) {
        float* panel = state + i * panel_size;
        advance_panel<DeltaKind::Delta, KeyGate::Channel>(t, BT, K, C, pad_up(width_of(i)), panel, nullptr,
                                                          w.x + i * kBV, vp, panel, &ahead);
      }
    }
  }
  for (std::int64_t j = 0; j < heads; ++j) {
    const Rows ht = state_rows(p.ht, n, hv + j);
    for (std::int64_t i = 0; i < f.panels; ++i)
      store_panel(w.state + j * state_size + i * panel_size, ht, K, i * kBV, width_of(i), w.tmp);
  }
}

std::size_t oja_chunk_bytes(const DeltaProblem& p, const OjaPlan& f) {
  Arena arena;
  OjaTiles w;
  w.carve(arena, p, f);
  return arena.bytes();
}

void oja_chunk(const OjaProblem& x, const OjaPlan& f, ThreadPool& pool, std::byte* workspace) {
  const DeltaProblem& p = x.delta;
  const std::size_t bytes = oja_chunk_bytes(p, f);
  run_items(pool, p.N * f.groups, f.slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    OjaTiles w;
    w.carve(arena, p, f);
    const std::int64_t hv = item % f.groups * f.group;
    oja_chunk_task(x, f, w, item / f.groups, hv, std::min(f.group, p.HV - hv));
  });
}

// One row of S at one token: decays, predicts, learns, adds to o.
HWY_INLINE void oja_step_row(float* HWY_RESTRICT S, const float* HWY_RESTRICT decay, const float* HWY_RESTRICT v,
                             std::int64_t padded, float k, float beta, float q, float* HWY_RESTRICT o) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto guess = hn::Zero(d);
  for (std::int64_t c = 0; c < padded; c += lanes) {
    const auto x = hn::Mul(hn::LoadU(d, S + c), hn::LoadU(d, decay + c));
    hn::StoreU(x, d, S + c);
    guess = hn::MulAdd(x, hn::LoadU(d, v + c), guess);
  }
  const auto e = hn::Set(d, beta * (k - hn::GetLane(hn::SumOfLanes(d, guess)))), vq = hn::Set(d, q);
  for (std::int64_t c = 0; c < padded; c += lanes) {
    const auto x = hn::MulAdd(e, hn::LoadU(d, v + c), hn::LoadU(d, S + c));
    hn::StoreU(x, d, S + c);
    hn::StoreU(hn::MulAdd(vq, x, hn::LoadU(d, o + c)), d, o + c);
  }
}

HWY_NOINLINE void oja_step_task(const OjaProblem& x, const OjaStepTiles& w, std::int64_t n, std::int64_t hv) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const DeltaProblem& p = x.delta;
  const std::int64_t V = p.V, K = p.K, kp = pad_up(K), vp = pad_up(V), h = hv / (p.HV / p.v.dim(2));
  const Sequence s = p.sequence(n);
  const Rows q = delta_rows(x.q, p, s, h), k = delta_rows(p.v, p, s, h), v = delta_rows(p.k, p, s, hv),
             gv = delta_rows(p.gk, p, s, hv), beta = delta_rows(p.beta, p, s, hv), o = delta_rows(x.o, p, s, hv);
  const auto by_key = [](Rows r) {  // the state as the caller has it: [K, V]
    const std::int64_t size = static_cast<std::int64_t>(size_of(r.dtype));
    return Rows{r.base, r.dtype, r.last * size, r.step / size};
  };
  const Rows h0 = state_rows(p.h0, n, hv), ht = state_rows(p.ht, n, hv);
  if (h0) {
    load_rows(by_key(h0), 0, V, 0, K, w.S, kp);
  } else {
    std::fill(w.S, w.S + V * kp, 0.0F);
  }
  const float scale = static_cast<float>(p.scale);
  float norm = 1.0F;
  std::fill(w.decay, w.decay + kp, 1.0F);
  for (std::int64_t t = 0; t < s.length; ++t) {
    load_rows(k, t, 1, 0, V, w.k, vp);
    if (x.unit_k) normalize_rows(w.k, vp, 1, &norm);
    load_rows(q, t, 1, 0, V, w.q, vp);
    if (x.unit_q) normalize_rows(w.q, vp, 1, &norm);
    load_rows(v, t, 1, 0, K, w.v, kp);
    if (gv) {
      load_rows(gv, t, 1, 0, K, w.decay, kp);
      for (std::int64_t c = 0; c < kp; c += lanes) hn::StoreU(exp_v(d, hn::LoadU(d, w.decay + c)), d, w.decay + c);
    }
    const float b = beta ? static_cast<float>(scalar_at(beta, t)) : 1.0F;
    std::fill(w.o, w.o + kp, 0.0F);
    for (std::int64_t i = 0; i < V; ++i) oja_step_row(w.S + i * kp, w.decay, w.v, kp, w.k[i], b, scale * w.q[i], w.o);
    if (o) store_rows(w.o, kp, o, t, 1, 0, K);
  }
  if (ht) store_rows(w.S, kp, by_key(ht), 0, V, 0, K);
}

void oja_step(const OjaProblem& x, std::int64_t slots, ThreadPool& pool, std::byte* workspace) {
  const std::size_t bytes = OjaStepTiles::bytes(x.delta);
  run_items(pool, x.delta.N * x.delta.HV, slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    OjaStepTiles w;
    w.carve(arena, x.delta);
    oja_step_task(x, w, item / x.delta.HV, item % x.delta.HV);
  });
}

HWY_INLINE Rows oja_head_row(const TensorView& x, std::int64_t b, std::int64_t t, std::int64_t h) {
  return {x.at(b, t, h), x.dtype, 0, x.stride[3]};
}

// to = x / sqrt(sum x^2 + 1e-6), rows of `to` contiguous; tmp: [pad_up(K)].
void oja_normalize(const TensorView& x, const TensorView& to, std::int64_t b, std::int64_t t, float* tmp) {
  const std::int64_t K = x.dim(3);
  for (std::int64_t h = 0; h < x.dim(2); ++h) {
    float norm = 1.0F;
    load_rows(oja_head_row(x, b, t, h), 0, 1, 0, K, tmp, pad_up(K));
    normalize_rows(tmp, pad_up(K), 1, &norm);
    store_rows(tmp, pad_up(K), oja_head_row(to, b, t, h), 0, 1, 0, K);
  }
}

// to = the gradient of x from dy, that of what the recurrence read, summed over `parts` tensors that lie one after the
// other. tmp: [2, pad_up(K)].
void oja_gradient(const TensorView& x, bool unit, const TensorView& dy, std::int64_t parts, const TensorView& to,
                  std::int64_t b, std::int64_t t, float* tmp) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), K = x.dim(3), kp = pad_up(K);
  const std::int64_t part = dy.numel() * static_cast<std::int64_t>(sizeof(float));
  float *sum = tmp, *y = tmp + kp;
  for (std::int64_t h = 0; h < x.dim(2); ++h) {
    Rows from = oja_head_row(dy, b, t, h);
    load_rows(from, 0, 1, 0, K, sum, kp);
    for (std::int64_t i = 1; i < parts; ++i) {
      from.base += part;
      load_rows(from, 0, 1, 0, K, y, kp);
      for (std::int64_t c = 0; c < kp; c += lanes)
        hn::StoreU(hn::Add(hn::LoadU(d, sum + c), hn::LoadU(d, y + c)), d, sum + c);
    }
    if (unit) {
      float norm = 1.0F;
      load_rows(oja_head_row(x, b, t, h), 0, 1, 0, K, y, kp);
      normalize_rows(y, kp, 1, &norm);
      normalize_backward(sum, y, norm, kp);
    }
    store_rows(sum, kp, oja_head_row(to, b, t, h), 0, 1, 0, K);
  }
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla {

namespace cpu {

HWY_EXPORT(oja_chunk_bytes);
HWY_EXPORT(oja_chunk);
HWY_EXPORT(oja_step);
HWY_EXPORT(oja_normalize);
HWY_EXPORT(oja_gradient);

}  // namespace cpu

namespace {

using namespace cpu;  // HWY_DYNAMIC_DISPATCH takes a plain name when there is one instruction set

using cpu::Arena;
using cpu::OjaPlan;
using cpu::OjaProblem;

std::size_t chunk_workspace(const GatedOjaRuleArgs& a, const CallInfo& c) {
  const OjaProblem x = cpu::oja_problem(a);
  const OjaPlan f = cpu::oja_plan(x.delta, c.threads);
  return HWY_DYNAMIC_DISPATCH(oja_chunk_bytes)(x.delta, f) * static_cast<std::size_t>(f.slots);
}

Status chunk_forward(const GatedOjaRuleArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const OjaProblem x = cpu::oja_problem(a);
  if (x.delta.N == 0 || x.delta.HV == 0) return {};
  HWY_DYNAMIC_DISPATCH(oja_chunk)(x, cpu::oja_plan(x.delta, c.threads), *l.pool, l.workspace.data());
  return {};
}

std::int64_t step_slots(const cpu::OjaProblem& x, const CallInfo& c) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(c.threads, x.delta.N * x.delta.HV));
}

std::size_t step_workspace(const GatedOjaRuleArgs& a, const CallInfo& c) {
  const OjaProblem x = cpu::oja_problem(a);
  return cpu::OjaStepTiles::bytes(x.delta) * static_cast<std::size_t>(step_slots(x, c));
}

Status step_forward(const GatedOjaRuleArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const OjaProblem x = cpu::oja_problem(a);
  if (x.delta.N == 0 || x.delta.HV == 0) return {};
  HWY_DYNAMIC_DISPATCH(oja_step)(x, step_slots(x, c), *l.pool, l.workspace.data());
  return {};
}

// Heads first, first + step, ... of axis `axis`.
TensorView every_head(TensorView x, std::size_t axis, std::int64_t first, std::int64_t step) {
  if (!x || step == 1) return x;
  if (x.data != nullptr) {
    x.data = static_cast<std::byte*>(x.data) + first * x.stride[axis] * static_cast<std::int64_t>(size_of(x.dtype));
  }
  x.shape[axis] /= step;
  x.stride[axis] *= step;
  return x;
}

// The backward, carved into the engine's problems: one per value head of a group, as in the engine's terms those share
// their values and do, which it has no word for.
struct OjaBackward {
  const GatedOjaRuleBackwardArgs& a;
  std::int64_t group;
  TensorView q, k;    // as the recurrence read them
  TensorView dq, dk;  // of those, [B, T, H, K]; F32 and one per value head of a group where they are not the caller's
  float* rows = nullptr;
  std::byte* rest = nullptr;  // what the engine gets
  std::size_t used = 0;       // up to there, at any address

  OjaBackward(const GatedOjaRuleBackwardArgs& args, const CallInfo& c, std::byte* workspace)
      : a(args), group(args.v.dim(2) / args.q.dim(2)), q(args.q), k(args.k), dq(args.dq), dk(args.dk) {
    Arena arena = workspace != nullptr ? Arena(workspace) : Arena();
    const auto take = [&](std::int64_t copies) {
      float* p = arena.floats(a.q.numel() * copies);
      return TensorView(p, {a.q.dim(0), a.q.dim(1), a.q.dim(2), a.q.dim(3)});
    };
    if (a.use_q_l2norm) q = take(1);
    if (a.use_k_l2norm) k = take(1);
    if (through_dq()) dq = take(group);
    if (through_dk()) dk = take(group);
    rows = arena.floats(2 * cpu::pad_up(a.q.dim(3)) * c.threads);
    rest = arena.take<std::byte>(0);
    used = arena.bytes();
  }
  bool through_dq() const { return a.dq && (group > 1 || a.use_q_l2norm || !a.do_); }
  bool through_dk() const { return a.dk && (group > 1 || a.use_k_l2norm); }

  // Of the value heads i, i + group, ...
  DeltaBackwardProblem backward(std::int64_t i) const {
    DeltaBackwardProblem p(problem(i));
    p.do_ = a.do_ ? q : TensorView();
    p.dht = every_head(swap_state_axes(a.dht), 1, i, group);
    p.dh0 = every_head(swap_state_axes(a.dh0), 1, i, group);
    p.dk = every_head(a.dv, 2, i, group);
    p.dv = part(dk, through_dk(), i);
    p.dgk = every_head(a.dgv, 2, i, group);
    p.dbeta = every_head(a.dbeta, 2, i, group);
    if (a.do_) p.backward_o = part(dq, through_dq(), i);
    return p;
  }

 private:
  DeltaProblem problem(std::int64_t i) const {
    DeltaProblem p = cpu::oja_problem(a).delta;
    p.ht = TensorView();
    p.H = p.HV = a.q.dim(2);
    p.q = every_head(a.do_ ? a.do_ : a.v, 2, i, group);
    p.k = every_head(p.k, 2, i, group);
    p.v = k;
    p.gk = every_head(p.gk, 2, i, group);
    p.beta = every_head(p.beta, 2, i, group);
    p.h0 = every_head(p.h0, 1, i, group);
    return p;
  }
  static TensorView part(TensorView x, bool own, std::int64_t i) {
    if (own && x.data != nullptr) x.data = x.as<float>() + i * x.numel();
    return x;
  }
};

std::size_t backward_workspace(const GatedOjaRuleBackwardArgs& a, const CallInfo& c) {
  const OjaBackward b(a, c, nullptr);
  return b.used + (b.group > 0 ? cpu::delta_chunk_backward_workspace(b.backward(0), c.threads) : 0);
}

Status backward(const GatedOjaRuleBackwardArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const OjaBackward b(a, c, l.workspace.data());
  const std::span<std::byte> rest = l.workspace.subspan(static_cast<std::size_t>(b.rest - l.workspace.data()));
  const std::int64_t T = a.q.dim(1), tokens = a.q.dim(0) * T, width = 2 * cpu::pad_up(a.q.dim(3));
  if (a.use_q_l2norm || a.use_k_l2norm) {
    l.pool->run(tokens, [&](std::int64_t i, int worker) {
      float* tmp = b.rows + worker * width;
      if (a.use_q_l2norm) HWY_DYNAMIC_DISPATCH(oja_normalize)(a.q, b.q, i / T, i % T, tmp);
      if (a.use_k_l2norm) HWY_DYNAMIC_DISPATCH(oja_normalize)(a.k, b.k, i / T, i % T, tmp);
    });
  }
  if (a.dq && !a.do_) std::fill_n(b.dq.as<float>(), b.dq.numel() * b.group, 0.0F);
  for (std::int64_t i = 0; i < b.group; ++i) {
    if (Status s = cpu::delta_chunk_backward(b.backward(i), *l.pool, rest); !s) return s;
  }
  if (!b.through_dq() && !b.through_dk()) return {};
  l.pool->run(tokens, [&](std::int64_t i, int worker) {
    float* tmp = b.rows + worker * width;
    const auto finish = HWY_DYNAMIC_DISPATCH(oja_gradient);
    if (b.through_dq()) finish(a.q, a.use_q_l2norm, b.dq, b.group, a.dq, i / T, i % T, tmp);
    if (b.through_dk()) finish(a.k, a.use_k_l2norm, b.dk, b.group, a.dk, i / T, i % T, tmp);
  });
  return {};
}

void add(Registry& r, FunctionId<GatedOjaRuleArgs> f, FunctionId<GatedOjaRuleBackwardArgs> b, Form form) {
  const bool step = form == Form::Step;
  r.add(Kernel<GatedOjaRuleArgs>{
      .function = f,
      .backend = "cpu",
      .name = step ? "oja.step.forward" : "oja.chunk.forward",
      .verify = [](const GatedOjaRuleArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace = step ? step_workspace : chunk_workspace,
      .launch = step ? step_forward : chunk_forward});
  r.add(Kernel<GatedOjaRuleBackwardArgs>{
      .function = b,
      .backend = "cpu",
      .name = "oja.chunk.backward",
      .verify = [](const GatedOjaRuleBackwardArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace = backward_workspace,
      .launch = backward});
}

}  // namespace

void register_gated_oja_rule_cpu(Registry& r) {
  r.add_backend("gated_oja_rule", cpu_backend());
  add(r, kChunkGatedOjaRule, kChunkGatedOjaRuleBackward, Form::Chunk);
  add(r, kFusedRecurrentGatedOjaRule, kFusedRecurrentGatedOjaRuleBackward, Form::Step);
}

}  // namespace fla
#endif
