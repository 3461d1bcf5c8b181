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

// ---- delta_gradient_kernel: a block per (slot, key head); products with the states on tensor cores into fp32 tiles
// [BT, KP], then a thread per key channel. A gate per channel leaves no pair of factors for two rows of one block of
// 16, so their decay is taken pair by pair; the block below the diagonal factors through row 15.

struct GradientLayout {
  int width, value_width, ldF, ldK, ldV;
  int S1, S2, S3, TQ, TK, Q, K, dO, E, dV, P, L, rows, channels, bytes;  // offsets

  FLA_HOST_DEVICE GradientLayout(int key_width, int values, bool group) {
    width = key_width;
    value_width = values;
    ldF = width + 4;
    ldK = width + 8;
    ldV = value_width + 8;
    int at = 0;
    const int tile = 4 * kBT * ldF;
    S1 = at;
    S2 = S1 + tile;
    S3 = S2 + tile;
    at = S3 + tile;
    TQ = group ? at : S1;
    TK = group ? at + tile : S3;
    at += group ? 2 * tile : 0;
    Q = at;
    K = Q + 2 * kBT * ldK;
    dO = K + 2 * kBT * ldK;
    E = dO + 2 * kBT * ldV;
    dV = E + 2 * kBT * ldV;
    P = dV + 2 * kBT * ldV;
    L = P + 4 * kBT * kLdL;
    rows = L + 4 * kBT * kLdL;
    channels = rows + 4 * 9 * kBT;
    bytes = channels + 4 * width + 4 * 8;
  }
};

inline constexpr int kGradientThreads = 128;

template <typename T, bool CHANNEL>
FLA_KERNEL(kGradientThreads, 1)
delta_gradient_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w, int width) {
  const int group = p.HV / p.H;
  const GradientLayout y(width, 16 * w.value_tiles, group > 1);
  constexpr int threads = kGradientThreads, warps = threads / 32;
  const int id = thread_id(), lane = lane_id();
  const int hk = block_x() % p.H, entries = 1 + (CHANNEL ? p.K : 1);
  const std::int64_t slot = block_x() / p.H;
  const Chunk c = find_chunk(p, slot);
  const bool parameters = p.dA_log.present() || p.ddt_bias.present();
  if (c.rows == 0) {
    for (int i = id; parameters && i < group * entries; i += threads) {
      w.partials[(slot * p.HV + hk * group) * entries + i] = 0.0F;
    }
    return;
  }
  const std::int64_t first = c.s.begin + c.t0;
  const auto floats = [](int at, int n) { return shared<float>(at, n); };
  const int tile = kBT * y.ldF;
  const Shared<float> S1 = floats(y.S1, tile), S2 = floats(y.S2, tile), S3 = floats(y.S3, tile),
                      TQ = floats(y.TQ, tile), TK = floats(y.TK, tile);
  const Shared<T> sQ = shared<T>(y.Q, kBT * y.ldK), sK = shared<T>(y.K, kBT * y.ldK),
                  sDO = shared<T>(y.dO, kBT * y.ldV), sE = shared<T>(y.E, kBT * y.ldV),
                  sDV = shared<T>(y.dV, kBT * y.ldV);
  const Shared<float> sP = floats(y.P, kBT * kLdL), sL = floats(y.L, kBT * kLdL);
  const Shared<float> rows = floats(y.rows, 9 * kBT);
  const Shared<float> sBeta = rows, sRk = rows + kBT, sRq = rows + 2 * kBT, sG = rows + 3 * kBT, dotQ = rows + 4 * kBT,
                      dotK = rows + 5 * kBT, dotA = rows + 6 * kBT, totalQ = rows + 7 * kBT, totalK = rows + 8 * kBT;
  const Shared<float> sEnd = floats(y.channels, width), sWarp = floats(y.channels + 4 * width, 8);

  // ---- q, k and their factors
  copy_rows(sQ, y.ldK, p.q.view.at<T>(c.s.row, first, hk), p.q.view.stride[1], width, c.rows, p.K, id, threads);
  copy_rows(sK, y.ldK, p.k.view.at<T>(c.s.row, first, hk), p.k.view.stride[1], width, c.rows, p.K, id, threads);
  sync_threads();
  for (int r = warp_id(); r < kBT; r += warps) {
    float qq = 0.0F, kk = 0.0F;
    for (int i = lane; i < width; i += 32) {
      const float q = to_f32(sQ.load(r * y.ldK + i)), k = to_f32(sK.load(r * y.ldK + i));
      qq += q * q;
      kk += k * k;
    }
    qq = warp_sum(qq);
    kk = warp_sum(kk);
    if (lane == 0) {
      sRq.store(r, p.normalize_q ? inverse_norm(qq) : 1.0F);
      sRk.store(r, p.normalize_k ? inverse_norm(kk) : 1.0F);
      totalQ.store(r, 0.0F);
      totalK.store(r, 0.0F);
    }
  }

  for (int j_group = 0; j_group < group; ++j_group) {
    const int hv = hk * group + j_group;
    const std::int64_t at = slot * p.HV + hv;
    sync_threads();
    const std::int64_t kept = at * (kBT * y.value_width);
    copy_rows(sDO, y.ldV, p.do_.view.at<T>(c.s.row, first, hv), p.do_.view.stride[1], y.value_width, c.rows, p.V, id,
              threads);
    copy_rows(sE, y.ldV, w.e + kept, y.value_width, y.value_width, kBT, y.value_width, id, threads);
    copy_rows(sDV, y.ldV, w.dvbar + kept, y.value_width, y.value_width, kBT, y.value_width, id, threads);
    if (id < kBT) {
      sBeta.store(id, id < c.rows ? load_beta(p, c.s.row, first + id, hv, 0) : 0.0F);
      if constexpr (!CHANNEL) sG.store(id, w.scalars[at * (5 * kBT) + 4 * kBT + id]);
    }
    sync_threads();

    // ---- scale dP and dL; a gate per head puts its decay on them
    for (int task = warp_id(); task < 6; task += warps) {
      const bool of_p = task < 3;
      const int block = task % 3, m = block == 0 ? 0 : 16, n = block == 2 ? 16 : 0;
      const Shared<T> left = of_p ? sDO : sDV;
      FragC x[2];
      clear(x[0]);
      clear(x[1]);
      for (int v = 0; v < y.value_width; v += 16) {
        FragA<T> a;
        FragB<T> b0, b1;
        load_a(a, left + (m * y.ldV + v), y.ldV);
        load_b(b0, b1, sE + (n * y.ldV + v), y.ldV);
        mma(x[0], a, b0);
        mma(x[1], a, b1);
      }
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        FLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int r = m + frag_row(i), col = n + 8 * e + frag_col(i);
          const bool inside = of_p ? col <= r : col < r;
          float decay = 1.0F;
          if constexpr (!CHANNEL) decay = exp2_approx(col < r ? sG.load(r) - sG.load(col) : 0.0F);
          (of_p ? sP : sL).store(r * kLdL + col, inside ? (of_p ? p.scale : -1.0F) * decay * x[e].x[i] : 0.0F);
        }
      }
    }

    // ---- S_0 dO, S_0 dVbar, D E as [token, channel]; rowsum(S_0 o D)
    for (int j = warp_id(); j < width / 16; j += warps) {
      FragC x1[4], x2[4], x3[4];
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        clear(x1[i]);
        clear(x2[i]);
        clear(x3[i]);
      }
      float sums[4] = {};  // channels 2t, 2t + 1, 2t + 8, 2t + 9
      for (int i_v = 0; i_v < w.value_tiles; ++i_v) {
        const Vec<std::uint32_t, 4> s = load_state_tile(w.states, at, w.value_tiles, i_v, width / 16, j);
        const Vec<std::uint32_t, 4> d = load_state_tile(w.adjoints, at, w.value_tiles, i_v, width / 16, j);
        FLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          sums[i / 2 * 2] += low_half<T>(s.x[i]) * low_half<T>(d.x[i]);
          sums[i / 2 * 2 + 1] += high_half<T>(s.x[i]) * high_half<T>(d.x[i]);
        }
        const FragA<T> state = {
            {transpose_8x8(s.x[0]), transpose_8x8(s.x[2]), transpose_8x8(s.x[1]), transpose_8x8(s.x[3])}};
        const FragA<T> adjoint = {
            {transpose_8x8(d.x[0]), transpose_8x8(d.x[2]), transpose_8x8(d.x[1]), transpose_8x8(d.x[3])}};
        FLA_UNROLL
        for (int i = 0; i < 4; i += 2) {
          const int from = 8 * i * y.ldV + 16 * i_v;
          FragB<T> b0, b1;
          load_b(b0, b1, sDO + from, y.ldV);
          mma(x1[i], state, b0);
          mma(x1[i + 1], state, b1);
          load_b(b0, b1, sDV + from, y.ldV);
          mma(x2[i], state, b0);
          mma(x2[i + 1], state, b1);
          load_b(b0, b1, sE + from, y.ldV);
          mma(x3[i], adjoint, b0);
          mma(x3[i + 1], adjoint, b1);
        }
      }
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) {
          const int to = (8 * i + frag_col(f)) * y.ldF + 16 * j + frag_row(f);
          S1.store(to, x1[i].x[f]);
          S2.store(to, x2[i].x[f]);
          S3.store(to, x3[i].x[f]);
        }
      }
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        FLA_UNROLL
        for (int by = 4; by < 32; by *= 2) sums[i] += shuffle_xor(sums[i], by);
        if (lane < 4) sEnd.store(16 * j + 2 * lane + (i & 1) + 8 * (i / 2), sums[i]);
      }
    }
    sync_threads();

    // ---- (7), (8) and u, a thread per channel; S1, S2, S3 become dq, a, u
    const float multiplier = gate_multiplier(p, hv), bias = CHANNEL && id < p.K ? gate_bias(p, hv, id) : 0.0F;
    if (id < width) {
      float G[kBT], u[kBT], k[kBT];
      if constexpr (CHANNEL) {
        float x[kBT] = {};  // raw gates
        if (id < p.K) load_gate_column(p.gk, c.s.row, first, hv, id, c.rows, x);
        float sum = 0.0F;
        FLA_UNROLL
        for (int i = 0; i < kBT; ++i) {
          if (id < p.K && i < c.rows) sum += log2_gate(p, x[i], bias, multiplier);
          G[i] = sum;
        }
      } else {
        FLA_UNROLL
        for (int i = 0; i < kBT; ++i) G[i] = sG.load(i);
      }
      float tail = exp2_approx(G[kBT - 1]) * sEnd.load(id);
      FLA_UNROLL
      for (int i = 0; i < kBT; ++i) {
        k[i] = to_f32(sK.load(i * y.ldK + id)) * sRk.load(i);
        u[i] = exp2_approx(G[kBT - 1] - G[i]) * S3.load(i * y.ldF + id);
        tail += k[i] * u[i];
      }
      sEnd.store(id, tail);
      float below[16] = {};  // of u, for rows 16 and later, without 2^{G_15 - G_j}
      FLA_UNROLL
      for (int i = 0; i < kBT; ++i) {
        const float q = to_f32(sQ.load(i * y.ldK + id)) * sRq.load(i), bk = sBeta.load(i) * k[i];
        const float into = exp2_approx(G[i]), diagonal = sP.load(i * kLdL + i);
        float dq = p.scale * into * S1.load(i * y.ldF + id) + diagonal * k[i];
        float a = -into * S2.load(i * y.ldF + id);
        u[i] += diagonal * q;
        const int base = CHANNEL ? i / 16 * 16 : 0;
        FLA_UNROLL
        for (int j = base; j < i; ++j) {
          float by = 1.0F;
          if constexpr (CHANNEL) by = exp2_approx(G[i] - G[j]);
          const float dP = sP.load(i * kLdL + j) * by, dL = sL.load(i * kLdL + j) * by;
          dq += dP * k[j];
          a += dL * k[j];
          u[j] += dP * q + dL * bk;
        }
        if constexpr (CHANNEL) {
          if (i >= 16) {
            const float by = exp2_approx(G[i] - G[15]);
            float q_sum = 0.0F, a_sum = 0.0F;
            FLA_UNROLL
            for (int j = 0; j < 16; ++j) {
              const float dP = sP.load(i * kLdL + j), dL = sL.load(i * kLdL + j);
              q_sum += dP * k[j];
              a_sum += dL * k[j];
              below[j] += by * (dP * q + dL * bk);
            }
            dq += by * q_sum;
            a += by * a_sum;
          }
          if (i == 15) {  // from here on the first block's keys count as row 15 sees them
            FLA_UNROLL
            for (int j = 0; j < 16; ++j) k[j] *= exp2_approx(G[15] - G[j]);
          }
        }
        S1.store(i * y.ldF + id, dq);
        S2.store(i * y.ldF + id, a);
      }
      FLA_UNROLL
      for (int i = 0; i < kBT; ++i) {
        if (CHANNEL && i < 16) u[i] += below[i & 15] * exp2_approx(G[15] - G[i]);
        S3.store(i * y.ldF + id, u[i]);
      }
    }
    sync_threads();

    // ---- sums over channels: <q, dq>, <k, u>, <a, k>, and <dVbar, v> of (9)
    for (int r = warp_id(); r < kBT; r += warps) {
      float q_sum = 0.0F, k_sum = 0.0F, a_sum = 0.0F, v_sum = 0.0F;
      for (int i = lane; i < width; i += 32) {
        const float k = to_f32(sK.load(r * y.ldK + i)) * sRk.load(r);
        q_sum += to_f32(sQ.load(r * y.ldK + i)) * sRq.load(r) * S1.load(r * y.ldF + i);
        k_sum += k * S3.load(r * y.ldF + i);
        a_sum += k * S2.load(r * y.ldF + i);
      }
      if (p.dbeta.present() && r < c.rows) {
        const T* v = p.v.view.at<T>(c.s.row, first + r, hv);
        for (int i = lane; i < p.V; i += 32) v_sum += to_f32(sDV.load(r * y.ldV + i)) * to_f32(v[i]);
      }
      q_sum = warp_sum(q_sum);
      k_sum = warp_sum(k_sum);
      a_sum = warp_sum(a_sum);
      v_sum = warp_sum(v_sum);
      if (lane == 0) {
        dotQ.store(r, q_sum);
        dotK.store(r, k_sum);
        dotA.store(r, a_sum);
        totalQ[r] += q_sum;
        totalK[r] += k_sum + sBeta.load(r) * a_sum;
        if (p.dbeta.present() && r < c.rows) {
          float d = a_sum + v_sum;
          if (p.beta_sigmoid > 0.0F) d *= sBeta.load(r) * (1.0F - sBeta.load(r) / p.beta_sigmoid);
          p.dbeta.store(d, c.s.row, first + r, hv);
        }
      }
    }
    sync_threads();

    // ---- the gate's gradient, and the sums over the group
    float* partials = w.partials + at * entries;
    if (id < width) {
      const float tail = sEnd.load(id);
      float sum = tail, sum_a = 0.0F, sum_bias = 0.0F;
      for (int i = kBT - 1; i >= 0; --i) {
        const int from = i * y.ldF + id;
        const float dq = S1.load(from), ba = sBeta.load(i) * S2.load(from), u = S3.load(from);
        if constexpr (CHANNEL) {
          const float k = to_f32(sK.load(i * y.ldK + id)) * sRk.load(i);
          sum += to_f32(sQ.load(i * y.ldK + id)) * sRq.load(i) * dq + k * (ba - u);
          if (i < c.rows && id < p.K) {
            const GateSlopes s = gate_slopes(p, p.gk.load(c.s.row, first + i, hv, id), bias, multiplier);
            if (p.dg.present()) p.dg.store(sum * s.raw, c.s.row, first + i, hv, id);
            sum_a += sum * s.A_log;
            sum_bias += sum * s.raw;
          }
        }
        const bool add = j_group > 0;
        TQ.store(from, add ? TQ.load(from) + dq : dq);
        TK.store(from, (add ? TK.load(from) : 0.0F) + (u + ba));
      }
      if constexpr (CHANNEL) {
        if (parameters && id < p.K) partials[1 + id] = sum_bias;
        sum_a = warp_sum(sum_a);
        if (lane == 0) sWarp.store(warp_id(), sum_a);
      }
    }
    if constexpr (CHANNEL) {
      sync_threads();
      if (id == 0 && parameters) {
        float sum = 0.0F;
        for (int i = 0; i < width / 32; ++i) sum += sWarp.load(i);
        partials[0] = sum;
      }
    } else if (warp_id() == 0 && p.g.present()) {
      float tail = 0.0F;
      for (int i = lane; i < width; i += 32) tail += sEnd.load(i);
      tail = warp_sum(tail);
      float sum = dotQ.load(lane) - dotK.load(lane) + sBeta.load(lane) * dotA.load(lane);
      FLA_UNROLL
      for (int by = 1; by < 32; by *= 2) {
        const float after = shuffle_down(sum, by);
        if (lane + by < 32) sum += after;
      }
      sum += tail;
      float sum_a = 0.0F, sum_bias = 0.0F;
      if (lane < c.rows) {
        const float raw = p.g.load(c.s.row, first + lane, hv);
        const GateSlopes s = gate_slopes(p, raw, gate_bias(p, hv, 0), multiplier);
        if (p.dg.present()) p.dg.store(sum * s.raw, c.s.row, first + lane, hv);
        sum_a = sum * s.A_log;
        sum_bias = sum * s.raw;
      }
      sum_a = warp_sum(sum_a);
      sum_bias = warp_sum(sum_bias);
      if (lane == 0 && parameters) {
        partials[0] = sum_a;
        partials[1] = sum_bias;
      }
    }
  }
  sync_threads();

  // ---- through the normalisation
  for (int i = id; i < kBT * width / 8; i += threads) {
    const int r = i / (width / 8), col = i % (width / 8) * 8;
    if (r >= c.rows || col >= p.K) continue;
    Vec<T, 8> dq, dk;
    const float rq = sRq.load(r), rk = sRk.load(r);
    const float q_by = p.normalize_q ? rq * totalQ.load(r) : 0.0F, k_by = p.normalize_k ? rk * totalK.load(r) : 0.0F;
    FLA_UNROLL
    for (int e = 0; e < 8; ++e) {
      dq.x[e] = from_f32<T>(rq * (TQ.load(r * y.ldF + col + e) - to_f32(sQ.load(r * y.ldK + col + e)) * q_by));
      dk.x[e] = from_f32<T>(rk * (TK.load(r * y.ldF + col + e) - to_f32(sK.load(r * y.ldK + col + e)) * k_by));
    }
    if (p.dq.present()) store_global<8>(p.dq.view.at<T>(c.s.row, first + r, hk, col), dq);
    if (p.dk.present()) store_global<8>(p.dk.view.at<T>(c.s.row, first + r, hk, col), dk);
  }
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
  const GradientLayout y(static_cast<int>(plan.width), 16 * w.value_tiles, p.HV > p.H);
  return launch<delta_gradient_kernel<T, CHANNEL>>({.name = "delta_gradient_kernel",
                                                    .grid = {delta_chunk_slots(p) * p.H},
                                                    .threads = kGradientThreads,
                                                    .shared_bytes = static_cast<std::size_t>(y.bytes)},
                                                   stream, a, w, static_cast<int>(plan.width));
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
