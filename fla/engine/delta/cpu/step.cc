// Stepwise form of the delta-rule recurrences, for short inputs, decoding, value gates and beta per value channel.
//   z_t = S^T n_t, S being S_{t-1} or, where n reads it so, decayed      x_t = vbar_t + z_t, beta o (v_t + z_t) or z_t
//   S_t = e^{gk} (x) e^{gv} o S_{t-1} + s_t x_t^T [+ s1_t v_t^T]        o_t = scale S_t^T q_t
// forward   a task is one sequence, value head and share of the value panels. The front end runs on kStepRows rows at a
//           time; then every panel [K, kBV] takes these rows while it is in L1. The pass that writes S_t also sums
//           S_t^T n_{t+1} and S_t^T (e^{gk_{t+1}} o q_{t+1}), so that a token costs one pass; o follows from the latter
//           by q^T s. The first pass reads h0, and one after which the state is wanted writes it there, where their
//           layout allows: decoding moves the state once each way
// backward  without gv and channel beta the chunk form computes the same function; with them, token by token with D
//           carried and the states between two kept ones made again. The gates' gradients are sums of
//           (decayed S_{t-1}) o D' taken directly
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "fla/engine/delta/cpu/entry.h"
#include "fla/engine/delta/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/delta/cpu/step.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/delta/cpu/rows-inl.h"

#ifndef FLA_ENGINE_DELTA_CPU_STEP_CC_ONCE
#define FLA_ENGINE_DELTA_CPU_STEP_CC_ONCE
namespace fla::cpu {

// Rows that one run of the front end prepares, and rows between two kept states of the backward.
inline constexpr std::int64_t kStepRows = 16;

inline std::int64_t delta_step_panels(const DeltaProblem& p) { return pad_up(p.V, kBV) / kBV; }
inline std::int64_t delta_step_split(const DeltaProblem& p, int threads) {
  const std::int64_t heads = std::max<std::int64_t>(p.N * p.HV, 1);
  return std::clamp<std::int64_t>((threads + heads - 1) / heads, 1, std::max<std::int64_t>(delta_step_panels(p), 1));
}
inline std::int64_t delta_step_slots(const DeltaProblem& p, int threads) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(threads, p.N * p.HV * delta_step_split(p, threads)));
}
inline std::int64_t delta_step_backward_slots(const DeltaBackwardProblem& p, int threads) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(threads, p.N * p.H));
}
inline std::int64_t delta_step_segments(const DeltaProblem& p) {
  return std::max<std::int64_t>(1, (longest_sequence(p.cu_seqlens, p.T) * p.R + kStepRows - 1) / kStepRows);
}
inline bool needs_step(const DeltaProblem& p) { return p.gv || (p.beta && p.beta.ndim > 3); }

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// What kStepRows rows need besides the front end's tiles.
struct StepRowTiles {
  DeltaTiles front;
  float* decay = nullptr;               // [rows, pad_up(K)] e^{g}; head gate: one number a row
  float* n = nullptr;                   // n, times decay where it reads the decayed state
  float* qd = nullptr;                  // scale q e^g
  float *qs = nullptr, *qs1 = nullptr;  // [rows] scale <q, s>, scale <q, s1>

  void carve(Arena& arena, const DeltaProblem& p) {
    const std::int64_t tile = token_rows_padded(kStepRows) * pad_up(p.K);
    front.carve(arena, p, kStepRows, true);
    decay = arena.floats(tile);
    n = arena.floats(tile);
    qd = arena.floats(tile);
    qs = arena.floats(kStepRows);
    qs1 = arena.floats(kStepRows);
  }
};

template <DeltaKind kKind, KeyGate kGate>
HWY_NOINLINE void prepare_steps(const DeltaProblem& p, const DeltaInputs& in, StepRowTiles& w, std::int64_t t0,
                                std::int64_t C, bool want_q) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), kp = pad_up(p.K);
  const auto scale = hn::Set(d, static_cast<float>(p.scale));
  DeltaTiles& t = w.front;
  load_chunk<kKind, kGate>(p, in, t, kStepRows, t0, C, want_q);
  if constexpr (kGate == KeyGate::Head) {
    for (std::int64_t i = 0; i < C; i += lanes) hn::StoreU(exp_v(d, hn::LoadU(d, t.hg + i)), d, t.eg + i);
  }
  const bool before = reads_before_decay(p);
  for (std::int64_t i = 0; i < C; ++i) {
    const auto head = kGate == KeyGate::Head ? hn::Set(d, t.eg[i]) : hn::Set(d, 1.0F);
    for (std::int64_t c = i * kp; c < (i + 1) * kp; c += lanes) {
      auto e = head;
      if constexpr (kGate == KeyGate::Channel) {
        e = exp_v(d, hn::LoadU(d, t.g + c));
        hn::StoreU(e, d, w.decay + c);
      }
      const auto n = hn::LoadU(d, t.n + c);
      hn::StoreU(before || kGate == KeyGate::None ? n : hn::Mul(n, e), d, w.n + c);
      if (want_q) hn::StoreU(hn::Mul(hn::Mul(scale, hn::LoadU(d, t.q + c)), e), d, w.qd + c);
    }
    if (kGate == KeyGate::Head) w.decay[i * kp] = t.eg[i];
    if (!want_q) continue;
    w.qs[i] = static_cast<float>(p.scale) * dot_rows(t.q + i * kp, t.s + i * kp, kp);
    if (kKind == DeltaKind::General) w.qs1[i] = static_cast<float>(p.scale) * dot_rows(t.q + i * kp, t.s1 + i * kp, kp);
  }
}

// z = S^T n and o = S^T q over the panel's rows. Channels in two chains, even and odd.
template <int NV>
HWY_INLINE void read_columns(const float* src, std::int64_t lds, std::int64_t K, const float* n, const float* q,
                             float* z, float* o) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V za[2][NV], oa[2][NV];
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) za[0][j] = za[1][j] = oa[0][j] = oa[1][j] = hn::Zero(d);
  const auto row = [&](std::int64_t c, V(&zz)[NV], V(&oo)[NV]) HWY_ATTR {
    const V nc = hn::Set(d, n[c]), qc = hn::Set(d, q[c]);
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      const V x = hn::LoadU(d, src + c * lds + j * lanes);
      zz[j] = hn::MulAdd(nc, x, zz[j]);
      oo[j] = hn::MulAdd(qc, x, oo[j]);
    }
  };
  std::int64_t c = 0;
  for (; c + 2 <= K; c += 2) {
    row(c, za[0], oa[0]);
    row(c + 1, za[1], oa[1]);
  }
  if (c < K) row(c, za[0], oa[0]);
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    hn::StoreU(hn::Add(za[0][j], za[1][j]), d, z + j * lanes);
    hn::StoreU(hn::Add(oa[0][j], oa[1][j]), d, o + j * lanes);
  }
}

struct StepRow {
  const float *decay, *s, *s1;  // of this row
  const float *n, *q;           // of the next one, as read_columns wants them; kNext
  const float *x, *v, *gv;      // columns: x, General's v, e^{gv}
};

// dst = decay (x) gv o src + s x^T [+ s1 v^T], and with kNext the next row's z and o.
template <DeltaKind kKind, KeyGate kGate, bool kValue, bool kNext, int NV>
HWY_INLINE void write_columns(const float* src, std::int64_t lds, float* dst, std::int64_t ldd, std::int64_t K,
                              const StepRow& r, std::int64_t j0, float* z, float* o) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V za[2][NV], oa[2][NV], xx[NV], vv[NV], gg[NV];
  const V head = kGate == KeyGate::Head ? hn::Set(d, r.decay[0]) : hn::Zero(d);
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    za[0][j] = za[1][j] = oa[0][j] = oa[1][j] = hn::Zero(d);
    xx[j] = hn::LoadU(d, r.x + j0 + j * lanes);
    vv[j] = kKind == DeltaKind::General ? hn::LoadU(d, r.v + j0 + j * lanes) : xx[j];
    gg[j] = kValue ? hn::LoadU(d, r.gv + j0 + j * lanes) : xx[j];
    if constexpr (kValue && kGate == KeyGate::Head) gg[j] = hn::Mul(gg[j], head);
  }
  const auto row = [&](std::int64_t c, V(&zz)[NV], V(&oo)[NV]) HWY_ATTR {
    const V sc = hn::Set(d, r.s[c]);
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      V x = hn::LoadU(d, src + c * lds + j0 + j * lanes);
      if constexpr (kValue) x = hn::Mul(x, gg[j]);
      if constexpr (kGate == KeyGate::Channel) x = hn::Mul(x, hn::Set(d, r.decay[c]));
      if constexpr (kGate == KeyGate::Head && !kValue) x = hn::Mul(x, head);
      x = hn::MulAdd(sc, xx[j], x);
      if constexpr (kKind == DeltaKind::General) x = hn::MulAdd(hn::Set(d, r.s1[c]), vv[j], x);
      hn::StoreU(x, d, dst + c * ldd + j0 + j * lanes);
      if constexpr (kNext) {
        zz[j] = hn::MulAdd(hn::Set(d, r.n[c]), x, zz[j]);
        oo[j] = hn::MulAdd(hn::Set(d, r.q[c]), x, oo[j]);
      }
    }
  };
  std::int64_t c = 0;
  for (; c + 2 <= K; c += 2) {
    row(c, za[0], oa[0]);
    row(c + 1, za[1], oa[1]);
  }
  if (c < K) row(c, za[0], oa[0]);
  if constexpr (kNext) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      hn::StoreU(hn::Add(za[0][j], za[1][j]), d, z + j0 + j * lanes);
      hn::StoreU(hn::Add(oa[0][j], oa[1][j]), d, o + j0 + j * lanes);
    }
  }
}

// The panel's `width` columns, a multiple of the vector. Pairs of vectors from the left on, whatever the width.
HWY_NOINLINE void read_panel(const float* src, std::int64_t lds, std::int64_t K, std::int64_t width, const float* n,
                             const float* q, float* z, float* o) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  std::int64_t j = 0;
  for (; j + 2 * lanes <= width; j += 2 * lanes) read_columns<2>(src + j, lds, K, n, q, z + j, o + j);
  if (j < width) read_columns<1>(src + j, lds, K, n, q, z + j, o + j);
}

template <DeltaKind kKind, KeyGate kGate, bool kValue, bool kNext>
HWY_NOINLINE void write_panel(const float* src, std::int64_t lds, float* dst, std::int64_t ldd, std::int64_t K,
                              std::int64_t width, const StepRow& r, float* z, float* o) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  std::int64_t j = 0;
  for (; j + 2 * lanes <= width; j += 2 * lanes) {
    write_columns<kKind, kGate, kValue, kNext, 2>(src, lds, dst, ldd, K, r, j, z, o);
  }
  if (j < width) write_columns<kKind, kGate, kValue, kNext, 1>(src, lds, dst, ldd, K, r, j, z, o);
}

// Elements of one row, columns padded with zeros: beta per value channel after its sigmoid.
inline HWY_NOINLINE void load_beta_row(const DeltaProblem& p, const Rows& beta, std::int64_t t, std::int64_t v0,
                                       std::int64_t width, float* out) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  load_rows(beta, t, 1, v0, width, out, kBV);
  if (p.beta_sigmoid == 0.0) return;
  const auto c = hn::Set(d, static_cast<float>(p.beta_sigmoid));
  for (std::int64_t j = 0; j < pad_up(width); j += lanes)
    hn::StoreU(hn::Mul(c, sigmoid_v(d, hn::LoadU(d, out + j))), d, out + j);
}

inline HWY_NOINLINE void load_value_gate(const Rows& gv, std::int64_t R, std::int64_t t, std::int64_t v0,
                                         std::int64_t width, float* out) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (t % R != 0) return std::fill(out, out + pad_up(width), 1.0F);
  load_rows(gv, t / R, 1, v0, width, out, kBV);
  for (std::int64_t j = 0; j < pad_up(width); j += lanes) hn::StoreU(exp_v(d, hn::LoadU(d, out + j)), d, out + j);
}

// Rows of one panel's columns.
struct StepColumns {
  float *z = nullptr, *o = nullptr;                 // [kBV]
  float *x = nullptr, *v = nullptr, *gv = nullptr;  // [kBV]; v: vbar, or with channel beta and General v
  float* beta = nullptr;                            // [kBV]
  float* tmp = nullptr;
  void carve(Arena& arena, std::int64_t kp) {
    for (float** a : {&z, &o, &x, &v, &gv, &beta}) *a = arena.floats(kBV);
    tmp = arena.floats((kPad + 4) * std::max(kp, kBV));
  }
};

// x of one row from z; z becomes S^T n of the state that the row reads. Loads v and gv.
template <DeltaKind kKind, bool kValue>
HWY_NOINLINE void solve_step(const DeltaProblem& p, const DeltaInputs& in, const Rows& gv, const DeltaTiles& front,
                             bool before, std::int64_t t, std::int64_t i, std::int64_t v0, std::int64_t width,
                             StepColumns& w, float* z, float* x, float* v) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d)), padded = pad_up(width);
  DeltaTiles row = front;
  row.beta = front.beta + i;
  load_values<kKind>(in, row, t, 1, v0, width, v, kBV, w.tmp);
  if (kValue) load_value_gate(gv, p.R, t, v0, width, w.gv);
  if (in.channel_beta) load_beta_row(p, in.beta, t, v0, width, w.beta);
  for (std::int64_t j = 0; j < padded; j += lanes) {
    auto zj = hn::LoadU(d, z + j);
    if (kValue && !before) zj = hn::Mul(zj, hn::LoadU(d, w.gv + j));
    hn::StoreU(zj, d, z + j);
    auto xj = zj;
    if (kKind == DeltaKind::Delta) xj = hn::Add(xj, hn::LoadU(d, v + j));
    if (in.channel_beta) xj = hn::Mul(xj, hn::LoadU(d, w.beta + j));
    hn::StoreU(xj, d, x + j);
  }
}

struct DeltaStepTiles {
  StepRowTiles rows;
  StepColumns columns;
  float* state = nullptr;  // panels [pad_up(K), kBV]
  void carve(Arena& arena, const DeltaProblem& p, std::int64_t panels) {
    rows.carve(arena, p);
    columns.carve(arena, pad_up(p.K));
    state = arena.floats(panels * pad_up(p.K) * kBV);
  }
};

template <DeltaKind kKind, KeyGate kGate, bool kValue>
HWY_NOINLINE void delta_step_task(const DeltaProblem& p, DeltaStepTiles& w, std::int64_t n, std::int64_t hv,
                                  std::int64_t first, std::int64_t last) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, R = p.R, kp = pad_up(K);
  const Sequence s = p.sequence(n);
  const DeltaInputs in(p, n, hv);
  const Rows o = delta_rows(p.o, p, s, hv), gv = delta_rows(p.gv, p, s, hv);
  const StateRows states(p, n, hv);
  const Rows h0 = states.start;
  const bool want_o = static_cast<bool>(o), before = reads_before_decay(p);
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, p.V - i * kBV); };
  StepColumns& col = w.columns;
  DeltaTiles& t = w.rows.front;
  if (states.padding) {
    std::fill(col.o, col.o + kBV, 0.0F);
    load_panel({}, K, 0, kBV, w.state, col.tmp);
    for (std::int64_t token = 0; token < s.length; ++token) {
      for (std::int64_t i = first; i < last; ++i) {
        if (want_o) store_rows(col.o, kBV, o, token, 1, i * kBV, width_of(i));
        store_panel(w.state, states.step(token), K, i * kBV, width_of(i), col.tmp);
      }
    }
    return;
  }
  load_gate_bias(in.gate, kGate, K, t.bias);
  for (std::int64_t i = first; i < last; ++i) {
    // Whole vectors need no padding and are read where the caller has them.
    if (in.length > 0 && width_of(i) % lanes == 0 && rows_of_floats(h0)) continue;
    load_panel(h0, K, i * kBV, width_of(i), w.state + (i - first) * kp * kBV, col.tmp);
  }
  for (std::int64_t t0 = 0; t0 < in.length; t0 += kStepRows) {
    const std::int64_t C = std::min(kStepRows, in.length - t0);
    prepare_steps<kKind, kGate>(p, in, w.rows, t0, C, want_o);
    const float* q = want_o ? w.rows.qd : w.rows.n;  // o is then not stored
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t width = width_of(i), padded = pad_up(width);
      float* state = w.state + (i - first) * kp * kBV;
      const float* src = state;
      std::int64_t lds = kBV;
      const bool whole = width % lanes == 0;
      const std::int64_t columns = whole ? width : padded;
      if (t0 == 0 && whole && rows_of_floats(h0)) {
        src = reinterpret_cast<const float*>(h0.at(0, i * kBV));
        lds = h0.step / static_cast<std::int64_t>(sizeof(float));
      }
      if (columns < padded) {
        std::fill(col.z, col.z + kBV, 0.0F);
        std::fill(col.o, col.o + kBV, 0.0F);
      }
      read_panel(src, lds, K, columns, w.rows.n, q, col.z, col.o);
      for (std::int64_t r = 0; r < C; ++r) {
        const std::int64_t at = r * kp;
        solve_step<kKind, kValue>(p, in, gv, t, before, t0 + r, r, i * kBV, width, col, col.z, col.x, col.v);
        if (want_o && (t0 + r) % R == R - 1) {
          const auto qs = hn::Set(d, w.rows.qs[r]);
          for (std::int64_t j = 0; j < padded; j += lanes) {
            auto y = hn::LoadU(d, col.o + j);
            if (kValue) y = hn::Mul(y, hn::LoadU(d, col.gv + j));
            y = hn::MulAdd(qs, hn::LoadU(d, col.x + j), y);
            if (kKind == DeltaKind::General) y = hn::MulAdd(hn::Set(d, w.rows.qs1[r]), hn::LoadU(d, col.v + j), y);
            hn::StoreU(y, d, col.o + j);
          }
          store_rows(col.o, kBV, o, (t0 + r) / R, 1, i * kBV, width);
        }
        float* dst = state;
        std::int64_t ldd = kBV;
        const bool next = r + 1 < C, ends = (t0 + r) % R == R - 1;
        const std::int64_t token = (t0 + r) / R;
        const Rows wanted[] = {ends ? states.slot(token) : Rows{}, ends ? states.step(token) : Rows{}};
        const Rows* into = nullptr;
        // The next run of rows looks for the panel in scratch.
        const bool free = whole && (next || t0 + C == in.length);
        for (const Rows& x : wanted) {
          if (into != nullptr || !free || !rows_of_floats(x)) continue;
          into = &x;
          dst = reinterpret_cast<float*>(x.at(0, i * kBV));
          ldd = x.step / static_cast<std::int64_t>(sizeof(float));
        }
        const StepRow row{w.rows.decay + at,
                          t.s + at,
                          kKind == DeltaKind::General ? t.s1 + at : nullptr,
                          w.rows.n + at + (next ? kp : 0),
                          q + at + (next ? kp : 0),
                          col.x,
                          col.v,
                          col.gv};
        if (next) {
          write_panel<kKind, kGate, kValue, true>(src, lds, dst, ldd, K, columns, row, col.z, col.o);
        } else {
          write_panel<kKind, kGate, kValue, false>(src, lds, dst, ldd, K, columns, row, col.z, col.o);
        }
        for (const Rows& x : wanted) {
          if (!x || &x == into) continue;
          if (into == nullptr) {
            store_state(dst, ldd, x, K, i * kBV, width, col.tmp);
          } else {  // a caller's rows have no spare ones that a transpose may read
            store_rows(dst, ldd, x, 0, K, i * kBV, width);
          }
        }
        src = dst;
        lds = ldd;
      }
    }
  }
  for (std::int64_t i = first; i < last; ++i)
    store_panel(w.state + (i - first) * kp * kBV, states.untouched(), K, i * kBV, width_of(i), col.tmp);
}

template <DeltaKind kKind, KeyGate kGate>
HWY_INLINE void delta_step_value(const DeltaProblem& p, DeltaStepTiles& w, std::int64_t n, std::int64_t hv,
                                 std::int64_t first, std::int64_t last) {
  if (p.gv) return delta_step_task<kKind, kGate, true>(p, w, n, hv, first, last);
  return delta_step_task<kKind, kGate, false>(p, w, n, hv, first, last);
}

template <DeltaKind kKind>
HWY_INLINE void delta_step_gate(const DeltaProblem& p, DeltaStepTiles& w, std::int64_t n, std::int64_t hv,
                                std::int64_t first, std::int64_t last) {
  switch (delta_gate(p)) {
    case KeyGate::None: return delta_step_value<kKind, KeyGate::None>(p, w, n, hv, first, last);
    case KeyGate::Head: return delta_step_value<kKind, KeyGate::Head>(p, w, n, hv, first, last);
    case KeyGate::Channel: return delta_step_value<kKind, KeyGate::Channel>(p, w, n, hv, first, last);
  }
}

std::size_t delta_step_bytes(const DeltaProblem& p, std::int64_t panels) {
  Arena arena;
  DeltaStepTiles w;
  w.carve(arena, p, panels);
  return arena.bytes();
}

void delta_step(const DeltaProblem& p, ThreadPool& pool, std::byte* workspace) {
  const std::int64_t panels = delta_step_panels(p), split = delta_step_split(p, pool.size());
  const std::int64_t share = (panels + split - 1) / split;
  const std::size_t bytes = delta_step_bytes(p, share);
  run_items(pool, p.N * p.HV * split, delta_step_slots(p, pool.size()), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    DeltaStepTiles w;
    w.carve(arena, p, share);
    const std::int64_t head = item / split, n = head / p.HV, hv = head % p.HV;
    const std::int64_t first = item % split * share, last = std::min(panels, first + share);
    if (first >= last) return;
    if (delta_kind(p) == DeltaKind::General) return delta_step_gate<DeltaKind::General>(p, w, n, hv, first, last);
    return delta_step_gate<DeltaKind::Delta>(p, w, n, hv, first, last);
  });
}

struct DeltaStepBackwardTiles {
  StepRowTiles rows;
  StepColumns columns;
  GroupSums sums;           // kStepRows rows
  float* kept = nullptr;    // [group][segments][panels][pad_up(K), kBV] entering states
  float* d = nullptr;       // [group][panels][...] D
  float* inside = nullptr;  // [kStepRows + 1][...] states of a segment, one panel
  float *dq = nullptr, *dn = nullptr, *ds = nullptr, *ds1 = nullptr, *dgate = nullptr;  // [kStepRows, pad_up(K)]
  float *x = nullptr, *z = nullptr, *v = nullptr;                                       // [kStepRows, kBV]
  float *do_ = nullptr, *y = nullptr, *dv = nullptr, *out = nullptr;                    // [kBV]
  float* dbeta = nullptr;                                                               // [kStepRows]
  float* scratch = nullptr;                                                             // [max(pad_up(K), 2 kBV)]

  void carve(Arena& arena, const DeltaProblem& p) {
    const std::int64_t kp = pad_up(p.K), panel = kp * kBV, state = delta_step_panels(p) * panel;
    rows.carve(arena, p);
    columns.carve(arena, kp);
    sums.carve(arena, p, kStepRows);
    kept = arena.floats(p.group() * delta_step_segments(p) * state);
    d = arena.floats(p.group() * state);
    inside = arena.floats((kStepRows + 1) * panel);
    for (float** q : {&dq, &dn, &ds, &ds1, &dgate}) *q = arena.floats(kStepRows * kp);
    for (float** q : {&x, &z, &v}) *q = arena.floats(kStepRows * kBV);
    for (float** q : {&do_, &y, &dv, &out}) *q = arena.floats(kBV);
    dbeta = arena.floats(kStepRows);
    scratch = arena.floats(std::max(kp, 2 * kBV));
  }
};

// The backward is the rare one of the two directions here, so kind and gates are run-time values in it.
void prepare_any(const DeltaProblem& p, const DeltaInputs& in, StepRowTiles& w, std::int64_t t0, std::int64_t C,
                 bool want_q) {
  const auto with = [&](auto kind) HWY_ATTR {
    constexpr DeltaKind kKind = decltype(kind)::value;
    switch (delta_gate(p)) {
      case KeyGate::None: return prepare_steps<kKind, KeyGate::None>(p, in, w, t0, C, want_q);
      case KeyGate::Head: return prepare_steps<kKind, KeyGate::Head>(p, in, w, t0, C, want_q);
      case KeyGate::Channel: return prepare_steps<kKind, KeyGate::Channel>(p, in, w, t0, C, want_q);
    }
  };
  if (delta_kind(p) == DeltaKind::General) return with(std::integral_constant<DeltaKind, DeltaKind::General>());
  with(std::integral_constant<DeltaKind, DeltaKind::Delta>());
}
template <DeltaKind kKind>
void solve_any(const DeltaProblem& p, const DeltaInputs& in, const Rows& gv, const DeltaTiles& front, bool before,
               std::int64_t t, std::int64_t i, std::int64_t v0, std::int64_t width, StepColumns& w, float* z, float* x,
               float* v) {
  if (gv) return solve_step<kKind, true>(p, in, gv, front, before, t, i, v0, width, w, z, x, v);
  solve_step<kKind, false>(p, in, gv, front, before, t, i, v0, width, w, z, x, v);
}

HWY_NOINLINE void delta_step_backward_task(const DeltaBackwardProblem& p, DeltaStepBackwardTiles& w, std::int64_t n,
                                           std::int64_t h, double* gate_partial) {
  const bool general = delta_kind(p) == DeltaKind::General, value = static_cast<bool>(p.gv);
  const KeyGate gate_kind = delta_gate(p);
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, V = p.V, R = p.R, kp = pad_up(K), group = p.group(), panels = delta_step_panels(p);
  const std::int64_t panel_size = kp * kBV, state_size = panels * panel_size,
                     head_size = delta_step_segments(p) * state_size;
  const Sequence span = p.sequence(n);
  const std::int64_t length = span.length * R, segments = (length + kStepRows - 1) / kStepRows;
  const bool before = reads_before_decay(p);
  const float scale = static_cast<float>(p.scale);
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, V - i * kBV); };
  StepColumns& col = w.columns;
  DeltaTiles& t = w.rows.front;

  const auto decay_of = [&](std::int64_t r, std::int64_t c) {
    return gate_kind == KeyGate::None ? 1.0F : w.rows.decay[r * kp + (gate_kind == KeyGate::Head ? 0 : c)];
  };
  // Row r of the loaded ones on one panel: x, z and v are kept, S goes from `from` to `to`.
  const auto run_row = [&](const DeltaInputs& in, const Rows& gv, std::int64_t t0, std::int64_t r, std::int64_t i,
                           const float* from, float* to, float* x, float* z, float* v) HWY_ATTR {
    const std::int64_t at = r * kp, padded = pad_up(width_of(i));
    read_panel(from, kBV, K, padded, w.rows.n + at, w.rows.n + at, z, col.o);
    if (general)
      solve_any<DeltaKind::General>(p, in, gv, t, before, t0 + r, r, i * kBV, width_of(i), col, z, x, v);
    else
      solve_any<DeltaKind::Delta>(p, in, gv, t, before, t0 + r, r, i * kBV, width_of(i), col, z, x, v);
    for (std::int64_t c = 0; c < K; ++c) {
      const auto dc = hn::Set(d, decay_of(r, c)), sc = hn::Set(d, t.s[at + c]);
      for (std::int64_t k = 0; k < padded; k += lanes) {
        auto S = hn::Mul(dc, hn::LoadU(d, from + c * kBV + k));
        if (value) S = hn::Mul(S, hn::LoadU(d, col.gv + k));
        S = hn::MulAdd(sc, hn::LoadU(d, x + k), S);
        if (general) S = hn::MulAdd(hn::Set(d, t.s1[at + c]), hn::LoadU(d, v + k), S);
        hn::StoreU(S, d, to + c * kBV + k);
      }
    }
  };

  for (std::int64_t j = 0; j < group; ++j) {
    const std::int64_t hv = h * group + j;
    const DeltaInputs in(p, n, hv);
    const Rows gv = delta_rows(p.gv, p, span, hv);
    load_gate_bias(in.gate, gate_kind, K, t.bias);
    if (gate_partial != nullptr) {
      const std::int64_t size = gate_sums_size(p);
      std::fill_n(gate_partial + (n * p.HV + hv) * size, size, 0.0);
    }
    for (std::int64_t i = 0; i < panels; ++i) {
      load_panel(state_rows(p.dht, n, hv), K, i * kBV, width_of(i), w.d + j * state_size + i * panel_size, col.tmp);
      load_panel(state_rows(p.h0, n, hv), K, i * kBV, width_of(i), w.kept + j * head_size + i * panel_size, col.tmp);
    }
    for (std::int64_t segment = 0; segment + 1 < segments; ++segment) {
      prepare_any(p, in, w.rows, segment * kStepRows, kStepRows, false);
      for (std::int64_t i = 0; i < panels; ++i) {
        const float* from = w.kept + j * head_size + segment * state_size + i * panel_size;
        float* to = w.kept + j * head_size + (segment + 1) * state_size + i * panel_size;
        for (std::int64_t r = 0; r < kStepRows; ++r) {
          run_row(in, gv, segment * kStepRows, r, i, r == 0 ? from : to, to, col.x, col.z, col.v);
        }
      }
    }
  }

  for (std::int64_t segment = segments - 1; segment >= 0; --segment) {
    const std::int64_t t0 = segment * kStepRows, C = std::min(kStepRows, length - t0);
    for (std::int64_t j = 0; j < group; ++j) {
      const std::int64_t hv = h * group + j;
      const DeltaInputs in(p, n, hv);
      const DeltaGradients grad(p, n, hv);
      const Rows gv = delta_rows(p.gv, p, span, hv), do_ = delta_rows(p.do_, p, span, hv);
      if (group > 1) load_gate_bias(in.gate, gate_kind, K, t.bias);
      prepare_any(p, in, w.rows, t0, C, true);
      for (float* x : {w.dq, w.dn, w.ds, w.ds1, w.dgate}) std::fill(x, x + C * kp, 0.0F);
      std::fill(w.dbeta, w.dbeta + C, 0.0F);
      for (std::int64_t i = 0; i < panels; ++i) {
        const std::int64_t width = width_of(i), padded = pad_up(width);
        const float* entry = w.kept + j * head_size + segment * state_size + i * panel_size;
        std::copy(entry, entry + panel_size, w.inside);
        for (std::int64_t r = 0; r < C; ++r) {
          run_row(in, gv, t0, r, i, w.inside + r * panel_size, w.inside + (r + 1) * panel_size, w.x + r * kBV,
                  w.z + r * kBV, w.v + r * kBV);
        }
        float* D = w.d + j * state_size + i * panel_size;
        for (std::int64_t r = C - 1; r >= 0; --r) {
          const std::int64_t at = r * kp;
          const float* old = w.inside + r * panel_size;
          const float* now = old + panel_size;
          const float* x = w.x + r * kBV;
          const float* v = w.v + r * kBV;
          const bool read = (t0 + r) % R == R - 1;
          if (do_ && read) {
            load_rows(do_, (t0 + r) / R, 1, i * kBV, width, w.do_, kBV);
          } else {
            std::fill(w.do_, w.do_ + padded, 0.0F);
          }
          if (value) {
            load_value_gate(gv, R, t0 + r, i * kBV, width, col.gv);
          } else {
            std::fill(col.gv, col.gv + padded, 1.0F);
          }
          std::fill(w.y, w.y + padded, 0.0F);
          std::fill(w.dv, w.dv + padded, 0.0F);
          for (std::int64_t c = 0; c < K; ++c) {
            const auto qc = hn::Set(d, scale * t.q[at + c]), sc = hn::Set(d, t.s[at + c]);
            const auto s1 = general ? hn::Set(d, t.s1[at + c]) : sc;
            auto dq = hn::Zero(d), ds = dq, ds1 = dq;
            for (std::int64_t k = 0; k < padded; k += lanes) {
              const auto up = hn::LoadU(d, w.do_ + k);
              const auto D1 = hn::MulAdd(qc, up, hn::LoadU(d, D + c * kBV + k));
              hn::StoreU(D1, d, D + c * kBV + k);
              dq = hn::MulAdd(hn::LoadU(d, now + c * kBV + k), up, dq);
              ds = hn::MulAdd(D1, hn::LoadU(d, x + k), ds);
              hn::StoreU(hn::MulAdd(sc, D1, hn::LoadU(d, w.y + k)), d, w.y + k);
              if (!general) continue;
              ds1 = hn::MulAdd(D1, hn::LoadU(d, v + k), ds1);
              hn::StoreU(hn::MulAdd(s1, D1, hn::LoadU(d, w.dv + k)), d, w.dv + k);
            }
            w.dq[at + c] += scale * hn::GetLane(hn::SumOfLanes(d, dq));
            w.ds[at + c] += hn::GetLane(hn::SumOfLanes(d, ds));
            if (general) w.ds1[at + c] += hn::GetLane(hn::SumOfLanes(d, ds1));
          }
          if (general) {
            if (grad.dv) store_row(w.dv, grad.dv.at(t0 + r, i * kBV), grad.dv.dtype, grad.dv.last, width);
          } else if (in.channel_beta) {
            // x = beta o (v + z)
            load_beta_row(p, in.beta, t0 + r, i * kBV, width, col.beta);
            for (std::int64_t k = 0; k < padded; ++k) {
              w.out[k] = beta_chain(p, col.beta[k], w.y[k] * (v[k] + w.z[r * kBV + k]));
              w.y[k] *= col.beta[k];
            }
            if (grad.dbeta) store_row(w.out, grad.dbeta.at(t0 + r, i * kBV), grad.dbeta.dtype, grad.dbeta.last, width);
            if (grad.dv) store_row(w.y, grad.dv.at(t0 + r, i * kBV), grad.dv.dtype, grad.dv.last, width);
          } else {
            store_value_row(in, grad, t0 + r, i * kBV, width, t.beta[r], w.y, w.scratch, w.scratch + kBV, &w.dbeta[r]);
          }
          std::fill(w.out, w.out + padded, 0.0F);
          for (std::int64_t c = 0; c < K; ++c) {
            const auto dc = hn::Set(d, decay_of(r, c)), nc = hn::Set(d, t.n[at + c]);
            auto dn = hn::Zero(d), dg = dn;
            for (std::int64_t k = 0; k < padded; k += lanes) {
              const auto yk = hn::LoadU(d, w.y + k), was = hn::LoadU(d, old + c * kBV + k);
              const auto g = hn::Mul(dc, hn::LoadU(d, col.gv + k)), decayed = hn::Mul(g, was);
              auto D1 = hn::LoadU(d, D + c * kBV + k);
              dn = hn::MulAdd(before ? was : decayed, yk, dn);
              if (!before) D1 = hn::MulAdd(nc, yk, D1);
              const auto gate = hn::Mul(D1, decayed);
              dg = hn::Add(dg, gate);
              hn::StoreU(hn::Add(gate, hn::LoadU(d, w.out + k)), d, w.out + k);
              D1 = hn::Mul(D1, g);
              if (before) D1 = hn::MulAdd(nc, yk, D1);
              hn::StoreU(D1, d, D + c * kBV + k);
            }
            w.dn[at + c] += hn::GetLane(hn::SumOfLanes(d, dn));
            w.dgate[at + c] += hn::GetLane(hn::SumOfLanes(d, dg));
          }
          if (grad.dgv && (t0 + r) % R == 0) {
            store_row(w.out, grad.dgv.at((t0 + r) / R, i * kBV), grad.dgv.dtype, grad.dgv.last, width);
          }
        }
      }
      GateSums gate_sums;
      if (gate_partial != nullptr) {
        gate_sums.dA_log = gate_partial + (n * p.HV + hv) * gate_sums_size(p);
        gate_sums.ddt_bias = gate_sums.dA_log + 1;
      }
      for (std::int64_t r = C - 1; r >= 0; --r) {
        const std::int64_t at = r * kp;
        accumulate_row(j == 0, w.dq + at, w.sums.dq + at, kp);
        w.dbeta[r] += (general ? add_group_row<DeltaKind::General>
                               : add_group_row<DeltaKind::Delta>)(p, grad, w.sums, j == 0, r, t0 + r, t.beta[r],
                                                                  t.k + at, t.p != nullptr ? t.p + at : nullptr,
                                                                  t.eb != nullptr ? t.eb + at : nullptr, w.dn + at,
                                                                  w.ds + at, w.ds1 + at, w.scratch);
        if (grad.dw && writes_per_value_head(p)) {
          store_row(w.sums.dw + at, grad.dw.at(t0 + r, 0), grad.dw.dtype, grad.dw.last, K);
        }
        if (grad.dbeta && !in.channel_beta) store_scalar(grad.dbeta, t0 + r, beta_chain(p, t.beta[r], w.dbeta[r]));
        if (gate_kind == KeyGate::None || (t0 + r) % R != 0) continue;
        const std::int64_t token = (t0 + r) / R;
        if (in.gate.g) store_head_gate(in, grad, gate_sums, token, t.hg[r], t.hy[r], sum_of_row(w.dgate + at, kp));
        if (gate_kind == KeyGate::Channel) {
          store_channel_gate(in, grad, gate_sums, K, token, t.g + at, t.y + at, w.dgate + at);
        }
      }
    }
    store_group_rows(p, DeltaGradients(p, n, h * group), w.sums, 0, t0, C, t.q, t.k, t.p, t.rq, t.rk, t.rp);
  }
  for (std::int64_t j = 0; j < group; ++j) {
    for (std::int64_t i = 0; i < panels; ++i) {
      store_panel(w.d + j * state_size + i * panel_size, state_rows(p.dh0, n, h * group + j), K, i * kBV, width_of(i),
                  col.tmp);
    }
  }
  hwy::FlushStream();
}

std::size_t delta_step_backward_bytes(const DeltaBackwardProblem& p) {
  Arena arena;
  DeltaStepBackwardTiles w;
  w.carve(arena, p);
  return arena.bytes();
}

std::size_t delta_step_sums_bytes(const DeltaBackwardProblem& p) {
  if (!p.dA_log && !p.ddt_bias) return 0;
  Arena arena;
  arena.take<double>(p.N * p.HV * gate_sums_size(p));
  return arena.bytes();
}

void delta_step_backward_all(const DeltaBackwardProblem& p, ThreadPool& pool, std::byte* workspace) {
  const std::size_t bytes = delta_step_backward_bytes(p), sums_bytes = delta_step_sums_bytes(p);
  double* sums = nullptr;
  if (sums_bytes != 0) {
    Arena arena(workspace);
    sums = arena.take<double>(p.N * p.HV * gate_sums_size(p));
    workspace += sums_bytes;
  }
  run_items(pool, p.N * p.H, delta_step_backward_slots(p, pool.size()), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    DeltaStepBackwardTiles w;
    w.carve(arena, p);
    const std::int64_t n = item / p.H, h = item % p.H;
    delta_step_backward_task(p, w, n, h, sums);
  });
  if (sums != nullptr) store_gate_sums(p, sums, gate_sums_size(p));
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(delta_step_bytes);
HWY_EXPORT(delta_step);
HWY_EXPORT(delta_step_backward_bytes);
HWY_EXPORT(delta_step_sums_bytes);
HWY_EXPORT(delta_step_backward_all);

std::size_t delta_step_forward_workspace(const DeltaProblem& p, int threads) {
  const std::int64_t split = delta_step_split(p, threads);
  return HWY_DYNAMIC_DISPATCH(delta_step_bytes)(p, (delta_step_panels(p) + split - 1) / split) *
         static_cast<std::size_t>(delta_step_slots(p, threads));
}

Status delta_step_forward(const DeltaProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (const char* why = delta_refusal(p)) return {Code::Unsupported, std::string("delta_step_forward: ") + why};
  if (p.h) return {Code::Unsupported, "delta_step_forward: states of every chunk need the chunk form"};
  if (p.N == 0 || p.HV == 0 || p.V == 0) return {};
  if (workspace.size() < delta_step_forward_workspace(p, pool.size())) {
    return {Code::OutOfMemory, "delta_step_forward: workspace too small"};
  }
  HWY_DYNAMIC_DISPATCH(delta_step)(p, pool, workspace.data());
  return {};
}

std::size_t delta_step_backward_workspace(const DeltaBackwardProblem& p, int threads) {
  if (!needs_step(p)) return delta_chunk_backward_workspace(p, threads);
  return HWY_DYNAMIC_DISPATCH(delta_step_sums_bytes)(p) +
         HWY_DYNAMIC_DISPATCH(delta_step_backward_bytes)(p) *
             static_cast<std::size_t>(delta_step_backward_slots(p, threads));
}

Status delta_step_backward(const DeltaBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (!needs_step(p)) return delta_chunk_backward(p, pool, workspace);
  if (const char* why = delta_refusal(p)) return {Code::Unsupported, std::string("delta_step_backward: ") + why};
  if (p.H == 0) return {};
  if (workspace.size() < delta_step_backward_workspace(p, pool.size())) {
    return {Code::OutOfMemory, "delta_step_backward: workspace too small"};
  }
  HWY_DYNAMIC_DISPATCH(delta_step_backward_all)(p, pool, workspace.data());
  return {};
}

}  // namespace fla::cpu
#endif
