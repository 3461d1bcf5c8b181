// Gradients of a chunk of 64 tokens with one gate per key channel, from the state S_0 before the chunk and the adjoint
// dS_N after it, in blocks of 16 tokens. Within a block L is the running sum of the gates and E its last; between them
// go
//   q' = q 2^L    k' = k 2^(E - L)    A, B as for one gate per head (diag_cuda_head_gradient.cuh), B without decays
// A state's part of dq walks forwards over the blocks before it, and dk's backwards, per channel in fp32:
//   x = scale do S_0^T    x = 2^E_J x + B_IJ k'_J for J < I       dq_I = 2^L (x + 2^-E B_II k'_I)
//   y = v dS_N^T          y = 2^E_I y + B_IJ^T q'_I for I > J     dk_J = 2^(E - L) (y + 2^-E B_JJ^T q'_J)
// The gate's gradient is known from products of q' and x at the boundaries of blocks, without any difference, and
// within a block from q o dq - k o dk, without the terms of a token with itself, from both sides; what these miss at
// the other boundary is spread evenly. A warp has 16 channels of each gradient. A block where some channel decays so
// far that 2^-E leaves the range of T forms its own products from exponents of differences, one by one.
#pragma once

#include "fla/ops/common/diag_cuda_gradient.cuh"

namespace fla::cuda {

// y += W X, or W^T X, of a block of 16 x 16 weights and 16 rows of 16 channels.
template <bool TRANS, typename T>
FLA_DEVICE void add_block(FragC (&y)[2], const Shared<T>& weights, int ld_weights, const Shared<T>& rows, int ld_rows) {
  FragA<T> w;
  FragB<T> b0, b1;
  if constexpr (TRANS) {
    load_a_trans(w, weights, ld_weights);
  } else {
    load_a(w, weights, ld_weights);
  }
  load_b_trans(b0, b1, rows, ld_rows);
  mma(y[0], w, b0);
  mma(y[1], w, b1);
}

template <int D>
struct ChannelGradientTiles {
  static constexpr int kBT = kStateChunk, kBlocks = kBT / 16, kWarps = D / 16, kThreads = 32 * kWarps;
  static constexpr int kLd = D + 8, kLdP = kBT + 8, kTile = kBT * kLd * 2, kProducts = kBT * kLdP * 2;
  static constexpr int kQ = 0, kKey = kTile, kV = 2 * kTile, kUp = 3 * kTile, kB = 4 * kTile, kTail = kB + kProducts,
                       kA = kTail + kTile, kEndOfTiles = kA + kProducts;
  // In the place of k's tail and A once dv is there: q o dq, as the lanes have it, but for the last block's.
  static constexpr int kChange = kTail, kChangeOfWarp = (kBlocks - 1) * 2 * 128 * 4;
  static_assert(kWarps * kChangeOfWarp <= kEndOfTiles - kTail);
  // of channels: E and 2^E by blocks, and the gate of the token behind the chunk
  static constexpr int kEnds = kEndOfTiles, kDecays = kEnds + kBlocks * D * 4, kNext = kDecays + kBlocks * D * 4;
  // B's diagonal; by warp, what is known at the blocks' boundaries
  static constexpr int kOwn = kNext + D * 4, kSums = kOwn + kBT * 4, kBad = kSums + kWarps * kBlocks * 16 * 4,
                       kBytes = kBad + kWarps * 4;
};

// Elements c and c + 1 of a row of `count` at `row`, as they lie in memory.
template <typename T>
FLA_DEVICE std::uint32_t pair_bits(const Operand& x, bool vector, std::int64_t row, int c, int count) {
  const T* from = static_cast<const T*>(x.at.data) + row;
  if (c + 1 < count && vector) {
    const Vec<T, 2> w = load_global<2>(from + c);
    return w.x[0].bits | static_cast<std::uint32_t>(w.x[1].bits) << 16U;
  }
  std::uint32_t w = 0;
  if (c < count) w = from[c * x.at.stride[3]].bits;
  if (c + 1 < count) w |= static_cast<std::uint32_t>(from[(c + 1) * x.at.stride[3]].bits) << 16U;
  return w;
}
template <typename T>
FLA_DEVICE float pair_value(std::uint32_t w, int e) {
  return to_f32(T{static_cast<std::uint16_t>(e == 0 ? w : w >> 16U)});
}
// The same for gates: two words of F32, or one of 16 bits.
struct GatePair {
  std::uint32_t x[2];
};
FLA_DEVICE GatePair gate_pair_bits(const Operand& x, bool vector, std::int64_t row, int c, int count) {
  if (x.type != DType::F32) return {{pair_bits<bf16>(x, vector, row, c, count), 0}};
  const std::uint32_t* from = static_cast<const std::uint32_t*>(x.at.data) + row;
  if (c + 1 < count && vector) {
    const Vec<std::uint32_t, 2> w = load_global<2>(from + c);
    return {{w.x[0], w.x[1]}};
  }
  return {{c < count ? from[c * x.at.stride[3]] : 0, c + 1 < count ? from[(c + 1) * x.at.stride[3]] : 0}};
}
template <typename G>
FLA_DEVICE float gate_value(const GatePair& g, int e) {
  if constexpr (sizeof(G) == 4) {
    return base2_gate(bits_to_float(g.x[e]));
  } else {
    return base2_gate(pair_value<G>(g.x[0], e));
  }
}
// Where a chunk's rows lie in an operand.
struct ChunkRows {
  std::int64_t first, step;
  int tokens;
  FLA_DEVICE ChunkRows(const DiagParams& p, const DiagTask& a, const View& x)
      : first(a.row * x.stride[0] + a.token(p, a.from) * x.stride[1] + a.h * x.stride[2]),
        step(p.reverse ? -x.stride[1] : x.stride[1]),
        tokens(static_cast<int>(a.to - a.from)) {}
  FLA_DEVICE std::int64_t at(int token) const { return first + token * step; }
};

// What a lane needs of a block's operands where its elements of an accumulator are: [half of the tokens][n]
template <typename T>
struct BlockOperands {
  std::uint32_t q[2][2], k[2][2];
  GatePair g[2][2];

  FLA_DEVICE void ask(const DiagParams& p, const DiagTask& a, int block, int channel) {
    const ChunkRows of_q(p, a, p.q.at), of_k(p, a, p.k.at), of_g(p, a, p.gk.at);
    const int first = 16 * block + lane_id() / 4, c = channel + frag_col(0);
    if (p.vector_qk && p.vector_gate && channel + 16 <= p.K && of_q.tokens == kStateChunk) {
      FLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const auto* from_q =
            reinterpret_cast<const std::uint32_t*>(static_cast<const T*>(p.q.at.data) + of_q.at(first + 8 * half) + c);
        const auto* from_k =
            reinterpret_cast<const std::uint32_t*>(static_cast<const T*>(p.k.at.data) + of_k.at(first + 8 * half) + c);
        q[half][0] = from_q[0];
        q[half][1] = from_q[4];
        k[half][0] = from_k[0];
        k[half][1] = from_k[4];
        const std::int64_t at = of_g.at(first + 8 * half) + c;
        if (p.gk.type == DType::F32) {
          const auto* from = static_cast<const std::uint32_t*>(p.gk.at.data) + at;
          const Vec<std::uint32_t, 2> low = load_global<2>(from), high = load_global<2>(from + 8);
          g[half][0] = {{low.x[0], low.x[1]}};
          g[half][1] = {{high.x[0], high.x[1]}};
        } else {
          const auto* from = reinterpret_cast<const std::uint32_t*>(static_cast<const bf16*>(p.gk.at.data) + at);
          g[half][0] = {{from[0], 0}};
          g[half][1] = {{from[4], 0}};
        }
      }
      return;
    }
    FLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int token = first + 8 * half, count = token < of_q.tokens ? p.K : 0;
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        q[half][n] = pair_bits<T>(p.q, p.vector_qk, of_q.at(token), c + 8 * n, count);
        k[half][n] = pair_bits<T>(p.k, p.vector_qk, of_k.at(token), c + 8 * n, count);
        g[half][n] = gate_pair_bits(p.gk, p.vector_gate, of_g.at(token), c + 8 * n, count);
      }
    }
  }
  // L of this lane's elements of an accumulator: [n][element]. Returns which gates are closed, a bit each.
  FLA_DEVICE std::uint32_t running_sums(DType type, float (&L)[2][4]) const {
    with_gate_type(type, [&](auto element) {
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) L[n][e] = gate_value<decltype(element)>(g[e / 2][n], e % 2);
      }
    });
    std::uint32_t closed = 0;
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (L[n][e] < kClosedGate) closed |= 1U << (4 * n + e);
        FLA_UNROLL
        for (int by = 4; by < 32; by *= 2) {
          const float before = shuffle_up(L[n][e], by);
          if (lane_id() >= by) L[n][e] += before;
        }
      }
      L[n][2] += shuffle(L[n][0], 28 + lane_id() % 4);
      L[n][3] += shuffle(L[n][1], 28 + lane_id() % 4);
    }
    return closed;
  }
  FLA_DEVICE float query(int n, int e) const { return pair_value<T>(q[e / 2][n], e % 2); }
  FLA_DEVICE float key(int n, int e) const { return pair_value<T>(k[e / 2][n], e % 2); }
};

// The column of a warp's 16 channels whose sum column_sums gives to this lane.
FLA_DEVICE int summed_column() { return lane_id() / 16 * 8 + lane_id() % 4 * 2 + lane_id() / 8 % 2; }
// Sums over the lanes that have other tokens: x[n][e] of this lane's columns.
FLA_DEVICE float column_sums(const float (&x)[2][2]) {
  const bool high = lane_id() >= 16, odd = lane_id() / 8 % 2 != 0;
  float y[2];
  FLA_UNROLL
  for (int e = 0; e < 2; ++e) y[e] = (high ? x[1][e] : x[0][e]) + shuffle_xor(high ? x[0][e] : x[1][e], 16);
  float z = (odd ? y[1] : y[0]) + shuffle_xor(odd ? y[0] : y[1], 8);
  z += shuffle_xor(z, 4);
  return z;
}

// A's block on the diagonal by differences: for each query, keys from the diagonal downwards.
template <typename T, int D>
FLA_DEVICE void exact_block(const DiagParams& p, const DiagTask& a, int block, FragC (&P)[2]) {
  constexpr int kPairs = D / 64;
  const ChunkRows of_q(p, a, p.q.at), of_k(p, a, p.k.at), of_g(p, a, p.gk.at);
  clear(P[0]);
  clear(P[1]);
  FLA_ROLL
  for (int i = 0; i < 16; ++i) {
    if (16 * block + i >= of_q.tokens) break;
    float sum[kPairs][2] = {};
    FLA_ROLL
    for (int j = i; j >= 0; --j) {
      float dot = 0.0F;
      FLA_UNROLL
      for (int c = 0; c < kPairs; ++c) {
        const int at = 64 * c + 2 * lane_id();
        const std::uint32_t query = pair_bits<T>(p.q, p.vector_qk, of_q.at(16 * block + i), at, p.K),
                            key = pair_bits<T>(p.k, p.vector_qk, of_k.at(16 * block + j), at, p.K);
        const GatePair gate = gate_pair_bits(p.gk, p.vector_gate, of_g.at(16 * block + j), at, p.K);
        with_gate_type(p.gk.type, [&](auto element) {
          FLA_UNROLL
          for (int e = 0; e < 2; ++e) {
            dot += pair_value<T>(query, e) * pair_value<T>(key, e) * exp2_approx(sum[c][e]);
            sum[c][e] += gate_value<decltype(element)>(gate, e);
          }
        });
      }
      dot = warp_sum(dot);
      FLA_UNROLL
      for (int e = 0; e < 8; ++e) {
        if (frag_row(e % 4) == i && 8 * (e / 4) + frag_col(e % 4) == j) P[e / 4].x[e % 4] = dot;
      }
    }
  }
}

// out(t) = sum over the block's u < t (LATER: u > t) of B 2^-|L_t - L_u| x_u, x as words of a lane's elements.
template <typename T, bool LATER>
FLA_DEVICE void exact_gradient(Shared<T> B, int ld, const float (&L)[2][4], const std::uint32_t (&x)[2][2],
                               FragC (&out)[2]) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  FLA_UNROLL
  for (int half = 0; half < 2; ++half) {
    FLA_ROLL
    for (int r = 0; r < 8; ++r) {
      const int u = 8 * half + r, from = 4 * r + t;
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const std::uint32_t word = shuffle(x[half][n], from);
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          const float there = shuffle(L[n][2 * half + e], from);
          FLA_UNROLL
          for (int mine = 0; mine < 2; ++mine) {
            const int token = g + 8 * mine;
            if (LATER ? u <= token : u >= token) continue;
            const float weight = to_f32(LATER ? B.load(u * ld + token) : B.load(token * ld + u)),
                        here = L[n][2 * mine + e];
            out[n].x[2 * mine + e] +=
                weight * pair_value<T>(word, e) * exp2_approx(LATER ? there - here : here - there);
          }
        }
      }
    }
  }
}

template <typename T, int D>
FLA_KERNEL((ChannelGradientTiles<D>::kThreads), 2)
diag_channel_gradient_kernel(const GradientParams x) {
  using Tiles = ChannelGradientTiles<D>;
  constexpr int BT = Tiles::kBT, kLd = Tiles::kLd, kLdP = Tiles::kLdP, kBlocks = Tiles::kBlocks;
  const DiagParams& p = x.p;
  const DiagTask a = chunk_task(p);
  if (a.from >= a.length) return;
  const int lane = lane_id(), warp = warp_id(), channel = 16 * warp;
  const Shared<T> q = shared<T>(Tiles::kQ, BT * kLd), k = shared<T>(Tiles::kKey, BT * kLd),
                  v = shared<T>(Tiles::kV, BT * kLd), up = shared<T>(Tiles::kUp, BT * kLd),
                  A = shared<T>(Tiles::kA, BT * kLdP), B = shared<T>(Tiles::kB, BT * kLdP);
  const Shared<float> ends = shared<float>(Tiles::kEnds, kBlocks * D),
                      decays = shared<float>(Tiles::kDecays, kBlocks * D), next = shared<float>(Tiles::kNext, D),
                      own = shared<float>(Tiles::kOwn, BT),
                      sums = shared<float>(Tiles::kSums + warp * kBlocks * 16 * 4, kBlocks * 16);
  const Shared<std::int32_t> bad = shared<std::int32_t>(Tiles::kBad, Tiles::kWarps);
  const auto is_bad = [&](int block) {
    bool any = false;
    FLA_UNROLL
    for (int i = 0; i < D / 64; ++i) any = any || bad.load(block * (D / 64) + i) != 0;
    return any;
  };

  load_chunk<T, D>(x, a, q, k, v, up, kLd);
  cp_async_commit();
  const auto tiles = [&](const std::uint32_t* kept, int row, int value) {
    return load_global<4>(state_tiles<D>(kept, p, a, a.from / BT) + (row * (D / 16) + value) * 128 + 4 * lane);
  };

  // A thread scales a pair of channels of a block.
  const int pair = thread_id() % (D / 2) * 2, part = thread_id() / (D / 2);
  {
    float L[16][2];
    const ChunkRows of_g(p, a, p.gk.at);
    GatePair held[16];
    if (p.vector_gate && p.K == D && of_g.tokens == BT && p.gk.type != DType::F32) {
      const auto* from = static_cast<const bf16*>(p.gk.at.data) + of_g.at(16 * part) + pair;
      FLA_UNROLL
      for (int i = 0; i < 16; ++i) held[i] = {{*reinterpret_cast<const std::uint32_t*>(from + i * of_g.step), 0}};
    } else {
      FLA_UNROLL
      for (int i = 0; i < 16; ++i) {
        const int token = 16 * part + i;
        held[i] = gate_pair_bits(p.gk, p.vector_gate, of_g.at(token), pair, token < of_g.tokens ? p.K : 0);
      }
    }
    if (part == 0) {
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        next.store(pair + e, a.to < a.length && pair + e < p.K ? gate_before(p, a, a.to, pair + e, 0) : 0.0F);
      }
    }
    with_gate_type(p.gk.type, [&](auto element) {
      FLA_UNROLL
      for (int i = 0; i < 16; ++i) {
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          L[i][e] = gate_value<decltype(element)>(held[i], e) + (i > 0 ? L[i - 1][e] : 0.0F);
        }
      }
    });
    const float last[2] = {L[15][0], L[15][1]};
    ends.template store_vec<2>(part * D + pair, Vec<float, 2>{{last[0], last[1]}});
    decays.template store_vec<2>(part * D + pair, Vec<float, 2>{{exp2_approx(last[0]), exp2_approx(last[1])}});
    cp_async_wait<0>();
    sync_threads();
    float most = 0.0F;
    FLA_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int at = ((16 * part + i) * kLd + pair) / 2;
      const std::uint32_t query = q.template as<std::uint32_t>().load(at),
                          key = k.template as<std::uint32_t>().load(at);
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float size = pair_value<T>(query, e);
        most = size > most ? size : -size > most ? -size : most;
      }
      q.template as<std::uint32_t>().store(at, scale_pair<T>(query, exp2_approx(L[i][0]), exp2_approx(L[i][1])));
      k.template as<std::uint32_t>().store(
          at, scale_pair<T>(key, exp2_approx(last[0] - L[i][0]), exp2_approx(last[1] - L[i][1])));
    }
    const float least = last[0] < last[1] ? last[0] : last[1];
    const bool in_range = least >= RaisedRange<T>::kLeast && most * exp2_approx(-least) <= RaisedRange<T>::kMost;
    const bool any = ballot(!in_range) != 0;
    if (lane == 0) bad[warp] = any ? 1 : 0;
  }
  sync_threads();

  for (int job = warp; job < kBlocks * (kBlocks + 1) / 2; job += Tiles::kWarps) {
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
      if (i != c + 1) {
        FLA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int at = 16 * kk + 8 * half + frag_col(0);
          Vec<float, 2> by;
          if (i == c) {
            const Vec<float, 2> end = ends.template load_vec<2>(i * D + at);
            by = {{exp2_approx(-end.x[0]), exp2_approx(-end.x[1])}};
          } else {
            by = decays.template load_vec<2>((c + 1) * D + at);
            if (i > c + 2) {
              const Vec<float, 2> more = decays.template load_vec<2>((c + 2) * D + at);
              by.x[0] *= more.x[0];
              by.x[1] *= more.x[1];
            }
          }
          query.x[2 * half] = scale_pair<T>(query.x[2 * half], by.x[0], by.x[1]);
          query.x[2 * half + 1] = scale_pair<T>(query.x[2 * half + 1], by.x[0], by.x[1]);
        }
      }
      load_b(b0, b1, k + (16 * c * kLd + 16 * kk), kLd);
      mma(qk[0], query, b0);
      mma(qk[1], query, b1);
      load_a(upstream, up + (16 * i * kLd + 16 * kk), kLd);
      load_b(b0, b1, v + (16 * c * kLd + 16 * kk), kLd);
      mma(dv[0], upstream, b0);
      mma(dv[1], upstream, b1);
    }
    if (i == c && is_bad(i)) exact_block<T, D>(p, a, i, qk);
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      FLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int query = 16 * i + 8 * half + lane / 4, key = 16 * c + 8 * n + frag_col(0), behind = query - key;
        float first[2], second[2];
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          first[e] = behind >= e ? p.scale * qk[n].x[2 * half + e] : 0.0F;
          second[e] = p.scale * dv[n].x[2 * half + e];
          // A token's own term has no decay and is mostly the largest: it stays out of the 16 bits of the others.
          if (behind == e) own.store(query, second[e]);
          if (behind <= e) second[e] = 0.0F;
        }
        const int at = (query * kLdP + key) / 2;
        A.template as<std::uint32_t>().store(at, pack2<T>(first[0], first[1]));
        B.template as<std::uint32_t>().store(at, pack2<T>(second[0], second[1]));
      }
    }
  }
  const Shared<T> last_keys = shared<T>(Tiles::kTail, BT * kLd);
  if (x.dv.present()) {
    // k' up to the end of the chunk and the token behind it.
    float by[2];
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      float between = next.load(pair + e);
      for (int block = kBlocks - 1; block > part; --block) between += ends.load(block * D + pair + e);
      by[e] = exp2_approx(between);
    }
    FLA_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int at = ((16 * part + i) * kLd + pair) / 2;
      last_keys.template as<std::uint32_t>().store(
          at, scale_pair<T>(k.template as<std::uint32_t>().load(at), by[0], by[1]));
    }
  }
  sync_threads();
  if (x.dv.present()) {
    FragC y[kBlocks][2];
    Vec<std::uint32_t, 4> after[D / 16];
    FLA_UNROLL
    for (int i = 0; i < D / 16; ++i) {
      const Vec<std::uint32_t, 4> w = tiles(x.after, i, warp);
      after[i] = {{transpose_8x8(w.x[0]), transpose_8x8(w.x[2]), transpose_8x8(w.x[1]), transpose_8x8(w.x[3])}};
    }
    FLA_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      clear(y[m][0]);
      clear(y[m][1]);
    }
    times_state<T, D>(y, last_keys, kLd, after);
    add_later<T>(y, A, kLdP, up + channel, kLd);
    store_gradient(p, a, x.dv, x.vector_out, channel, p.V, y);
  }
  const bool gates = x.dgk.present();
  if (!x.dq.present() && !x.dk.present() && !gates) return;
  sync_threads();

  // What follows concerns this warp's channels only. Loops over blocks are not unrolled: code must fit into its cache.
  const Shared<float> changes = shared<float>(Tiles::kChange + warp * Tiles::kChangeOfWarp, (kBlocks - 1) * 2 * 128);
  FragC change[2];     // q o dq of the last block
  float both[2] = {};  // <S_0, dS_N> of channels lane / 4 and 8 behind it
  // y of a block times 2^E of one, by channels
  const auto decay_block = [&](FragC(&y)[2], int block) {
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      const Vec<float, 2> by = decays.template load_vec<2>(block * D + channel + 8 * n + frag_col(0));
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) y[n].x[e] *= by.x[e % 2];
    }
  };
  // What the blocks from first to last - 1 leave.
  const auto between = [&](int first, int last, int n) {
    Vec<float, 2> all = {{1.0F, 1.0F}};
    FLA_ROLL
    for (int block = first; block < last; ++block) {
      const Vec<float, 2> by = decays.template load_vec<2>(block * D + channel + 8 * n + frag_col(0));
      all.x[0] *= by.x[0];
      all.x[1] *= by.x[1];
    }
    return all;
  };
  // y = x S^T of a block
  const auto state_part = [&](FragC(&y)[2], Shared<T> from, int block, const Vec<std::uint32_t, 4>(&state)[D / 16]) {
    clear(y[0]);
    clear(y[1]);
    FLA_UNROLL
    for (int i = 0; i < D / 16; ++i) {
      FragA<T> w;
      load_a(w, from + (16 * block * kLd + 16 * i), kLd);
      mma(y[0], w, FragB<T>{{state[i].x[0], state[i].x[2]}});
      mma(y[1], w, FragB<T>{{state[i].x[1], state[i].x[3]}});
    }
  };
  if (x.dq.present() || gates) {
    Vec<std::uint32_t, 4> before[D / 16];
    FLA_UNROLL
    for (int i = 0; i < D / 16; ++i) before[i] = tiles(x.before, warp, i);
    BlockOperands<T> here;
    here.ask(p, a, 0, channel);
    if (gates) {
      FLA_UNROLL
      for (int i = 0; i < D / 16; ++i) {
        const Vec<std::uint32_t, 4> after = tiles(x.after, warp, i);
        FLA_UNROLL
        for (int w = 0; w < 4; ++w) both[w % 2] += word_product<T>(before[i].x[w], after.x[w]);
      }
      both[0] = warp_sum<4>(both[0]);
      both[1] = warp_sum<4>(both[1]);
      sums.store(lane, 0.0F);
      sums.store(32 + lane, 0.0F);
      sync_warp();
    }
    FLA_ROLL
    for (int i = 0; i < kBlocks; ++i) {
      if (i > 0) here.ask(p, a, i, channel);
      FragC o[2];
      state_part(o, up, i, before);
      float L[2][4], query[2][4];
      (void)here.running_sums(p.gk.type, L);
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          query[n][e] = exp2_approx(L[n][e]) * here.query(n, e);
          o[n].x[e] *= p.scale;
        }
      }
      FLA_ROLL
      for (int c = 0; c <= i; ++c) {
        if (gates) {
          // What the queries take from the state at this boundary.
          float known[2][2];
          FLA_UNROLL
          for (int n = 0; n < 2; ++n) {
            const Vec<float, 2> fall = between(c, i, n);
            FLA_UNROLL
            for (int e = 0; e < 2; ++e) {
              const float sum = query[n][e] * o[n].x[e] + query[n][2 + e] * o[n].x[2 + e];
              known[n][e] = sum * fall.x[e];
            }
          }
          const float sum = column_sums(known);
          const int at = c * 16 + summed_column();
          if (lane / 4 % 2 == 0) sums.store(at, sums.load(at) + sum);
        }
        if (c == i) break;
        decay_block(o, c);
        add_block<false>(o, B + (16 * i * kLdP + 16 * c), kLdP, k + (16 * c * kLd + channel), kLd);
      }
      FragC inner[2];
      clear(inner[0]);
      clear(inner[1]);
      const bool exact = is_bad(i);
      if (exact) {
        exact_gradient<T, false>(B + (16 * i * kLdP + 16 * i), kLdP, L, here.k, inner);
      } else {
        add_block<false>(inner, B + (16 * i * kLdP + 16 * i), kLdP, k + (16 * i * kLd + channel), kLd);
      }
      FragC dq[2];
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const Vec<float, 2> end = ends.template load_vec<2>(i * D + channel + 8 * n + frag_col(0));
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          const float raise = exact ? 1.0F : exp2_approx(L[n][e] - end.x[e % 2]);
          const float sum = exp2_approx(L[n][e]) * o[n].x[e] + raise * inner[n].x[e];
          dq[n].x[e] = sum + own.load(16 * i + frag_row(e)) * here.key(n, e);
          change[n].x[e] = sum * here.query(n, e);
        }
        const FragC& w = change[n];
        if (i + 1 < kBlocks) {
          changes.template store_vec<4>((2 * i + n) * 128 + 4 * lane, Vec<float, 4>{{w.x[0], w.x[1], w.x[2], w.x[3]}});
        }
      }
      store_block(p, a, x.dq, x.vector_out, i, channel, p.K, dq);
    }
    sync_warp();
  }
  if (!x.dk.present() && !gates) return;
  Vec<std::uint32_t, 4> after[D / 16];
  FLA_UNROLL
  for (int i = 0; i < D / 16; ++i) after[i] = tiles(x.after, warp, i);
  // dg at the first token of a block, without what comes from queries within the chunk: by this lane's channels
  float passing[2][2];
  FLA_UNROLL
  for (int n = 0; n < 2; ++n) {
    const Vec<float, 2> all = between(0, kBlocks, n), behind = next.template load_vec<2>(channel + 8 * n + frag_col(0));
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      passing[n][e] = shuffle(both[n], 4 * frag_col(e)) * all.x[e] * exp2_approx(behind.x[e]);
    }
  }
  FLA_ROLL
  for (int c = 0; c < kBlocks; ++c) {
    BlockOperands<T> here;
    here.ask(p, a, c, channel);
    FragC y[2], first[2];  // first: without the chunk's own queries
    state_part(y, v, c, after);
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      const Vec<float, 2> behind = next.template load_vec<2>(channel + 8 * n + frag_col(0));
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) y[n].x[e] *= exp2_approx(behind.x[e % 2]);
      first[n] = y[n];
    }
    FLA_ROLL
    for (int i = kBlocks - 1; i > c; --i) {
      decay_block(y, i);
      add_block<true>(y, B + (16 * i * kLdP + 16 * c), kLdP, q + (16 * i * kLd + channel), kLd);
    }
    FragC inner[2];
    clear(inner[0]);
    clear(inner[1]);
    const bool exact = is_bad(c);
    if (!exact) {
      add_block<true>(inner, B + (16 * c * kLdP + 16 * c), kLdP, q + (16 * c * kLd + channel), kLd);
    }
    float L[2][4];
    const std::uint32_t closed = here.running_sums(p.gk.type, L);
    if (exact) exact_gradient<T, true>(B + (16 * c * kLdP + 16 * c), kLdP, L, here.q, inner);
    float arriving[2][2] = {};  // what the block's keys add to `passing`
    FragC dk[2];
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      const int at = channel + 8 * n + frag_col(0);
      const Vec<float, 2> end = ends.template load_vec<2>(c * D + at), fall_behind = between(c + 1, kBlocks, n);
      FragC w = change[n];
      if (c + 1 < kBlocks) {
        const Vec<float, 4> held = changes.template load_vec<4>((2 * c + n) * 128 + 4 * lane);
        w = {{held.x[0], held.x[1], held.x[2], held.x[3]}};
      }
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float fall = exp2_approx(end.x[e % 2] - L[n][e]), raise = exact ? 1.0F : exp2_approx(-L[n][e]);
        const float sum = fall * y[n].x[e] + raise * inner[n].x[e];
        dk[n].x[e] = sum + own.load(16 * c + frag_row(e)) * here.query(n, e);
        inner[n].x[e] = w.x[e] - sum * here.key(n, e);  // q o dq - k o dk
        arriving[n][e % 2] += fall * here.key(n, e) * first[n].x[e];
      }
      arriving[n][0] *= fall_behind.x[0];
      arriving[n][1] *= fall_behind.x[1];
    }
    store_block(p, a, x.dk, x.vector_out, c, channel, p.K, dk);
    if (!gates) continue;
    FragC dg[2];
    const float arrived = column_sums(arriving);
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * n + frag_col(e);
        const float left = passing[n][e] + sums.load(c * 16 + at);
        passing[n][e] += shuffle(arrived, 16 * n + 8 * e + lane % 4);
        const float right = passing[n][e] + (c + 1 < kBlocks ? sums.load((c + 1) * 16 + at) : 0.0F);
        float later[2] = {inner[n].x[e], inner[n].x[2 + e]};
        FLA_UNROLL
        for (int half = 0; half < 2; ++half) {
          FLA_UNROLL
          for (int by = 4; by < 32; by *= 2) {
            const float other = shuffle_down(later[half], by);
            if (lane + by < 32) later[half] += other;
          }
        }
        later[0] += shuffle(later[1], lane % 4);
        const float miss = (left - right - shuffle(later[0], lane % 4)) * (1.0F / 16);
        FLA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int token = 8 * half + lane / 4;
          const bool shut = (closed >> (4 * n + 2 * half + e) & 1U) != 0;
          dg[n].x[2 * half + e] = shut ? 0.0F : right + later[half] + miss * static_cast<float>(16 - token);
        }
      }
    }
    store_block(p, a, x.dgk, x.vector_gates, c, channel, p.K, dg);
  }
}

template <typename T>
Status launch_diag_channel_gradient(const GradientParams& x, const DiagPlan& plan, Stream stream) {
  if (plan.key == 64)
    return launch_by_chunk<diag_channel_gradient_kernel<T, 64>, ChannelGradientTiles<64>>("diag_channel_gradient", x,
                                                                                          stream);
  return launch_by_chunk<diag_channel_gradient_kernel<T, 128>, ChannelGradientTiles<128>>("diag_channel_gradient", x,
                                                                                          stream);
}

}  // namespace fla::cuda
