// Chunks of BT tokens with one gate per head and token:
//   P = tril(scale q k^T o 2^(G_i - G_j))    o^T = scale 2^G_i S^T q^T + v^T P^T    S^T = 2^G_C S^T + (2^(G_C - G) v)^T
//   k
// Two barriers a chunk: tiles arrived, P complete. P's 16 x 16 blocks on and below the diagonal are dealt out to the
// warps; in all else a warp is alone with its value rows.
#pragma once

#include "fla/ops/common/diag_cuda.cuh"

namespace fla::cuda {

template <int KP, int BT, int NW, int WM>
struct HeadTiles {
  static constexpr int kThreads = 32 * NW, kValue = 16 * NW * WM;
  static constexpr int kLdK = KP + 8, kLdV = kValue + 8, kLdP = BT + 8;
  static constexpr int kQ = 0, kKey = kQ + BT * kLdK * 2, kV = kKey + BT * kLdK * 2, kStage = kV + BT * kLdV * 2;
  static constexpr int kP = 2 * kStage, kG = kP + BT * kLdP * 2, kBytes = kG + NW * BT * 4;
};

template <typename T, int KP, int BT, int NW, int WM, int BLOCKS>
FLA_KERNEL(32 * NW, BLOCKS)
diag_head_kernel(const DiagParams p) {
  static_assert(BT == 32 || BT == 64);
  using Tiles = HeadTiles<KP, BT, NW, WM>;
  constexpr int kLdK = Tiles::kLdK, kLdV = Tiles::kLdV, kLdP = Tiles::kLdP;
  const DiagTask a = diag_task(p, BT, Tiles::kValue);
  if (p.pass == DiagPass::Local && a.s == p.segments - 1) return;
  const bool want_o = p.pass != DiagPass::Local && p.o.present();
  const int lane = lane_id(), warp = warp_id();
  const int row = 16 * WM * warp;  // of the block's value columns

  const Shared<T> prod = shared<T>(Tiles::kP, BT * kLdP);
  const Shared<float> G = shared<float>(Tiles::kG + warp * BT * 4, BT);
  const auto q_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kQ, BT * kLdK); };
  const auto k_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kKey, BT * kLdK); };
  const auto v_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kV, BT * kLdV); };

  const float constant = head_gate(p, a.h);
  const auto gate = [&](std::int64_t t) {
    t -= p.shift ? 1 : 0;
    if (t < 0 || t >= a.to - (p.shift ? 1 : 0)) return 0.0F;
    if (!p.g.present()) return constant;
    const auto& s = p.g.at.stride;
    return base2_gate(load_any(p.g.at.data, p.g.type, a.row * s[0] + a.token(p, t) * s[1] + a.h * s[2]));
  };
  const auto fetch = [&](std::int64_t t, int stage) {
    if (t < a.to) {
      if (want_o) load_tokens<BT, KP>(p, a, p.q.at, p.vector_qk, t, 0, 0, p.K, q_tile(stage), kLdK);
      load_tokens<BT, KP>(p, a, p.k.at, p.vector_qk, t, 0, 0, p.K, k_tile(stage), kLdK);
      load_tokens<BT, Tiles::kValue>(p, a, p.v.at, p.vector_v, t, 0, a.v0,
                                     p.V - a.v0 < Tiles::kValue ? p.V - a.v0 : Tiles::kValue, v_tile(stage), kLdV);
    }
    cp_async_commit();
  };

  fetch(a.from, 0);
  constexpr int kGates = BT / 32;
  float next[kGates];
  FLA_UNROLL
  for (int i = 0; i < kGates; ++i) next[i] = gate(a.from + 32 * i + lane);
  FragC S[WM][KP / 8];
  load_warp_state<KP, WM>(p, a, a.v0 + row, S);
  if (a.s == 0) keep_at_boundary<KP, WM>(p, a, 0, row, S);
  float total = 0.0F;

  int stage = 0;
  for (std::int64_t t = a.from; t < a.to; t += BT, stage ^= 1) {
    cp_async_wait<0>();
    sync_threads();
    fetch(t + BT, stage ^ 1);
    float sum = 0.0F;
    FLA_UNROLL
    for (int i = 0; i < kGates; ++i) {
      const float x = warp_prefix_sum(next[i]) + sum;
      G[32 * i + lane] = x;
      sum = shuffle(x, 31);
      next[i] = gate(t + BT + 32 * i + lane);
    }
    total += sum;
    sync_warp();
    const Shared<T> q = q_tile(stage), k = k_tile(stage), v = v_tile(stage);
    sum_at_boundary<KP, WM>(p, a, t, row, S);

    if (want_o) {
      // A warp's blocks advance together, so that their chains of products hide each other's latency.
      constexpr int kBlocks = BT / 16 * (BT / 16 + 1) / 2, kRounds = (kBlocks + NW - 1) / NW;
      int bi[kRounds], bj[kRounds];
      FragC c[kRounds][2];
      FLA_UNROLL
      for (int r = 0; r < kRounds; ++r) {
        const int u = warp + r * NW < kBlocks ? warp + r * NW : kBlocks - 1;
        bi[r] = u >= 6 ? 3 : u >= 3 ? 2 : u >= 1 ? 1 : 0;
        bj[r] = u - bi[r] * (bi[r] + 1) / 2;
        clear(c[r][0]);
        clear(c[r][1]);
      }
      FLA_UNROLL
      for (int kk = 0; kk < KP; kk += 16) {
        FLA_UNROLL
        for (int r = 0; r < kRounds; ++r) {
          FragA<T> x;
          FragB<T> b0, b1;
          load_a(x, q + (16 * bi[r] * kLdK + kk), kLdK);
          load_b(b0, b1, k + (16 * bj[r] * kLdK + kk), kLdK);
          mma(c[r][0], x, b0);
          mma(c[r][1], x, b1);
        }
      }
      FLA_UNROLL
      for (int r = 0; r < kRounds; ++r) {
        if (warp + r * NW >= kBlocks) break;
        FLA_UNROLL
        for (int half = 0; half < 2; ++half) {
          FLA_UNROLL
          for (int e = 0; e < 4; ++e) {
            const int i = 16 * bi[r] + frag_row(e), j = 16 * bj[r] + 8 * half + frag_col(e);
            const float gi = G[i], gj = G[j];
            float& x = c[r][half].x[e];
            x = j <= i ? x * (p.scale * p.update_scale) * exp2_approx(gi - gj) : 0.0F;
          }
          store_c<T>(prod + (16 * bi[r] * kLdP + 16 * bj[r] + 8 * half), kLdP, c[r][half]);
        }
      }
      sync_threads();
    }

    FragA<T> values[WM][BT / 16];
    FLA_UNROLL
    for (int m = 0; m < WM; ++m) {
      FLA_UNROLL
      for (int c = 0; c < BT / 16; ++c) load_a_trans(values[m][c], v + (16 * c * kLdV + row + 16 * m), kLdV);
    }
    if (want_o) {
      FragC o[WM][BT / 8];
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        FLA_UNROLL
        for (int n = 0; n < BT / 8; ++n) clear(o[m][n]);
      }
      FLA_UNROLL
      for (int kk = 0; kk < KP / 16; ++kk) {
        FragA<T> state[WM];
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) state[m] = to_a<T>(S[m][2 * kk], S[m][2 * kk + 1]);
        FLA_UNROLL
        for (int n = 0; n < BT / 16; ++n) {
          FragB<T> b0, b1;
          load_b(b0, b1, q + (16 * n * kLdK + 16 * kk), kLdK);
          FLA_UNROLL
          for (int m = 0; m < WM; ++m) {
            mma(o[m][2 * n], state[m], b0);
            mma(o[m][2 * n + 1], state[m], b1);
            if (p.boundary == Boundary::None) continue;
            const FragA<T> rest = rest_of<T>(S[m][2 * kk], S[m][2 * kk + 1], state[m]);
            mma(o[m][2 * n], rest, b0);
            mma(o[m][2 * n + 1], rest, b1);
          }
        }
      }
      FLA_UNROLL
      for (int n = 0; n < BT / 8; ++n) {
        const Vec<float, 2> g = G.template load_vec<2>(8 * n + frag_col(0));
        const float lo = p.scale * exp2_approx(g.x[0]), hi = p.scale * exp2_approx(g.x[1]);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          o[m][n].x[0] *= lo;
          o[m][n].x[1] *= hi;
          o[m][n].x[2] *= lo;
          o[m][n].x[3] *= hi;
        }
      }
      FLA_UNROLL
      for (int c = 0; c < BT / 16; ++c) {
        FLA_UNROLL
        for (int n = c; n < BT / 16; ++n) {
          FragB<T> b0, b1;
          load_b(b0, b1, prod + (16 * n * kLdP + 16 * c), kLdP);
          FLA_UNROLL
          for (int m = 0; m < WM; ++m) {
            mma(o[m][2 * n], values[m][c], b0);
            mma(o[m][2 * n + 1], values[m][c], b1);
          }
        }
      }
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        FLA_UNROLL
        for (int n = 0; n < BT / 8; ++n) store_output<T>(p, a, t + 8 * n, a.v0 + row + 16 * m, o[m][n]);
      }
    }

    FLA_UNROLL
    for (int c = 0; c < BT / 16; ++c) {
      FLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Vec<float, 2> g = G.template load_vec<2>(16 * c + 8 * half + frag_col(0));
        const float lo = p.update_scale * exp2_approx(sum - g.x[0]), hi = p.update_scale * exp2_approx(sum - g.x[1]);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          std::uint32_t(&x)[4] = values[m][c].x;
          x[2 * half] = scale_pair<T>(x[2 * half], lo, hi);
          x[2 * half + 1] = scale_pair<T>(x[2 * half + 1], lo, hi);
        }
      }
    }
    const float decay = exp2_approx(sum);
    FLA_UNROLL
    for (int n = 0; n < KP / 16; ++n) {
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          S[m][2 * n].x[e] *= decay;
          S[m][2 * n + 1].x[e] *= decay;
        }
      }
      FLA_UNROLL
      for (int c = 0; c < BT / 16; ++c) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, k + (16 * c * kLdK + 16 * n), kLdK);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          mma(S[m][2 * n], values[m][c], b0);
          mma(S[m][2 * n + 1], values[m][c], b1);
        }
      }
    }
    if (p.boundary != Boundary::None) {
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        FLA_UNROLL
        for (int c = 0; c < BT / 16; ++c) {
          load_a_trans(values[m][c], v + (16 * c * kLdV + row + 16 * m), kLdV);
          FLA_UNROLL
          for (int w = 0; w < 4; ++w) {
            const Vec<float, 2> g = G.template load_vec<2>(16 * c + 8 * (w / 2) + frag_col(0));
            values[m][c].x[w] = rest_of_pair<T>(values[m][c].x[w], p.update_scale * exp2_approx(sum - g.x[0]),
                                                p.update_scale * exp2_approx(sum - g.x[1]));
          }
        }
      }
      FLA_UNROLL
      for (int n = 0; n < KP / 16; ++n) {
        FLA_UNROLL
        for (int c = 0; c < BT / 16; ++c) {
          FragB<T> b0, b1;
          load_b_trans(b0, b1, k + (16 * c * kLdK + 16 * n), kLdK);
          FLA_UNROLL
          for (int m = 0; m < WM; ++m) {
            mma(S[m][2 * n], values[m][c], b0);
            mma(S[m][2 * n + 1], values[m][c], b1);
          }
        }
      }
    }
    keep_at_boundary<KP, WM>(p, a, t + BT, row, S);
  }

  if (a.s == p.segments - 1) sum_at_boundary<KP, WM>(p, a, a.length, row, S);
  if (keeps_state(p, a)) store_warp_state<KP, WM>(p, a, a.v0 + row, S);
  if (p.pass == DiagPass::Local && a.v0 == 0 && thread_id() == 0) p.total[(a.n * p.H + a.h) * p.segments + a.s] = total;
}

template <typename T, int KP, int BT, int NW, int WM, int BLOCKS>
Status launch_head(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  using Tiles = HeadTiles<KP, BT, NW, WM>;
  return launch<diag_head_kernel<T, KP, BT, NW, WM, BLOCKS>>({.name = plan.name(),
                                                              .grid = {p.N * p.H * p.segments * p.v_blocks},
                                                              .threads = Tiles::kThreads,
                                                              .shared_bytes = Tiles::kBytes},
                                                             stream, p);
}

template <typename T>
Status launch_diag_head(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  switch (plan.key) {
    case 64:
      if (plan.value == 32) return launch_head<T, 64, 64, 2, 1, 4>(p, plan, stream);
      return launch_head<T, 64, 64, 4, 1, 3>(p, plan, stream);
    case 128:
      if (plan.value == 64) return launch_head<T, 128, 64, 4, 1, 2>(p, plan, stream);
      if (plan.chunk == 32) return launch_head<T, 128, 32, 4, 2, 2>(p, plan, stream);
      return launch_head<T, 128, 64, 8, 1, 1>(p, plan, stream);
    default: return launch_head<T, 256, 32, 4, 1, 2>(p, plan, stream);
  }
}

}  // namespace fla::cuda
