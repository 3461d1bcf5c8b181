// Stepwise form of the diagonal-decay recurrence, for short inputs, decoding and value gates.
//   S_t = e^{gk_t} (x) e^{gv_t} o S_{t-1} + k_t v_t^T      o_t = scale S_t^T q_t
// forward   a task is one sequence, head and share of the value panels; a panel [K, 4 vectors] stays in scratch over
//           all tokens, each of which makes one pass over it. The first pass reads h0, and one after which the state is
//           wanted writes it there, where their layout allows: decoding moves the state once each way
// backward  without gv the chunk form computes the same function; with it, token by token with D carried and S
//           recomputed from a state kept every kStride tokens. The gates' gradients are sums of
//           (decayed S_{t-1}) o D_t taken directly: no running sums over the sequence, nothing cancels
#include <algorithm>
#include <cstdint>

#include "fla/engine/diag/cpu/entry.h"
#include "fla/engine/diag/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/diag/cpu/step.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/diag/cpu/chunk-inl.h"

#ifndef FLA_ENGINE_DIAG_CPU_STEP_CC_ONCE
#define FLA_ENGINE_DIAG_CPU_STEP_CC_ONCE
namespace fla::cpu {

// Widest panel of any target: 4 vectors of 16.
inline constexpr std::int64_t kMaxStepCols = 64;
// Tokens between kept states in the backward.
inline constexpr std::int64_t kStride = 32;

inline std::int64_t step_split(const DiagProblem& p, int threads) {
  const std::int64_t heads = std::max<std::int64_t>(p.N * p.H, 1);
  // In units of kMaxStepCols columns on every target.
  return std::clamp<std::int64_t>((threads + heads - 1) / heads, 1,
                                  std::max<std::int64_t>(pad_up(p.V, kMaxStepCols) / kMaxStepCols, 1));
}
inline std::int64_t step_slots(const DiagProblem& p, int threads) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(threads, p.N * p.H * step_split(p, threads)));
}
inline std::int64_t step_backward_slots(const DiagBackwardProblem& p, int threads) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(threads, p.N * p.H));
}

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct StepTiles {
  float* state = nullptr;                              // [pad_up(K), kMaxStepCols]
  float *q = nullptr, *k = nullptr, *decay = nullptr;  // [pad_up(K)]
  float* u = nullptr;                                  // [pad_up(K)] bonus
  float *v = nullptr, *gv = nullptr, *o = nullptr;     // [kMaxStepCols]
  float* tmp = nullptr;                                // [kPad + 4, pad_up(K)]
  void carve(Arena& arena, std::int64_t K) {
    const std::int64_t kp = pad_up(K);
    state = arena.floats(kp * kMaxStepCols);
    q = arena.floats(kp);
    k = arena.floats(kp);
    decay = arena.floats(kp);
    u = arena.floats(kp);
    v = arena.floats(kMaxStepCols);
    gv = arena.floats(kMaxStepCols);
    o = arena.floats(kMaxStepCols);
    tmp = arena.floats((kPad + 4) * kp);
  }
};

// One token on one panel of NV vectors. Two chains per output column, even and odd channels, hide the latency. own:
// with Read::Before scale <q, u o k>.
template <bool kKey, bool kValue, Read kRead, int NV>
HWY_NOINLINE void step_token(const float* src, std::int64_t lds, float* dst, std::int64_t ldd, std::int64_t K,
                             const float* q, const float* k, const float* decay, const float* v, const float* gv,
                             float scale, float own, float* o) {
  const hn::ScalableTag<float> d;
  using Vec = hn::Vec<decltype(d)>;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  Vec o0[NV], o1[NV], vv[NV], gg[NV];
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    o0[j] = o1[j] = hn::Zero(d);
    vv[j] = hn::LoadU(d, v + j * lanes);
    gg[j] = kValue ? hn::LoadU(d, gv + j * lanes) : vv[j];
  }
  const auto row = [&](std::int64_t c, Vec(&acc)[NV]) HWY_ATTR {
    const Vec kc = hn::Set(d, k[c]), qc = hn::Set(d, q[c]);
    const Vec dc = kKey ? hn::Set(d, decay[c]) : kc;
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      Vec x = hn::LoadU(d, src + c * lds + j * lanes);
      if constexpr (kRead == Read::Before) acc[j] = hn::MulAdd(qc, x, acc[j]);
      if constexpr (kKey && kValue) x = hn::Mul(x, hn::Mul(dc, gg[j]));
      if constexpr (kKey && !kValue) x = hn::Mul(x, dc);
      if constexpr (!kKey && kValue) x = hn::Mul(x, gg[j]);
      x = hn::MulAdd(kc, vv[j], x);
      hn::StoreU(x, d, dst + c * ldd + j * lanes);
      if constexpr (kRead == Read::After) acc[j] = hn::MulAdd(qc, x, acc[j]);
    }
  };
  std::int64_t c = 0;
  for (; c + 2 <= K; c += 2) {
    row(c, o0);
    row(c + 1, o1);
  }
  if (c < K) row(c, o0);
  const Vec s = hn::Set(d, scale);
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    Vec x = hn::Mul(s, hn::Add(o0[j], o1[j]));
    if constexpr (kRead == Read::Before) x = hn::MulAdd(hn::Set(d, own), vv[j], x);
    hn::StoreU(x, d, o + j * lanes);
  }
}

template <bool kKey, bool kValue, Read kRead>
HWY_INLINE void step_any(std::int64_t nv, const float* src, std::int64_t lds, float* dst, std::int64_t ldd,
                         std::int64_t K, const float* q, const float* k, const float* decay, const float* v,
                         const float* gv, float scale, float own, float* o) {
  switch (nv) {
    case 1: return step_token<kKey, kValue, kRead, 1>(src, lds, dst, ldd, K, q, k, decay, v, gv, scale, own, o);
    case 2: return step_token<kKey, kValue, kRead, 2>(src, lds, dst, ldd, K, q, k, decay, v, gv, scale, own, o);
    case 3: return step_token<kKey, kValue, kRead, 3>(src, lds, dst, ldd, K, q, k, decay, v, gv, scale, own, o);
    default: return step_token<kKey, kValue, kRead, 4>(src, lds, dst, ldd, K, q, k, decay, v, gv, scale, own, o);
  }
}

// scale <q, u o k>
HWY_INLINE float bonus_score(const float* q, const float* k, const float* u, std::int64_t K, float scale) {
  float sum = 0.0F;
  for (std::int64_t c = 0; c < K; ++c) sum += q[c] * (u[c] * k[c]);
  return scale * sum;
}

HWY_INLINE void exp_row(const float* src, float* dst, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < n; i += lanes) hn::StoreU(exp_v(d, hn::LoadU(d, src + i)), d, dst + i);
}

// The decay of the key channels at token t into row [pad_up(K)].
template <KeyGate kGate>
HWY_INLINE void key_decay(const Rows& g, double gamma, std::int64_t t, std::int64_t K, float* row) {
  if constexpr (kGate == KeyGate::Channel) {
    load_rows(g, t, 1, 0, K, row, pad_up(K));
    exp_row(row, row, pad_up(K));
  }
  if constexpr (kGate == KeyGate::Head) {
    std::fill(row, row + kPad, static_cast<float>(g ? scalar_at(g, t) : gamma));
    exp_row(row, row, kPad);
    std::fill(row + kPad, row + pad_up(K), row[0]);
  }
}

// Elements [c0, c0 + n) of row t as fp32 without padding: in place where they already are.
HWY_INLINE const float* row_in_place(const Rows& x, std::int64_t t, std::int64_t c0, std::int64_t n, float* scratch) {
  if (x.dtype == DType::F32 && x.last == 1) return reinterpret_cast<const float*>(x.at(t, c0));
  load_row(x.at(t, c0), x.dtype, x.last, n, scratch);
  return scratch;
}

template <KeyGate kGate, bool kValue, Read kRead = Read::After>
HWY_NOINLINE void step_task(const DiagProblem& p, StepTiles& w, std::int64_t n, std::int64_t h, std::int64_t v_begin,
                            std::int64_t v_end) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), cols = 4 * lanes;
  const std::int64_t K = p.K;
  const Sequence s = p.sequence(n);
  const Rows q = token_rows(p.q, p, s, h), k = token_rows(p.k, p, s, h), v = token_rows(p.v, p, s, h),
             o = token_rows(p.o, p, s, h), gv = token_rows(p.gv, p, s, h);
  const Rows g = token_rows(kGate == KeyGate::Channel ? p.gk : p.g, p, s, h);
  const StateRows states(p, n, h);
  const Rows h0 = states.start;
  const double gamma = kGate == KeyGate::Head && !p.g ? p.head.at(h) : 0.0;
  const float scale = static_cast<float>(p.scale);
  if (kRead == Read::Before) load_rows(bonus_row(p, h), 0, 1, 0, K, w.u, pad_up(K));

  for (std::int64_t v0 = v_begin; v0 < v_end; v0 += cols) {
    const std::int64_t width = std::min(cols, v_end - v0), nv = (width + lanes - 1) / lanes;
    const bool whole = width % lanes == 0;
    if (states.padding) {
      std::fill(w.state, w.state + K * kMaxStepCols, 0.0F);
      std::fill(w.o, w.o + kMaxStepCols, 0.0F);
      for (std::int64_t t = 0; t < s.length; ++t) {
        if (o) store_rows(w.o, kMaxStepCols, o, t, 1, v0, width);
        if (const Rows step = states.step(t)) store_state(w.state, kMaxStepCols, step, K, v0, width, w.tmp);
      }
      continue;
    }
    const bool read_h0 = whole && rows_of_floats(h0) && s.length > 0;
    if (!read_h0) {
      if (h0) {
        load_state(h0, K, v0, width, w.state, kMaxStepCols, w.tmp);
      } else {
        std::fill(w.state, w.state + K * kMaxStepCols, 0.0F);
      }
    }
    const float* src = w.state;
    std::int64_t lds = kMaxStepCols;
    if (read_h0) {
      src = reinterpret_cast<const float*>(h0.at(0, v0));
      lds = h0.step / static_cast<std::int64_t>(sizeof(float));
    }
    for (std::int64_t t = 0; t < s.length; ++t) {
      const float* qt = o ? row_in_place(q, t, 0, K, w.q) : nullptr;
      const float* kt = row_in_place(k, t, 0, K, w.k);
      if (qt == nullptr) qt = kt;  // o is not stored
      const float* vt = w.v;
      if (whole) {
        vt = row_in_place(v, t, v0, width, w.v);
      } else {
        load_rows(v, t, 1, v0, width, w.v, kMaxStepCols);
      }
      if (kGate == KeyGate::Channel || (kGate == KeyGate::Head && (g || t == 0))) {
        key_decay<kGate>(g, gamma, t, K, w.decay);
      }
      if (kValue) {
        load_rows(gv, t, 1, v0, width, w.gv, kMaxStepCols);
        exp_row(w.gv, w.gv, pad_up(width));
      }
      float* dst = w.state;
      std::int64_t ldd = kMaxStepCols;
      const Rows wanted[] = {states.slot(t), states.step(t)};
      const Rows* into = nullptr;
      for (const Rows& x : wanted) {
        if (into != nullptr || !whole || !rows_of_floats(x)) continue;
        into = &x;
        dst = reinterpret_cast<float*>(x.at(0, v0));
        ldd = x.step / static_cast<std::int64_t>(sizeof(float));
      }
      const float own = kRead == Read::Before ? bonus_score(qt, kt, w.u, K, scale) : 0.0F;
      step_any<kGate != KeyGate::None, kValue, kRead>(nv, src, lds, dst, ldd, K, qt, kt, w.decay, vt, w.gv, scale, own,
                                                      w.o);
      if (o) store_rows(w.o, kMaxStepCols, o, t, 1, v0, width);
      for (const Rows& x : wanted) {
        if (!x || &x == into) continue;
        if (into == nullptr) {
          store_state(dst, ldd, x, K, v0, width, w.tmp);
        } else {  // a caller's rows have no spare ones that a transpose may read
          store_rows(dst, ldd, x, 0, K, v0, width);
        }
      }
      src = dst;
      lds = ldd;
    }
    if (const Rows to = states.untouched()) store_state(w.state, kMaxStepCols, to, K, v0, width, w.tmp);
  }
}

template <KeyGate kGate>
HWY_INLINE void step_gate(const DiagProblem& p, StepTiles& w, std::int64_t n, std::int64_t h, std::int64_t v_begin,
                          std::int64_t v_end) {
  if (p.gv) return step_task<kGate, true>(p, w, n, h, v_begin, v_end);
  return step_task<kGate, false>(p, w, n, h, v_begin, v_end);
}

std::size_t step_bytes(const DiagProblem& p) {
  Arena arena;
  StepTiles w;
  w.carve(arena, p.K);
  return arena.bytes();
}

void step_forward(const DiagProblem& p, ThreadPool& pool, std::byte* workspace) {
  const KeyGate gate = key_gate(p);
  const std::size_t bytes = step_bytes(p);
  const std::int64_t split = step_split(p, pool.size());
  const std::int64_t share = pad_up((p.V + split - 1) / split, kMaxStepCols);
  run_items(pool, p.N * p.H * split, step_slots(p, pool.size()), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    StepTiles w;
    w.carve(arena, p.K);
    const std::int64_t head = item / split, n = head / p.H, h = head % p.H;
    const std::int64_t v_begin = item % split * share, v_end = std::min(p.V, v_begin + share);
    switch (gate) {
      case KeyGate::None: return step_gate<KeyGate::None>(p, w, n, h, v_begin, v_end);
      case KeyGate::Head: return step_gate<KeyGate::Head>(p, w, n, h, v_begin, v_end);
      case KeyGate::Channel:
        if (p.u) return step_task<KeyGate::Channel, false, Read::Before>(p, w, n, h, v_begin, v_end);
        return step_gate<KeyGate::Channel>(p, w, n, h, v_begin, v_end);
    }
  });
}

struct StepBackwardTiles {
  float* states = nullptr;   // [segments][panels][pad_up(K), kBV] entering states
  float* decayed = nullptr;  // [kStride][pad_up(K), kBV] S_{t-1} after the decay of t, one panel
  float* d = nullptr;        // [panels][pad_up(K), kBV] D
  float* state = nullptr;    // [pad_up(K), kBV]
  float *q = nullptr, *k = nullptr, *decay = nullptr, *dq = nullptr, *dk = nullptr, *dgk = nullptr;  // [kStride, kp]
  float *v = nullptr, *gv = nullptr, *do_ = nullptr, *dv = nullptr, *dgv = nullptr;  // [kStride, panels * kBV]
  float* tmp = nullptr;
  void carve(Arena& arena, std::int64_t K, std::int64_t V, std::int64_t longest) {
    const std::int64_t kp = pad_up(K), panels = pad_up(V, kBV) / kBV, ldv = panels * kBV;
    const std::int64_t segments = std::max<std::int64_t>(1, (longest + kStride - 1) / kStride);
    states = arena.floats(segments * panels * kp * kBV);
    decayed = arena.floats(kStride * kp * kBV);
    d = arena.floats(panels * kp * kBV);
    state = arena.floats(kp * kBV);
    for (float** x : {&q, &k, &decay, &dq, &dk, &dgk}) *x = arena.floats(kStride * kp);
    for (float** x : {&v, &gv, &do_, &dv, &dgv}) *x = arena.floats(kStride * ldv);
    tmp = arena.floats((kPad + 4) * kp);
  }
};

// The decay of one token: out = e^{gk} (x) e^{gv} o s. Widths are padded.
template <KeyGate kGate>
HWY_INLINE void decay_panel(const float* s, float* out, std::int64_t K, std::int64_t width, const float* decay,
                            const float* gv) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < K; ++c) {
    const auto dc = hn::Set(d, kGate == KeyGate::None ? 1.0F : decay[c]);
    for (std::int64_t j = 0; j < width; j += lanes) {
      hn::StoreU(hn::Mul(hn::Mul(dc, hn::LoadU(d, gv + j)), hn::LoadU(d, s + c * kBV + j)), d, out + c * kBV + j);
    }
  }
}

HWY_INLINE void add_outer(const float* s, float* out, std::int64_t K, std::int64_t width, const float* k,
                          const float* v) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < K; ++c) {
    const auto kc = hn::Set(d, k[c]);
    for (std::int64_t j = 0; j < width; j += lanes) {
      hn::StoreU(hn::MulAdd(kc, hn::LoadU(d, v + j), hn::LoadU(d, s + c * kBV + j)), d, out + c * kBV + j);
    }
  }
}

template <KeyGate kGate>
HWY_NOINLINE void step_backward_task(const DiagBackwardProblem& p, StepBackwardTiles& w, std::int64_t n,
                                     std::int64_t h) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, V = p.V, kp = pad_up(K), panels = pad_up(V, kBV) / kBV, ldv = panels * kBV;
  const std::int64_t panel_size = kp * kBV, state_size = panels * panel_size;
  const Sequence s = p.sequence(n);
  const Rows q = token_rows(p.q, p, s, h), k = token_rows(p.k, p, s, h), v = token_rows(p.v, p, s, h),
             gv = token_rows(p.gv, p, s, h), do_ = token_rows(p.do_, p, s, h),
             g = token_rows(kGate == KeyGate::Channel ? p.gk : p.g, p, s, h);
  const Rows dq = token_rows(p.dq, p, s, h), dk = token_rows(p.dk, p, s, h), dv = token_rows(p.dv, p, s, h),
             dgv = token_rows(p.dgv, p, s, h), dgk = token_rows(p.dgk, p, s, h), dg = token_rows(p.dg, p, s, h);
  const double gamma = kGate == KeyGate::Head && !p.g ? p.head.at(h) : 0.0;
  const float scale = static_cast<float>(p.scale);
  const std::int64_t segments = (s.length + kStride - 1) / kStride;
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, V - i * kBV); };

  const auto load_segment = [&](std::int64_t t0, std::int64_t C) HWY_ATTR {
    load_rows(k, t0, C, 0, K, w.k, kp);
    load_rows(v, t0, C, 0, V, w.v, ldv);
    load_rows(gv, t0, C, 0, V, w.gv, ldv);
    for (std::int64_t i = 0; i < C; ++i) {
      exp_row(w.gv + i * ldv, w.gv + i * ldv, pad_up(V));
      key_decay<kGate>(g, gamma, t0 + i, K, w.decay + i * kp);
    }
  };

  for (std::int64_t i = 0; i < panels; ++i) {
    load_panel(state_rows(p.dht, n, h), K, i * kBV, width_of(i), w.d + i * panel_size, w.tmp);
    if (segments > 0) {
      load_panel(state_rows(p.h0, n, h), K, i * kBV, width_of(i), w.states + i * panel_size, w.tmp);
    }
  }
  for (std::int64_t seg = 0; seg + 1 < segments; ++seg) {
    load_segment(seg * kStride, kStride);
    for (std::int64_t i = 0; i < panels; ++i) {
      const float* from = w.states + seg * state_size + i * panel_size;
      float* to = w.states + (seg + 1) * state_size + i * panel_size;
      const std::int64_t width = pad_up(width_of(i));
      for (std::int64_t t = 0; t < kStride; ++t) {
        decay_panel<kGate>(t == 0 ? from : to, to, K, width, w.decay + t * kp, w.gv + t * ldv + i * kBV);
        add_outer(to, to, K, width, w.k + t * kp, w.v + t * ldv + i * kBV);
      }
    }
  }
  for (std::int64_t seg = segments - 1; seg >= 0; --seg) {
    const std::int64_t t0 = seg * kStride, C = std::min(kStride, s.length - t0);
    load_segment(t0, C);
    load_rows(q, t0, C, 0, K, w.q, kp);
    if (do_) {
      load_rows(do_, t0, C, 0, V, w.do_, ldv);
    } else {
      std::fill(w.do_, w.do_ + C * ldv, 0.0F);
    }
    for (float* x : {w.dq, w.dk, w.dgk}) std::fill(x, x + C * kp, 0.0F);
    for (float* x : {w.dv, w.dgv}) std::fill(x, x + C * ldv, 0.0F);
    for (std::int64_t i = 0; i < panels; ++i) {
      const std::int64_t width = pad_up(width_of(i));
      const float* from = w.states + seg * state_size + i * panel_size;
      for (std::int64_t t = 0; t < C; ++t) {
        float* decayed = w.decayed + t * panel_size;
        decay_panel<kGate>(t == 0 ? from : w.state, decayed, K, width, w.decay + t * kp, w.gv + t * ldv + i * kBV);
        add_outer(decayed, w.state, K, width, w.k + t * kp, w.v + t * ldv + i * kBV);
      }
      float* D = w.d + i * panel_size;
      for (std::int64_t t = C - 1; t >= 0; --t) {
        const float* decayed = w.decayed + t * panel_size;
        const float* vt = w.v + t * ldv + i * kBV;
        const float* dot = w.do_ + t * ldv + i * kBV;
        const float* gvt = w.gv + t * ldv + i * kBV;
        float* dvt = w.dv + t * ldv + i * kBV;
        float* dgvt = w.dgv + t * ldv + i * kBV;
        for (std::int64_t c = 0; c < K; ++c) {
          const auto kc = hn::Set(d, w.k[t * kp + c]), qc = hn::Set(d, scale * w.q[t * kp + c]);
          const auto dc = hn::Set(d, kGate == KeyGate::None ? 1.0F : w.decay[t * kp + c]);
          auto dk_sum = hn::Zero(d), dq_sum = hn::Zero(d), gate_sum = hn::Zero(d);
          for (std::int64_t j = 0; j < width; j += lanes) {
            const auto vj = hn::LoadU(d, vt + j), doj = hn::LoadU(d, dot + j);
            const auto before = hn::LoadU(d, decayed + c * kBV + j);
            const auto Dj = hn::MulAdd(qc, doj, hn::LoadU(d, D + c * kBV + j));
            const auto gate = hn::Mul(before, Dj);
            dk_sum = hn::MulAdd(Dj, vj, dk_sum);
            dq_sum = hn::MulAdd(hn::MulAdd(kc, vj, before), doj, dq_sum);
            gate_sum = hn::Add(gate_sum, gate);
            hn::StoreU(hn::MulAdd(kc, Dj, hn::LoadU(d, dvt + j)), d, dvt + j);
            hn::StoreU(hn::Add(gate, hn::LoadU(d, dgvt + j)), d, dgvt + j);
            hn::StoreU(hn::Mul(hn::Mul(dc, hn::LoadU(d, gvt + j)), Dj), d, D + c * kBV + j);
          }
          w.dk[t * kp + c] += hn::GetLane(hn::SumOfLanes(d, dk_sum));
          w.dq[t * kp + c] += scale * hn::GetLane(hn::SumOfLanes(d, dq_sum));
          w.dgk[t * kp + c] += hn::GetLane(hn::SumOfLanes(d, gate_sum));
        }
      }
    }
    if (dq) store_rows(w.dq, kp, dq, t0, C, 0, K);
    if (dk) store_rows(w.dk, kp, dk, t0, C, 0, K);
    if (dv) store_rows(w.dv, ldv, dv, t0, C, 0, V);
    if (dgv) store_rows(w.dgv, ldv, dgv, t0, C, 0, V);
    if (dgk) store_rows(w.dgk, kp, dgk, t0, C, 0, K);
    if (dg) {
      for (std::int64_t t = 0; t < C; ++t) {
        float sum = 0.0F;
        for (std::int64_t c = 0; c < K; ++c) sum += w.dgk[t * kp + c];
        store_row(&sum, dg.at(t0 + t, 0), dg.dtype, 1, 1);
      }
    }
  }
  for (std::int64_t i = 0; i < panels; ++i) {
    store_panel(w.d + i * panel_size, state_rows(p.dh0, n, h), K, i * kBV, width_of(i), w.tmp);
  }
}

std::size_t step_backward_bytes(const DiagBackwardProblem& p) {
  Arena arena;
  StepBackwardTiles w;
  w.carve(arena, p.K, p.V, longest_sequence(p.cu_seqlens, p.T));
  return arena.bytes();
}

void step_backward(const DiagBackwardProblem& p, ThreadPool& pool, std::byte* workspace) {
  const KeyGate gate = key_gate(p);
  const std::size_t bytes = step_backward_bytes(p);
  const std::int64_t longest = longest_sequence(p.cu_seqlens, p.T);
  run_items(pool, p.N * p.H, step_backward_slots(p, pool.size()), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    StepBackwardTiles w;
    w.carve(arena, p.K, p.V, longest);
    const std::int64_t n = item / p.H, h = item % p.H;
    switch (gate) {
      case KeyGate::None: return step_backward_task<KeyGate::None>(p, w, n, h);
      case KeyGate::Head: return step_backward_task<KeyGate::Head>(p, w, n, h);
      case KeyGate::Channel: return step_backward_task<KeyGate::Channel>(p, w, n, h);
    }
  });
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(step_bytes);
HWY_EXPORT(step_forward);
HWY_EXPORT(step_backward_bytes);
HWY_EXPORT(step_backward);

std::size_t diag_step_forward_workspace(const DiagProblem& p, int threads) {
  return HWY_DYNAMIC_DISPATCH(step_bytes)(p) * static_cast<std::size_t>(step_slots(p, threads));
}

Status diag_step_forward(const DiagProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (p.N == 0 || p.H == 0 || p.V == 0) return {};
  if (workspace.size() < diag_step_forward_workspace(p, pool.size())) {
    return {Code::OutOfMemory, "diag_step_forward: workspace too small"};
  }
  HWY_DYNAMIC_DISPATCH(step_forward)(p, pool, workspace.data());
  return {};
}

std::size_t diag_step_backward_workspace(const DiagBackwardProblem& p, int threads) {
  if (!p.gv) return diag_chunk_backward_workspace(p, 0, threads);
  return HWY_DYNAMIC_DISPATCH(step_backward_bytes)(p) * static_cast<std::size_t>(step_backward_slots(p, threads));
}

Status diag_step_backward(const DiagBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (!p.gv) return diag_chunk_backward(p, 0, pool, workspace);
  if (p.N == 0 || p.H == 0) return {};
  if (workspace.size() < diag_step_backward_workspace(p, pool.size())) {
    return {Code::OutOfMemory, "diag_step_backward: workspace too small"};
  }
  HWY_DYNAMIC_DISPATCH(step_backward)(p, pool, workspace.data());
  return {};
}

}  // namespace fla::cpu
#endif
