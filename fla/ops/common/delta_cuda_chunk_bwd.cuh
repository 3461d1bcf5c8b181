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
// Serves BF16 and K <= 128, which keeps the build short; the token kernels serve the rest.
// q and k stand for the normalised vectors; gradients of a key head's value heads are added in fp32, in their order.
#pragma once

#include "fla/ops/common/delta_cuda_chunk.cuh"

namespace fla::cuda {

// ---- delta_reverse_kernel: like delta_chunk_kernel, with dO in the place of v and the transposed D [16, K] of 16
// value channels in a warp's registers

template <typename T, int KP, int COLUMNS, bool CHANNEL>
FLA_KERNEL(4 * COLUMNS, 1)
delta_reverse_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w, int stages) {
  using L = ChunkLayout<KP, COLUMNS, CHANNEL>;
  const int parts = (p.V + COLUMNS - 1) / COLUMNS;
  const int part = block_x() % parts, hv = block_x() / parts % p.HV;
  const std::int64_t n = block_x() / parts / p.HV;
  const int v_begin = part * COLUMNS, v_own = 16 * warp_id();
  const int v_count = p.V - v_begin < COLUMNS ? p.V - v_begin : COLUMNS;
  const Span s = sequence(p, n);
  const std::int64_t chunks = (s.length + kBT - 1) / kBT, slot = first_slot(p, s, n);
  const auto tile = [&](int stage, int offset, int bytes) { return shared<T>(stage * L::kStage + offset, bytes / 2); };
  const auto rows_of = [&](std::int64_t ic) {
    const std::int64_t left = s.length - ic * kBT;
    return left < kBT ? static_cast<int>(left) : kBT;
  };
  const auto fetch = [&](std::int64_t ic, int stage) {
    fetch_chunk<T, KP, COLUMNS, CHANNEL>(p, w, p.do_.view, s, ic, slot, hv, v_begin, v_count, stage);
  };
  const bool computes = warp_id() < L::kWarps, loads = !computes || block_threads() == 2 * COLUMNS;

  FragC D[KP / 8];
  const auto each_state = [&](auto&& f) {
    FLA_UNROLL
    for (int j = 0; j < KP / 8; ++j) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int column = v_own + frag_row(i), c = 8 * j + frag_col(i);
        if (column < v_count && c < p.K) f(D[j].x[i], c, v_begin + column);
      }
    }
  };
  FLA_UNROLL
  for (FragC& x : D) clear(x);
  if (p.dht.present()) each_state([&](float& x, int c, int column) { x = p.dht.load(n, hv, c, column); });

  for (int i = 0; loads && i < stages - 1; ++i) {
    if (i < chunks) fetch(chunks - 1 - i, i);
    cp_async_commit();
  }
  int stage = stages - 1;
  for (std::int64_t ic = chunks - 1; ic >= 0; --ic) {
    const int free = stage;
    stage = stage + 1 == stages ? 0 : stage + 1;
    if (loads) wait_for_stage(stages);
    sync_threads();
    if (loads) {
      if (ic - (stages - 1) >= 0) fetch(ic - (stages - 1), free);
      cp_async_commit();
    }
    if (!computes) continue;
    const Shared<T> sK = tile(stage, L::kK, L::kKey), sQ = tile(stage, L::kQ, L::kKey),
                    sA = tile(stage, L::kA, L::kKey), sM = tile(stage, L::kM, L::kSquare),
                    sV = tile(stage, L::kV, L::kValue) + v_own;
    constexpr int kCount = kScalars<KP, CHANNEL>;
    const Shared<float> scalars = shared<float>(stage * L::kStage + L::kS, kCount);
    const std::int64_t at = (slot + ic) * p.HV + hv;

    FragC x[4];  // [16, BT]: dE^T, then dVbar^T
    FLA_UNROLL
    for (FragC& y : x) clear(y);
    FLA_UNROLL
    for (int j = 0; j < KP / 16; ++j) {
      const FragA<T> a = to_a<T>(D[2 * j], D[2 * j + 1]);
      store_state_tile(w.adjoints, at, w.value_tiles, (v_begin + v_own) / 16, KP / 16, j, a);
      FLA_UNROLL
      for (int i = 0; i < 4; i += 2) {
        FragB<T> b0, b1;
        load_b(b0, b1, sK + (8 * i * L::kLdK + 16 * j), L::kLdK);
        mma(x[i], a, b0);
        mma(x[i + 1], a, b1);
      }
    }
    if constexpr (!CHANNEL) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Vec<float, 2> by = scalars.load_vec<2>(3 * kBT + 8 * i + frag_col(0));
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) x[i].x[f] *= by.x[f & 1];
      }
    }
    FragA<T> dO[2];
    FLA_UNROLL
    for (int m = 0; m < 2; ++m) load_a_trans(dO[m], sV + 16 * m * L::kLdV, L::kLdV);
    // c += a^T of a lower square
    const auto times_lower_transposed = [&](const FragA<T>(&a)[2], Shared<T> square) {
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        FLA_UNROLL
        for (int m = i; m < 2; ++m) {
          FragB<T> b0, b1;
          load_b_trans(b0, b1, square + (16 * m * L::kLdM + 16 * i), L::kLdM);
          mma(x[2 * i], a[m], b0);
          mma(x[2 * i + 1], a[m], b1);
        }
      }
    };
    times_lower_transposed(dO, sM + kBT);
    const FragA<T> dE[2] = {to_a<T>(x[0], x[1]), to_a<T>(x[2], x[3])};
    times_lower_transposed(dE, sM);

    sync_warp();
    const int rows = rows_of(ic);
    put_transposed(x, sV, L::kLdV);
    sync_warp();
    copy_rows_of_16(w.dvbar + at * (kBT * 16) * w.value_tiles + v_begin + v_own, 16 * w.value_tiles, sV, L::kLdV, kBT,
                    16);
    if (p.dv.present()) {
      FragC dv[4];
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Vec<float, 2> beta = scalars.load_vec<2>((CHANNEL ? 0 : kBT) + 8 * i + frag_col(0));
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) dv[i].x[f] = x[i].x[f] * beta.x[f & 1];
      }
      sync_warp();
      put_transposed(dv, sV, L::kLdV);
      sync_warp();
      copy_rows_of_16(p.dv.view.at<T>(s.row, s.begin + ic * kBT, hv, v_begin + v_own), p.dv.view.stride[1], sV, L::kLdV,
                      rows, v_count - v_own);
    }

    FLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      Vec<float, 2> by = {{1.0F, 1.0F}};
      if constexpr (!CHANNEL) {
        by = scalars.load_vec<2>(8 * i + frag_col(0));
        const Vec<float, 2> q = scalars.load_vec<2>(2 * kBT + 8 * i + frag_col(0));
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
    Vec<float, 2> decay = {};
    if constexpr (!CHANNEL) decay.x[0] = decay.x[1] = exp2_approx(scalars.load(5 * kBT - 1));
    FLA_UNROLL
    for (int j = 0; j < KP / 8; j += 2) {
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        if constexpr (CHANNEL) decay = scalars.load_vec<2>(kBT + 8 * (j + e) + frag_col(0));
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) D[j + e].x[f] *= decay.x[f & 1];
      }
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, sQ + (16 * m * L::kLdK + 8 * j), L::kLdK);
        mma(D[j], dO[m], b0);
        mma(D[j + 1], dO[m], b1);
        load_b_trans(b0, b1, sA + (16 * m * L::kLdK + 8 * j), L::kLdK);
        mma(D[j], dV[m], b0);
        mma(D[j + 1], dV[m], b1);
      }
    }
  }
  if (p.dh0.present()) each_state([&](float& x, int c, int column) { p.dh0.store(x, n, hv, c, column); });
}

// ---- host

template <typename T, int KP, bool CHANNEL>
Status launch_reverse(const DeltaArgs& a, const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w,
                      Stream stream) {
  Launch l{.name = "delta_reverse_kernel", .grid = {p.N * p.HV * plan.parts}};
  l.threads = static_cast<int>((plan.loaders ? 4 : 2) * plan.columns);
  if constexpr (kWideBlocks<T, KP>) {
    if (plan.columns == 64) {
      l.shared_bytes = static_cast<std::size_t>(ChunkLayout<KP, 64, CHANNEL>::bytes(plan.stages));
      return launch<delta_reverse_kernel<T, KP, 64, CHANNEL>>(l, stream, a, w, plan.stages);
    }
  }
  l.shared_bytes = static_cast<std::size_t>(ChunkLayout<KP, 32, CHANNEL>::bytes(plan.stages));
  return launch<delta_reverse_kernel<T, KP, 32, CHANNEL>>(l, stream, a, w, plan.stages);
}

template <typename T, bool CHANNEL>
Status launch_backward(const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w, Stream stream) {
  DeltaProblem forward = p;
  forward.o = forward.ht = forward.h = {};
  if (const Status s = launch_chunk<T>(forward, plan, w, stream); !s) return s;
  const DeltaArgs a = delta_args(p);
  const Status s = plan.width == 64 ? launch_reverse<T, 64, CHANNEL>(a, p, plan, w, stream)
                                    : launch_reverse<T, 128, CHANNEL>(a, p, plan, w, stream);
  if (!s) return s;
  return launch_gradient<T>(p, plan, w, stream);
}

template <typename T>
std::size_t delta_chunk_backward_workspace(const DeltaProblem& p, const DeltaPlan& plan) {
  DeltaChunkSpace<T> w;
  return carve_chunk_space<T>(p, plan, true, nullptr, w);
}

template <typename T>
Status delta_chunk_backward(const DeltaProblem& p, const DeltaPlan& plan, Stream stream,
                            std::span<std::byte> workspace) {
  DeltaChunkSpace<T> w;
  carve_chunk_space<T>(p, plan, true, workspace.data(), w);
  const Status s = p.gk ? launch_backward<T, true>(p, plan, w, stream) : launch_backward<T, false>(p, plan, w, stream);
  if (!s || (!p.dA_log && !p.ddt_bias)) return s;
  return delta_parameter_gradients(p, w.partials, delta_chunk_slots(p), stream);
}

}  // namespace fla::cuda
