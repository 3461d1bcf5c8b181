// The tensor-core forward of the delta rule, chunks of BT = 32 tokens; alpha = beta e^g o k, decays in base 2.
//   L_ij = beta_i sum_c k_ic k_jc 2^{G_ic - G_jc}  (j < i)
//   P_ij = scale sum_c q_ic k_jc 2^{G_ic - G_jc}   (j <= i)                                     (1)
//   X = beta v - beta (k o 2^G) S_0,   E = (I + L)^{-1} X                                       (2)
//   O = scale (q o 2^G) S_0 + P E,     S_C = 2^{G_C} o S_0 + (k o 2^{G_C - G})^T E              (3)
// The prologue kernels are parallel over chunks and form what does not depend on the state: (I + L)^{-1} - I and P as
// 16-bit tiles, the decays, and for a gate per channel the decayed q and k. The main kernel walks a sequence.
// numerics  sums, gate sums, the triangular inverse and the state are fp32; operands of products have 16 bits; E starts
//           from X in fp32, so that only the correction (I + L)^{-1} - I is rounded
// exponents are differences of gate sums with the later row first, never positive. A step's gate is cut at 2^-160, which
//           is 0 like everything below, so that one strong gate does not cost later differences their digits
// causality an element of row i is a function of rows <= i only, in one order of sums
#pragma once

#include "fla/engine/delta/cuda/chunk.cuh"
#include "fla/engine/delta/cuda/segment.cuh"

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

inline constexpr int kHeadPrologueWarps = 4, kHeadPrologueFloats = 5 * kBT + kBT * kLdL;

template <typename T, int KP>
FLA_KERNEL(32 * kHeadPrologueWarps, 3)
delta_head_prologue_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w, std::int64_t items) {
  const std::int64_t item = block_x() * kHeadPrologueWarps + warp_id();
  if (item >= items) return;
  const int hk = static_cast<int>(item % p.H), group = p.HV / p.H;
  const std::int64_t slot = item / p.H;
  const Chunk c = find_chunk(p, w, slot);
  if (c.rows == 0) return;
  const Shared<float> own = shared<float>(warp_id() * kHeadPrologueFloats * 4, kHeadPrologueFloats);
  const Shared<float> sRk = own, sRq = own + kBT, sG = own + 2 * kBT, sBeta = own + 3 * kBT, sKk = own + 4 * kBT,
                      sL = own + 5 * kBT;
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
    EightElements kw[4], qw[4];
    FLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * i + g;
      kw[i] = qw[i] = {};
      if (row < c.rows && c0 + 8 * t < p.K) {
        kw[i] = load_elements(gK + (row * p.k.view.stride[1] + c0 + 8 * t));
        qw[i] = load_elements(gQ + (row * p.q.view.stride[1] + c0 + 8 * t));
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
    const float kk_sum = warp_sum<4>(k_squares[i]), rk = p.normalize_k ? inverse_norm(kk_sum) : 1.0F;
    const float rq = inverse_norm(warp_sum<4>(q_squares[i]));
    if (t == 0) {
      sRk.store(8 * i + g, rk);
      sKk.store(8 * i + g, rk * rk * kk_sum);
      sRq.store(8 * i + g, p.normalize_q ? rq : 1.0F);
    }
  }

  for (int j = 0; j < group; ++j) {
    const int hv = hk * group + j, row = lane_id();
    const std::int64_t at = slot * p.HV + hv;
    float gate = 0.0F, beta = 0.0F;
    if (row < c.rows) {
      if (p.g.present()) {
        gate = log2_gate(p, p.g.load(c.s.row, first + row, hv), gate_bias(p, hv, 0), gate_scale(p, hv));
      }
      beta = load_beta(p, c.s.row, first + row, hv, 0);
    }
    const float G = warp_prefix_sum(gate), end = shuffle(G, 31);
    sync_warp();
    sG.store(row, G);
    sBeta.store(row, beta);
    sync_warp();
    if (w.falls != nullptr) {
      const float fall = end + warp_sum(log2_rise(beta * sKk.load(row)));
      if (row == 0) w.falls[at] = fall;
    }
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

// Element (r, col) of a [BT, KP] tile whose pieces of 8 are permuted by row: what a warp reads at a time of the rows
// that row_without puts side by side lies in different banks.
template <int KP>
FLA_DEVICE int permuted(int r, int col) {
  return r * KP + (col ^ (8 * (((r ^ (r >> 3)) & 7) ^ (((r >> 1) ^ (r >> 2)) & 4))));
}

// The places that bits 0 to 3 of a number are moved to, three bits each: an array would lie in local memory.
FLA_HOST_DEVICE constexpr int bit_places(int of_0, int of_1, int of_2, int of_3) {
  return of_0 | of_1 << 3 | of_2 << 6 | of_3 << 9;
}
// Row i of the 16 that lack bit b, in an order that suits permuted(): two neighbours have their 64 bytes of fp32 in
// different halves of the banks, four their 32 bytes of 16-bit elements in different quarters.
FLA_DEVICE int row_without(int b, int i) {
  const int places = b == 0   ? bit_places(1, 2, 3, 4)
                     : b == 1 ? bit_places(4, 2, 0, 3)
                     : b == 2 ? bit_places(1, 3, 0, 4)
                     : b == 3 ? bit_places(1, 2, 0, 4)
                              : bit_places(1, 2, 0, 3);
  int r = 0;
  FLA_UNROLL
  for (int bit = 0; bit < 4; ++bit) r |= ((i >> bit) & 1) << ((places >> (3 * bit)) & 7);
  return r;
}

template <typename T, int KP>
FLA_KERNEL(kChannelPrologueThreads, KP <= 128 ? 5 : 3)
delta_channel_prologue_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w) {
  constexpr int kTile = kBT * KP, kSquare = kBT * kLdL, kRowsAt = 8 * kTile + 8 * kSquare;
  const Shared<float> sG = shared<float>(0, kTile);
  // Two elements in a word
  const Shared<std::uint32_t> sK = shared<std::uint32_t>(4 * kTile, kTile / 2),
                              sQ = shared<std::uint32_t>(6 * kTile, kTile / 2);
  const Shared<float> sL = shared<float>(8 * kTile, kSquare), sP = shared<float>(8 * kTile + 4 * kSquare, kSquare);
  const Shared<float> sBeta = shared<float>(kRowsAt, kBT), sRk = shared<float>(kRowsAt + 4 * kBT, kBT),
                      sRq = shared<float>(kRowsAt + 8 * kBT, kBT);
  const int hv = block_x() % p.HV, hk = hv / (p.HV / p.H), id = thread_id();
  const std::int64_t slot = block_x() / p.HV;
  if (w.round > 0) let_next_start();
  const Chunk c = find_chunk(p, w, slot);
  if (c.rows == 0) {
    wait_for_previous();
    return;
  }
  const std::int64_t first = c.s.begin + c.t0, at = slot * p.HV + hv;

  const GateScale multiplier = gate_scale(p, hv);
  for (int channel = id; channel < KP; channel += kChannelPrologueThreads) {
    float raw[kBT] = {}, sum = 0.0F;
    if (channel < p.K) load_gate_column(p.gk, c.s.row, first, hv, channel, c.rows, raw);
    if (p.gate == GateActivation::Kind::None) {
      FLA_UNROLL
      for (int i = 0; i < kBT; ++i) {
        sum += log2_gate(raw[i]);
        sG.store(permuted<KP>(i, channel), sum);
      }
      continue;
    }
    FLA_UNROLL
    for (int i = 0; i < kBT; ++i) sG.store(permuted<KP>(i, channel), raw[i]);
    const float bias = channel < p.K ? gate_bias(p, hv, channel) : 0.0F;
    const int count = channel < p.K ? c.rows : 0;
    for (int i = 0; i < kBT; ++i) {
      const int to = permuted<KP>(i, channel);
      if (i < count) sum += log2_gate(p, sG.load(to), bias, multiplier);
      sG.store(to, sum);
    }
  }
  {
    constexpr int kLanes = KP / 8, kRows = 32 / kLanes;  // lanes of a row, rows of a warp
    const int col = lane_id() % kLanes * 8;
    for (int r = warp_id() * kRows + lane_id() / kLanes; r < kBT; r += kChannelPrologueWarps * kRows) {
      EightElements k = {}, q = {};
      if (r < c.rows && col < p.K) {
        k = load_elements(p.k.view.at<T>(c.s.row, first + r, hk, col));
        q = load_elements(p.q.view.at<T>(c.s.row, first + r, hk, col));
      }
      float kk = 0.0F, qq = 0.0F, qk = 0.0F;
      FLA_UNROLL
      for (int e = 0; e < 8; ++e) {
        const float x = element<T>(k, e), y = element<T>(q, e);
        kk += x * x;
        qq += y * y;
        qk += x * y;
      }
      sK.store_vec<4>(permuted<KP>(r, col) >> 1, k);
      sQ.store_vec<4>(permuted<KP>(r, col) >> 1, q);
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
  if (id < kBT) {
    sBeta.store(id, id < c.rows ? load_beta(p, c.s.row, first + id, hv, 0) : 0.0F);
    // Of what is not below the diagonal, what comes along with what is read.
    for (int col = id; col <= (id | 3); ++col) sL.store(id * kLdL + col, 0.0F);
    if (id % 2 == 0) sP.store(id * kLdL + id + 1, 0.0F);
  }
  sync_threads();

  wait_for_previous();  // which may be reading what the workspace held of the round before
  float* scalars = w.scalars + at * (kBT + KP);
  if (id < kBT) scalars[id] = sBeta.load(id);
  for (int channel = id; channel < KP; channel += kChannelPrologueThreads) {
    scalars[kBT + channel] = exp2_approx(sG.load(permuted<KP>(kBT - 1, channel)));
  }
  {
    constexpr int kLanes = KP / 8;  // threads of a row
    const int col = id % kLanes * 8;
    Vec<float, 4> ends[2];
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) ends[e] = sG.load_vec<4>(permuted<KP>(kBT - 1, col) + 4 * e);
    for (int r = id / kLanes; r < kBT; r += kChannelPrologueThreads / kLanes) {
      const float by_k = sRk.load(r), by_a = by_k * sBeta.load(r), by_q = p.scale * sRq.load(r);
      const int from = permuted<KP>(r, col);
      const EightElements x = sK.load_vec<4>(from >> 1), y = sQ.load_vec<4>(from >> 1);
      EightElements q, a, k;
      FLA_UNROLL
      for (int e = 0; e < 8; e += 2) {
        const Vec<float, 2> g = sG.load_vec<2>(from + e);
        float to_q[2], to_a[2], to_k[2];
        FLA_UNROLL
        for (int f = 0; f < 2; ++f) {
          const float decay = exp2_approx(g.x[f]), key = element<T>(x, e + f);
          to_q[f] = by_q * element<T>(y, e + f) * decay;
          to_a[f] = by_a * key * decay;
          to_k[f] = by_k * key * exp2_approx(ends[e / 4].x[e % 4 + f] - g.x[f]);
        }
        q.x[e / 2] = pack2<T>(to_q[0], to_q[1]);
        a.x[e / 2] = pack2<T>(to_a[0], to_a[1]);
        k.x[e / 2] = pack2<T>(to_k[0], to_k[1]);
      }
      const std::int64_t to = (at * kBT + r) * KP + col;
      store_elements(w.q + to, q);
      store_elements(w.a + to, a);
      store_elements(w.k + to, k);
    }
  }

  {
    // The sum over channels may take them in any order: a lane's of two products are four neighbours.
    const int b = warp_id(), g = lane_id() / 4, t = lane_id() % 4;
    const auto middle = [&](int r) { return (r >> (b + 1) << (b + 1)) + (1 << b) - 1; };
    FragC kk[2], qk[2];
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      clear(kk[n]);
      clear(qk[n]);
    }
    int low[2], high[2], between[2];  // where a lane's channels of its rows are
    FLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = row_without(b, g + 8 * i);
      low[i] = permuted<KP>(r, 4 * t);
      high[i] = permuted<KP>(r | (1 << b), 4 * t);
      between[i] = permuted<KP>(middle(r), 4 * t);
    }
    for (int c0 = 0; c0 < KP; c0 += 16) {
      FragATf32 ka[2], qa[2];
      Vec<float, 4> m[2];
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        m[i] = sG.load_vec<4>(between[i] ^ c0);
        const Vec<float, 4> G = sG.load_vec<4>(high[i] ^ c0);
        const Vec<std::uint32_t, 2> k = sK.load_vec<2>((high[i] ^ c0) >> 1), q = sQ.load_vec<2>((high[i] ^ c0) >> 1);
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          const float decay = exp2_approx(G.x[e] - m[i].x[e]);
          ka[e / 2].x[i + 2 * (e % 2)] = to_tf32(element<T>(k, e) * decay);
          qa[e / 2].x[i + 2 * (e % 2)] = to_tf32(element<T>(q, e) * decay);
        }
      }
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const Vec<float, 4> G = sG.load_vec<4>(low[n] ^ c0);
        const Vec<std::uint32_t, 2> k = sK.load_vec<2>((low[n] ^ c0) >> 1);
        FragBTf32 x[2];
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          x[e / 2].x[e % 2] = to_tf32(element<T>(k, e) * exp2_approx(m[n].x[e] - G.x[e]));
        }
        FLA_UNROLL
        for (int i = 0; i < 2; ++i) {
          mma(kk[n], ka[i], x[i]);
          mma(qk[n], qa[i], x[i]);
        }
      }
    }
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      const int r = row_without(b, g + 8 * e) | (1 << b);
      const float by_k = sBeta.load(r) * sRk.load(r), by_q = p.scale * sRq.load(r);
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        FLA_UNROLL
        for (int f = 0; f < 2; ++f) {
          const int col = row_without(b, 2 * t) | row_without(b, 8 * n + f);
          if (r >> (b + 1) != col >> (b + 1)) continue;
          const float rk = sRk.load(col);
          sL.store(r * kLdL + col, by_k * rk * kk[n].x[2 * e + f]);
          sP.store(r * kLdL + col, by_q * rk * qk[n].x[2 * e + f]);
        }
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
    Vec<float, 2> x = {};
    if (col <= r) x = sP.load_vec<2>(r * kLdL + col);
    store_global<2>(w.squares + (at * (2 * kBT * kBT) + r * 2 * kBT + kBT + col),
                    Vec<T, 2>{{from_f32<T>(x.x[0]), from_f32<T>(x.x[1])}});
  }
}

// ---- delta_chunk_kernel: o and the state of 32 TILES value channels of one (sequence or segment of it, value head),
// chunk after chunk
// grid     segments * HV * parts in x
// modes    Output: o. Keep, for a backward: the entering states and E instead of o. Transfer, for all segments but a
//          sequence's last: M and N instead of o, see segment.cuh; a head has more blocks for M's columns
// warps    two hold the transposed state [16 TILES, K] in registers as accumulators, half of the key channels each, and
//          both solve for E; each gives o for half of the tokens. One more fills the stages.
// shared   2 to 4 stages, a chunk each, filled by cp.async: (a, if decayed per channel,) k, q [BT, KP], squares, v,
//          scalars; for each warp what it hands over and its rows of o

enum class ChunkMode : std::uint8_t { Output, Keep, Transfer };

template <typename T, int KP, int TILES, bool CHANNEL, ChunkMode MODE>
FLA_KERNEL((ChunkLayout<KP, TILES, CHANNEL>::kThreads), (ChunkLayout<KP, TILES, CHANNEL>::kBlocks))
delta_chunk_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w, int stages) {
  using L = ChunkLayout<KP, TILES, CHANNEL>;
  constexpr int kKeys = L::kKeys, kColumns = L::kColumns, kKeyTiles = kKeys / 8;
  constexpr bool kOutput = MODE == ChunkMode::Output, kKeep = MODE == ChunkMode::Keep,
                 kTransfer = MODE == ChunkMode::Transfer;
  constexpr bool kStates = kOutput && TILES == 1;  // whether it gives the states between chunks, where asked for
  const int value_parts = (p.V + kColumns - 1) / kColumns, parts = value_parts + (kTransfer ? KP / kColumns : 0);
  const int part = block_x() % parts, hv = block_x() / parts % p.HV;
  const std::int64_t number = block_x() / parts / p.HV;
  const Segment g = find_segment(p, w, number);
  if (w.round > 0 && !g.last) let_next_start();
  wait_for_previous();
  const bool keys = kTransfer && part >= value_parts;  // whether the columns are those of M
  if (!g.real || (kTransfer && (g.last || (keys && g.before == 0)))) return;
  const int v_begin = (keys ? part - value_parts : part) * kColumns, v_left = keys ? kColumns : p.V - v_begin;
  const int v_count = v_left < kColumns ? v_left : kColumns;
  std::int64_t nt = 0;
  if constexpr (kStates) {
    if (p.h.present()) nt = first_state(p, g.n, shared<std::int64_t>(stages * L::kStage, L::kWarps + 1));
  }

  Reach reach;
  if constexpr (kTransfer) {
    if constexpr (!CHANNEL) {
      if (w.falls != nullptr) reach = find_reach(w.falls + (g.slot * p.HV + hv), p.HV, g.chunks);
    }
    if (part == 0 && thread_id() == 0) w.passes[number * p.HV + hv] = reach.passes ? 1 : 0;
    if (keys && !reach.passes) return;
  }

  const auto fetch = [&](int ic, int stage) {
    const int left = g.tokens - ic * kBT;
    if (left > 0) {
      fetch_chunk<T, KP, TILES, CHANNEL, kOutput>(p, w, p.v.view, g.row, g.begin + ic * kBT, left < kBT ? left : kBT,
                                                  (g.slot + ic) * p.HV + hv, hv, v_begin, keys ? 0 : v_count, stage);
    }
    cp_async_commit();
  };
  int free = stages - 1;
  if (!L::kLoader || warp_id() == L::kWarps) {
    for (int i = 0; i < stages - 1; ++i) fetch(reach.first + i, i);
  }
  if constexpr (L::kLoader) {
    if (warp_id() == L::kWarps) {
      for (int ic = reach.first; ic * kBT < g.tokens; ++ic) {
        wait_for_stage(stages);
        sync_roles<L::kThreads>();
        fetch(ic + stages - 1, free);
        free = free + 1 == stages ? 0 : free + 1;
      }
      return;
    }
  }

  const int pair = warp_id() / 2, half = warp_id() % 2, v_own = 16 * TILES * pair, k_own = kKeys * half;
  const int tile_row = (v_begin + v_own) / 16, tile_column = half * kKeyTiles;  // of this warp's part of a state
  FragC S[TILES][kKeyTiles];                                                    // [16 TILES, K / 2] of S^T
  const auto each_state = [&](int count, auto&& f) {
    FLA_UNROLL
    for (int t = 0; t < TILES; ++t) {
      FLA_UNROLL
      for (int j = 0; j < kKeyTiles; ++j) {
        FLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int column = v_own + 16 * t + frag_row(i), c = k_own + 8 * j + frag_col(i);
          if (column < count && c < p.K) f(S[t][j].x[i], c, v_begin + column);
        }
      }
    }
  };
  FLA_UNROLL
  for (int t = 0; t < TILES; ++t) {
    FLA_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      clear(S[t][j]);
      if (kTransfer || g.before == 0) continue;
      const Vec<float, 4> x =
          load_global<4>(w.ends + tile_at<KP>((CHANNEL && w.round > 0 ? number : number - 1) * p.HV + hv, w.value_tiles,
                                              tile_row + t, tile_column + j));
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) S[t][j].x[i] = x.x[i];
    }
  }
  if (keys) {
    FLA_UNROLL
    for (int t = 0; t < TILES; ++t) {
      FLA_UNROLL
      for (int j = 0; j < kKeyTiles; ++j) {
        FLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int column = v_begin + v_own + 16 * t + frag_row(i), c = k_own + 8 * j + frag_col(i);
          S[t][j].x[i] = column == c ? 1.0F : 0.0F;
        }
      }
    }
  } else if (g.before == 0 && p.h0.present() && reach.passes) {
    each_state(v_count, [&](float& x, int c, int value) { x = p.h0.load(g.n, hv, c, value); });
  }

  const int own = stages * L::kStage + warp_id() * L::kOwn, partner = stages * L::kStage + (warp_id() ^ 1) * L::kOwn;
  const Shared<float> mine = shared<float>(own, L::kHanded / 4), handed = shared<float>(partner, L::kHanded / 4);
  constexpr int kFar = 512 * TILES;  // where what is handed of o follows that of x
  const Shared<T> rows = shared<T>(own + L::kHanded, L::kRows / 2);
  // A lane's 16 bytes of rows of a chunk's output: o, or for a backward E.
  constexpr int kLanes = 2 * TILES, kStep = 32 / kLanes;
  const int row = lane_id() / kLanes, token = 16 * half + row, column = v_own + lane_id() % kLanes * 8;
  T* to = nullptr;
  std::int64_t stride = 0;
  if constexpr (kKeep) {
    stride = 16 * w.value_tiles;
    to = w.e + ((g.slot * p.HV + hv) * kBT + token) * stride + v_begin + column;
  } else if (kOutput && p.o.present() && column < v_count) {
    stride = p.o.view.stride[1];
    to = p.o.view.at<T>(g.row, g.begin + token, hv, v_begin + column);
  }
  const auto flush = [&](int ic) {
    if (to == nullptr) return;
    FLA_UNROLL
    for (int i = 0; i < 16; i += kStep) {
      if (!kKeep && ic * kBT + token + i >= g.tokens) break;
      store_global<8>(to + i * stride, rows.template load_vec<8>((row + i) * L::kLdO + column - v_own));
    }
    to += (kKeep ? std::int64_t{p.HV} * kBT : kBT) * stride;
  };

  const int finals = g.last && p.ht.present() ? v_count : 0;  // channels whose final state is asked for
  int stage = 0, ic = reach.first;
  for (; ic * kBT < g.tokens; ++ic) {
    if constexpr (!L::kLoader) wait_for_stage(stages);
    sync_roles<L::kThreads>();
    if constexpr (!L::kLoader) {
      fetch(ic + stages - 1, free);
      free = free + 1 == stages ? 0 : free + 1;
    }
    if (ic > 0) flush(ic - 1);
    const ChunkTiles<T, KP, TILES, CHANNEL> tiles(stage);
    stage = stage + 1 == stages ? 0 : stage + 1;
    if constexpr (kStates) {
      const std::int64_t before = ((CHANNEL ? w.first : 0) + ic) * kBT;
      if (p.h.present() && before % p.h_chunk == 0) {
        const std::int64_t i_h = nt + before / p.h_chunk;
        each_state(v_count, [&](float& x, int c, int value) { p.h.store(x, g.row, i_h, hv, c, value); });
      }
    }

    const Shared<T> a_rows = lane_of_b<false>(tiles.a + k_own, L::kLdK),
                    q_rows = lane_of_b<false>(tiles.q + (k_own + 16 * half * L::kLdK), L::kLdK),
                    q_far = lane_of_b<false>(tiles.q + (k_own + 16 * (1 - half) * L::kLdK), L::kLdK),
                    m_rows = lane_of_b<false>(tiles.m, L::kLdM), k_rows = lane_of_b<true>(tiles.k + k_own, L::kLdK);
    FragC x[TILES][4], o[TILES][2], far[TILES][2];  // [16, BT]: X^T, then E^T; O^T of own tokens and of the other's
    FLA_UNROLL
    for (int t = 0; t < TILES; ++t) {
      FLA_UNROLL
      for (FragC& y : x[t]) clear(y);
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        clear(o[t][i]);
        clear(far[t][i]);
      }
    }
    FLA_UNROLL
    for (int j = 0; j < kKeys / 16; ++j) {
      FragA<T> a[TILES];
      FLA_UNROLL
      for (int t = 0; t < TILES; ++t) {
        a[t] = to_a<T>(S[t][2 * j], S[t][2 * j + 1]);
        if constexpr (kKeep) {
          store_state_tile(w.states, (g.slot + ic) * p.HV + hv, w.value_tiles, tile_row + t, KP / 16,
                           tile_column / 2 + j, a[t]);
        }
      }
      // Two tiles of 8 rows each of k or q
      const auto times = [&](FragC(&c)[TILES][2], Shared<T> from) {
        FragB<T> b0, b1;
        load_b_at<false>(b0, b1, from + 16 * j);
        FLA_UNROLL
        for (int t = 0; t < TILES; ++t) {
          mma(c[t][0], a[t], b0);
          mma(c[t][1], a[t], b1);
        }
      };
      FLA_UNROLL
      for (int i = 0; i < 4; i += 2) {
        FragB<T> b0, b1;
        load_b_at<false>(b0, b1, a_rows + (8 * i * L::kLdK + 16 * j));
        FLA_UNROLL
        for (int t = 0; t < TILES; ++t) {
          mma(x[t][i], a[t], b0);
          mma(x[t][i + 1], a[t], b1);
        }
      }
      if constexpr (kOutput) {
        times(o, q_rows);
        times(far, q_far);
      }
    }
    FLA_UNROLL
    for (int t = 0; t < TILES; ++t) {
      hand_over(mine + 512 * t, x[t]);
      if constexpr (kOutput) hand_over(mine + (kFar + 256 * t), far[t]);
    }
    barrier_arrive(1 + (warp_id() ^ 1), 64);
    // What the other warp's sums are not needed for: it waits the less for this one, and this one for it.
    const Shared<T> v_rows =
        tiles.v + ((8 * (lane_id() / 16) + lane_id() % 8) * L::kLdV + v_own + 8 * (lane_id() / 8 % 2));
    std::uint32_t v[2][TILES][4] = {};
    FLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      FLA_UNROLL
      for (int t = 0; t < TILES; ++t) {
        if (!keys) ldmatrix_x4<true>(v[i][t], v_rows + (16 * i * L::kLdV + 16 * t));
      }
    }
    FragB<T> m[3][2];  // the tiles (0, 0), (1, 0) and (1, 1) of (I + L)^{-1} - I
    FLA_UNROLL
    for (int i = 0; i < 3; ++i) {
      load_b_at<false>(m[i][0], m[i][1], m_rows + ((i > 0 ? 16 * L::kLdM : 0) + (i == 2 ? 16 : 0)));
    }
    FLA_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      const Vec<float, 2> decay = tiles.decay(k_own + 8 * j);
      FLA_UNROLL
      for (int t = 0; t < TILES; ++t) {
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) S[t][j].x[f] *= decay.x[f & 1];
      }
    }
    barrier_sync(1 + warp_id(), 64);
    FLA_UNROLL
    for (int t = 0; t < TILES; ++t) {
      add_handed(x[t], handed + 512 * t);
      if constexpr (kOutput) add_handed(o[t], handed + (kFar + 256 * t));
    }

    const auto form_x = [&](const std::uint32_t(&values)[2][TILES][4]) {
      FLA_UNROLL
      for (int i = 0; i < 4; i += 2) {
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int at = 8 * (i + e) + frag_col(0);
          const Vec<float, 2> beta = tiles.scalars.template load_vec<2>((CHANNEL ? 0 : kBT) + at);
          Vec<float, 2> by = {{1.0F, 1.0F}};
          if constexpr (!CHANNEL) by = tiles.scalars.template load_vec<2>(at);
          FLA_UNROLL
          for (int t = 0; t < TILES; ++t) {
            FragC& y = x[t][i + e];
            FLA_UNROLL
            for (int f = 0; f < 2; ++f) {
              const std::uint32_t word = values[i / 2][t][2 * e + f];
              y.x[2 * f] = beta.x[0] * low_half<T>(word) - by.x[0] * y.x[2 * f];
              y.x[2 * f + 1] = beta.x[1] * high_half<T>(word) - by.x[1] * y.x[2 * f + 1];
            }
          }
        }
      }
    };
    form_x(v);
    FragA<T> a[TILES][2];
    const auto pack = [&] {
      FLA_UNROLL
      for (int t = 0; t < TILES; ++t) {
        a[t][0] = to_a<T>(x[t][0], x[t][1]);
        a[t][1] = to_a<T>(x[t][2], x[t][3]);
      }
    };
    pack();
    FLA_UNROLL
    for (int i = 0; i < 3; ++i) {
      FLA_UNROLL
      for (int t = 0; t < TILES; ++t) {
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) mma(x[t][(i > 0 ? 2 : 0) + e], a[t][i == 2 ? 1 : 0], m[i][e]);
      }
    }
    pack();
    std::uint32_t seen = 0;  // whether E is finite
    if constexpr (kOutput) {
      FLA_UNROLL
      for (int t = 0; t < TILES; ++t) seen = ask_finite<T>(a[t][1].x, ask_finite<T>(a[t][0].x, seen));
    }
    if constexpr (kKeep) {
      FLA_UNROLL
      for (int t = 0; t < TILES; ++t) {
        FLA_UNROLL
        for (int i = 0; i < 2; ++i) {
          FLA_UNROLL
          for (int f = 0; f < 4; ++f) o[t][i].x[f] = half == 0 ? x[t][i].x[f] : x[t][2 + i].x[f];
        }
      }
    }
    // O of own tokens, once E is there.
    const auto add_scores = [&] {
      const bool finite = all_finite(seen);
      if (!finite) {
        // E once more, from X as the pair handed it over: its earlier rows must not see the later ones.
        std::uint32_t again[2][TILES][4] = {};
        FLA_UNROLL
        for (int t = 0; t < TILES; ++t) {
          FLA_UNROLL
          for (FragC& y : x[t]) clear(y);
          add_handed(x[t], mine + 512 * t);
          add_handed(x[t], handed + 512 * t);
          FLA_UNROLL
          for (int i = 0; i < 2; ++i) ldmatrix_x4<true>(again[i][t], v_rows + (16 * i * L::kLdV + 16 * t));
        }
        form_x(again);
        pack();
        FLA_UNROLL
        for (int i = 0; i < 3; ++i) {
          FragB<T> b[2];
          load_b_at<false>(b[0], b[1], m_rows + ((i > 0 ? 16 * L::kLdM : 0) + (i == 2 ? 16 : 0)));
          FLA_UNROLL
          for (int t = 0; t < TILES; ++t) {
            FragC &c0 = x[t][i > 0 ? 2 : 0], &c1 = x[t][i > 0 ? 3 : 1];
            if (i == 1) {
              mma(c0, a[t][0], b[0]);
              mma(c1, a[t][0], b[1]);
            } else {
              add_upper_exact<true>(c0, c1, a[t][i / 2], b);
            }
          }
        }
        pack();
      }
      if constexpr (!CHANNEL) {
        FLA_UNROLL
        for (int i = 0; i < 2; ++i) {
          const Vec<float, 2> q = tiles.scalars.template load_vec<2>(2 * kBT + 16 * half + 8 * i + frag_col(0));
          FLA_UNROLL
          for (int t = 0; t < TILES; ++t) {
            FLA_UNROLL
            for (int f = 0; f < 4; ++f) o[t][i].x[f] *= q.x[f & 1];
          }
        }
      }
      const Shared<T> scores = m_rows + (kBT + 16 * half * L::kLdM);
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (i > half) break;
        FragB<T> b[2];
        load_b_at<false>(b[0], b[1], scores + 16 * i);
        if (finite || i < half) {
          FLA_UNROLL
          for (int t = 0; t < TILES; ++t) {
            mma(o[t][0], a[t][i], b[0]);
            mma(o[t][1], a[t][i], b[1]);
          }
        } else {
          FLA_UNROLL
          for (int t = 0; t < TILES; ++t) add_upper_exact<false>(o[t][0], o[t][1], a[t][i], b);
        }
      }
    };
    // A warp of one tile has the registers to do the state first and not to wait for the answer about E.
    if constexpr (kOutput && TILES > 1) add_scores();
    FragA<T> of_state[TILES][2];
    FLA_UNROLL
    for (int t = 0; t < TILES; ++t) {
      of_state[t][0] = a[t][0];
      of_state[t][1] = a[t][1];
    }
    if constexpr (!CHANNEL) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Vec<float, 2> by = tiles.scalars.template load_vec<2>(3 * kBT + 8 * i + frag_col(0));
        FLA_UNROLL
        for (int t = 0; t < TILES; ++t) {
          FLA_UNROLL
          for (int f = 0; f < 4; ++f) x[t][i].x[f] *= by.x[f & 1];
        }
      }
      FLA_UNROLL
      for (int t = 0; t < TILES; ++t) {
        of_state[t][0] = to_a<T>(x[t][0], x[t][1]);
        of_state[t][1] = to_a<T>(x[t][2], x[t][3]);
      }
    }
    FLA_UNROLL
    for (int j = 0; j < kKeyTiles; j += 2) {
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        FragB<T> b0, b1;
        load_b_at<true>(b0, b1, k_rows + (16 * i * L::kLdK + 8 * j));
        FLA_UNROLL
        for (int t = 0; t < TILES; ++t) {
          mma(S[t][j], of_state[t][i], b0);
          mma(S[t][j + 1], of_state[t][i], b1);
        }
      }
    }
    if constexpr (kOutput && TILES == 1) add_scores();
    if constexpr (!kTransfer) {
      FLA_UNROLL
      for (int t = 0; t < TILES; ++t) put_transposed(o[t], rows + 16 * t, L::kLdO);
    }
  }
  const auto put_end = [&](std::int64_t item) {
    FLA_UNROLL
    for (int t = 0; t < TILES; ++t) {
      FLA_UNROLL
      for (int j = 0; j < kKeyTiles; ++j) {
        const FragC& y = S[t][j];
        store_global<4>(w.ends + tile_at<KP>(item, w.value_tiles, tile_row + t, tile_column + j),
                        Vec<float, 4>{{y.x[0], y.x[1], y.x[2], y.x[3]}});
      }
    }
  };
  if constexpr (kTransfer) {
    const std::int64_t item = number * p.HV + hv;
    if (!keys) {
      put_end(item);
      return;
    }
    FLA_UNROLL
    for (int t = 0; t < TILES; ++t) {
      FLA_UNROLL
      for (int j = 0; j < kKeyTiles; ++j) {
        const FragC& y = S[t][j];
        FragC rest;
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) rest.x[e] = y.x[e] - to_f32(from_f32<bf16>(y.x[e]));
        const FragB<bf16> high = to_b<bf16>(y), low = to_b<bf16>(rest);
        store_global<4>(w.transfers + tile_at<KP>(item, KP / 16, tile_row + t, tile_column + j),
                        Vec<std::uint32_t, 4>{{high.x[0], high.x[1], low.x[0], low.x[1]}});
      }
    }
    return;
  }
  sync_warp();
  if (ic > 0) flush(ic - 1);
  if constexpr (kOutput && CHANNEL) {
    if (w.round > 0 && (w.first + w.round) * kBT < p.T) put_end(number * p.HV + hv);
  }
  if (finals > 0) each_state(finals, [&](float& x, int c, int value) { p.ht.store(x, g.n, hv, c, value); });
}

// ---- host

template <typename T>
std::size_t delta_chunk_forward_workspace(const DeltaProblem& p, const DeltaPlan& plan) {
  DeltaChunkSpace<T> w;
  return carve_chunk_space<T>(p, plan, nullptr, nullptr, w);
}

// What follows the prologue, with blocks of 32 TILES value channels.
template <typename T, int KP, int TILES, bool CHANNEL>
Status launch_chunk_blocks(const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w, Stream stream) {
  using L = ChunkLayout<KP, TILES, CHANNEL>;
  const DeltaArgs a = delta_args(p);
  const std::int64_t sequences = plan.segment > 0 ? delta_segment_slots(p, plan.segment) : p.N;
  Launch l{.name = "delta_chunk_kernel", .threads = L::kThreads, .overlapped = true};
  if constexpr (KP <= 128) {
    if (plan.segments > 1) {
      l.grid = {sequences * p.HV * (plan.parts + KP / L::kColumns)};
      l.shared_bytes = static_cast<std::size_t>(L::bytes(plan.transfer_stages));
      const Status formed =
          launch<delta_chunk_kernel<T, KP, TILES, CHANNEL, ChunkMode::Transfer>>(l, stream, a, w, plan.transfer_stages);
      if (!formed) return formed;
      if (const Status joined = launch_join<T, KP>(p, w, stream); !joined) return joined;
    }
  }
  l.grid = {sequences * p.HV * plan.parts};
  l.shared_bytes = static_cast<std::size_t>(L::bytes(plan.stages));
  if constexpr (kHasBackward<T> && TILES == 1) {
    if (w.states != nullptr) {
      return launch<delta_chunk_kernel<T, KP, TILES, CHANNEL, ChunkMode::Keep>>(l, stream, a, w, plan.stages);
    }
  }
  return launch<delta_chunk_kernel<T, KP, TILES, CHANNEL, ChunkMode::Output>>(l, stream, a, w, plan.stages);
}

template <typename T, int KP, bool CHANNEL>
Status launch_prologue(const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w, Stream stream) {
  const std::int64_t places = delta_chunk_places(p, plan);
  if constexpr (CHANNEL) {
    return launch<delta_channel_prologue_kernel<T, KP>>(
        {.name = "delta_channel_prologue_kernel",
         .grid = {places * p.HV},
         .threads = kChannelPrologueThreads,
         .shared_bytes = static_cast<std::size_t>(channel_prologue_bytes<KP>()),
         .overlapped = w.first > 0},
        stream, delta_args(p), w);
  } else {
    const std::int64_t items = places * p.H;
    return launch<delta_head_prologue_kernel<T, KP <= 128 ? 128 : 256>>(
        {.name = "delta_head_prologue_kernel",
         .grid = {(items + kHeadPrologueWarps - 1) / kHeadPrologueWarps},
         .threads = 32 * kHeadPrologueWarps,
         .shared_bytes = std::size_t{4} * kHeadPrologueWarps * kHeadPrologueFloats},
        stream, delta_args(p), w, items);
  }
}

template <typename T, int KP, bool CHANNEL>
Status launch_chunk_kernels(const DeltaProblem& p, const DeltaPlan& plan, DeltaChunkSpace<T> w, Stream stream) {
  const auto blocks = [&]() -> Status {
    if constexpr (kHasWideBlocks<KP>) {
      if (plan.columns == kDeltaWide) return launch_chunk_blocks<T, KP, 2, CHANNEL>(p, plan, w, stream);
    }
    return launch_chunk_blocks<T, KP, 1, CHANNEL>(p, plan, w, stream);
  };
  do {
    if (const Status s = launch_prologue<T, KP, CHANNEL>(p, plan, w, stream); !s) return s;
    if (const Status s = blocks(); !s) return s;
    w.first += w.round;
  } while (w.round > 0 && w.first * kBT < p.T);
  return {};
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
  carve_chunk_space<T>(p, plan, nullptr, workspace.data(), w);
  return launch_chunk<T>(p, plan, w, stream);
}

}  // namespace fla::cuda
