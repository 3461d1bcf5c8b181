// The states before each chunk of kStateChunk tokens and the states' adjoints after it, in 16 bits, for gradients that
// are formed chunk by chunk. Both runs update a state of one row per key channel,
//   S = 2^G_C S + (2^(G_C - G) x)^T y
// with x, y = k, v forwards and q, do backwards; gates are per head, or per row (CHANNEL), where a warp owns whole
// rows.
#pragma once

#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/gradient.cuh"
#include "fla/engine/diag/cuda/output.cuh"
#include "fla/engine/diag/cuda/pairs.cuh"
#include "fla/engine/diag/cuda/token_rows.cuh"
#include "fla/engine/diag/cuda/warp_state.cuh"

namespace fla::cuda {

template <int D, bool CHANNEL>
struct StateTiles {
  static constexpr int kBT = kStateChunk, kWarps = kStateRows / 16, kThreads = 32 * kWarps;
  static constexpr int kLdY = D + 8, kLdX = kStateRows + 8;
  // Pitches of gates per row, in floats: as they come where those are 16 bits, else as F32.
  static constexpr int kLdNarrow = kStateRows / 2 + 4, kLdWide = kStateRows + 4;
  static constexpr int kTask = 0, kX = static_cast<int>(sizeof(KeptTask)), kY = kX + kBT * kLdX * 2,
                       kRaw = kY + kBT * kLdY * 2;
  FLA_HOST_DEVICE static int stage(bool narrow) {
    return kRaw - kX + (!CHANNEL ? 2 * kBT * 4 : narrow ? kBT * kLdNarrow * 4 : kBT * kLdWide * 4);
  }
  // With the decays of the lanes' rows behind both stages.
  FLA_HOST_DEVICE static int bytes(bool narrow) { return kX + 2 * stage(narrow) + 2 * kThreads * 4; }
};

FLA_HOST_DEVICE bool narrow_gates(const DiagParams& p) { return p.vector_gate && p.gv.type != DType::F32; }

// What the gates leave of 16 tokens x 16 rows at the end of the last of them, and what the whole leaves of the state.
// A lane's elements are those of an A fragment (row, token): [half of the tokens][half of the rows][token parity].
template <typename G>
FLA_DEVICE void row_gates(Shared<G> tile, int ld, float (&left)[2][2][2], float (&all)[2]) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  FLA_UNROLL
  for (int m = 0; m < 2; ++m) {
    all[m] = 0.0F;
    FLA_UNROLL
    for (int half = 1; half >= 0; --half) {
      const int at = (8 * half + 2 * t) * ld + 8 * m + g;
      const float first = base2_gate(to_f32(tile.load(at))), second = base2_gate(to_f32(tile.load(at + ld)));
      float sum = first + second;  // of this lane's tokens and those behind them
      FLA_UNROLL
      for (int by = 1; by < 4; by *= 2) {
        const float x = shuffle_down(sum, by);
        if (t + by < 4) sum += x;
      }
      const float next = shuffle_down(sum, 1), behind = all[m] + (t < 3 ? next : 0.0F);
      left[half][m][1] = behind;
      left[half][m][0] = behind + second;
      all[m] += shuffle(sum, lane_id() & ~3);
    }
  }
}

template <typename T, int D, bool CHANNEL>
FLA_KERNEL((StateTiles<D, CHANNEL>::kThreads), 3)
diag_states_kernel(const StateRuns runs) {
  using Tiles = StateTiles<D, CHANNEL>;
  constexpr int BT = Tiles::kBT, kLdX = Tiles::kLdX, kLdY = Tiles::kLdY, kTiles = BT / 16;
  const std::int64_t each = grid_x() / 2;
  const DiagParams& p = runs.run[block_x() < each ? 0 : 1];
  const bool narrow = narrow_gates(p);
  const int bytes = Tiles::stage(narrow);
  const DiagTask a = diag_task(p, BT, kStateRows, block_x() < each ? block_x() : block_x() - each);
  if (p.pass == DiagPass::Local && a.s == p.segments - 1) return;
  FragC S[1][D / 8];
  load_warp_state<D, 1>(p, a, a.v0 + 16 * warp_id(), S);
  const int row = 16 * warp_id(), rows = p.V - a.v0 < kStateRows ? p.V - a.v0 : kStateRows;

  const auto x_tile = [&](int stage) { return shared<T>(stage * bytes + Tiles::kX, BT * kLdX); };
  const auto y_tile = [&](int stage) { return shared<T>(stage * bytes + Tiles::kY, BT * kLdY); };
  const auto g_tile = [&](int stage) {
    return shared<float>(stage * bytes + Tiles::kRaw, BT * (narrow ? Tiles::kLdNarrow : Tiles::kLdWide));
  };
  // per head: what a chunk leaves of each token, then of the state
  const auto factors = [&](int stage) { return shared<float>(stage * bytes + Tiles::kRaw, 2 * BT); };
  const bool whole =
      p.k.at.present() && p.v.at.present() && p.K == D && rows == kStateRows && p.vector_qk && p.vector_v;
  const bool whole_gates = p.vector_gate && rows == kStateRows && !p.shift;
  const auto fetch = [&](std::int64_t t, int stage) {
    if (t < a.to) {
      const bool inside = t >= 0 && t + BT <= a.to;
      if (whole && inside) {
        copy_rows<BT, D, Tiles::kThreads>(p, a, p.k.at, t, 0, y_tile(stage), kLdY, thread_id());
        copy_rows<BT, kStateRows, Tiles::kThreads>(p, a, p.v.at, t, a.v0, x_tile(stage), kLdX, thread_id());
      } else {
        load_tokens<BT, D>(p, a, p.k.at, p.vector_qk, t, 0, 0, p.K, y_tile(stage), kLdY);
        load_tokens<BT, kStateRows>(p, a, p.v.at, p.vector_v, t, 0, a.v0, rows, x_tile(stage), kLdX);
      }
      if constexpr (CHANNEL) {
        if (whole_gates && inside && !narrow) {
          copy_rows<BT, kStateRows, Tiles::kThreads>(p, a, p.gv.at, t, a.v0, g_tile(stage), Tiles::kLdWide,
                                                     thread_id());
        } else if (whole_gates && inside) {
          copy_rows<BT, kStateRows, Tiles::kThreads>(p, a, p.gv.at, t, a.v0, g_tile(stage).template as<bf16>(),
                                                     2 * Tiles::kLdNarrow, thread_id());
        } else if (narrow) {
          load_gates<BT, kStateRows, Tiles::kLdNarrow>(p, a, p.gv, t, a.v0, rows, g_tile(stage));
        } else {
          load_gates<BT, kStateRows, Tiles::kLdWide>(p, a, p.gv, t, a.v0, rows, g_tile(stage));
        }
      }
    }
    cp_async_commit();
  };
  HeadGates<BT> gates(p, a);

  if constexpr (!CHANNEL) gates.ask(a.from);
  fetch(a.from, 0);
  // A segment's decay of this lane's rows, or of the state.
  const Shared<float> total = shared<float>(Tiles::kX + 2 * bytes, 2 * Tiles::kThreads) + 2 * thread_id();
  total.template store_vec<2>(0, Vec<float, 2>{{0.0F, 0.0F}});
  // Needed again behind the loop, which has no register to spare.
  const Shared<KeptTask> task = shared<KeptTask>(Tiles::kTask, 1);
  if (thread_id() == 0) task.store(0, KeptTask{.task = a});
  const std::int64_t chunk = p.shift ? (a.length - a.from) / BT - 1 : a.from / BT;
  std::uint32_t* kept = state_tiles<D>(runs.kept[p.shift ? 1 : 0], p, a, chunk) + (a.v0 + row) / 16 * (D / 16) * 128;
  const bool keep = p.pass != DiagPass::Local;

  int stage = 0;
  for (std::int64_t t = a.from; t < a.to; t += BT, stage ^= 1) {
    if constexpr (!CHANNEL) {
      if (warp_id() == 0) {
        float G[BT / 32], sum;
        gates.take(G, sum);
        gates.ask(t + BT);
        if (p.pass == DiagPass::Local) total.store(0, total.load(0) + sum);
        FLA_UNROLL
        for (int i = 0; i < BT / 32; ++i) {
          factors(stage).store(32 * i + lane_id(), p.update_scale * exp2_approx(sum - G[i]));
        }
        if (lane_id() == 0) factors(stage).store(BT, exp2_approx(sum));
      }
    }
    cp_async_wait<0>();
    sync_threads();
    fetch(t + BT, stage ^ 1);
    if (keep) {
      FLA_UNROLL
      for (int n = 0; n < D / 16; ++n) {
        const FragA<T> words = to_a<T>(S[0][2 * n], S[0][2 * n + 1]);
        store_global<4>(kept + n * 128 + 4 * lane_id(),
                        Vec<std::uint32_t, 4>{{words.x[0], words.x[1], words.x[2], words.x[3]}});
      }
      kept += (p.shift ? -p.H : p.H) * (D * D / 2);
    }

    const Shared<T> x = x_tile(stage), y = y_tile(stage);
    FragA<T> scaled[kTiles];
    float decay[2];
    if constexpr (CHANNEL) {
      float behind[2] = {};
      with_gate_type(narrow ? p.gv.type : DType::F32, [&](auto element) {
        using G = decltype(element);
        constexpr int kLd = sizeof(G) == 4 ? Tiles::kLdWide : 2 * Tiles::kLdNarrow;
        const Shared<G> tile = g_tile(stage).template as<G>() + row;
        FLA_UNROLL
        for (int c = kTiles - 1; c >= 0; --c) {
          float left[2][2][2], all[2];
          row_gates(tile + 16 * c * kLd, kLd, left, all);
          load_a_trans(scaled[c], x + (16 * c * kLdX + row), kLdX);
          FLA_UNROLL
          for (int w = 0; w < 4; ++w) {
            const float(&l)[2] = left[w / 2][w % 2];
            scaled[c].x[w] = scale_pair<T>(scaled[c].x[w], p.update_scale * exp2_approx(l[0] + behind[w % 2]),
                                           p.update_scale * exp2_approx(l[1] + behind[w % 2]));
          }
          behind[0] += all[0];
          behind[1] += all[1];
        }
      });
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        decay[m] = exp2_approx(behind[m]);
        if (!keep) total.store(m, total.load(m) + behind[m]);
      }
    } else {
      FLA_UNROLL
      for (int c = 0; c < kTiles; ++c) {
        load_a_trans(scaled[c], x + (16 * c * kLdX + row), kLdX);
        FLA_UNROLL
        for (int w = 0; w < 4; ++w) {
          const Vec<float, 2> by = factors(stage).template load_vec<2>(16 * c + 8 * (w / 2) + frag_col(0));
          scaled[c].x[w] = scale_pair<T>(scaled[c].x[w], by.x[0], by.x[1]);
        }
      }
      decay[0] = decay[1] = factors(stage).load(BT);
    }
    FLA_UNROLL
    for (int n = 0; n < D / 16; ++n) {
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        S[0][2 * n].x[e] *= decay[e / 2];
        S[0][2 * n + 1].x[e] *= decay[e / 2];
      }
      FLA_UNROLL
      for (int c = 0; c < kTiles; ++c) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, y + (16 * c * kLdY + 16 * n), kLdY);
        mma(S[0][2 * n], scaled[c], b0);
        mma(S[0][2 * n + 1], scaled[c], b1);
      }
    }
  }

  sync_threads();
  const DiagTask end = task.load(0).task;
  if (p.pass == DiagPass::Local) {
    float* to = p.total + ((end.n * p.H + end.h) * p.segments + end.s) * (CHANNEL ? p.V : 1);
    if (CHANNEL && lane_id() % 4 == 0) {
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        const int j = end.v0 + row + 8 * m + lane_id() / 4;
        if (j < p.V) to[j] = total.load(m);
      }
    }
    if (!CHANNEL && end.v0 == 0 && thread_id() == 0) *to = total.load(0);
  } else if (keeps_state(p, end) && p.shift) {
    // The first token's gate.
    FLA_UNROLL
    for (int m = 0; m < 2; ++m) {
      const int j = end.v0 + row + 8 * m + lane_id() / 4;
      const float by = j < p.V ? exp2_approx(gate_before(p, end, end.length, 0, j)) : 0.0F;
      FLA_UNROLL
      for (int n = 0; n < D / 8; ++n) {
        S[0][n].x[2 * m] *= by;
        S[0][n].x[2 * m + 1] *= by;
      }
    }
  }
  if (keeps_state(p, end)) write_warp_state<D, 1>(p, end, end.v0 + row, S);
}

template <typename T, int D, bool CHANNEL>
Status launch_states(const StateRuns& runs, const DiagPlan& plan, Stream stream) {
  const DiagParams& p = runs.run[0];
  return launch<diag_states_kernel<T, D, CHANNEL>>(
      {.name = plan.name(),
       .grid = {2 * p.N * p.H * p.segments * p.v_blocks},
       .threads = StateTiles<D, CHANNEL>::kThreads,
       .shared_bytes = static_cast<std::size_t>(StateTiles<D, CHANNEL>::bytes(narrow_gates(p)))},
      stream, runs);
}

template <typename T>
Status launch_diag_states(const StateRuns& runs, const DiagPlan& plan, Stream stream) {
  const bool channel = runs.run[0].gv.present();
  if (plan.key == 64) {
    return channel ? launch_states<T, 64, true>(runs, plan, stream) : launch_states<T, 64, false>(runs, plan, stream);
  }
  return channel ? launch_states<T, 128, true>(runs, plan, stream) : launch_states<T, 128, false>(runs, plan, stream);
}

}  // namespace fla::cuda
