// Tiles of BT tokens in blocks of 16, one gate per key channel. Within a block of 16, L is the running sum of the gates
// and L_15 its last; the products that the tensor cores see are rounded to T after scaling:
//   q' = q 2^L    k' = k 2^(L_15 - L)    k'' = k 2^-L
//   P = tril(scale q' k''^T)    o = scale q' S + P v    S^T = 2^L_15 o S^T + v^T k'
// P is most of o, so it and its operands are sums of two T, of which only the product of the lower parts of q' and k''
// is left out. k'' is the one place with a positive exponent. From the first row on where some channel has decayed so
// far, or some key is so large, that k'' leaves the range of T, a block's rows of P come from exponents of differences
// instead, one by one: a row's way depends on rows before it alone. While NW warps
// walk the blocks of a tile, each with its own value columns, SW others copy the tile after next, and scale the next
// one and form its P, for all of them. One barrier a tile.
#pragma once

#include <cmath>

#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/launches.h"
#include "fla/engine/diag/cuda/output.cuh"
#include "fla/engine/diag/cuda/pairs.cuh"
#include "fla/engine/diag/cuda/params.cuh"
#include "fla/engine/diag/cuda/token_rows.cuh"
#include "fla/engine/diag/cuda/warp_state.cuh"

namespace fla::cuda {

template <int KP, int BT, int NW, int WM, int SW>
struct ChannelTiles {
  static constexpr int kValue = 16 * NW * WM, kBlocks = BT / 16;
  // A part is what a warp scales at a time: 32 channels of a block.
  static constexpr int kScalers = 32 * SW, kThreads = 32 * NW + kScalers, kParts = kBlocks * KP / 32;
  static constexpr int kLdK = KP + 8, kLdV = kValue + 8, kLdG = KP + 4, kLdP = 24;
  // Two tiles as they come, three of v, two scaled.
  static constexpr int kQ = 0, kKey = kQ + BT * kLdK * 2, kG = kKey + BT * kLdK * 2, kRaw = kG + BT * kLdG * 4;
  static constexpr int kV = 2 * kRaw, kVTile = BT * kLdV * 2;
  static constexpr int kScaledQ = 0, kScaledK = kScaledQ + BT * kLdK * 2, kP = kScaledK + BT * kLdK * 2,
                       kLowP = kP + BT * kLdP * 2, kDecay = kLowP + BT * kLdP * 2,
                       kScaledTile = kDecay + kBlocks * KP * 4;
  // Operands of P alone: the lower part of q', both of k''.
  static constexpr int kScaled = kV + 3 * kVTile, kLowQ = kScaled + 2 * kScaledTile, kRaisedK = kLowQ + BT * kLdK * 2,
                       kLowK = kRaisedK + BT * kLdK * 2, kTask = KeptTask::offset(kLowK + BT * kLdK * 2),
                       kBad = kTask + static_cast<int>(sizeof(KeptTask)), kBytes = kBad + kParts * 4;
};

// P of a block's rows from `from` on by differences: for each query, keys from the diagonal downwards.
template <typename T, int KP, int LDK, int LDG>
FLA_DEVICE void exact_products(const DiagParams& p, Shared<T> q, Shared<T> k, Shared<float> g, int first, int from,
                               FragC (&P)[2]) {
  constexpr int kPairs = KP / 64;
  clear(P[0]);
  clear(P[1]);
  for (int i = from; i < 16; ++i) {
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

template <typename T, int KP, int BT, int NW, int WM, int SW>
struct ChannelBlock {
  using Tiles = ChannelTiles<KP, BT, NW, WM, SW>;
  static constexpr int kLdK = Tiles::kLdK, kLdV = Tiles::kLdV, kLdG = Tiles::kLdG, kLdP = Tiles::kLdP;
  const DiagParams& p;
  const DiagTask a;
  const bool want_o;

  FLA_DEVICE explicit ChannelBlock(const DiagParams& params)
      : p(params), a(diag_task(p, BT, Tiles::kValue)), want_o(p.pass != DiagPass::Local && p.o.present()) {}

  FLA_DEVICE Shared<T> raw(int stage, int at) const { return shared<T>(stage * Tiles::kRaw + at, BT * kLdK); }
  FLA_DEVICE Shared<float> gates(int stage) const { return shared<float>(stage * Tiles::kRaw + Tiles::kG, BT * kLdG); }
  FLA_DEVICE Shared<T> values(int of) const { return shared<T>(Tiles::kV + of * Tiles::kVTile, BT * kLdV); }
  FLA_DEVICE Shared<T> scaled(int stage, int at) const {
    return shared<T>(Tiles::kScaled + stage * Tiles::kScaledTile + at, BT * kLdK);
  }
  FLA_DEVICE Shared<T> products(int stage, int at) const {
    return shared<T>(Tiles::kScaled + stage * Tiles::kScaledTile + at, BT * kLdP);
  }
  FLA_DEVICE Shared<float> decays(int stage) const {
    return shared<float>(Tiles::kScaled + stage * Tiles::kScaledTile + Tiles::kDecay, Tiles::kBlocks * KP);
  }
  FLA_DEVICE Shared<T> operand(int at) const { return shared<T>(at, BT * kLdK); }
  // By parts the first row of a block that is out of range, 16 where there is none.
  FLA_DEVICE Shared<std::int32_t> bad() const { return shared<std::int32_t>(Tiles::kBad, Tiles::kParts); }
};

// The gates of a pair of channels of row r; G: as the tile holds them.
template <typename G, int LD>
FLA_DEVICE Vec<float, 2> held_gates(Shared<float> tile, int r, int c) {
  if constexpr (sizeof(G) == 4) {
    const Vec<float, 2> x = tile.template load_vec<2>(r * LD + c);
    return {{base2_gate(x.x[0]), base2_gate(x.x[1])}};
  } else {
    const Vec<G, 2> x = tile.template as<G>().template load_vec<2>(r * 2 * LD + c);
    return {{base2_gate(to_f32(x.x[0])), base2_gate(to_f32(x.x[1]))}};
  }
}

// What a lane scales of a part: channels c and c + 1 of eight rows from `row` of the tile on, 0 to 3 and 8 to 11. The
// lanes of the other half have rows 4 to 7 and 12 to 15 of the block, which lie in the other banks.
template <int KP>
struct ScaledLane {
  int part, row, c;
  bool later;
  FLA_DEVICE explicit ScaledLane(int of) : part(of), later(lane_id() >= 16) {
    row = of / (KP / 32) * 16 + (later ? 4 : 0);
    c = of % (KP / 32) * 32 + lane_id() % 16 * 2;
  }
};

// k' of a part, with OUT q' and k'', too, and the sum of the block's gates. All is read before anything is written, so
// that the rows' latencies overlap.
template <typename G, bool OUT, typename T, int KP, int BT, int NW, int WM, int SW>
FLA_DEVICE Vec<float, 2> scale_part(const ChannelBlock<T, KP, BT, NW, WM, SW>& x, int stage, const ScaledLane<KP>& a) {
  using Tiles = ChannelTiles<KP, BT, NW, WM, SW>;
  constexpr int kLdK = Tiles::kLdK;
  const int first = (a.row * kLdK + a.c) / 2;
  const auto words = [&](Shared<T> tile) { return tile.template as<std::uint32_t>() + first; };
  const auto from_q = words(x.raw(stage, Tiles::kQ)), from_k = words(x.raw(stage, Tiles::kKey)),
             scaled_q = words(x.scaled(stage, Tiles::kScaledQ)), scaled_k = words(x.scaled(stage, Tiles::kScaledK)),
             low_q = words(x.operand(Tiles::kLowQ)), raised_k = words(x.operand(Tiles::kRaisedK)),
             low_k = words(x.operand(Tiles::kLowK));
  const Shared<float> g = x.gates(stage);
  Vec<float, 2> L[8];
  std::uint32_t q[8], k[8];
  FLA_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int row = i % 4 + i / 4 * 8;
    L[i] = held_gates<G, Tiles::kLdG>(g, a.row + row, a.c);
    k[i] = from_k.load(row * kLdK / 2);
    if constexpr (OUT) q[i] = from_q.load(row * kLdK / 2);
    if (i % 4 > 0) {
      L[i].x[0] += L[i - 1].x[0];
      L[i].x[1] += L[i - 1].x[1];
    }
  }
  Vec<float, 2> last, decay;
  FLA_UNROLL
  for (int e = 0; e < 2; ++e) {
    const float mine[2] = {L[3].x[e], L[7].x[e]}, other[2] = {shuffle_xor(mine[0], 16), shuffle_xor(mine[1], 16)};
    // Of rows 0 to 3, 0 to 7 and 0 to 11: the same numbers in both halves.
    const float four = a.later ? other[0] : mine[0], eight = four + (a.later ? mine[0] : other[0]),
                twelve = eight + (a.later ? other[1] : mine[1]);
    last.x[e] = twelve + (a.later ? mine[1] : other[1]);
    decay.x[e] = exp2_approx(last.x[e]);
    FLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      L[i].x[e] += a.later ? four : 0.0F;
      L[i + 4].x[e] += a.later ? twelve : eight;
    }
  }
  if (!a.later) x.decays(stage).template store_vec<2>(a.row / 16 * KP + a.c, decay);
  bool in_range = last.x[0] >= RaisedRange<T>::kLeast && last.x[1] >= RaisedRange<T>::kLeast;
  // k' of a channel that is out of range is formed apart.
  const bool direct = !in_range;
  float end[2], back[2];
  FLA_UNROLL
  for (int e = 0; e < 2; ++e) {
    end[e] = direct ? last.x[e] : 0.0F;
    back[e] = x.p.update_scale * (direct ? 1.0F : decay.x[e]);
  }
  FLA_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int at = (i % 4 + i / 4 * 8) * kLdK / 2;
    float up[2], query[2];
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      up[e] = to_f32(T{static_cast<std::uint16_t>(k[i] >> (16 * e))}) * exp2_approx(end[e] - L[i].x[e]);
      in_range = in_range && std::fabs(up[e]) <= RaisedRange<T>::kMost;
      if constexpr (OUT) query[e] = to_f32(T{static_cast<std::uint16_t>(q[i] >> (16 * e))}) * exp2_approx(L[i].x[e]);
    }
    scaled_k.store(at, pack2<T>(up[0] * back[0], up[1] * back[1]));
    if constexpr (OUT) {
      const std::uint32_t high_k = pack2<T>(up[0], up[1]), high_q = pack2<T>(query[0], query[1]);
      raised_k.store(at, high_k);
      low_k.store(at, low_pair<T>(high_k, up[0], up[1]));
      scaled_q.store(at, high_q);
      low_q.store(at, low_pair<T>(high_q, query[0], query[1]));
    }
  }
  if constexpr (OUT) {
    int bad = 16;
    if (ballot(!in_range) != 0) {
      FLA_UNROLL
      for (int i = 7; i >= 0; --i) {
        float up[2];
        bool row_in_range = true;
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          up[e] = to_f32(T{static_cast<std::uint16_t>(k[i] >> (16 * e))}) * exp2_approx(-L[i].x[e]);
          row_in_range =
              row_in_range && L[i].x[e] >= RaisedRange<T>::kLeast && std::fabs(up[e]) <= RaisedRange<T>::kMost;
        }
        if (!row_in_range) bad = a.row % 16 + i % 4 + i / 4 * 8;
        // Rows before the first that is out of range have their products all the same.
        const std::uint32_t high = pack2<T>(up[0], up[1]);
        const int at = (i % 4 + i / 4 * 8) * kLdK / 2;
        raised_k.store(at, high);
        low_k.store(at, low_pair<T>(high, up[0], up[1]));
      }
      FLA_UNROLL
      for (int by = 16; by > 0; by /= 2) {
        const int other = shuffle_xor(bad, by);
        bad = other < bad ? other : bad;
      }
    }
    if (lane_id() == 0) x.bad()[a.part] = bad;
  }
  return last;
}

template <bool OUT, typename T, int KP, int BT, int NW, int WM, int SW>
FLA_DEVICE Vec<float, 2> scale_part(const ChannelBlock<T, KP, BT, NW, WM, SW>& x, int stage, const ScaledLane<KP>& a) {
  if (!x.p.vector_gate || x.p.gk.type == DType::F32) return scale_part<float, OUT>(x, stage, a);
  return x.p.gk.type == DType::BF16 ? scale_part<bf16, OUT>(x, stage, a) : scale_part<f16, OUT>(x, stage, a);
}

// P of one half of a block's keys, from row `first` of the tile on: 16 queries x 8 keys.
template <typename T, int KP, int BT, int NW, int WM, int SW>
FLA_DEVICE FragC half_products(const ChannelBlock<T, KP, BT, NW, WM, SW>& x, int stage, int first, int half) {
  using Tiles = ChannelTiles<KP, BT, NW, WM, SW>;
  constexpr int kLdK = Tiles::kLdK;
  int bad = 16;  // the first row that is out of range
  FLA_UNROLL
  for (int i = 0; i < KP / 32; ++i) {
    const int of_part = x.bad().load(first / 16 * (KP / 32) + i);
    bad = of_part < bad ? of_part : bad;
  }
  const int query_at = first * kLdK, keys_at = (first + 8 * half) * kLdK;
  const Shared<T> high_q = x.scaled(stage, Tiles::kScaledQ) + query_at, low_q = x.operand(Tiles::kLowQ) + query_at,
                  high_k = x.operand(Tiles::kRaisedK) + keys_at, low_k = x.operand(Tiles::kLowK) + keys_at;
  FragC P[2], rest[2];
  FLA_UNROLL
  for (int i = 0; i < 2; ++i) {
    clear(P[i]);  // of every other 16 channels
    clear(rest[i]);
  }
  FLA_UNROLL
  for (int k0 = 0; k0 < KP; k0 += 32) {
    FragB<T> high[2][1], low[2][1];
    load_key_rows<T, 1, 32>(high, high_k + k0, kLdK);
    load_key_rows<T, 1, 32>(low, low_k + k0, kLdK);
    FLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      FragA<T> query, low_query;
      load_a(query, high_q + (k0 + 16 * i), kLdK);
      load_a(low_query, low_q + (k0 + 16 * i), kLdK);
      mma(P[i], query, high[i][0]);
      mma(rest[0], low_query, high[i][0]);
      mma(rest[1], query, low[i][0]);
    }
  }
  FLA_UNROLL
  for (int e = 0; e < 4; ++e) P[0].x[e] += P[1].x[e] + (rest[0].x[e] + rest[1].x[e]);
  if (bad < 16) {
    FragC both[2];
    exact_products<T, KP, kLdK, Tiles::kLdG>(x.p, x.raw(stage, Tiles::kQ), x.raw(stage, Tiles::kKey), x.gates(stage),
                                             first, bad, both);
    FLA_UNROLL
    for (int e = 0; e < 4; ++e) {
      const float exact = half == 0 ? both[0].x[e] : both[1].x[e];
      P[0].x[e] = frag_row(e) >= bad ? exact : P[0].x[e];
    }
  }
  return P[0];
}

template <typename T, int KP, int BT, int NW, int WM, int SW>
FLA_DEVICE void scale_tiles(const ChannelBlock<T, KP, BT, NW, WM, SW>& x) {
  using Tiles = ChannelTiles<KP, BT, NW, WM, SW>;
  constexpr int kLdK = Tiles::kLdK, kLdP = Tiles::kLdP, kScalers = Tiles::kScalers;
  const DiagParams& p = x.p;
  const DiagTask& a = x.a;
  const int id = thread_id() - 32 * NW, warp = id / 32;
  const int columns = p.V - a.v0 < Tiles::kValue ? p.V - a.v0 : Tiles::kValue;
  const bool present = p.q.at.present() && p.k.at.present() && p.v.at.present();
  const bool whole = present && columns == Tiles::kValue && p.K == KP && p.vector_qk && p.vector_v;
  const bool whole_gates = p.vector_gate && p.K == KP && !p.shift;

  const bool wide_gates = p.gk.type == DType::F32;
  RowWalk q_rows = RowWalk::of<KP, kScalers, T>(p, a, p.q.at, 0, kLdK, id),
          k_rows = RowWalk::of<KP, kScalers, T>(p, a, p.k.at, 0, kLdK, id),
          v_rows = RowWalk::of<Tiles::kValue, kScalers, T>(p, a, p.v.at, a.v0, Tiles::kLdV, id),
          g_rows = wide_gates ? RowWalk::of<KP, kScalers, float>(p, a, p.gk.at, 0, Tiles::kLdG, id)
                              : RowWalk::of<KP, kScalers, bf16>(p, a, p.gk.at, 0, 2 * Tiles::kLdG, id);
  const auto fetch = [&](std::int64_t t, int stage, int value) {
    if (t < a.to) {
      const Shared<T> q = x.raw(stage, Tiles::kQ), k = x.raw(stage, Tiles::kKey), v = x.values(value);
      const bool inside = t >= 0 && t + BT <= a.to;
      // `id`, in a way that leaves what is formed from it where it is needed: rare tiles may not take the loop's
      // registers.
      const auto own = [&] { return shuffle(id, lane_id()); };
      if (whole && inside) {
        if (x.want_o) q_rows.copy<BT, KP, kScalers>(q, kLdK);
        k_rows.copy<BT, KP, kScalers>(k, kLdK);
        v_rows.copy<BT, Tiles::kValue, kScalers>(v, Tiles::kLdV);
      } else {
        const int by = own();
        if (x.want_o) load_tokens<BT, KP>(p, a, p.q.at, p.vector_qk, t, 0, 0, p.K, q, kLdK, by, kScalers);
        load_tokens<BT, KP>(p, a, p.k.at, p.vector_qk, t, 0, 0, p.K, k, kLdK, by, kScalers);
        load_tokens<BT, Tiles::kValue>(p, a, p.v.at, p.vector_v, t, 0, a.v0, columns, v, Tiles::kLdV, by, kScalers);
        q_rows.skip<BT, KP, kScalers, T>();
        k_rows.skip<BT, KP, kScalers, T>();
        v_rows.skip<BT, Tiles::kValue, kScalers, T>();
      }
      const Shared<float> g = x.gates(stage);
      if (whole_gates && inside && wide_gates) {
        g_rows.copy<BT, KP, kScalers>(g, Tiles::kLdG);
      } else if (whole_gates && inside) {
        g_rows.copy<BT, KP, kScalers>(g.template as<bf16>(), 2 * Tiles::kLdG);
      } else {
        load_gates<BT, KP, Tiles::kLdG>(p, a, p.gk, t, 0, p.K, g, own(), kScalers);
        if (wide_gates) {
          g_rows.skip<BT, KP, kScalers, float>();
        } else {
          g_rows.skip<BT, KP, kScalers, bf16>();
        }
      }
    }
    cp_async_commit();
  };

  static_assert(Tiles::kParts % SW == 0);
  Vec<float, 2> total[Tiles::kParts / SW] = {};
  const auto scale = [&](int stage) {
    FLA_UNROLL
    for (int i = 0; i < Tiles::kParts / SW; ++i) {
      const ScaledLane<KP> lane(warp + i * SW);
      const Vec<float, 2> sum = x.want_o ? scale_part<true>(x, stage, lane) : scale_part<false>(x, stage, lane);
      total[i].x[0] += sum.x[0];
      total[i].x[1] += sum.x[1];
    }
    if (!x.want_o) return;
    barrier_sync(1, kScalers);
    for (int job = warp; job < 2 * Tiles::kBlocks; job += kScalers / 32) {
      const int first = job / 2 * 16, half = job % 2, at = first * kLdP + 8 * half;
      FragC P = half_products(x, stage, first, half), rest;
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        P.x[e] = 8 * half + frag_col(e) <= frag_row(e) ? P.x[e] * (p.scale * p.update_scale) : 0.0F;
        rest.x[e] = P.x[e] - to_f32(from_f32<T>(P.x[e]));
      }
      store_c<T>(x.products(stage, Tiles::kP) + at, kLdP, P);
      store_c<T>(x.products(stage, Tiles::kLowP) + at, kLdP, rest);
    }
  };

  fetch(a.from, 0, 0);
  int stage = 1, value = 1;
  for (std::int64_t t = a.from - BT; t < a.to; t += BT, stage ^= 1, value = value == 2 ? 0 : value + 1) {
    fetch(t + 2 * BT, stage, value);
    cp_async_wait<1>();
    barrier_sync(1, kScalers);
    if (t + BT < a.to) scale(stage ^ 1);
    sync_roles<Tiles::kThreads>();
  }
  // Of the first value columns alone; a.v0 would have to be kept through the loop.
  if (p.pass != DiagPass::Local || block_x() % p.v_blocks != 0) return;
  const Shared<float> sums = x.gates(0);
  FLA_UNROLL
  for (int i = 0; i < Tiles::kParts / SW; ++i) {
    const ScaledLane<KP> lane(warp + i * SW);
    if (!lane.later) sums.template store_vec<2>(lane.row / 16 * KP + lane.c, total[i]);
  }
  barrier_sync(1, kScalers);
  for (int i = id; i < p.K; i += kScalers) {
    float all = 0.0F;
    for (int of = 0; of < Tiles::kBlocks; ++of) all += sums.load(of * KP + i);
    p.total[((a.n * p.H + a.h) * p.segments + a.s) * p.K + i] = all;
  }
}

template <typename T, int KP, int BT, int NW, int WM, int SW, int BLOCKS>
FLA_KERNEL((ChannelTiles<KP, BT, NW, WM, SW>::kThreads), BLOCKS)
diag_channel_kernel(const DiagParams p) {
  using Tiles = ChannelTiles<KP, BT, NW, WM, SW>;
  constexpr int kLdK = Tiles::kLdK, kLdV = Tiles::kLdV, kLdP = Tiles::kLdP;
  const ChannelBlock<T, KP, BT, NW, WM, SW> x(p);
  const DiagTask& a = x.a;
  if (p.pass == DiagPass::Local && a.s == p.segments - 1) return;
  if (warp_id() >= NW) {
    scale_tiles(x);
    return;
  }
  const int row = 16 * WM * warp_id();  // of the block's value columns
  const Shared<KeptTask> kept = shared<KeptTask>(Tiles::kTask, 1);
  if (thread_id() == 0) kept.store(0, KeptTask::of(p, a, 16, Tiles::kValue));
  FragC S[WM][KP / 8];
  load_warp_state<KP, WM>(p, a, a.v0 + row, S);
  const OutputRows<T, 1, WM> output{p, kept, row};
  const int blocks = static_cast<int>((a.to - a.from + 15) / 16);
  const bool want_o = x.want_o;
  sync_roles<Tiles::kThreads>();

  int stage = 0, value = 0;
  for (int first = 0; first < blocks; first += Tiles::kBlocks, stage ^= 1, value = value == 2 ? 0 : value + 1) {
    const Shared<T> q = x.scaled(stage, Tiles::kScaledQ), k = x.scaled(stage, Tiles::kScaledK), v = x.values(value),
                    prod = x.products(stage, Tiles::kP), low_prod = x.products(stage, Tiles::kLowP);
    const Shared<float> decays = x.decays(stage);
    for (int b = 0; b < Tiles::kBlocks && first + b < blocks; ++b) {
      FragA<T> values[WM];  // v^T
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) load_a_trans(values[m], v + (16 * b * kLdV + row + 16 * m), kLdV);
      if (want_o) {
        std::uint32_t seen = 0;  // the answer is not waited for before the products are under way
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) seen = ask_finite<T>(values[m].x, seen);
        FragC o[1][2 * WM], odd[2 * WM], within[2 * WM];  // q' S of every other 16 channels, P v
        FragA<T> P, low;
        load_a(P, prod + 16 * b * kLdP, kLdP);
        load_a(low, low_prod + 16 * b * kLdP, kLdP);
        FragB<T> columns[2 * WM];
        FLA_UNROLL
        for (int n = 0; n < 2 * WM; ++n) {
          clear(o[0][n]);
          clear(odd[n]);
          clear(within[n]);
          const std::uint32_t* v_words = values[n / 2].x + n % 2;
          columns[n] = {{v_words[0], v_words[2]}};
        }
        FLA_UNROLL
        for (int n = 0; n < 2 * WM; ++n) {
          mma(within[n], low, columns[n]);
          mma(within[n], P, columns[n]);
        }
        FLA_UNROLL
        for (int kk = 0; kk < KP / 16; ++kk) {
          FragA<T> query;
          load_a(query, q + (16 * b * kLdK + 16 * kk), kLdK);
          FLA_UNROLL
          for (int m = 0; m < WM; ++m) {
            // The words of S^T as A are those of S as B.
            const FragA<T> state = to_a<T>(S[m][2 * kk], S[m][2 * kk + 1]);
            mma(kk % 2 == 0 ? o[0][2 * m] : odd[2 * m], query, FragB<T>{{state.x[0], state.x[2]}});
            mma(kk % 2 == 0 ? o[0][2 * m + 1] : odd[2 * m + 1], query, FragB<T>{{state.x[1], state.x[3]}});
          }
        }
        if (!all_finite(seen)) {  // P v once more: its earlier rows must not see the later ones of v
          FLA_UNROLL
          for (int n = 0; n < 2 * WM; ++n) {
            clear(within[n]);
            const std::uint32_t* v_words = values[n / 2].x + n % 2;
            columns[n] = {{v_words[0], v_words[2]}};
          }
          load_a(low, low_prod + 16 * b * kLdP, kLdP);
          add_lower_exact(within, low, columns);
          load_a(P, prod + 16 * b * kLdP, kLdP);
          add_lower_exact(within, P, columns);
        }
        FLA_UNROLL
        for (int n = 0; n < 2 * WM; ++n) {
          FLA_UNROLL
          for (int e = 0; e < 4; ++e) o[0][n].x[e] = within[n].x[e] + p.scale * (o[0][n].x[e] + odd[n].x[e]);
        }
        output.store(first + b, o);
      }
      FLA_UNROLL
      for (int n = 0; n < KP / 16; ++n) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, k + (16 * b * kLdK + 16 * n), kLdK);
        const Vec<float, 2> d0 = decays.template load_vec<2>(b * KP + 16 * n + frag_col(0)),
                            d1 = decays.template load_vec<2>(b * KP + 16 * n + 8 + frag_col(0));
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
    sync_roles<Tiles::kThreads>();
  }

  const DiagTask task = kept.load(0).task;
  if (keeps_state(p, task)) store_warp_state<KP, WM>(p, task, task.v0 + row, S);
}

template <typename T, int KP, int BT, int NW, int WM, int SW, int BLOCKS>
Status launch_channel(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  using Tiles = ChannelTiles<KP, BT, NW, WM, SW>;
  return launch<diag_channel_kernel<T, KP, BT, NW, WM, SW, BLOCKS>>({.name = plan.name(),
                                                                     .grid = {p.N * p.H * p.segments * p.v_blocks},
                                                                     .threads = Tiles::kThreads,
                                                                     .shared_bytes = Tiles::kBytes},
                                                                    stream, p);
}

template <typename T>
Status launch_diag_channel(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  switch (plan.key) {
    case 64:
      if (plan.value == 32) return launch_channel<T, 64, 32, 2, 1, 4, 2>(p, plan, stream);
      return launch_channel<T, 64, 32, 4, 1, 4, 2>(p, plan, stream);
    case 128:
      if (plan.value == 64) return launch_channel<T, 128, 32, 4, 1, 8, 1>(p, plan, stream);
      return launch_channel<T, 128, 32, 8, 1, 8, 1>(p, plan, stream);
    default: return launch_channel<T, 256, 16, 4, 1, 4, 1>(p, plan, stream);
  }
}

}  // namespace fla::cuda
