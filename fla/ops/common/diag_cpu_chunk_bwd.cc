// Chunkwise backward of the diagonal-decay recurrence; linear_common.md, "Chunk of C tokens, key gate".
//   dA = lower(dO v^T)   dv = A^T dO + (k o e^{G_C - G}) D     D_prev = e^{G_C} o D + scale (q o e^G)^T dO
//   dq_i = scale e^{G_i} o (S_0 do_i) + scale sum_{j<=i} dA_ij e^{G_i - G_j} o k_j
//   dk_j = e^{G_C - G_j} o (D v_j)    + scale sum_{i>=j} dA_ij e^{G_i - G_j} o q_i
// task     one sequence and a few neighbouring heads: pass A keeps the state at every chunk's start, pass B walks the
// chunks backwards layout   sums over V leave dq, dk key-major ([K, C]): then S and D are used as they lie and only [C,
// V] tiles are
//          transposed
// gates    dg_t is the sum over all pairs (source before t, use at or after t). The diagonal pairs (i, i) and the
//          sources at or after t are left out of the sums from the start: with strong gates dg is far smaller than
//          they are, and their difference would be rounding noise
#include <algorithm>
#include <cstdint>

#include "fla/kernels/cpu/targets.h"
#include "fla/ops/common/diag_cpu.h"
#include "fla/ops/common/diag_cpu_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/ops/common/diag_cpu_chunk_bwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/ops/common/diag_cpu_chunk-inl.h"

#ifndef FLA_OPS_COMMON_DIAG_CPU_CHUNK_BWD_CC_ONCE
#define FLA_OPS_COMMON_DIAG_CPU_CHUNK_BWD_CC_ONCE
namespace fla::cpu {

inline constexpr std::int64_t kBackwardGroup = 8;

struct BackwardPlan {
  std::int64_t BT = 0, panels = 0, chunks = 0, group = 0, groups = 0, slots = 0;
};

// A state is kept per chunk, so short chunks cost memory and long ones work: 32 tokens keep it below the inputs up to
// 256 channels (2 KB a token against 2.3 KB of bf16 at 128), 64 beyond.
inline BackwardPlan backward_plan(const DiagProblem& p, std::int64_t chunk, int threads) {
  BackwardPlan b;
  b.BT = chunk > 32 || std::max(p.K, p.V) > 256 ? 64 : 32;
  b.panels = pad_up(p.V, kBV) / kBV;
  b.chunks = std::max<std::int64_t>(1, (longest_sequence(p) + b.BT - 1) / b.BT);
  b.group = head_group(p, b.panels, threads, kBackwardGroup);
  b.groups = (p.H + b.group - 1) / b.group;
  // Every slot has room for the longest sequence; in a batch of uneven ones all threads together may not need more than
  // one state per chunk that exists.
  std::int64_t existing = 0;
  for (std::int64_t n = 0; n < p.N; ++n) existing += (p.sequence(n).length + b.BT - 1) / b.BT;
  const std::int64_t affordable = existing * b.groups / b.chunks;
  b.slots = std::max<std::int64_t>(1, std::min({static_cast<std::int64_t>(threads), p.N * b.groups, affordable}));
  return b;
}

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct BackwardTiles {
  ChunkTiles chunk;
  float* states = nullptr;  // [group][chunks][panels][pad_up(K), kBV]
  float* d = nullptr;       // [group][panels][pad_up(K), kBV] D
  float* v = nullptr;       // [BT, ldv]
  float* do_ = nullptr;     // [BT, ldv]
  float* vt = nullptr;      // [ldv, lt]
  float* dot = nullptr;     // [ldv, lt]
  float* da = nullptr;      // [BT, lt] dA strictly below the diagonal, times e^{G_i - G_j} for a head gate
  float* dat = nullptr;     // its transpose
  float* sdo = nullptr;     // [pad_up(K), lt] S_0 do_i
  float* dvt = nullptr;     // [pad_up(K), lt] D v_j
  float* dqt = nullptr;     // [pad_up(K), lt] dq_i / (scale e^{G_i - anchor}) without the diagonal
  float* ut = nullptr;      // [pad_up(K), lt] dk_j / e^{anchor - G_j} without the diagonal and D
  float* dq = nullptr;      // [BT, kp] the same, token-major
  float* u = nullptr;       // [BT, kp]
  float* dv_k = nullptr;    // [BT, kp] D v_j
  float* out = nullptr;     // [BT, kBV]
  float* gates = nullptr;   // [BT, kp] sum_{j<t} k_j tau_j, then dgk
  float* row = nullptr;     // [4, kp]
  float* delta = nullptr;   // [BT] <do_i, v_i>
  float* tmp = nullptr;     // [kPad + 4, kp]

  void carve(Arena& arena, const BackwardPlan& b, std::int64_t K, KeyGate gate) {
    const std::int64_t kp = pad_up(K), lt = token_ld(b.BT), ldv = b.panels * kBV, rows = token_rows_padded(b.BT);
    chunk.carve(arena, b.BT, K, gate, true);
    states = arena.floats(b.group * b.chunks * b.panels * kp * kBV);
    d = arena.floats(b.group * b.panels * kp * kBV);
    v = arena.floats(rows * ldv);
    do_ = arena.floats(rows * ldv);
    vt = arena.floats(ldv * lt);
    dot = arena.floats(ldv * lt);
    da = arena.floats(rows * lt);
    dat = arena.floats(lt * lt);
    sdo = arena.floats(kp * lt);
    dvt = arena.floats(kp * lt);
    dqt = arena.floats(kp * lt);
    ut = arena.floats(kp * lt);
    dq = arena.floats(lt * kp);  // transposed from tiles of lt columns
    u = arena.floats(lt * kp);
    dv_k = arena.floats(lt * kp);
    out = arena.floats(b.BT * kBV);
    gates = arena.floats(b.BT * kp);
    row = arena.floats(4 * kp);
    delta = arena.floats(b.BT);
    tmp = arena.floats((kPad + 4) * kp);
  }
};

HWY_INLINE float sum_row(const float* x, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto s = hn::Zero(d);
  for (std::int64_t c = 0; c < n; c += lanes) s = hn::Add(s, hn::LoadU(d, x + c));
  return hn::GetLane(hn::SumOfLanes(d, s));
}

struct BackwardHead {
  Rows q, k, v, do_, dq, dk, dv, dg;
  ChunkGate gate;
  float* states = nullptr;  // [chunks][panels][pad_up(K), kBV]
  float* d = nullptr;       // [panels][pad_up(K), kBV]
};

// Pass A: the state at the start of chunk c + 1 from that of chunk c.
template <KeyGate kGate>
HWY_NOINLINE void backward_advance(const DiagProblem& p, const BackwardPlan& b, BackwardTiles& w, const BackwardHead& x,
                                   std::int64_t c, Prefetcher& ahead) {
  const std::int64_t K = p.K, V = p.V, kp = pad_up(K), lt = token_ld(b.BT), ldv = b.panels * kBV, BT = b.BT;
  const std::int64_t panel_size = kp * kBV, state_size = b.panels * panel_size;
  const float scale = static_cast<float>(p.scale);
  ChunkTiles& t = w.chunk;
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, V - i * kBV); };
  load_rows(x.k, c * BT, BT, 0, K, t.k, kp);
  load_rows(x.v, c * BT, BT, 0, V, w.v, ldv);
  prepare_chunk<kGate>(t, BT, K, x.gate, c * BT, BT, scale, false, [](std::int64_t, std::int64_t, bool) {});
  for (std::int64_t i = 0; i < b.panels; ++i) {
    const float* state = x.states + c * state_size + i * panel_size;
    gemm<false>(K, pad_up(width_of(i)), {t.kt, lt, w.v + i * kBV, ldv, BT}, {}, Tri::None,
                {state, kBV, kGate == KeyGate::None ? nullptr : t.decay},
                x.states + (c + 1) * state_size + i * panel_size, kBV, -1, &ahead);
  }
}

// Pass B: chunk [t0, t0 + C) of one head, with the state that enters it; D is carried to the chunk before.
template <KeyGate kGate>
HWY_NOINLINE void backward_chunk(const DiagProblem& p, const BackwardPlan& b, BackwardTiles& w, const BackwardHead& x,
                                 std::int64_t t0, std::int64_t C, const float* states, Prefetcher& ahead) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K, V = p.V, kp = pad_up(K), lt = token_ld(b.BT), ldv = b.panels * kBV, BT = b.BT;
  const std::int64_t panel_size = kp * kBV;
  const float scale = static_cast<float>(p.scale);
  const bool want_dg = static_cast<bool>(x.dg), want_dq = x.dq || want_dg, want_dk = x.dk || want_dg;
  ChunkTiles& t = w.chunk;
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, V - i * kBV); };
  load_rows(x.q, t0, C, 0, K, t.q, kp);
  load_rows(x.k, t0, C, 0, K, t.k, kp);
  load_rows(x.v, t0, C, 0, V, w.v, ldv);
  if (x.do_) {
    load_rows(x.do_, t0, C, 0, V, w.do_, ldv);
  } else {
    std::fill(w.do_, w.do_ + C * ldv, 0.0F);
  }
  transpose(w.v, ldv, C, V, w.vt, lt);
  if (want_dq) transpose(w.do_, ldv, C, V, w.dot, lt);

  if (want_dq || want_dk) {
    gemm<false>(C, C, {w.do_, ldv, w.vt, lt, V}, {}, Tri::None, {}, w.da, lt, 0);
    for (std::int64_t i = 0; i < C; ++i) {
      w.delta[i] = w.da[i * lt + i];
      std::fill(w.da + i * lt + i, w.da + (i + 1) * lt, 0.0F);
    }
  }
  float* rowsum = w.row;  // rowsum_v(S_0 o D)
  std::fill(rowsum, rowsum + kp, 0.0F);
  for (std::int64_t i = 0; i < b.panels; ++i) {
    const float* state = states + i * panel_size;
    const float* D = x.d + i * panel_size;
    const std::int64_t width = width_of(i);
    const Start more_q{i == 0 ? nullptr : w.sdo, lt, nullptr}, more_k{i == 0 ? nullptr : w.dvt, lt, nullptr};
    if (want_dq) gemm<false>(K, C, {state, kBV, w.dot + i * kBV * lt, lt, width}, {}, Tri::None, more_q, w.sdo, lt);
    if (want_dk) gemm<false>(K, C, {D, kBV, w.vt + i * kBV * lt, lt, width}, {}, Tri::None, more_k, w.dvt, lt);
    if (want_dg) {
      for (std::int64_t c = 0; c < K; ++c) {
        auto sum = hn::Zero(d);
        for (std::int64_t j = 0; j < width; j += lanes) {
          sum = hn::MulAdd(hn::LoadU(d, state + c * kBV + j), hn::LoadU(d, D + c * kBV + j), sum);
        }
        rowsum[c] += hn::GetLane(hn::SumOfLanes(d, sum));
      }
    }
  }

  prepare_chunk<kGate>(
      t, BT, K, x.gate, t0, C, scale, true, [&](std::int64_t first, std::int64_t last, bool entry) HWY_ATTR {
        if (!want_dq && !want_dk) return;
        if constexpr (kGate == KeyGate::Head) {
          for (std::int64_t i = 0; i < C; ++i) {
            for (std::int64_t j = 0; j < i; j += lanes) {
              hn::StoreU(hn::Mul(hn::LoadU(d, t.mask + i * lt + j), hn::LoadU(d, w.da + i * lt + j)), d,
                         w.da + i * lt + j);
            }
          }
          for (std::int64_t c = 0; want_dq && c < K; ++c) {
            for (std::int64_t j = 0; j < C; j += lanes) {
              hn::StoreU(hn::Mul(hn::LoadU(d, t.eg + j), hn::LoadU(d, w.sdo + c * lt + j)), d, w.sdo + c * lt + j);
            }
          }
        }
        if (!want_dq) return;
        transpose(w.da + first * lt, lt, last - first, last, w.dat + first, lt);
        gemm<false>(K, last - first, {t.kt, lt, w.dat + first, lt, last}, {}, Tri::None,
                    {w.sdo + first, lt, entry ? nullptr : t.ep}, w.dqt + first, lt);
      });
  for (std::int64_t i = 0; i < C; ++i) std::fill(t.a + i * lt + i + 1, t.a + (i + 1) * lt, 0.0F);

  if (want_dk) {
    for (std::int64_t g = t.segments - 1; g >= 0; --g) {
      const std::int64_t first = t.segment[g], last = t.segment[g + 1];
      const bool newest = g == t.segments - 1;
      gemm<true>(K, last, {t.qa + first * kp, kp, w.da + first * lt, lt, last - first}, {}, Tri::None,
                 {newest ? nullptr : w.ut, lt, newest ? nullptr : t.jump + last * kp}, w.ut, lt);
    }
  }
  for (std::int64_t i = 0; i < b.panels; ++i) {
    float* D = x.d + i * panel_size;
    const std::int64_t width = width_of(i);
    if (x.dv) {
      gemm<true>(C, width, {t.kt, lt, D, kBV, K}, {t.a, lt, w.do_ + i * kBV, ldv, C}, Tri::Upper, {}, w.out, kBV);
      store_rows(w.out, kBV, x.dv, t0, C, i * kBV, width);
    }
    gemm<true>(K, pad_up(width), {t.qe, kp, w.do_ + i * kBV, ldv, C}, {}, Tri::None,
               {D, kBV, kGate == KeyGate::None ? nullptr : t.decay}, D, kBV, -1, &ahead);
  }
  if (!want_dq && !want_dk) return;

  if (want_dq) transpose(w.dqt, lt, K, C, w.dq, kp);
  if (want_dk) transpose(w.ut, lt, K, C, w.u, kp);
  if (want_dk) transpose(w.dvt, lt, K, C, w.dv_k, kp);
  // Token by token: finish dq and dk in place, keep what the gate needs. Before the loop body of row i:
  //   carry = sum_{j>i} (q_j dq'_j - k_j dk'_j),  move = e^{G_C - anchor of i's segment}
  // The sum over earlier sources needs the other direction first.
  float* move = w.row + kp;
  float* carry = w.row + 2 * kp;
  float* prefix = w.row + 3 * kp;
  const auto vscale = hn::Set(d, scale);
  std::fill(carry, carry + kp, 0.0F);
  if (kGate == KeyGate::Channel && C > 0) {
    // e^{G_C - anchor} of the last segment is e of the last row.
    std::copy(t.e + (C - 1) * kp, t.e + C * kp, move);
  }
  std::int64_t seg = t.segments - 1;
  for (std::int64_t i = C - 1; i >= 0; --i) {
    if (kGate == KeyGate::Channel && i < t.segment[seg]) {
      const float* jump = t.jump + t.segment[seg] * kp;
      for (std::int64_t c = 0; c < kp; c += lanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, jump + c), hn::LoadU(d, move + c)), d, move + c);
      }
      --seg;
    }
    const float* qi = t.q + i * kp;
    const float* ki = t.k + i * kp;
    float* dqi = w.dq + i * kp;
    float* ui = w.u + i * kp;
    float* dvi = w.dv_k + i * kp;
    const auto diag = hn::Set(d, scale * w.delta[i]);
    auto used = hn::Zero(d), made = hn::Zero(d);
    for (std::int64_t c = 0; c < K; c += lanes) {
      const auto qv = hn::LoadU(d, qi + c), kv = hn::LoadU(d, ki + c);
      auto gq = want_dq ? hn::Mul(vscale, hn::LoadU(d, dqi + c)) : hn::Zero(d);
      auto gk = want_dk ? hn::LoadU(d, ui + c) : hn::Zero(d);
      auto tau = want_dk ? hn::LoadU(d, dvi + c) : hn::Zero(d);
      if constexpr (kGate == KeyGate::Channel) {
        const auto e = hn::LoadU(d, t.e + i * kp + c);
        gq = hn::Mul(gq, e);
        gk = hn::Div(gk, e);
        tau = hn::Mul(tau, hn::Div(hn::LoadU(d, move + c), e));
      }
      if constexpr (kGate == KeyGate::Head) tau = hn::Mul(tau, hn::Set(d, t.ec[i]));
      if (want_dq) hn::StoreU(hn::MulAdd(diag, kv, gq), d, dqi + c);
      if (want_dk) hn::StoreU(hn::MulAdd(diag, qv, hn::Add(gk, tau)), d, ui + c);
      if (want_dg) {
        const auto net = hn::Sub(hn::Mul(qv, gq), hn::Mul(kv, gk));
        const auto y = hn::Mul(kv, tau);
        if constexpr (kGate == KeyGate::Channel) {
          const auto sum = hn::Add(hn::LoadU(d, carry + c), net);
          hn::StoreU(sum, d, carry + c);
          hn::StoreU(sum, d, w.gates + i * kp + c);
          hn::StoreU(y, d, dvi + c);
        } else {
          used = hn::Add(used, net);
          made = hn::Add(made, y);
        }
      }
    }
    if (want_dg && kGate == KeyGate::Head) {
      carry[0] += hn::GetLane(hn::SumOfLanes(d, used));
      w.gates[i * kp] = carry[0];
      dvi[0] = hn::GetLane(hn::SumOfLanes(d, made));
    }
  }
  if (x.dq) store_rows(w.dq, kp, x.dq, t0, C, 0, K);
  if (x.dk) store_rows(w.u, kp, x.dk, t0, C, 0, K);
  if (want_dg && kGate == KeyGate::Channel) {
    for (std::int64_t c = 0; c < K; c += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, t.decay + c), hn::LoadU(d, rowsum + c)), d, prefix + c);
    }
    for (std::int64_t i = 0; i < C; ++i) {
      for (std::int64_t c = 0; c < K; c += lanes) {
        const auto before = hn::LoadU(d, prefix + c);
        hn::StoreU(hn::Add(before, hn::LoadU(d, w.gates + i * kp + c)), d, w.gates + i * kp + c);
        hn::StoreU(hn::Add(before, hn::LoadU(d, w.dv_k + i * kp + c)), d, prefix + c);
      }
    }
    store_rows(w.gates, kp, x.dg, t0, C, 0, K);
  }
  if (want_dg && kGate == KeyGate::Head) {
    float before = t.decay[0] * sum_row(rowsum, kp);
    for (std::int64_t i = 0; i < C; ++i) {
      const float sum = w.gates[i * kp] + before;
      store_row(&sum, x.dg.at(t0 + i, 0), x.dg.dtype, 1, 1);
      before += w.dv_k[i * kp];
    }
  }
}

template <KeyGate kGate>
HWY_NOINLINE void backward_task(const DiagProblem& p, const BackwardPlan& b, BackwardTiles& w, std::int64_t n,
                                std::int64_t h_begin, std::int64_t heads) {
  const std::int64_t K = p.K, V = p.V, kp = pad_up(K), lt = token_ld(b.BT), BT = b.BT;
  const std::int64_t panel_size = kp * kBV, state_size = b.panels * panel_size;
  const DiagProblem::Span s = p.sequence(n);
  const std::int64_t chunks = (s.length + BT - 1) / BT;
  const TensorView& dgate = kGate == KeyGate::Channel ? p.dgk : p.dg;
  const bool want_dg = kGate != KeyGate::None && dgate, want_states = p.dq || want_dg;
  const auto width_of = [&](std::int64_t i) { return std::min(kBV, V - i * kBV); };

  BackwardHead head[kBackwardGroup];
  for (std::int64_t j = 0; j < heads; ++j) {
    const std::int64_t h = h_begin + j;
    BackwardHead& x = head[j];
    x.q = token_rows(p.q, p, s, h);
    x.k = token_rows(p.k, p, s, h);
    x.v = token_rows(p.v, p, s, h);
    x.do_ = token_rows(p.do_, p, s, h);
    x.dq = token_rows(p.dq, p, s, h);
    x.dk = token_rows(p.dk, p, s, h);
    x.dv = token_rows(p.dv, p, s, h);
    if (want_dg) x.dg = token_rows(dgate, p, s, h);
    if (kGate == KeyGate::Channel) x.gate.rows = token_rows(p.gk, p, s, h);
    if (kGate == KeyGate::Head) x.gate = {token_rows(p.g, p, s, h), p.g ? 0.0 : p.head.at(h)};
    x.states = w.states + j * b.chunks * state_size;
    x.d = w.d + j * state_size;
    const Rows h0 = state_rows(p.h0, n, h), dht = state_rows(p.dht, n, h);
    for (std::int64_t i = 0; i < b.panels; ++i) {
      load_panel(dht, K, i * kBV, width_of(i), x.d + i * panel_size, w.tmp);
      if (chunks > 0 && want_states) load_panel(h0, K, i * kBV, width_of(i), x.states + i * panel_size, w.tmp);
    }
  }
  // Padding channels take part in whole-vector arithmetic and must be finite; nothing below writes them.
  for (float* x : {w.dqt, w.ut, w.dvt}) std::fill(x + K * lt, x + kp * lt, 0.0F);
  for (float* x : {w.dq, w.u, w.dv_k}) std::fill(x, x + lt * kp, 0.0F);

  Prefetcher ahead;
  const auto fetch = [&](const TensorView& x, const Rows& rows, std::int64_t t0, std::int64_t width) {
    const std::int64_t bytes = heads * width * static_cast<std::int64_t>(size_of(x.dtype));
    if (rows && x.stride[2] == width && bytes >= kPrefetchBytes) {
      ahead.add(rows, t0, std::min(BT, s.length - t0), 0, heads * width);
    }
  };
  for (std::int64_t c = 0; want_states && c + 1 < chunks; ++c) {
    const std::int64_t next = (c + 1) * BT;
    ahead.clear();
    fetch(p.k, head[0].k, next, K);
    fetch(p.v, head[0].v, next, V);
    if (kGate == KeyGate::Channel) fetch(p.gk, head[0].gate.rows, next, K);
    ahead.spread(heads * b.panels * (K / kMR + 1));
    for (std::int64_t j = 0; j < heads; ++j) backward_advance<kGate>(p, b, w, head[j], c, ahead);
  }
  for (std::int64_t c = chunks - 1; c >= 0; --c) {
    const std::int64_t t0 = c * BT, C = std::min(BT, s.length - t0), next = t0 - BT;
    ahead.clear();
    if (next >= 0) {
      fetch(p.q, head[0].q, next, K);
      fetch(p.k, head[0].k, next, K);
      fetch(p.v, head[0].v, next, V);
      fetch(p.do_, head[0].do_, next, V);
      if (kGate == KeyGate::Channel) fetch(p.gk, head[0].gate.rows, next, K);
    }
    ahead.spread(heads * b.panels * (K / kMR + 1));
    for (std::int64_t j = 0; j < heads; ++j) {
      backward_chunk<kGate>(p, b, w, head[j], t0, C, head[j].states + c * state_size, ahead);
    }
  }
  for (std::int64_t j = 0; j < heads; ++j) {
    for (std::int64_t i = 0; i < b.panels; ++i) {
      store_panel(head[j].d + i * panel_size, state_rows(p.dh0, n, h_begin + j), K, i * kBV, width_of(i), w.tmp);
    }
  }
}

std::size_t backward_bytes(const DiagProblem& p, const BackwardPlan& b) {
  Arena arena;
  BackwardTiles w;
  w.carve(arena, b, p.K, key_gate(p));
  return arena.bytes();
}

void backward(const DiagProblem& p, const BackwardPlan& b, ThreadPool& pool, std::byte* workspace) {
  const KeyGate gate = key_gate(p);
  const std::size_t bytes = backward_bytes(p, b);
  run_items(pool, p.N * b.groups, b.slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    BackwardTiles w;
    w.carve(arena, b, p.K, gate);
    const std::int64_t n = item / b.groups, h = item % b.groups * b.group, heads = std::min(b.group, p.H - h);
    switch (gate) {
      case KeyGate::None: return backward_task<KeyGate::None>(p, b, w, n, h, heads);
      case KeyGate::Head: return backward_task<KeyGate::Head>(p, b, w, n, h, heads);
      case KeyGate::Channel: return backward_task<KeyGate::Channel>(p, b, w, n, h, heads);
    }
  });
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(backward_bytes);
HWY_EXPORT(backward);

std::size_t diag_chunk_backward_workspace(const DiagProblem& p, std::int64_t chunk, int threads) {
  const BackwardPlan b = backward_plan(p, chunk, threads);
  return HWY_DYNAMIC_DISPATCH(backward_bytes)(p, b) * static_cast<std::size_t>(b.slots);
}

Status diag_chunk_backward(const DiagProblem& p, std::int64_t chunk, ThreadPool& pool, std::span<std::byte> workspace) {
  if (p.gv) return {Code::Unsupported, "diag_chunk_backward: gv needs the step form"};
  if (p.N == 0 || p.H == 0) return {};
  if (workspace.size() < diag_chunk_backward_workspace(p, chunk, pool.size())) {
    return {Code::OutOfMemory, "diag_chunk_backward: workspace too small"};
  }
  HWY_DYNAMIC_DISPATCH(backward)(p, backward_plan(p, chunk, pool.size()), pool, workspace.data());
  return {};
}

}  // namespace fla::cpu
#endif
