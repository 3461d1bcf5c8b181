// The tensor-core forward of the delta rule, chunks of BT = 32 tokens; alpha = beta e^g o k, decays in base 2.
//   L_ij = beta_i sum_c k_ic k_jc 2^{G_ic - G_jc} (j < i)    P_ij = scale sum_c q_ic k_jc 2^{G_ic - G_jc} (j <= i) (1)
//   X = beta v - beta (k o 2^G) S_0,  E = (I + L)^{-1} X (2) O = scale (q o 2^G) S_0 + P E,    S_C = 2^{G_C} o S_0 + (k
//   o 2^{G_C - G})^T E                                    (3)
// The prologue kernels are parallel over chunks and form what does not depend on the state: (I + L)^{-1} - I and P as
// 16-bit tiles, the decays, and for a gate per channel the decayed q and k. The main kernel walks a sequence.
// numerics  sums, gate sums, the triangular inverse and the state are fp32; operands of products have 16 bits; E starts
//           from X in fp32, so that only the correction (I + L)^{-1} - I is rounded
// exponents are differences of gate sums with the later row first, never positive. A step's gate is cut at 2^-160,
// which
//           is 0 like everything below, so that one strong gate does not cost later differences their digits
// causality an element of row i is a function of rows <= i only, in one order of sums
#pragma once

#include "fla/ops/common/delta_cuda_chunk.cuh"

namespace fla::cuda {

// (I + L)^{-1} - I of a strictly lower L by substitution in fp32: lane j of one warp finds column j.
template <typename T>
FLA_DEVICE void invert_unit_lower(Shared<float> L, T* inverse) {
  const int lane = lane_id();
  float x[kBT];
  FLA_UNROLL
  for (int i = 0; i < kBT; ++i) {
    float sum[4] = {};
    FLA_UNROLL
    for (int m = 0; m < i; m += 4) {
      const Vec<float, 4> l = L.load_vec<4>(i * kLdL + m);
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (m + e < i) sum[e] += l.x[e] * x[m + e];
      }
    }
    const float below = -((sum[0] + sum[1]) + (sum[2] + sum[3]));
    x[i] = lane == i ? 1.0F : below;
    inverse[i * 2 * kBT + lane] = from_f32<T>(lane == i ? 0.0F : below);
  }
}

// ---- no gate or one per head: a warp serves a chunk of a key head and its value heads. Nothing but L goes through
// shared memory: the sum over channels may take them in any order, so a lane's 16 bytes of a row serve as they are.

inline constexpr int kHeadPrologueWarps = 4, kHeadPrologueFloats = 4 * kBT + kBT * kLdL;

template <typename T, int KP>
FLA_KERNEL(32 * kHeadPrologueWarps, 3)
delta_head_prologue_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w, std::int64_t items) {
  const std::int64_t item = static_cast<std::int64_t>(block_x()) * kHeadPrologueWarps + warp_id();
  if (item >= items) return;
  const int hk = static_cast<int>(item % p.H), group = p.HV / p.H;
  const std::int64_t slot = item / p.H;
  const Chunk c = find_chunk(p, slot);
  if (c.rows == 0) return;
  const Shared<float> own = shared<float>(warp_id() * kHeadPrologueFloats * 4, kHeadPrologueFloats);
  const Shared<float> sRk = own, sRq = own + kBT, sG = own + 2 * kBT, sBeta = own + 3 * kBT, sL = own + 4 * kBT;
  const int g = lane_id() / 4, t = lane_id() % 4;

  // Tiles (m, n) of 16 x 8: (0, 0), (0, 1), (1, 0) to (1, 3).
  FragC kk[6], qk[6];
  FLA_UNROLL
  for (int i = 0; i < 6; ++i) {
    clear(kk[i]);
    clear(qk[i]);
  }
  float k_squares[4] = {}, q_squares[4] = {};
  const std::int64_t first = c.s.begin + c.t0;
  const T* gQ = p.q.view.at<T>(c.s.row, first, hk);
  const T* gK = p.k.view.at<T>(c.s.row, first, hk);
  FLA_UNROLL
  for (int c0 = 0; c0 < KP; c0 += 32) {
    Vec<std::uint32_t, 4> kw[4], qw[4];
    FLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * i + g;
      kw[i] = qw[i] = {};
      if (row < c.rows && c0 + 8 * t < p.K) {
        kw[i] = load_global<4>(reinterpret_cast<const std::uint32_t*>(gK + (row * p.k.view.stride[1] + c0 + 8 * t)));
        qw[i] = load_global<4>(reinterpret_cast<const std::uint32_t*>(gQ + (row * p.q.view.stride[1] + c0 + 8 * t)));
      }
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float k0 = low_half<T>(kw[i].x[e]), k1 = high_half<T>(kw[i].x[e]);
        const float q0 = low_half<T>(qw[i].x[e]), q1 = high_half<T>(qw[i].x[e]);
        k_squares[i] += k0 * k0 + k1 * k1;
        q_squares[i] += q0 * q0 + q1 * q1;
      }
    }
    FLA_UNROLL
    for (int e = 0; e < 4; e += 2) {
      FragA<T> ka[2], qa[2];
      FragB<T> kb[4];
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        ka[m] = {{kw[2 * m].x[e], kw[2 * m + 1].x[e], kw[2 * m].x[e + 1], kw[2 * m + 1].x[e + 1]}};
        qa[m] = {{qw[2 * m].x[e], qw[2 * m + 1].x[e], qw[2 * m].x[e + 1], qw[2 * m + 1].x[e + 1]}};
      }
      FLA_UNROLL
      for (int n = 0; n < 4; ++n) kb[n] = {{kw[n].x[e], kw[n].x[e + 1]}};
      FLA_UNROLL
      for (int i = 0; i < 6; ++i) {
        const int m = i < 2 ? 0 : 1, n = i < 2 ? i : i - 2;
        mma(kk[i], ka[m], kb[n]);
        mma(qk[i], qa[m], kb[n]);
      }
    }
  }
  FLA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float rk = inverse_norm(warp_sum<4>(k_squares[i])), rq = inverse_norm(warp_sum<4>(q_squares[i]));
    if (t == 0) {
      sRk.store(8 * i + g, p.normalize_k ? rk : 1.0F);
      sRq.store(8 * i + g, p.normalize_q ? rq : 1.0F);
    }
  }

  for (int j = 0; j < group; ++j) {
    const int hv = hk * group + j, row = lane_id();
    const std::int64_t at = slot * p.HV + hv;
    float gate = 0.0F, beta = 0.0F;
    if (row < c.rows) {
      if (p.g.present()) {
        gate = log2_gate(p, p.g.load(c.s.row, first + row, hv), gate_bias(p, hv, 0), gate_multiplier(p, hv));
      }
      beta = load_beta(p, c.s.row, first + row, hv, 0);
    }
    const float G = warp_prefix_sum(gate), end = shuffle(G, 31);
    sync_warp();
    sG.store(row, G);
    sBeta.store(row, beta);
    sync_warp();
    float* scalars = w.scalars + at * (5 * kBT);
    const float decay = exp2_approx(G), rk = sRk.load(row);
    scalars[row] = beta * decay * rk;
    scalars[kBT + row] = beta;
    scalars[2 * kBT + row] = p.scale * decay * sRq.load(row);
    scalars[3 * kBT + row] = rk * exp2_approx(end - G);
    scalars[4 * kBT + row] = G;

    FLA_UNROLL
    for (int i = 0; i < 6; ++i) {
      const int m = i < 2 ? 0 : 16, n = 8 * (i < 2 ? i : i - 2);
      FLA_UNROLL
      for (int e = 0; e < 4; e += 2) {
        const int r = m + frag_row(e);
        const float rG = sG.load(r), by_k = sBeta.load(r) * sRk.load(r), by_q = p.scale * sRq.load(r);
        Vec<float, 2> l;
        Vec<T, 2> score;
        FLA_UNROLL
        for (int f = 0; f < 2; ++f) {
          const int col = n + frag_col(f);
          const float x = rG - sG.load(col), d = sRk.load(col) * exp2_approx(col < r ? x : 0.0F);
          l.x[f] = col < r ? kk[i].x[e + f] * by_k * d : 0.0F;
          score.x[f] = from_f32<T>(col <= r ? qk[i].x[e + f] * by_q * d : 0.0F);
        }
        sL.store_vec<2>(r * kLdL + n + frag_col(0), l);
        store_global<2>(w.squares + (at * (2 * kBT * kBT) + r * 2 * kBT + kBT + n + frag_col(0)), score);
      }
    }
    sync_warp();
    invert_unit_lower(sL, w.squares + at * (2 * kBT * kBT));
  }
}

// ---- a gate per channel: a block serves a chunk of a value head. One pair of factors cannot carry the decay between
// any two rows, so a warp per bit b takes the pairs i > j whose highest differing bit is b: rows with b set against
// rows without it in the same 2^{b+1} rows, through m, the last of these without b: 2^{G_i - G_j} = 2^{G_i - G_m}
// 2^{G_m - G_j}.

inline constexpr int kChannelPrologueWarps = 5, kChannelPrologueThreads = 32 * kChannelPrologueWarps;

template <int KP>
constexpr int channel_prologue_bytes() {
  return kBT * KP * (4 + 2 + 2) + 4 * (2 * kBT * kLdL + 3 * kBT);
}

// Element (r, col) of a [BT, KP] tile whose pieces of 8 are permuted by row: any 8 rows that a warp of the prologue
// reads at a time have them in different banks.
template <int KP>
FLA_DEVICE int permuted(int r, int col) {
  return r * KP + (col ^ (8 * (((r ^ (r >> 3)) & 7) ^ (((r >> 1) ^ (r >> 2)) & 4))));
}

// Row i of the 16 that lack bit b, in an order that suits permuted().
FLA_DEVICE int row_without(int b, int i) {
  // An octal digit is the place of a bit of i, from the right.
  const int places = b == 0 ? 04231 : b == 1 ? 03240 : b == 2 ? 04310 : b == 3 ? 04210 : 03210;
  int r = 0;
  FLA_UNROLL
  for (int bit = 0; bit < 4; ++bit) r |= ((i >> bit) & 1) << ((places >> (3 * bit)) & 7);
  return r;
}

template <typename T, int KP>
FLA_KERNEL(kChannelPrologueThreads, 4)
delta_channel_prologue_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w) {
  constexpr int kTile = kBT * KP, kSquare = kBT * kLdL, kRowsAt = 8 * kTile + 8 * kSquare;
  const Shared<float> sG = shared<float>(0, kTile);
  const Shared<T> sK = shared<T>(4 * kTile, kTile), sQ = shared<T>(6 * kTile, kTile);
  const Shared<float> sL = shared<float>(8 * kTile, kSquare), sP = shared<float>(8 * kTile + 4 * kSquare, kSquare);
  const Shared<float> sBeta = shared<float>(kRowsAt, kBT), sRk = shared<float>(kRowsAt + 4 * kBT, kBT),
                      sRq = shared<float>(kRowsAt + 8 * kBT, kBT);
  const int hv = block_x() % p.HV, hk = hv / (p.HV / p.H), id = thread_id();
  const std::int64_t slot = block_x() / p.HV;
  const Chunk c = find_chunk(p, slot);
  if (c.rows == 0) return;
  const std::int64_t first = c.s.begin + c.t0, at = slot * p.HV + hv;

  const float multiplier = gate_multiplier(p, hv);
  for (int channel = id; channel < KP; channel += kChannelPrologueThreads) {
    {
      float raw[kBT] = {};
      if (channel < p.K) load_gate_column(p.gk, c.s.row, first, hv, channel, c.rows, raw);
      FLA_UNROLL
      for (int i = 0; i < kBT; ++i) sG.store(permuted<KP>(i, channel), raw[i]);
    }
    const float bias = channel < p.K ? gate_bias(p, hv, channel) : 0.0F;
    const int count = channel < p.K ? c.rows : 0;
    float sum = 0.0F;
    for (int i = 0; i < kBT; ++i) {
      const int to = permuted<KP>(i, channel);
      if (i < count) sum += log2_gate(p, sG.load(to), bias, multiplier);
      sG.store(to, sum);
    }
    w.scalars[at * (kBT + KP) + kBT + channel] = exp2_approx(sum);
  }
  {
    constexpr int kLanes = KP / 8, kRows = 32 / kLanes;  // lanes of a row, rows of a warp
    const int col = lane_id() % kLanes * 8;
    for (int r = warp_id() * kRows + lane_id() / kLanes; r < kBT; r += kChannelPrologueWarps * kRows) {
      Vec<T, 8> k = {}, q = {};
      if (r < c.rows && col < p.K) {
        k = load_global<8>(p.k.view.at<T>(c.s.row, first + r, hk, col));
        q = load_global<8>(p.q.view.at<T>(c.s.row, first + r, hk, col));
      }
      float kk = 0.0F, qq = 0.0F, qk = 0.0F;
      FLA_UNROLL
      for (int e = 0; e < 8; ++e) {
        const float x = to_f32(k.x[e]), y = to_f32(q.x[e]);
        kk += x * x;
        qq += y * y;
        qk += x * y;
      }
      sK.template store_vec<8>(permuted<KP>(r, col), k);
      sQ.template store_vec<8>(permuted<KP>(r, col), q);
      float rk = inverse_norm(warp_sum<kLanes>(kk)), rq = inverse_norm(warp_sum<kLanes>(qq));
      qk = warp_sum<kLanes>(qk);
      if (!p.normalize_k) rk = 1.0F;
      if (!p.normalize_q) rq = 1.0F;
      if (lane_id() % kLanes == 0) {
        sRk.store(r, rk);
        sRq.store(r, rq);
        sP.store(r * kLdL + r, p.scale * rk * rq * qk);
      }
    }
  }
  for (int i = id; i < kBT * kBT; i += kChannelPrologueThreads) {
    const int r = i / kBT, col = i % kBT;
    if (col >= r) sL.store(r * kLdL + col, 0.0F);
    if (col > r) sP.store(r * kLdL + col, 0.0F);
  }
  if (id < kBT) {
    const float beta = id < c.rows ? load_beta(p, c.s.row, first + id, hv, 0) : 0.0F;
    sBeta.store(id, beta);
    w.scalars[at * (kBT + KP) + id] = beta;
  }
  sync_threads();

  for (int i = id; i < kTile / 8; i += kChannelPrologueThreads) {
    const int r = i / (KP / 8), col = i % (KP / 8) * 8, from = permuted<KP>(r, col), last = permuted<KP>(kBT - 1, col);
    const float by_k = sRk.load(r), by_a = by_k * sBeta.load(r), by_q = p.scale * sRq.load(r);
    const Vec<T, 8> x = sK.template load_vec<8>(from), y = sQ.template load_vec<8>(from);
    Vec<T, 8> q, a, k;
    FLA_UNROLL
    for (int e = 0; e < 8; e += 4) {
      const Vec<float, 4> g = sG.load_vec<4>(from + e), end = sG.load_vec<4>(last + e);
      FLA_UNROLL
      for (int f = 0; f < 4; ++f) {
        const float decay = exp2_approx(g.x[f]), key = to_f32(x.x[e + f]);
        q.x[e + f] = from_f32<T>(by_q * to_f32(y.x[e + f]) * decay);
        a.x[e + f] = from_f32<T>(by_a * key * decay);
        k.x[e + f] = from_f32<T>(by_k * key * exp2_approx(end.x[f] - g.x[f]));
      }
    }
    const std::int64_t to = (at * kBT + r) * KP + col;
    store_global<8>(w.q + to, q);
    store_global<8>(w.a + to, a);
    store_global<8>(w.k + to, k);
  }

  {
    // The sum over channels may take them in any order: a lane's two of a product are neighbours.
    const int b = warp_id(), g = lane_id() / 4, t = lane_id() % 4;
    const auto middle = [&](int r) { return (r >> (b + 1) << (b + 1)) + (1 << b) - 1; };
    FragC kk[2], qk[2];
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      clear(kk[n]);
      clear(qk[n]);
    }
    const int low[2] = {row_without(b, g), row_without(b, 8 + g)};
    for (int c0 = 2 * t; c0 < KP; c0 += 8) {
      FragATf32 ka, qa;
      Vec<float, 2> m[2];
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int at_row = permuted<KP>(low[i] | (1 << b), c0);
        m[i] = sG.load_vec<2>(permuted<KP>(middle(low[i]), c0));
        const Vec<float, 2> G = sG.load_vec<2>(at_row);
        const Vec<T, 2> k = sK.template load_vec<2>(at_row), q = sQ.template load_vec<2>(at_row);
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          const float decay = exp2_approx(G.x[e] - m[i].x[e]);
          ka.x[i + 2 * e] = to_tf32(to_f32(k.x[e]) * decay);
          qa.x[i + 2 * e] = to_tf32(to_f32(q.x[e]) * decay);
        }
      }
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const int at_row = permuted<KP>(low[n], c0);
        const Vec<float, 2> G = sG.load_vec<2>(at_row);
        const Vec<T, 2> k = sK.template load_vec<2>(at_row);
        FragBTf32 x;
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) x.x[e] = to_tf32(to_f32(k.x[e]) * exp2_approx(m[n].x[e] - G.x[e]));
        mma(kk[n], ka, x);
        mma(qk[n], qa, x);
      }
    }
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int r = row_without(b, frag_row(i)) | (1 << b), col = row_without(b, 8 * n + frag_col(i));
        if (r >> (b + 1) != col >> (b + 1)) continue;
        sL.store(r * kLdL + col, sBeta.load(r) * sRk.load(r) * sRk.load(col) * kk[n].x[i]);
        sP.store(r * kLdL + col, p.scale * sRq.load(r) * sRk.load(col) * qk[n].x[i]);
      }
    }
  }
  sync_threads();
  if (warp_id() == 0) {
    invert_unit_lower(sL, w.squares + at * (2 * kBT * kBT));
    return;
  }
  for (int i = id - 32; i < kBT * kBT / 2; i += kChannelPrologueThreads - 32) {
    const int r = i / (kBT / 2), col = i % (kBT / 2) * 2;
    const Vec<float, 2> x = sP.load_vec<2>(r * kLdL + col);
    store_global<2>(w.squares + (at * (2 * kBT * kBT) + r * 2 * kBT + kBT + col),
                    Vec<T, 2>{{from_f32<T>(x.x[0]), from_f32<T>(x.x[1])}});
  }
}

// ---- delta_chunk_kernel: o and the state of one (sequence, value head, COLUMNS value channels), chunk after chunk
// grid     N * HV * parts in x; a warp holds the transposed state [16, K] of 16 value channels in registers as
//          accumulators, and every other product of the chunk has them as its rows: nothing passes between warps
// loaders  where registers are left over, as many warps again do nothing but fill the stages
// shared   2 to 4 stages, a chunk each, filled by cp.async: (a, if decayed per channel,) k, q [BT, KP], squares, v,
// scalars

template <typename T, int KP, int COLUMNS, bool CHANNEL>
FLA_KERNEL(4 * COLUMNS, 1)
delta_chunk_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w, int stages) {
  using L = ChunkLayout<KP, COLUMNS, CHANNEL>;
  const int parts = (p.V + COLUMNS - 1) / COLUMNS;
  const int part = block_x() % parts, hv = block_x() / parts % p.HV;
  const std::int64_t n = block_x() / parts / p.HV;
  const int v_begin = part * COLUMNS, v_own = 16 * warp_id(),
            v_count = p.V - v_begin < COLUMNS ? p.V - v_begin : COLUMNS;
  const Span s = sequence(p, n);
  const std::int64_t chunks = (s.length + kBT - 1) / kBT, slot = first_slot(p, s, n);
  const std::int64_t nt =
      p.h.present() ? first_state(p, n, shared<std::int64_t>(stages * L::kStage, 2 * L::kWarps)) : 0;

  const auto tile = [&](int stage, int offset, int bytes) { return shared<T>(stage * L::kStage + offset, bytes / 2); };
  const auto rows_of = [&](std::int64_t ic) {
    const std::int64_t left = s.length - ic * kBT;
    return left < kBT ? static_cast<int>(left) : kBT;
  };
  const auto fetch = [&](std::int64_t ic, int stage) {
    fetch_chunk<T, KP, COLUMNS, CHANNEL>(p, w, p.v.view, s, ic, slot, hv, v_begin, v_count, stage);
  };
  const bool computes = warp_id() < L::kWarps, loads = !computes || block_threads() == 2 * COLUMNS;

  FragC S[KP / 8];  // [16, KP] of S^T
  const auto each_state = [&](auto&& f) {
    FLA_UNROLL
    for (int j = 0; j < KP / 8; ++j) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int column = v_own + frag_row(i), c = 8 * j + frag_col(i);
        if (column < v_count && c < p.K) f(S[j].x[i], c, v_begin + column);
      }
    }
  };
  FLA_UNROLL
  for (FragC& x : S) clear(x);
  if (p.h0.present()) each_state([&](float& x, int c, int column) { x = p.h0.load(n, hv, c, column); });

  for (int i = 0; loads && i < stages - 1; ++i) {
    if (i < chunks) fetch(i, i);
    cp_async_commit();
  }
  int stage = stages - 1;
  for (std::int64_t ic = 0; ic < chunks; ++ic) {
    const int free = stage;
    stage = stage + 1 == stages ? 0 : stage + 1;
    if (loads) wait_for_stage(stages);
    sync_threads();
    if (loads) {
      if (ic + stages - 1 < chunks) fetch(ic + stages - 1, free);
      cp_async_commit();
    }
    if (!computes) continue;
    if (p.h.present() && ic * kBT % p.h_chunk == 0) {
      const std::int64_t i_h = nt + ic * kBT / p.h_chunk;
      each_state([&](float& x, int c, int column) { p.h.store(x, s.row, i_h, hv, c, column); });
    }
    const Shared<T> sK = tile(stage, L::kK, L::kKey), sQ = tile(stage, L::kQ, L::kKey),
                    sA = tile(stage, L::kA, L::kKey), sM = tile(stage, L::kM, L::kSquare),
                    sV = tile(stage, L::kV, L::kValue) + v_own;
    constexpr int kCount = kScalars<KP, CHANNEL>;
    const Shared<float> scalars = shared<float>(stage * L::kStage + L::kS, kCount);

    const std::int64_t at = (slot + ic) * p.HV + hv;
    FragC x[4], o[4];  // [16, BT]: X^T, then E^T; O^T
    FLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      clear(x[i]);
      clear(o[i]);
    }
    FLA_UNROLL
    for (int j = 0; j < KP / 16; ++j) {
      const FragA<T> a = to_a<T>(S[2 * j], S[2 * j + 1]);
      if (w.states != nullptr) {
        store_state_tile(w.states, at, w.value_tiles, (v_begin + v_own) / 16, KP / 16, j, a);
      }
      FLA_UNROLL
      for (int i = 0; i < 4; i += 2) {
        FragB<T> b0, b1;
        load_b(b0, b1, sA + (8 * i * L::kLdK + 16 * j), L::kLdK);
        mma(x[i], a, b0);
        mma(x[i + 1], a, b1);
        load_b(b0, b1, sQ + (8 * i * L::kLdK + 16 * j), L::kLdK);
        mma(o[i], a, b0);
        mma(o[i + 1], a, b1);
      }
    }
    FLA_UNROLL
    for (int i = 0; i < 4; i += 2) {
      std::uint32_t v[4];
      ldmatrix_x4<true>(v, sV + ((8 * i + 8 * (lane_id() / 16) + lane_id() % 8) * L::kLdV + 8 * (lane_id() / 8 % 2)));
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int token = 8 * (i + e) + frag_col(0);
        const Vec<float, 2> beta = scalars.load_vec<2>((CHANNEL ? 0 : kBT) + token);
        Vec<float, 2> by = {{1.0F, 1.0F}};
        if constexpr (!CHANNEL) by = scalars.load_vec<2>(token);
        FragC& y = x[i + e];
        y.x[0] = beta.x[0] * low_half<T>(v[2 * e]) - by.x[0] * y.x[0];
        y.x[1] = beta.x[1] * high_half<T>(v[2 * e]) - by.x[1] * y.x[1];
        y.x[2] = beta.x[0] * low_half<T>(v[2 * e + 1]) - by.x[0] * y.x[2];
        y.x[3] = beta.x[1] * high_half<T>(v[2 * e + 1]) - by.x[1] * y.x[3];
        if constexpr (!CHANNEL) {
          const Vec<float, 2> q = scalars.load_vec<2>(2 * kBT + token);
          FLA_UNROLL
          for (int f = 0; f < 4; ++f) o[i + e].x[f] *= q.x[f & 1];
        }
      }
    }
    FragA<T> a[2] = {to_a<T>(x[0], x[1]), to_a<T>(x[2], x[3])};
    const auto times_lower = [&](FragC(&c)[4], Shared<T> square) {
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        FLA_UNROLL
        for (int m = 0; m <= i; ++m) {
          FragB<T> b0, b1;
          load_b(b0, b1, square + (16 * i * L::kLdM + 16 * m), L::kLdM);
          mma(c[2 * i], a[m], b0);
          mma(c[2 * i + 1], a[m], b1);
        }
      }
    };
    times_lower(x, sM);
    sync_warp();
    if (w.states != nullptr) {
      put_transposed(x, sV, L::kLdV);
      sync_warp();
      copy_rows_of_16(w.e + at * (kBT * 16) * w.value_tiles + v_begin + v_own, 16 * w.value_tiles, sV, L::kLdV, kBT,
                      16);
      sync_warp();
    }
    a[0] = to_a<T>(x[0], x[1]);
    a[1] = to_a<T>(x[2], x[3]);
    times_lower(o, sM + kBT);
    if constexpr (!CHANNEL) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Vec<float, 2> by = scalars.load_vec<2>(3 * kBT + 8 * i + frag_col(0));
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) x[i].x[f] *= by.x[f & 1];
      }
      a[0] = to_a<T>(x[0], x[1]);
      a[1] = to_a<T>(x[2], x[3]);
    }
    Vec<float, 2> decay = {};
    if constexpr (!CHANNEL) decay.x[0] = decay.x[1] = exp2_approx(scalars.load(5 * kBT - 1));
    FLA_UNROLL
    for (int j = 0; j < KP / 8; j += 2) {
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        if constexpr (CHANNEL) decay = scalars.load_vec<2>(kBT + 8 * (j + e) + frag_col(0));
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) S[j + e].x[f] *= decay.x[f & 1];
      }
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, sK + (16 * m * L::kLdK + 8 * j), L::kLdK);
        mma(S[j], a[m], b0);
        mma(S[j + 1], a[m], b1);
      }
    }

    if (p.o.present()) {  // in the place of this warp's columns of v
      put_transposed(o, sV, L::kLdV);
      sync_warp();
      copy_rows_of_16(p.o.view.at<T>(s.row, s.begin + ic * kBT, hv, v_begin + v_own), p.o.view.stride[1], sV, L::kLdV,
                      rows_of(ic), v_count - v_own);
    }
  }
  if (p.ht.present()) each_state([&](float& x, int c, int column) { p.ht.store(x, n, hv, c, column); });
}

// ---- host

template <typename T>
std::size_t delta_chunk_forward_workspace(const DeltaProblem& p, const DeltaPlan& plan) {
  DeltaChunkSpace<T> w;
  return carve_chunk_space<T>(p, plan, false, nullptr, w);
}

template <typename T, int KP, bool CHANNEL>
Status launch_chunk_kernels(const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w, Stream stream) {
  const DeltaArgs a = delta_args(p);
  if constexpr (CHANNEL) {
    const Status s = launch<delta_channel_prologue_kernel<T, KP>>(
        {.name = "delta_channel_prologue_kernel",
         .grid = {delta_chunk_slots(p) * p.HV},
         .threads = kChannelPrologueThreads,
         .shared_bytes = static_cast<std::size_t>(channel_prologue_bytes<KP>())},
        stream, a, w);
    if (!s) return s;
  } else {
    const std::int64_t items = delta_chunk_slots(p) * p.H;
    const Status s = launch<delta_head_prologue_kernel<T, KP <= 128 ? 128 : 256>>(
        {.name = "delta_head_prologue_kernel",
         .grid = {(items + kHeadPrologueWarps - 1) / kHeadPrologueWarps},
         .threads = 32 * kHeadPrologueWarps,
         .shared_bytes = std::size_t{4} * kHeadPrologueWarps * kHeadPrologueFloats},
        stream, a, w, items);
    if (!s) return s;
  }
  if constexpr (KP <= 128) {
    if (plan.segment > 0) return launch_segments<T>(p, plan, w, stream);
  }
  Launch l{.name = "delta_chunk_kernel", .grid = {p.N * p.HV * plan.parts}};
  l.threads = static_cast<int>((plan.loaders ? 4 : 2) * plan.columns);
  if constexpr (kWideBlocks<T, KP>) {
    if (plan.columns == 64) {
      l.shared_bytes = static_cast<std::size_t>(ChunkLayout<KP, 64, CHANNEL>::bytes(plan.stages));
      return launch<delta_chunk_kernel<T, KP, 64, CHANNEL>>(l, stream, a, w, plan.stages);
    }
  }
  l.shared_bytes = static_cast<std::size_t>(ChunkLayout<KP, 32, CHANNEL>::bytes(plan.stages));
  return launch<delta_chunk_kernel<T, KP, 32, CHANNEL>>(l, stream, a, w, plan.stages);
}

template <typename T, int KP>
Status launch_chunk_of_width(const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w, Stream stream) {
  return p.gk ? launch_chunk_kernels<T, KP, true>(p, plan, w, stream)
              : launch_chunk_kernels<T, KP, false>(p, plan, w, stream);
}

template <typename T>
Status launch_chunk(const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w, Stream stream) {
  switch (plan.width) {
    case 64:
      if constexpr (std::is_same_v<T, bf16>) return launch_chunk_of_width<T, 64>(p, plan, w, stream);
      return {Code::Internal, "delta_chunk_kernel: no instance of this width"};
    case 128: return launch_chunk_of_width<T, 128>(p, plan, w, stream);
    default: return launch_chunk_of_width<T, 256>(p, plan, w, stream);
  }
}

template <typename T>
Status delta_chunk_forward(const DeltaProblem& p, const DeltaPlan& plan, Stream stream,
                           std::span<std::byte> workspace) {
  DeltaChunkSpace<T> w;
  carve_chunk_space<T>(p, plan, false, workspace.data(), w);
  return launch_chunk<T>(p, plan, w, stream);
}

}  // namespace fla::cuda
