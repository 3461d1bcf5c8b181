// Chunks of BT tokens with one gate per head and token:
//   P = tril(scale q k^T o 2^(G_i - G_j))    o = scale 2^G_i q S + P v    S^T = 2^G_C S^T + (2^(G_C - G) v)^T k
// A warp has its own value columns of S and o, and BT / NW columns of P for all warps; q's words serve q S and q k^T.
// One warp beside these NW copies the chunks and prepares their gates. One barrier a chunk: P complete, the next chunk
// and its gates there, this one read. Before it S takes up the chunk, which waits for nobody; after it P v is left.
#pragma once

#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/launches.h"
#include "fla/engine/diag/cuda/output.cuh"
#include "fla/engine/diag/cuda/pairs.cuh"
#include "fla/engine/diag/cuda/params.cuh"
#include "fla/engine/diag/cuda/token_rows.cuh"
#include "fla/engine/diag/cuda/warp_state.cuh"

namespace fla::cuda {

template <int KP, int BT, int NW, int WM>
struct HeadTiles {
  static constexpr int kThreads = 32 * (NW + 1), kValue = 16 * NW * WM;
  static constexpr int kLdK = KP + 8, kLdV = kValue + 8, kLdP = BT + 8;
  static constexpr int kQ = 0, kKey = kQ + BT * kLdK * 2, kV = kKey + BT * kLdK * 2, kStage = kV + BT * kLdV * 2;
  static constexpr int kProducts = BT * kLdP * 2, kGates = 3 * BT * 4;
  static constexpr int kP = 2 * kStage, kG = kP + 2 * kProducts, kTask = KeptTask::offset(kG + 2 * kGates),
                       kBytes = kTask + static_cast<int>(sizeof(KeptTask));
};

template <typename T, int KP, int BT, int NW, int WM, int BLOCKS, bool BOUNDARY>
FLA_KERNEL(32 * (NW + 1), BLOCKS)
diag_head_kernel(const DiagParams p) {
  static_assert(BT == 32 || BT == 64);
  using Tiles = HeadTiles<KP, BT, NW, WM>;
  constexpr int kLdK = Tiles::kLdK, kLdV = Tiles::kLdV, kLdP = Tiles::kLdP, kValue = Tiles::kValue;
  constexpr int kRows = BT / 16, kColumns = BT / NW, kN = kColumns / 8;
  const DiagTask a = diag_task(p, BT, kValue);
  if (p.pass == DiagPass::Local && a.s == p.segments - 1) return;
  const bool want_o = p.pass != DiagPass::Local && p.o.present();
  const int lane = lane_id(), warp = warp_id();
  const int row = 16 * WM * warp;  // of the block's value columns

  const auto products = [&](int of) { return shared<T>(Tiles::kP + of * Tiles::kProducts, BT * kLdP); };
  // G, scale 2^G and update_scale 2^(G_C - G) of a chunk's tokens
  const auto gates = [&](int of) { return shared<float>(Tiles::kG + of * Tiles::kGates, 3 * BT); };
  const auto q_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kQ, BT * kLdK); };
  const auto k_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kKey, BT * kLdK); };
  const auto v_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kV, BT * kLdV); };

  if (warp == NW) {
    const int columns = p.V - a.v0 < kValue ? p.V - a.v0 : kValue;
    const bool present = p.q.at.present() && p.k.at.present() && p.v.at.present();
    const bool whole = present && columns == kValue && p.K == KP && p.vector_qk && p.vector_v;
    const auto fetch = [&](std::int64_t t, int stage) {
      if (t >= a.to) {
      } else if (whole && t >= 0 && t + BT <= a.to) {
        if (want_o) copy_rows<BT, KP, 32>(p, a, p.q.at, t, 0, q_tile(stage), kLdK, lane);
        copy_rows<BT, KP, 32>(p, a, p.k.at, t, 0, k_tile(stage), kLdK, lane);
        copy_rows<BT, kValue, 32>(p, a, p.v.at, t, a.v0, v_tile(stage), kLdV, lane);
      } else {
        if (want_o) load_tokens<BT, KP>(p, a, p.q.at, p.vector_qk, t, 0, 0, p.K, q_tile(stage), kLdK, lane, 32);
        load_tokens<BT, KP>(p, a, p.k.at, p.vector_qk, t, 0, 0, p.K, k_tile(stage), kLdK, lane, 32);
        load_tokens<BT, kValue>(p, a, p.v.at, p.vector_v, t, 0, a.v0, columns, v_tile(stage), kLdV, lane, 32);
      }
      cp_async_commit();
    };
    HeadGates<BT> asked(p, a);
    float total = 0.0F;
    // The gates of a chunk, which were asked for; asks for those from t on.
    const auto prepare = [&](std::int64_t t, int of) {
      const Shared<float> to = gates(of);
      float G[BT / 32], sum;
      asked.take(G, sum);
      total += sum;
      asked.ask(t);
      FLA_UNROLL
      for (int i = 0; i < BT / 32; ++i) {
        to.store(32 * i + lane, G[i]);
        to.store(BT + 32 * i + lane, p.scale * exp2_approx(G[i]));
        to.store(2 * BT + 32 * i + lane, p.update_scale * exp2_approx(sum - G[i]));
      }
    };
    asked.ask(a.from);
    fetch(a.from, 0);
    fetch(a.from + BT, 1);
    prepare(a.from + BT, 0);
    cp_async_wait<1>();
    sync_roles<Tiles::kThreads>();
    int stage = 0;
    for (std::int64_t t = a.from; t < a.to; t += BT, stage ^= 1) {
      prepare(t + 2 * BT, stage ^ 1);
      cp_async_wait<0>();
      sync_roles<Tiles::kThreads>();
      fetch(t + 2 * BT, stage);
    }
    if (p.pass == DiagPass::Local && a.v0 == 0 && lane == 0) p.total[(a.n * p.H + a.h) * p.segments + a.s] = total;
    return;
  }

  const Shared<KeptTask> kept = shared<KeptTask>(Tiles::kTask, 1);
  if (thread_id() == 0) kept.store(0, KeptTask::of(p, a, BT, kValue));
  FragC S[WM][KP / 8];
  load_warp_state<KP, WM>(p, a, a.v0 + row, S);
  if constexpr (BOUNDARY) {
    if (a.s == 0) keep_at_boundary<KP, WM>(p, a, 0, kValue, row, S);
  }
  const OutputRows<T, kRows, WM> output{p, kept, row};
  const int chunks = static_cast<int>((a.to - a.from + BT - 1) / BT);
  sync_roles<Tiles::kThreads>();

  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int stage = chunk & 1;
    const Shared<T> q = q_tile(stage), k = k_tile(stage), v = v_tile(stage), prod = products(stage);
    const Shared<float> G = gates(stage);
    if constexpr (BOUNDARY) {
      const DiagTask task = kept.load(0).task;
      sum_at_boundary<KP, WM>(p, task, task.from + std::int64_t{chunk} * BT, kValue, row, S);
    }

    FragC o[kRows][2 * WM];
    if (want_o) {
      FragC P[kRows][kN];
      FLA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        FLA_UNROLL
        for (int n = 0; n < 2 * WM; ++n) clear(o[i][n]);
        FLA_UNROLL
        for (int n = 0; n < kN; ++n) clear(P[i][n]);
      }
      FLA_UNROLL
      for (int k0 = 0; k0 < KP; k0 += 32) {
        FragB<T> keys[2][kN];
        load_key_rows<T, kN, 32>(keys, k + (warp * kColumns * kLdK + k0), kLdK);
        FLA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int kk = k0 / 16 + half;
          FragA<T> state[WM], rest[WM];
          FLA_UNROLL
          for (int m = 0; m < WM; ++m) {
            state[m] = to_a<T>(S[m][2 * kk], S[m][2 * kk + 1]);
            if constexpr (BOUNDARY) rest[m] = rest_of<T>(S[m][2 * kk], S[m][2 * kk + 1], state[m]);
          }
          FLA_UNROLL
          for (int i = 0; i < kRows; ++i) {
            FragA<T> x;
            load_a(x, q + (16 * i * kLdK + 16 * kk), kLdK);
            FLA_UNROLL
            for (int m = 0; m < WM; ++m) {
              // The words of S^T as A are those of S as B.
              mma(o[i][2 * m], x, FragB<T>{{state[m].x[0], state[m].x[2]}});
              mma(o[i][2 * m + 1], x, FragB<T>{{state[m].x[1], state[m].x[3]}});
              if constexpr (BOUNDARY) {
                mma(o[i][2 * m], x, FragB<T>{{rest[m].x[0], rest[m].x[2]}});
                mma(o[i][2 * m + 1], x, FragB<T>{{rest[m].x[1], rest[m].x[3]}});
              }
            }
            FLA_UNROLL
            for (int n = 0; n < kN; ++n) mma(P[i][n], x, keys[half][n]);
          }
        }
      }
      const float scale = p.scale * p.update_scale;
      FLA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const int query = 16 * i + lane / 4;
        const float by[2] = {G.load(BT + query), G.load(BT + query + 8)}, to[2] = {G.load(query), G.load(query + 8)};
        FLA_UNROLL
        for (int n = 0; n < 2 * WM; ++n) {
          FLA_UNROLL
          for (int e = 0; e < 4; ++e) o[i][n].x[e] *= by[e / 2];
        }
        FLA_UNROLL
        for (int n = 0; n < kN; ++n) {
          const int key = warp * kColumns + 8 * n + frag_col(0);
          const Vec<float, 2> from = G.template load_vec<2>(key);
          FLA_UNROLL
          for (int half = 0; half < 2; ++half) {
            // Cleared by its bits, whatever a later token holds.
            const int behind = query + 8 * half - key;
            const std::uint32_t earlier = behind > 0 ? 0xFFFFFFFFU : behind == 0 ? 0xFFFFU : 0U;
            const std::uint32_t pair = pack2<T>(scale * P[i][n].x[2 * half] * exp2_approx(to[half] - from.x[0]),
                                                scale * P[i][n].x[2 * half + 1] * exp2_approx(to[half] - from.x[1]));
            prod.template as<std::uint32_t>().store(((query + 8 * half) * kLdP + key) / 2, pair & earlier);
          }
        }
      }
    }

    FragA<T> values[WM][kRows];  // v^T
    FLA_UNROLL
    for (int m = 0; m < WM; ++m) {
      FLA_UNROLL
      for (int c = 0; c < kRows; ++c) load_a_trans(values[m][c], v + (16 * c * kLdV + row + 16 * m), kLdV);
    }
    FragA<T> scaled[WM][kRows];
    FLA_UNROLL
    for (int c = 0; c < kRows; ++c) {
      FLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Vec<float, 2> by = G.template load_vec<2>(2 * BT + 16 * c + 8 * half + frag_col(0));
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          FLA_UNROLL
          for (int w = 2 * half; w < 2 * half + 2; ++w) {
            scaled[m][c].x[w] = scale_pair<T>(values[m][c].x[w], by.x[0], by.x[1]);
          }
        }
      }
    }
    const float decay = exp2_approx(G.load(BT - 1));
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
      for (int c = 0; c < kRows; ++c) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, k + (16 * c * kLdK + 16 * n), kLdK);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          mma(S[m][2 * n], scaled[m][c], b0);
          mma(S[m][2 * n + 1], scaled[m][c], b1);
        }
      }
    }
    if constexpr (BOUNDARY) {
      FLA_UNROLL
      for (int c = 0; c < kRows; ++c) {
        FLA_UNROLL
        for (int w = 0; w < 4; ++w) {
          const Vec<float, 2> by = G.template load_vec<2>(2 * BT + 16 * c + 8 * (w / 2) + frag_col(0));
          FLA_UNROLL
          for (int m = 0; m < WM; ++m) scaled[m][c].x[w] = rest_of_pair<T>(values[m][c].x[w], by.x[0], by.x[1]);
        }
      }
      FLA_UNROLL
      for (int n = 0; n < KP / 16; ++n) {
        FLA_UNROLL
        for (int c = 0; c < kRows; ++c) {
          FragB<T> b0, b1;
          load_b_trans(b0, b1, k + (16 * c * kLdK + 16 * n), kLdK);
          FLA_UNROLL
          for (int m = 0; m < WM; ++m) {
            mma(S[m][2 * n], scaled[m][c], b0);
            mma(S[m][2 * n + 1], scaled[m][c], b1);
          }
        }
      }
      const DiagTask task = kept.load(0).task;
      keep_at_boundary<KP, WM>(p, task, task.from + std::int64_t{chunk + 1} * BT, kValue, row, S);
    }

    std::uint32_t seen = 0;
    FLA_UNROLL
    for (int m = 0; m < WM; ++m) {
      FLA_UNROLL
      for (int c = 0; c < kRows; ++c) seen = ask_finite<T>(values[m][c].x, seen);
    }
    const bool finite = all_finite(seen);
    sync_roles<Tiles::kThreads>();
    if (!want_o) continue;
    const auto add_values = [&](int i, int c, bool exact) {
      FragA<T> x;
      load_a(x, prod + (16 * i * kLdP + 16 * c), kLdP);
      FragB<T> columns[2 * WM];
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        columns[2 * m] = {{values[m][c].x[0], values[m][c].x[2]}};
        columns[2 * m + 1] = {{values[m][c].x[1], values[m][c].x[3]}};
      }
      if (exact) {
        add_lower_exact(o[i], x, columns);
        return;
      }
      FLA_UNROLL
      for (int n = 0; n < 2 * WM; ++n) mma(o[i][n], x, columns[n]);
    };
    if (finite) {
      FLA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        FLA_UNROLL
        for (int c = 0; c <= i; ++c) add_values(i, c, false);
      }
    } else {
      FLA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        FLA_UNROLL
        for (int c = 0; c < i; ++c) add_values(i, c, false);
        add_values(i, i, true);
      }
    }
    output.store(chunk, o);
  }

  const DiagTask task = kept.load(0).task;
  if constexpr (BOUNDARY) {
    if (task.s == p.segments - 1) sum_at_boundary<KP, WM>(p, task, task.length, kValue, row, S);
  }
  if (keeps_state(p, task)) store_warp_state<KP, WM>(p, task, task.v0 + row, S);
}

template <typename T, int KP, int BT, int NW, int WM, int BLOCKS, bool BOUNDARY = false>
Status launch_head(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  using Tiles = HeadTiles<KP, BT, NW, WM>;
  return launch<diag_head_kernel<T, KP, BT, NW, WM, BLOCKS, BOUNDARY>>({.name = plan.name(),
                                                                        .grid = {p.N * p.H * p.segments * p.v_blocks},
                                                                        .threads = Tiles::kThreads,
                                                                        .shared_bytes = Tiles::kBytes},
                                                                       stream, p);
}

template <typename T>
Status launch_diag_head(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  const bool boundary = p.boundary != Boundary::None;
  switch (plan.key) {
    case 64:
      if (boundary) return launch_head<T, 64, 64, 4, 1, 1, true>(p, plan, stream);
      if (plan.value == 32) return launch_head<T, 64, 64, 2, 1, 2>(p, plan, stream);
      return launch_head<T, 64, 64, 4, 1, 2>(p, plan, stream);
    case 128:
      if (boundary) return launch_head<T, 128, 32, 4, 1, 1, true>(p, plan, stream);
      if (plan.value == 64) return launch_head<T, 128, 64, 4, 1, 1>(p, plan, stream);
      return launch_head<T, 128, 64, 8, 1, 1>(p, plan, stream);
    default:
      if (boundary) return launch_head<T, 256, 32, 4, 1, 1, true>(p, plan, stream);
      return launch_head<T, 256, 32, 4, 1, 1>(p, plan, stream);
  }
}

}  // namespace fla::cuda
