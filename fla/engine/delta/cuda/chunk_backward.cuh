// The tensor-core backward of the delta rule; D is the gradient of a chunk's final state. Four kernels beside the
// prologue: the forward once more, which keeps each chunk's entering state and E; delta_reverse_kernel, which walks the
// chunks backwards with D in registers; delta_gradient_kernel, parallel over chunks, for everything else;
// delta_parameter_kernel for the sums over tokens.
//   dE = P^T dO + (k o 2^{G_C - G}) D,  dVbar = (I + L)^{-T} dE,  dv = beta dVbar                                   (4)
//   D <- 2^{G_C} o D + scale (q o 2^G)^T dO - (beta k o 2^G)^T dVbar                                                (5)
//   dP = lower(dO E^T),  dL = -strictly lower(dVbar E^T)                                                            (6)
//   dq_i = scale [2^{G_i} o (S_0 dO_i) + sum_{j<=i} dP_ij 2^{G_i-G_j} o k_j]                                        (7)
//   a_i  = -2^{G_i} o (S_0 dVbar_i) + sum_{j<i} dL_ij 2^{G_i-G_j} o k_j                                             (8)
//   u_j  = 2^{G_C-G_j} o (D E_j) + scale sum_{i>=j} dP_ij 2^{G_i-G_j} o q_i + sum_{i>j} dL_ij 2^{G_i-G_j} beta_i o k_i
//   dk   = u + beta a,  dbeta = <a, k> + <dVbar, v>                                                                 (9)
//   dg_t = sum_{i>=t} (q o dq - k o u + beta k o a)_i + 2^{G_C} o rowsum(S_0 o D) + sum_j k_j o 2^{G_C-G_j} o (D E_j)
//   (10)
// Serves BF16, which keeps the build short; the token kernels serve the rest.
// q and k stand for the normalised vectors; gradients of a key head's value heads are added in fp32, in their order.
#pragma once

#include "fla/engine/delta/cuda/chunk.cuh"

namespace fla::cuda {

// ---- delta_reverse_kernel: like delta_chunk_kernel, with dO in the place of v and two warps for the transposed D
// [16, K] of 16 value channels, each with half of the key channels. Both form dVbar; each writes half of its rows.

template <typename T, int KP, int TILES, bool CHANNEL>
FLA_KERNEL((ChunkLayout<KP, TILES, CHANNEL>::kThreads), (ChunkLayout<KP, TILES, CHANNEL>::kBlocks))
delta_reverse_kernel(const DeltaBackwardArgs p, const DeltaChunkSpace<T> w, int stages) {
  using L = ChunkLayout<KP, TILES, CHANNEL>;
  constexpr int kKeys = L::kKeys;
  const int parts = (p.V + L::kColumns - 1) / L::kColumns;
  const int part = block_x() % parts, hv = block_x() / parts % p.HV;
  const std::int64_t n = block_x() / parts / p.HV;
  const Segment g = find_segment(p, w, n);
  const int v_begin = part * L::kColumns, v_count = p.V - v_begin < L::kColumns ? p.V - v_begin : L::kColumns;

  if (warp_id() == L::kWarps) {
    const auto fetch = [&](int ic, int stage) {
      if (ic >= 0) {
        const int left = g.tokens - ic * kBT;
        fetch_chunk<T, KP, TILES, CHANNEL, true>(p, w, p.do_.view, g.row, g.begin + ic * kBT, left < kBT ? left : kBT,
                                                 (g.slot + ic) * p.HV + hv, hv, v_begin, v_count, stage);
      }
      cp_async_commit();
    };
    for (int i = 0; i < stages - 1; ++i) fetch(g.chunks - 1 - i, i);
    int free = stages - 1;
    for (int ic = g.chunks - 1; ic >= 0; --ic) {
      wait_for_stage(stages);
      sync_roles<L::kThreads>();
      fetch(ic - (stages - 1), free);
      free = free + 1 == stages ? 0 : free + 1;
    }
    return;
  }

  const int pair = warp_id() / 2, half = warp_id() % 2, v_own = 16 * pair, k_own = kKeys * half;
  FragC D[kKeys / 8];
  const auto each_state = [&](auto&& f) {
    FLA_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int column = v_own + frag_row(i), c = k_own + 8 * j + frag_col(i);
        if (column < v_count && c < p.K) f(D[j].x[i], c, v_begin + column);
      }
    }
  };
  FLA_UNROLL
  for (FragC& x : D) clear(x);
  if (p.dht.present()) each_state([&](float& x, int c, int value) { x = p.dht.load(n, hv, c, value); });

  const int own = stages * L::kStage + warp_id() * L::kOwn, partner = stages * L::kStage + (warp_id() ^ 1) * L::kOwn;
  const Shared<float> mine = shared<float>(own, L::kHanded / 4), handed = shared<float>(partner, L::kHanded / 4);
  // This warp's rows of dVbar, and, in what it does not hand over, of dv.
  const Shared<T> rows = shared<T>(own + L::kHanded, L::kRows / 2), more = shared<T>(own + 4 * 512, L::kRows / 2);
  static_assert(4 * 512 + L::kRows <= L::kHanded);
  const int token = 16 * half + lane_id() / 2, column = v_own + lane_id() % 2 * 8;
  const auto flush = [&](int ic) {
    const int from = lane_id() / 2 * L::kLdO + lane_id() % 2 * 8;
    const std::int64_t at = (g.slot + ic) * p.HV + hv;
    store_global<8>(w.dvbar + (at * kBT + token) * 16 * w.value_tiles + v_begin + column,
                    rows.template load_vec<8>(from));
    if (p.dv.present() && column < v_count && ic * kBT + token < g.tokens) {
      store_global<8>(p.dv.view.at<T>(g.row, g.begin + ic * kBT + token, hv, v_begin + column),
                      more.template load_vec<8>(from));
    }
  };

  int stage = 0;
  for (int ic = g.chunks - 1; ic >= 0; --ic) {
    sync_roles<L::kThreads>();
    if ((ic + 1) * kBT < g.tokens) flush(ic + 1);
    const ChunkTiles<T, KP, TILES, CHANNEL> tiles(stage);
    stage = stage + 1 == stages ? 0 : stage + 1;

    const Shared<T> k_rows = lane_of_b<false>(tiles.k + k_own, L::kLdK),
                    q_rows = lane_of_b<true>(tiles.q + k_own, L::kLdK),
                    a_rows = lane_of_b<true>(tiles.a + k_own, L::kLdK), m_rows = lane_of_b<true>(tiles.m, L::kLdM);
    FragC x[4];  // [16, BT]: dE^T, then dVbar^T
    FLA_UNROLL
    for (FragC& y : x) clear(y);
    FLA_UNROLL
    for (int j = 0; j < kKeys / 16; ++j) {
      const FragA<T> a = to_a<T>(D[2 * j], D[2 * j + 1]);
      store_state_tile(w.adjoints, (g.slot + ic) * p.HV + hv, w.value_tiles, (v_begin + v_own) / 16, KP / 16,
                       half * (kKeys / 16) + j, a);
      FLA_UNROLL
      for (int i = 0; i < 4; i += 2) {
        FragB<T> b0, b1;
        load_b_at<false>(b0, b1, k_rows + (8 * i * L::kLdK + 16 * j));
        mma(x[i], a, b0);
        mma(x[i + 1], a, b1);
      }
    }
    hand_over(mine, x);
    barrier_arrive(1 + (warp_id() ^ 1), 64);
    FLA_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
      const Vec<float, 2> decay = tiles.decay(k_own + 8 * j);
      FLA_UNROLL
      for (int f = 0; f < 4; ++f) D[j].x[f] *= decay.x[f & 1];
    }
    FragA<T> dO[2];
    FLA_UNROLL
    for (int m = 0; m < 2; ++m) load_a_trans(dO[m], tiles.v + (16 * m * L::kLdV + v_own), L::kLdV);
    barrier_sync(1 + warp_id(), 64);
    add_handed(x, handed);
    if constexpr (!CHANNEL) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Vec<float, 2> by = tiles.scalars.template load_vec<2>(3 * kBT + 8 * i + frag_col(0));
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) x[i].x[f] *= by.x[f & 1];
      }
    }
    // x += a^T of a lower square
    const auto times_lower_transposed = [&](const FragA<T>(&a)[2], Shared<T> square) {
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        FLA_UNROLL
        for (int m = i; m < 2; ++m) {
          FragB<T> b0, b1;
          load_b_at<true>(b0, b1, square + (16 * m * L::kLdM + 16 * i));
          mma(x[2 * i], a[m], b0);
          mma(x[2 * i + 1], a[m], b1);
        }
      }
    };
    times_lower_transposed(dO, m_rows + kBT);
    const FragA<T> dE[2] = {to_a<T>(x[0], x[1]), to_a<T>(x[2], x[3])};
    times_lower_transposed(dE, m_rows);

    FragC out[2];
    FLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      FLA_UNROLL
      for (int f = 0; f < 4; ++f) out[i].x[f] = half == 0 ? x[i].x[f] : x[2 + i].x[f];
    }
    put_transposed(out, rows, L::kLdO);
    FLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const Vec<float, 2> beta =
          tiles.scalars.template load_vec<2>((CHANNEL ? 0 : kBT) + 16 * half + 8 * i + frag_col(0));
      FLA_UNROLL
      for (int f = 0; f < 4; ++f) out[i].x[f] *= beta.x[f & 1];
    }
    put_transposed(out, more, L::kLdO);

    FLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      Vec<float, 2> by = {{1.0F, 1.0F}};
      if constexpr (!CHANNEL) {
        by = tiles.scalars.template load_vec<2>(8 * i + frag_col(0));
        const Vec<float, 2> q = tiles.scalars.template load_vec<2>(2 * kBT + 8 * i + frag_col(0));
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          std::uint32_t& word = dO[i / 2].x[2 * (i % 2) + e];
          word = pack2<T>(low_half<T>(word) * q.x[0], high_half<T>(word) * q.x[1]);
        }
      }
      FLA_UNROLL
      for (int f = 0; f < 4; ++f) x[i].x[f] *= -by.x[f & 1];
    }
    const FragA<T> dV[2] = {to_a<T>(x[0], x[1]), to_a<T>(x[2], x[3])};
    FLA_UNROLL
    for (int j = 0; j < kKeys / 8; j += 2) {
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        FragB<T> b0, b1;
        load_b_at<true>(b0, b1, q_rows + (16 * m * L::kLdK + 8 * j));
        mma(D[j], dO[m], b0);
        mma(D[j + 1], dO[m], b1);
        load_b_at<true>(b0, b1, a_rows + (16 * m * L::kLdK + 8 * j));
        mma(D[j], dV[m], b0);
        mma(D[j + 1], dV[m], b1);
      }
    }
  }
  sync_warp();
  if (g.tokens > 0) flush(0);
  if (p.dh0.present()) each_state([&](float& x, int c, int value) { p.dh0.store(x, n, hv, c, value); });
}

// ---- host

template <typename T, int KP, bool CHANNEL>
Status launch_reverse(const DeltaBackwardArgs& a, const DeltaBackwardProblem& p, const DeltaPlan& plan,
                      const DeltaChunkSpace<T>& w, Stream stream) {
  using L = ChunkLayout<KP, 1, CHANNEL>;
  return launch<delta_reverse_kernel<T, KP, 1, CHANNEL>>(
      {.name = "delta_reverse_kernel",
       .grid = {p.N * p.HV * plan.parts},
       .threads = L::kThreads,
       .shared_bytes = static_cast<std::size_t>(L::bytes(plan.stages))},
      stream, a, w, plan.stages);
}

template <typename T, bool CHANNEL>
Status launch_backward(const DeltaBackwardProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w,
                       Stream stream) {
  DeltaProblem forward = p;
  forward.o = forward.ht = forward.h = {};
  if (const Status s = launch_chunk<T>(forward, plan, w, stream); !s) return s;
  const DeltaBackwardArgs a = delta_args(p);
  const Status s = plan.width == 64    ? launch_reverse<T, 64, CHANNEL>(a, p, plan, w, stream)
                   : plan.width == 128 ? launch_reverse<T, 128, CHANNEL>(a, p, plan, w, stream)
                                       : launch_reverse<T, 256, CHANNEL>(a, p, plan, w, stream);
  if (!s) return s;
  return launch_gradient<T>(p, plan, w, stream);
}

template <typename T>
std::size_t delta_chunk_backward_workspace(const DeltaBackwardProblem& p, const DeltaPlan& plan) {
  DeltaChunkSpace<T> w;
  return carve_chunk_space<T>(p, plan, &p, nullptr, w);
}

template <typename T>
Status delta_chunk_backward(const DeltaBackwardProblem& p, const DeltaPlan& plan, Stream stream,
                            std::span<std::byte> workspace) {
  DeltaChunkSpace<T> w;
  carve_chunk_space<T>(p, plan, &p, workspace.data(), w);
  const Status s = p.gk ? launch_backward<T, true>(p, plan, w, stream) : launch_backward<T, false>(p, plan, w, stream);
  if (!s || (!p.dA_log && !p.ddt_bias)) return s;
  return delta_parameter_gradients(p, w.partials, delta_chunk_slots(p), stream);
}

}  // namespace fla::cuda
