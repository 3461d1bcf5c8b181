// Tiles of BT tokens in blocks of 16, one gate per key channel. Within a block of 16, L is the running sum of the gates
// and L_15 its last; the products that the tensor cores see are rounded to T after scaling:
//   q' = q 2^L    k' = k 2^(L_15 - L)    k'' = k 2^-L
//   P = tril(scale q' k''^T)    o^T = scale S^T q'^T + v^T P^T    S^T = 2^L_15 o S^T + v^T k'
// k'' is the one place with a positive exponent. A block where some channel decays so far, or some key is so large,
// that k'' leaves the range of T computes P from exponents of differences instead, one by one. Two barriers a tile:
// tiles arrived, scaled tiles complete. Each warp then walks the blocks alone.
#pragma once

#include "fla/ops/common/diag_cuda.cuh"

namespace fla::cuda {

template <int KP, int BT, int NW, int WM>
struct ChannelTiles {
  static constexpr int kThreads = 32 * NW, kValue = 16 * NW * WM, kBlocks = BT / 16;
  static constexpr int kLdK = KP + 8, kLdV = kValue + 8, kLdG = KP + 4;
  static constexpr int kQ = 0, kKey = kQ + BT * kLdK * 2, kV = kKey + BT * kLdK * 2, kG = kV + BT * kLdV * 2,
                       kStage = kG + BT * kLdG * 4;
  static constexpr int kUnits = kBlocks * KP / 2;  // pairs of channels of a block
  static constexpr int kScaledQ = 2 * kStage, kScaledK = kScaledQ + BT * kLdK * 2, kRaisedK = kScaledK + BT * kLdK * 2,
                       kSum = kRaisedK + BT * kLdK * 2, kDecay = kSum + kBlocks * KP * 4,
                       kBad = kDecay + kBlocks * KP * 4, kBytes = kBad + kUnits / 32 * 4;
};

// P of a block by differences: for each query, keys from the diagonal downwards.
template <typename T, int KP, int LDK, int LDG>
FLA_DEVICE void exact_products(const DiagParams& p, Shared<T> q, Shared<T> k, Shared<float> g, int first,
                               FragC (&P)[2]) {
  constexpr int kPairs = KP / 64;
  clear(P[0]);
  clear(P[1]);
  for (int i = 0; i < 16; ++i) {
    Vec<float, 2> sum[kPairs], query[kPairs];
    FLA_UNROLL
    for (int c = 0; c < kPairs; ++c) {
      const Vec<T, 2> w = q.template load_vec<2>((first + i) * LDK + 64 * c + 2 * lane_id());
      query[c] = {{to_f32(w.x[0]), to_f32(w.x[1])}};
      sum[c] = {{0.0F, 0.0F}};
    }
    for (int j = i; j >= 0; --j) {
      float dot = 0.0F;
      FLA_UNROLL
      for (int c = 0; c < kPairs; ++c) {
        const int at = 64 * c + 2 * lane_id();
        const Vec<T, 2> w = k.template load_vec<2>((first + j) * LDK + at);
        dot += query[c].x[0] * to_f32(w.x[0]) * exp2_approx(sum[c].x[0]);
        dot += query[c].x[1] * to_f32(w.x[1]) * exp2_approx(sum[c].x[1]);
        const Vec<float, 2> gate = gate_pair<LDG>(p, p.gk.type, g, first + j, at);
        sum[c].x[0] += gate.x[0];
        sum[c].x[1] += gate.x[1];
      }
      dot = warp_sum(dot);
      FLA_UNROLL
      for (int e = 0; e < 8; ++e) {
        if (frag_row(e % 4) == i && 8 * (e / 4) + frag_col(e % 4) == j) P[e / 4].x[e % 4] = dot;
      }
    }
  }
}

template <typename T, int KP, int BT, int NW, int WM, int BLOCKS>
FLA_KERNEL(32 * NW, BLOCKS)
diag_channel_kernel(const DiagParams p) {
  using Tiles = ChannelTiles<KP, BT, NW, WM>;
  constexpr int kLdK = Tiles::kLdK, kLdV = Tiles::kLdV, kLdG = Tiles::kLdG;
  const DiagTask a = diag_task(p, BT, Tiles::kValue);
  if (p.pass == DiagPass::Local && a.s == p.segments - 1) return;
  const bool want_o = p.pass != DiagPass::Local && p.o.present();
  const int row = 16 * WM * warp_id();  // of the block's value columns

  const Shared<T> scaled_q = shared<T>(Tiles::kScaledQ, BT * kLdK), scaled_k = shared<T>(Tiles::kScaledK, BT * kLdK),
                  raised_k = shared<T>(Tiles::kRaisedK, BT * kLdK);
  const Shared<float> sums = shared<float>(Tiles::kSum, Tiles::kBlocks * KP),
                      decays = shared<float>(Tiles::kDecay, Tiles::kBlocks * KP);
  const Shared<std::int32_t> bad = shared<std::int32_t>(Tiles::kBad, Tiles::kUnits / 32);
  const auto q_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kQ, BT * kLdK); };
  const auto k_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kKey, BT * kLdK); };
  const auto v_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kV, BT * kLdV); };
  const auto g_tile = [&](int stage) { return shared<float>(stage * Tiles::kStage + Tiles::kG, BT * kLdG); };
  const auto fetch = [&](std::int64_t t, int stage) {
    if (t < a.to) {
      if (want_o) load_tokens<BT, KP>(p, a, p.q.at, p.vector_qk, t, 0, 0, p.K, q_tile(stage), kLdK);
      load_tokens<BT, KP>(p, a, p.k.at, p.vector_qk, t, 0, 0, p.K, k_tile(stage), kLdK);
      load_gates<BT, KP, kLdG>(p, a, p.gk, t, 0, p.K, g_tile(stage));
      load_tokens<BT, Tiles::kValue>(p, a, p.v.at, p.vector_v, t, 0, a.v0,
                                     p.V - a.v0 < Tiles::kValue ? p.V - a.v0 : Tiles::kValue, v_tile(stage), kLdV);
    }
    cp_async_commit();
  };

  fetch(a.from, 0);
  FragC S[WM][KP / 8];
  load_warp_state<KP, WM>(p, a, a.v0 + row, S);
  float total[KP / Tiles::kThreads + 1] = {};  // of channels thread_id() + i kThreads

  int stage = 0;
  for (std::int64_t t = a.from; t < a.to; t += BT, stage ^= 1) {
    cp_async_wait<0>();
    sync_threads();
    fetch(t + BT, stage ^ 1);
    const Shared<T> q = q_tile(stage), k = k_tile(stage), v = v_tile(stage);
    const Shared<float> g = g_tile(stage);

    for (int u = thread_id(); u < Tiles::kUnits; u += Tiles::kThreads) {
      const int b = u / (KP / 2), c = u % (KP / 2) * 2;
      Vec<float, 2> L[16];
      FLA_UNROLL
      for (int i = 0; i < 16; ++i) {
        L[i] = gate_pair<kLdG>(p, p.gk.type, g, 16 * b + i, c);
        if (i > 0) {
          L[i].x[0] += L[i - 1].x[0];
          L[i].x[1] += L[i - 1].x[1];
        }
      }
      const Vec<float, 2> last = L[15], decay = {{exp2_approx(last.x[0]), exp2_approx(last.x[1])}};
      sums.store_vec<2>(b * KP + c, last);
      decays.store_vec<2>(b * KP + c, decay);
      bool in_range = last.x[0] >= RaisedRange<T>::kLeast && last.x[1] >= RaisedRange<T>::kLeast;
      const bool direct = !in_range;
      FLA_UNROLL
      for (int i = 0; i < 16; ++i) {
        const int at = (16 * b + i) * kLdK + c;
        const Vec<T, 2> kw = k.template load_vec<2>(at);
        Vec<T, 2> down, up;
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          const float key = to_f32(kw.x[e]);
          const float raised = direct ? 0.0F : key * exp2_approx(-L[i].x[e]);
          down.x[e] =
              from_f32<T>(p.update_scale * (direct ? key * exp2_approx(last.x[e] - L[i].x[e]) : raised * decay.x[e]));
          up.x[e] = from_f32<T>(raised);
          in_range = in_range && raised <= RaisedRange<T>::kMost && raised >= -RaisedRange<T>::kMost;
        }
        scaled_k.template store_vec<2>(at, down);
        if (!want_o) continue;
        raised_k.template store_vec<2>(at, up);
        const Vec<T, 2> qw = q.template load_vec<2>(at);
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) up.x[e] = from_f32<T>(to_f32(qw.x[e]) * exp2_approx(L[i].x[e]));
        scaled_q.template store_vec<2>(at, up);
      }
      const bool any = ballot(!in_range) != 0;
      if (lane_id() == 0) bad[u / 32] = any ? 1 : 0;
    }
    sync_threads();
    if (p.pass == DiagPass::Local) {
      FLA_UNROLL
      for (int i = 0; i < KP / Tiles::kThreads + 1; ++i) {
        const int c = thread_id() + i * Tiles::kThreads;
        if (c >= KP) break;
        for (int b = 0; b < Tiles::kBlocks; ++b) total[i] += sums.load(b * KP + c);
      }
    }

    for (int b = 0; b < Tiles::kBlocks && t + 16 * b < a.to; ++b) {
      FragA<T> values[WM];
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) load_a_trans(values[m], v + (16 * b * kLdV + row + 16 * m), kLdV);
      if (want_o) {
        FragC o[WM][2], P[2];
        clear(P[0]);
        clear(P[1]);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          clear(o[m][0]);
          clear(o[m][1]);
        }
        FLA_UNROLL
        for (int kk = 0; kk < KP / 16; ++kk) {
          FragA<T> x;
          load_a(x, scaled_q + (16 * b * kLdK + 16 * kk), kLdK);
          FragB<T> b0, b1;
          load_b(b0, b1, raised_k + (16 * b * kLdK + 16 * kk), kLdK);
          mma(P[0], x, b0);
          mma(P[1], x, b1);
          // The words of q' as A are those of q'^T as B.
          b0 = {{x.x[0], x.x[2]}};
          b1 = {{x.x[1], x.x[3]}};
          FLA_UNROLL
          for (int m = 0; m < WM; ++m) {
            const FragA<T> state = to_a<T>(S[m][2 * kk], S[m][2 * kk + 1]);
            mma(o[m][0], state, b0);
            mma(o[m][1], state, b1);
          }
        }
        bool exact = false;
        FLA_UNROLL
        for (int i = 0; i < KP / 64; ++i) exact = exact || bad.load(b * (KP / 64) + i) != 0;
        if (exact) exact_products<T, KP, kLdK, kLdG>(p, q, k, g, 16 * b, P);
        const float scale = p.scale * p.update_scale;
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          P[0].x[e] = frag_col(e) <= frag_row(e) ? P[0].x[e] * scale : 0.0F;
          P[1].x[e] = 8 + frag_col(e) <= frag_row(e) ? P[1].x[e] * scale : 0.0F;
        }
        FragB<T> b0, b1;
        to_b_transposed(b0, b1, P[0], P[1]);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          FLA_UNROLL
          for (int e = 0; e < 4; ++e) {
            o[m][0].x[e] *= p.scale;
            o[m][1].x[e] *= p.scale;
          }
          mma(o[m][0], values[m], b0);
          mma(o[m][1], values[m], b1);
          store_output<T>(p, a, t + 16 * b, a.v0 + row + 16 * m, o[m][0]);
          store_output<T>(p, a, t + 16 * b + 8, a.v0 + row + 16 * m, o[m][1]);
        }
      }
      FLA_UNROLL
      for (int n = 0; n < KP / 16; ++n) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, scaled_k + (16 * b * kLdK + 16 * n), kLdK);
        const Vec<float, 2> d0 = decays.load_vec<2>(b * KP + 16 * n + frag_col(0)),
                            d1 = decays.load_vec<2>(b * KP + 16 * n + 8 + frag_col(0));
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          FLA_UNROLL
          for (int e = 0; e < 4; ++e) {
            S[m][2 * n].x[e] *= d0.x[e & 1];
            S[m][2 * n + 1].x[e] *= d1.x[e & 1];
          }
          mma(S[m][2 * n], values[m], b0);
          mma(S[m][2 * n + 1], values[m], b1);
        }
      }
    }
  }

  if (keeps_state(p, a)) store_warp_state<KP, WM>(p, a, a.v0 + row, S);
  if (p.pass == DiagPass::Local && a.v0 == 0) {
    FLA_UNROLL
    for (int i = 0; i < KP / Tiles::kThreads + 1; ++i) {
      const int c = thread_id() + i * Tiles::kThreads;
      if (c < p.K) p.total[((a.n * p.H + a.h) * p.segments + a.s) * p.K + c] = total[i];
    }
  }
}

template <typename T, int KP, int BT, int NW, int WM, int BLOCKS>
Status launch_channel(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  using Tiles = ChannelTiles<KP, BT, NW, WM>;
  return launch<diag_channel_kernel<T, KP, BT, NW, WM, BLOCKS>>({.name = plan.name(),
                                                                 .grid = {p.N * p.H * p.segments * p.v_blocks},
                                                                 .threads = Tiles::kThreads,
                                                                 .shared_bytes = Tiles::kBytes},
                                                                stream, p);
}

template <typename T>
Status launch_diag_channel(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  switch (plan.key) {
    case 64:
      if (plan.value == 32) return launch_channel<T, 64, 32, 2, 1, 4>(p, plan, stream);
      return launch_channel<T, 64, 32, 4, 1, 3>(p, plan, stream);
    case 128:
      if (plan.value == 64) return launch_channel<T, 128, 32, 4, 1, 2>(p, plan, stream);
      if (plan.warps == 4) return launch_channel<T, 128, 32, 4, 2, 1>(p, plan, stream);
      return launch_channel<T, 128, 32, 8, 1, 1>(p, plan, stream);
    default: return launch_channel<T, 256, 16, 4, 1, 2>(p, plan, stream);
  }
}

}  // namespace fla::cuda
