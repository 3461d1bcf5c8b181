// Gradients of a chunk of 64 tokens with one gate per head and token, from the state S_0 before the chunk and the
// adjoint dS_N after it. With G the running sum of the gates and, for j <= i, P_ij = 2^(G_i - G_j),
//   A = scale tril(q k^T o P)    B = scale tril(do v^T o P)
//   dq = scale 2^G (do S_0^T) + B k    dk = 2^(G_N - G) (v dS_N^T) + B^T q    dv = 2^(G_N - G) (k dS_N) + A^T do
// and of the gate that acts before token t, where x and y are the products of q and k with the first terms above,
//   dg_t = 2^G_N <S_0, dS_N> + sum_{i >= t} x_i + sum_{j < t} y_j + sum_{j < t <= i} A_ij <do_i, v_j>
// none of which is a difference of what was rounded. A warp has 16 channels of each gradient.
#pragma once

#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/gradient.cuh"

namespace fla::cuda {

template <int D>
struct HeadGradientTiles {
  static constexpr int kBT = kStateChunk, kWarps = D / 16, kThreads = 32 * kWarps;
  static constexpr int kLd = D + 8, kLdP = kBT + 8, kTile = kBT * kLd * 2, kProducts = kBT * kLdP * 2;
  static constexpr int kQ = 0, kKey = kTile, kV = 2 * kTile, kUp = 3 * kTile, kA = 4 * kTile, kB = kA + kProducts;
  // of tokens: G, scale 2^G, 2^(G_N - G)
  static constexpr int kGates = kB + kProducts;
  // x and y by warp, <S_0, dS_N> by warp, sums of A o B along its rows and columns by tiles
  static constexpr int kX = kGates + 3 * kBT * 4, kY = kX + kWarps * kBT * 4, kS = kY + kWarps * kBT * 4,
                       kRows = kS + kWarps * 4, kColumns = kRows + kBT / 16 * kBT * 4,
                       kBytes = kColumns + kBT / 16 * kBT * 4;
};

// Sums over the warp's 16 channels of o times x (x from shared memory), for each token.
template <typename T>
FLA_DEVICE void channel_products(const FragC (&o)[4][2], Shared<T> x, int ld, Shared<float> to) {
  FLA_UNROLL
  for (int m = 0; m < 4; ++m) {
    FLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int token = 16 * m + 8 * half + lane_id() / 4;
      float sum = 0.0F;
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const Vec<T, 2> w = x.template load_vec<2>(token * ld + 8 * n + frag_col(0));
        sum += o[m][n].x[2 * half] * to_f32(w.x[0]) + o[m][n].x[2 * half + 1] * to_f32(w.x[1]);
      }
      sum = warp_sum<4>(sum);
      if (lane_id() % 4 == 0) to.store(token, sum);
    }
  }
}

template <typename T, int D>
FLA_KERNEL((HeadGradientTiles<D>::kThreads), 2)
diag_head_gradient_kernel(const GradientParams x) {
  using Tiles = HeadGradientTiles<D>;
  constexpr int BT = Tiles::kBT, kLd = Tiles::kLd, kLdP = Tiles::kLdP, kTiles = BT / 16, kWarps = Tiles::kWarps;
  const DiagParams& p = x.p;
  const DiagTask a = chunk_task(p);
  if (a.from >= a.length) return;
  const int lane = lane_id(), warp = warp_id(), channel = 16 * warp;
  const std::int64_t chunk = a.from / BT;
  const Shared<T> q = shared<T>(Tiles::kQ, BT * kLd), k = shared<T>(Tiles::kKey, BT * kLd),
                  v = shared<T>(Tiles::kV, BT * kLd), up = shared<T>(Tiles::kUp, BT * kLd),
                  A = shared<T>(Tiles::kA, BT * kLdP), B = shared<T>(Tiles::kB, BT * kLdP);
  const Shared<float> G = shared<float>(Tiles::kGates, 3 * BT);

  load_chunk<T, D>(x, a, q, k, v, up, kLd);
  cp_async_commit();
  const auto tiles = [&](const std::uint32_t* kept, int row, int value) {
    return load_global<4>(state_tiles<D>(kept, p, a, chunk) + (row * (D / 16) + value) * 128 + 4 * lane);
  };
  Vec<std::uint32_t, 4> before[D / 16];
  FLA_UNROLL
  for (int i = 0; i < D / 16; ++i) before[i] = tiles(x.before, warp, i);
  // The adjoint was kept before the gate of the token behind the chunk.
  if (warp == 0) {
    HeadGates<BT> gates(p, a);
    gates.ask(a.from);
    const float next = a.to < a.length ? gate_before(p, a, a.to, 0, 0) : 0.0F;
    float g[BT / 32], sum;
    gates.take(g, sum);
    FLA_UNROLL
    for (int i = 0; i < BT / 32; ++i) {
      G.store(32 * i + lane, g[i]);
      G.store(BT + 32 * i + lane, p.scale * exp2_approx(g[i]));
      G.store(2 * BT + 32 * i + lane, exp2_approx(sum - g[i] + next));
    }
  }
  cp_async_wait<0>();
  sync_threads();

  const Shared<float> rows = shared<float>(Tiles::kRows, kTiles * BT),
                      columns = shared<float>(Tiles::kColumns, kTiles * BT);
  for (int job = warp; job < kTiles * (kTiles + 1) / 2; job += kWarps) {
    const int i = job < 1 ? 0 : job < 3 ? 1 : job < 6 ? 2 : 3, c = job - i * (i + 1) / 2;
    FragC qk[2], dv[2];
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      clear(qk[n]);
      clear(dv[n]);
    }
    FLA_UNROLL
    for (int kk = 0; kk < D / 16; ++kk) {
      FragA<T> query, upstream;
      FragB<T> b0, b1;
      load_a(query, q + (16 * i * kLd + 16 * kk), kLd);
      load_b(b0, b1, k + (16 * c * kLd + 16 * kk), kLd);
      mma(qk[0], query, b0);
      mma(qk[1], query, b1);
      load_a(upstream, up + (16 * i * kLd + 16 * kk), kLd);
      load_b(b0, b1, v + (16 * c * kLd + 16 * kk), kLd);
      mma(dv[0], upstream, b0);
      mma(dv[1], upstream, b1);
    }
    const int query = 16 * i + lane / 4;
    const float to[2] = {G.load(query), G.load(query + 8)};
    float row_sum[2] = {}, column_sum[2][2] = {};
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      const int key = 16 * c + 8 * n + frag_col(0);
      const Vec<float, 2> from = G.template load_vec<2>(key);
      FLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        // Cleared by their bits, whatever a later token holds.
        const int behind = query + 8 * half - key;
        const std::uint32_t earlier = behind > 0 ? 0xFFFFFFFFU : behind == 0 ? 0xFFFFU : 0U;
        const float decay[2] = {p.scale * exp2_approx(to[half] - from.x[0]),
                                p.scale * exp2_approx(to[half] - from.x[1])};
        float first[2], second[2];
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          first[e] = decay[e] * qk[n].x[2 * half + e];
          second[e] = decay[e] * dv[n].x[2 * half + e];
          const float both = behind > e ? first[e] * dv[n].x[2 * half + e] : 0.0F;
          row_sum[half] += both;
          column_sum[n][e] += both;
        }
        const int at = ((query + 8 * half) * kLdP + key) / 2;
        A.template as<std::uint32_t>().store(at, pack2<T>(first[0], first[1]) & earlier);
        B.template as<std::uint32_t>().store(at, pack2<T>(second[0], second[1]) & earlier);
      }
    }
    if (!x.dg.present()) continue;
    FLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float all = warp_sum<4>(row_sum[half]);
      if (lane % 4 == 0) rows.store(c * BT + query + 8 * half, all);
    }
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        float all = column_sum[n][e];
        FLA_UNROLL
        for (int by = 4; by < 32; by *= 2) all += shuffle_xor(all, by);
        if (lane < 4) columns.store(i * BT + 16 * c + 8 * n + frag_col(e), all);
      }
    }
  }
  sync_threads();

  FragC o[kTiles][2];
  const auto scale_rows = [&](int from) {
    FLA_UNROLL
    for (int m = 0; m < kTiles; ++m) {
      const float by[2] = {G.load(from + 16 * m + lane / 4), G.load(from + 16 * m + lane / 4 + 8)};
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) o[m][n].x[e] *= by[e / 2];
      }
    }
  };
  const auto clear_rows = [&] {
    FLA_UNROLL
    for (int m = 0; m < kTiles; ++m) {
      clear(o[m][0]);
      clear(o[m][1]);
    }
  };
  if (x.dq.present() || x.dg.present()) {
    clear_rows();
    times_state<T, D>(o, up, kLd, before);
    scale_rows(BT);
    if (x.dg.present()) channel_products<T>(o, q + channel, kLd, shared<float>(Tiles::kX + warp * BT * 4, BT));
    FLA_UNROLL
    for (int c = 0; c < kTiles; ++c) {
      FragB<T> b0, b1;
      load_b_trans(b0, b1, k + (16 * c * kLd + channel), kLd);
      FLA_UNROLL
      for (int m = c; m < kTiles; ++m) {
        FragA<T> w;
        load_a(w, B + (16 * m * kLdP + 16 * c), kLdP);
        mma(o[m][0], w, b0);
        mma(o[m][1], w, b1);
      }
    }
    store_gradient(p, a, x.dq, x.vector_out, channel, p.K, o);
  }
  Vec<std::uint32_t, 4> after[D / 16];
  if (x.dk.present() || x.dg.present()) {
    FLA_UNROLL
    for (int i = 0; i < D / 16; ++i) after[i] = tiles(x.after, warp, i);
    if (x.dg.present()) {
      float sum = 0.0F;
      FLA_UNROLL
      for (int i = 0; i < D / 16; ++i) {
        FLA_UNROLL
        for (int w = 0; w < 4; ++w) sum += word_product<T>(before[i].x[w], after[i].x[w]);
      }
      sum = warp_sum(sum);
      if (lane == 0) shared<float>(Tiles::kS, kWarps).store(warp, sum);
    }
    clear_rows();
    times_state<T, D>(o, v, kLd, after);
    scale_rows(2 * BT);
    if (x.dg.present()) channel_products<T>(o, k + channel, kLd, shared<float>(Tiles::kY + warp * BT * 4, BT));
    add_later<T>(o, B, kLdP, q + channel, kLd);
    store_gradient(p, a, x.dk, x.vector_out, channel, p.K, o);
  }
  if (x.dv.present()) {
    FLA_UNROLL
    for (int i = 0; i < D / 16; ++i) {
      const Vec<std::uint32_t, 4> w = tiles(x.after, i, warp);
      after[i] = {{transpose_8x8(w.x[0]), transpose_8x8(w.x[2]), transpose_8x8(w.x[1]), transpose_8x8(w.x[3])}};
    }
    clear_rows();
    times_state<T, D>(o, k, kLd, after);
    scale_rows(2 * BT);
    add_later<T>(o, A, kLdP, up + channel, kLd);
    store_gradient(p, a, x.dv, x.vector_out, channel, p.V, o);
  }

  if (!x.dg.present()) return;
  sync_threads();
  if (warp != 0) return;
  // A lane has two tokens beside each other.
  const int t = 2 * lane, tile = t / 16;
  float later[2] = {}, earlier[2] = {};
  FLA_UNROLL
  for (int e = 0; e < 2; ++e) {
    FLA_UNROLL
    for (int w = 0; w < kWarps; ++w) {
      later[e] += shared<float>(Tiles::kX + w * BT * 4, BT).load(t + e);
      earlier[e] += shared<float>(Tiles::kY + w * BT * 4, BT).load(t + e);
    }
    FLA_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      if (i <= tile) later[e] += rows.load(i * BT + t + e);
      if (i >= tile) later[e] -= columns.load(i * BT + t + e);
    }
  }
  float suffix = later[0] + later[1];
  FLA_UNROLL
  for (int by = 1; by < 32; by *= 2) {
    const float behind = shuffle_down(suffix, by);
    if (lane + by < 32) suffix += behind;
  }
  const float prefix = warp_prefix_sum(earlier[0] + earlier[1]) - earlier[1] - earlier[0];
  float both = 0.0F;
  FLA_UNROLL
  for (int w = 0; w < kWarps; ++w) both += shared<float>(Tiles::kS, kWarps).load(w);
  // 2^(G_N + the next gate)
  both *= exp2_approx(G.load(0)) * G.load(2 * BT);
  const auto& s = x.dg.at.stride;
  FLA_UNROLL
  for (int e = 0; e < 2; ++e) {
    const std::int64_t token = a.from + t + e;
    if (token >= a.to) continue;
    const float sum = both + suffix - (e == 1 ? later[0] : 0.0F) + prefix + (e == 1 ? earlier[0] : 0.0F);
    store_any(x.dg.at.data, x.dg.type, a.row * s[0] + a.token(p, token) * s[1] + a.h * s[2], sum);
  }
}

template <typename T>
Status launch_diag_head_gradient(const GradientParams& x, const DiagPlan& plan, Stream stream) {
  if (plan.key == 64)
    return launch_by_chunk<diag_head_gradient_kernel<T, 64>, HeadGradientTiles<64>>("diag_head_gradient", x, stream);
  return launch_by_chunk<diag_head_gradient_kernel<T, 128>, HeadGradientTiles<128>>("diag_head_gradient", x, stream);
}

}  // namespace fla::cuda
