// Gradients of a chunk of 64 tokens with one gate per key channel, from the state S_0 before the chunk and the adjoint
// dS_N after it, in blocks of 16 tokens. Gates are summed up to G, by channels; at the blocks' boundaries R is the
// number next to G that is a whole one away from the others, so that scaling from one to another rounds nothing (F16: G
// itself). Within a block L is G less the R at its start and E that at its end; between blocks go
//   q' = q 2^L    k' = k 2^(E - L)    A, B as for one gate per head (head_gradient.cuh), B without decays
// A state's part of dq walks forwards over the blocks before it, and dk's backwards, per channel in fp32:
//   x = scale do S_0^T    x = 2^E_J x + B_IJ k'_J for J < I       dq_I = 2^L (x + 2^-E B_II k'_I)
//   y = v dS_N^T          y = 2^E_I y + B_IJ^T q'_I for I > J     dk_J = 2^(E - L) (y + 2^-E B_JJ^T q'_J)
// The nearest tokens have decayed least, so their rounding is what gradients would show: within a block and between
// neighbours q', k', A and B are pairs of a number rounded to T and the rest, and only the rests' product is left out.
// The gate's gradient is known from products of q' and x at the boundaries of blocks, without any difference, and
// within a block from q o dq - k o dk, without the terms of a token with itself, from both sides; what these miss at
// the other boundary is spread evenly. A warp has 16 channels of each gradient. A block where some channel decays so
// far that 2^-E leaves the range of T forms its own products from exponents of differences, one by one.
#pragma once

#include <cmath>
#include <type_traits>

#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/gradient.cuh"
#include "fla/engine/diag/cuda/pairs.cuh"

namespace fla::cuda {

// y += w x of 16 x 16 weights and 16 rows of 16 channels.
template <typename T>
FLA_DEVICE void add_block(FragC (&y)[2], const FragA<T>& w, const FragB<T> (&x)[2]) {
  mma(y[0], w, x[0]);
  mma(y[1], w, x[1]);
}
template <typename T>
FLA_DEVICE void load_rows(FragB<T> (&x)[2], Shared<T> rows, int ld) {
  load_b_trans(x[0], x[1], rows, ld);
}

// A chunk's weights, lower triangular, in blocks of 16 x 16 that lie as the A fragments of a warp: all rounded to T,
// then what rounding leaves of those on the diagonal and below it.
template <typename T>
struct ChunkWeights {
  static constexpr int kBlocks = kStateChunk / 16, kHigh = kBlocks * (kBlocks + 1) / 2, kAll = kHigh + 2 * kBlocks - 1,
                       kBytes = kAll * 128 * 4;
  Shared<std::uint32_t> at;

  FLA_DEVICE static int high(int i, int c) { return i * (i + 1) / 2 + c; }
  FLA_DEVICE static int low(int i, int c) { return kHigh + i + c; }
  FLA_DEVICE static FragA<T> transposed(const FragA<T>& w) {
    return {{transpose_8x8(w.x[0]), transpose_8x8(w.x[2]), transpose_8x8(w.x[1]), transpose_8x8(w.x[3])}};
  }

  FLA_DEVICE void store(int block, const FragA<T>& w) const {
    at.template store_vec<4>(block * 128 + 4 * lane_id(), Vec<std::uint32_t, 4>{{w.x[0], w.x[1], w.x[2], w.x[3]}});
  }
  template <bool TRANS>
  FLA_DEVICE void store(int i, int c, const FragC& left, const FragC& right) const {
    const FragA<T> w = to_a<T>(left, right);
    store(high(i, c), TRANS ? transposed(w) : w);
    if (i > c + 1) return;
    const FragA<T> rest = rest_of(left, right, w);
    store(low(i, c), TRANS ? transposed(rest) : rest);
  }
  template <bool TRANS>
  FLA_DEVICE FragA<T> load(int block) const {
    const Vec<std::uint32_t, 4> w = at.template load_vec<4>(block * 128 + 4 * lane_id());
    const FragA<T> a = {{w.x[0], w.x[1], w.x[2], w.x[3]}};
    return TRANS ? transposed(a) : a;
  }
  // Of a block on the diagonal.
  FLA_DEVICE float value(int i, int row, int col) const {
    const int word = (row % 8 * 4 + col % 8 / 2) * 4 + row / 8 + col / 8 * 2;
    const auto half = [&](int block) {
      const std::uint32_t w = at.load(block * 128 + word);
      return to_f32(T{static_cast<std::uint16_t>(col % 2 == 0 ? w : w >> 16U)});
    };
    return half(high(i, i)) + half(low(i, i));
  }
};

// y += W x, or W^T x, of a chunk's block of weights and 16 rows x of 16 channels, which are rounded and their rests.
template <bool TRANS, typename T>
FLA_DEVICE void add_near_block(FragC (&y)[2], const ChunkWeights<T>& weights, int i, int c, const FragB<T> (&x)[2],
                               const FragB<T> (&rest)[2]) {
  const FragA<T> high = weights.template load<TRANS>(ChunkWeights<T>::high(i, c));
  add_block(y, high, x);
  add_block(y, high, rest);
  add_block(y, weights.template load<TRANS>(ChunkWeights<T>::low(i, c)), x);
}

// What rounding left of a block's rows, by its exact elements, as operands of add_near_block.
template <typename T>
FLA_DEVICE void rest_of_rows(FragB<T> (&rest)[2], const float (&exact)[2][4], Shared<T> rounded, int ld) {
  FLA_UNROLL
  for (int n = 0; n < 2; ++n) {
    FLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int at = (8 * half + lane_id() / 4) * ld + 8 * n + frag_col(0);
      const std::uint32_t w = rounded.template as<std::uint32_t>().load(at / 2);
      rest[n].x[half] = transpose_8x8(low_pair<T>(w, exact[n][2 * half], exact[n][2 * half + 1]));
    }
  }
}

template <int D>
struct ChannelGradientTiles {
  static constexpr int kBT = kStateChunk, kBlocks = kBT / 16, kWarps = D / 16, kThreads = 32 * kWarps;
  static constexpr int kLd = D + 8, kTile = kBT * kLd * 2, kWeights = ChunkWeights<bf16>::kBytes;
  // kRest: what rounding leaves of q'. The rest of k', then k' up to the end of the chunk, are in the place of v, which
  // comes when both are used up; A and B share a place in the same way.
  static constexpr int kQ = 0, kKey = kTile, kV = 2 * kTile, kUp = 3 * kTile, kRest = 4 * kTile, kA = kRest + kTile,
                       kB = kA, kEndOfTiles = kB + kWeights;
  // of channels: by blocks G - R at the start, E and 2^E; the gate of the token behind the chunk, and the decay from
  // the last R to there
  static constexpr int kOfChannels = kBlocks * D * 4, kStarts = kEndOfTiles, kEnds = kStarts + kOfChannels,
                       kDecays = kEnds + kOfChannels, kNext = kDecays + kOfChannels, kBehind = kNext + D * 4;
  // B's diagonal; by warp, what is known at the blocks' boundaries, and before that the blocks' sums of gates
  static constexpr int kSumsOfWarp = (kBlocks + 1) * 16 * 4, kOwn = kBehind + D * 4, kSums = kOwn + kBT * 4,
                       kBad = kSums + kWarps * kSumsOfWarp, kBytes = kBad + kWarps * 4;
  static_assert(kWarps * kSumsOfWarp >= kOfChannels);
};

// Powers of two round nothing away. F16 has no range for what q' and k' would grow by.
template <typename T>
FLA_DEVICE float nearest_whole(float x) {
  return std::is_same_v<T, f16> ? x : rintf(x);
}

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
  FLA_DEVICE std::uint32_t running_sums(DType type, Shared<float> starts, float (&L)[2][4]) const {
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
      const Vec<float, 2> start = starts.template load_vec<2>(8 * n + frag_col(0));
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) L[n][e] += start.x[e % 2];
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
FLA_DEVICE void exact_gradient(const ChunkWeights<T>& B, int block, const float (&L)[2][4],
                               const std::uint32_t (&x)[2][2], FragC (&out)[2]) {
  FLA_ROLL
  for (int u = 0; u < 16; ++u) {
    const bool second = u >= 8;
    const int from = u % 8 * 4 + lane_id() % 4;
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      const std::uint32_t word = shuffle(second ? x[1][n] : x[0][n], from);
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float there = shuffle(second ? L[n][2 + e] : L[n][e], from);
        FLA_UNROLL
        for (int mine = 0; mine < 2; ++mine) {
          const int token = lane_id() / 4 + 8 * mine;
          if (LATER ? u <= token : u >= token) continue;
          const float weight = LATER ? B.value(block, u, token) : B.value(block, token, u), here = L[n][2 * mine + e];
          out[n].x[2 * mine + e] += weight * pair_value<T>(word, e) * exp2_approx(LATER ? there - here : here - there);
        }
      }
    }
  }
}

template <typename T, int D>
FLA_KERNEL((ChannelGradientTiles<D>::kThreads), 2)
diag_channel_gradient_kernel(const GradientParams x) {
  using Tiles = ChannelGradientTiles<D>;
  constexpr int BT = Tiles::kBT, kLd = Tiles::kLd, kBlocks = Tiles::kBlocks;
  const DiagParams& p = x.p;
  const DiagTask task = chunk_task(p);
  if (task.from >= task.length) return;
  // The chunk as a sequence of its own.
  DiagTask a = task;
  a.length = a.to = task.to - task.from;
  a.begin = task.token(p, p.reverse ? task.to - 1 : task.from);
  a.from = 0;
  const int lane = lane_id(), warp = warp_id(), channel = 16 * warp;
  const Shared<T> q = shared<T>(Tiles::kQ, BT * kLd), k = shared<T>(Tiles::kKey, BT * kLd),
                  v = shared<T>(Tiles::kV, BT * kLd), up = shared<T>(Tiles::kUp, BT * kLd),
                  rest_q = shared<T>(Tiles::kRest, BT * kLd), rest_k = v;
  const ChunkWeights<T> A{shared<std::uint32_t>(Tiles::kA, Tiles::kWeights / 4)},
      B{shared<std::uint32_t>(Tiles::kB, Tiles::kWeights / 4)};
  const Shared<float> starts = shared<float>(Tiles::kStarts, kBlocks * D),
                      falls = shared<float>(Tiles::kSums, kBlocks * D), ends = shared<float>(Tiles::kEnds, kBlocks * D),
                      decays = shared<float>(Tiles::kDecays, kBlocks * D), next = shared<float>(Tiles::kNext, D),
                      behind = shared<float>(Tiles::kBehind, D), own = shared<float>(Tiles::kOwn, BT),
                      sums = shared<float>(Tiles::kSums + warp * Tiles::kSumsOfWarp, (kBlocks + 1) * 16);
  const Shared<std::int32_t> bad = shared<std::int32_t>(Tiles::kBad, Tiles::kWarps);
  const auto is_bad = [&](int block) {
    bool any = false;
    FLA_UNROLL
    for (int i = 0; i < D / 64; ++i) any = any || bad.load(block * (D / 64) + i) != 0;
    return any;
  };

  load_chunk<T, D>(p, a, p.q, p.vector_qk, p.K, q, kLd);
  load_chunk<T, D>(p, a, p.k, p.vector_qk, p.K, k, kLd);
  load_chunk<T, D>(p, a, x.up, x.vector_up, p.V, up, kLd);
  cp_async_commit();
  const auto tiles = [&](const std::uint32_t* kept, int row, int value) {
    return load_global<4>(kept + block_x() * (D * D / 2) + (row * (D / 16) + value) * 128 + 4 * lane);
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
        next.store(pair + e,
                   task.to < task.length && pair + e < p.K ? gate_before(p, task, task.to, pair + e, 0) : 0.0F);
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
    falls.template store_vec<2>(part * D + pair, Vec<float, 2>{{L[15][0], L[15][1]}});
    cp_async_wait<0>();
    sync_threads();
    float start[2], end[2];
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      const float gate = next.load(pair + e), whole = nearest_whole<T>(gate);
      if (part == 0) behind.store(pair + e, exp2_approx(whole));
      start[e] = whole - gate;
      for (int block = kBlocks - 1; block >= part; --block) {
        const float to = start[e] - falls.load(block * D + pair + e);
        end[e] = -nearest_whole<T>(to);
        start[e] = to + end[e];
      }
    }
    starts.template store_vec<2>(part * D + pair, Vec<float, 2>{{start[0], start[1]}});
    ends.template store_vec<2>(part * D + pair, Vec<float, 2>{{end[0], end[1]}});
    decays.template store_vec<2>(part * D + pair, Vec<float, 2>{{exp2_approx(end[0]), exp2_approx(end[1])}});
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
        L[i][e] += start[e];
      }
      const float of_q[2] = {exp2_approx(L[i][0]), exp2_approx(L[i][1])},
                  of_k[2] = {exp2_approx(end[0] - L[i][0]), exp2_approx(end[1] - L[i][1])};
      q.template as<std::uint32_t>().store(at, scale_pair<T>(query, of_q[0], of_q[1]));
      rest_q.template as<std::uint32_t>().store(at, rest_of_pair<T>(query, of_q[0], of_q[1]));
      k.template as<std::uint32_t>().store(at, scale_pair<T>(key, of_k[0], of_k[1]));
      rest_k.template as<std::uint32_t>().store(at, rest_of_pair<T>(key, of_k[0], of_k[1]));
    }
    const float least = end[0] < end[1] ? end[0] : end[1];
    const bool in_range = least >= RaisedRange<T>::kLeast && most * exp2_approx(1.0F - least) <= RaisedRange<T>::kMost;
    const bool any = ballot(!in_range) != 0;
    if (lane == 0) bad[warp] = any ? 1 : 0;
  }
  sync_threads();

  const auto block_of = [](int job) { return job < 1 ? 0 : job < 3 ? 1 : job < 6 ? 2 : 3; };
  if (x.dv.present()) {
    FLA_ROLL
    for (int job = warp; job < kBlocks * (kBlocks + 1) / 2; job += Tiles::kWarps) {
      const int i = block_of(job), c = job - i * (i + 1) / 2;
      FragC qk[2];
      clear(qk[0]);
      clear(qk[1]);
      FLA_UNROLL
      for (int kk = 0; kk < D / 16; ++kk) {
        const int rows = 16 * i * kLd + 16 * kk, keys = 16 * c * kLd + 16 * kk;
        FragA<T> query, rest;
        FragB<T> key[2];
        load_a(query, q + rows, kLd);
        if (i <= c + 1) load_a(rest, rest_q + rows, kLd);
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
            FLA_UNROLL
            for (int w = 2 * half; w < 2 * half + 2; ++w) {
              query.x[w] = scale_pair<T>(query.x[w], by.x[0], by.x[1]);
              if (i == c) rest.x[w] = scale_pair<T>(rest.x[w], by.x[0], by.x[1]);
            }
          }
        }
        load_b(key[0], key[1], k + keys, kLd);
        add_block(qk, query, key);
        if (i > c + 1) continue;
        add_block(qk, rest, key);
        load_b(key[0], key[1], rest_k + keys, kLd);
        add_block(qk, query, key);
      }
      if (i == c && is_bad(i)) exact_block<T, D>(p, a, i, qk);
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          const bool later = 16 * i + frag_row(e) >= 16 * c + 8 * n + frag_col(e);
          qk[n].x[e] = later ? p.scale * qk[n].x[e] : 0.0F;
        }
      }
      A.template store<true>(i, c, qk[0], qk[1]);
    }
  }
  const bool gates = x.dgk.present(), more = x.dq.present() || x.dk.present() || gates;
  FragC dv[kBlocks][2];
  if (x.dv.present()) {
    sync_threads();
    // k' up to the end of the chunk and the token behind it.
    const Shared<T> last_keys = rest_k;
    Vec<float, 2> by = behind.template load_vec<2>(pair);
    for (int block = kBlocks - 1; block > part; --block) {
      const Vec<float, 2> fall = decays.template load_vec<2>(block * D + pair);
      by.x[0] *= fall.x[0];
      by.x[1] *= fall.x[1];
    }
    FLA_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int at = ((16 * part + i) * kLd + pair) / 2;
      last_keys.template as<std::uint32_t>().store(
          at, scale_pair<T>(k.template as<std::uint32_t>().load(at), by.x[0], by.x[1]));
    }
    sync_threads();
    Vec<std::uint32_t, 4> after[D / 16];
    FLA_UNROLL
    for (int i = 0; i < D / 16; ++i) {
      const Vec<std::uint32_t, 4> w = tiles(x.after, i, warp);
      after[i] = {{transpose_8x8(w.x[0]), transpose_8x8(w.x[2]), transpose_8x8(w.x[1]), transpose_8x8(w.x[3])}};
    }
    FLA_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      clear(dv[m][0]);
      clear(dv[m][1]);
    }
    times_state<T, D>(dv, last_keys, kLd, after);
    FLA_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      FragB<T> rows[2];
      load_rows(rows, up + (16 * i * kLd + channel), kLd);
      FLA_UNROLL
      for (int m = 0; m <= i; ++m) {
        add_block(dv[m], A.template load<false>(A.high(i, m)), rows);
        if (i <= m + 1) add_block(dv[m], A.template load<false>(A.low(i, m)), rows);
      }
    }
    sync_threads();
  }
  if (more) load_chunk<T, D>(p, a, p.v, p.vector_v, p.V, v, kLd);
  cp_async_commit();
  if (x.dv.present()) store_gradient(p, a, x.dv, x.vector_out, channel, p.V, dv);
  if (!more) return;
  cp_async_wait<0>();
  sync_threads();
  FLA_ROLL
  for (int job = warp; job < kBlocks * (kBlocks + 1) / 2; job += Tiles::kWarps) {
    const int i = block_of(job), c = job - i * (i + 1) / 2;
    FragC w[2];
    clear(w[0]);
    clear(w[1]);
    FLA_UNROLL
    for (int kk = 0; kk < D / 16; ++kk) {
      FragA<T> upstream;
      FragB<T> value[2];
      load_a(upstream, up + (16 * i * kLd + 16 * kk), kLd);
      load_b(value[0], value[1], v + (16 * c * kLd + 16 * kk), kLd);
      add_block(w, upstream, value);
    }
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int query = 16 * i + frag_row(e), apart = query - (16 * c + 8 * n + frag_col(e));
        w[n].x[e] *= p.scale;
        // A token's own term has no decay and is mostly the largest: it stays out of the 16 bits of the others.
        if (apart == 0) own.store(query, w[n].x[e]);
        if (apart <= 0) w[n].x[e] = 0.0F;
      }
    }
    B.template store<false>(i, c, w[0], w[1]);
  }
  sync_threads();

  // What follows concerns this warp's channels only. Loops over blocks are not unrolled: code must fit into its cache.

  // Where this lane's part of the gate's gradients lies once the block's q' is used up: in the place of this warp's
  // channels of it. First k o dk, then q o dq less that.
  const auto change_of = [&](int block, int n) {
    return (n == 0 ? q : rest_q).template as<float>() + (((16 * block + lane / 2) * kLd + channel) / 2 + lane % 2 * 4);
  };
  const int column = summed_column();
  const auto add_to_sums = [&](int block, float sum) {
    const int at = 16 * block + column;
    if (lane / 4 % 2 == 0) sums.store(at, sums.load(at) + sum);
  };
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
  std::uint32_t closed = 0;  // which gates of this lane's elements are, 8 bits of a block
  if (x.dk.present() || gates) {
    Vec<std::uint32_t, 4> after[D / 16];
    FLA_UNROLL
    for (int i = 0; i < D / 16; ++i) after[i] = tiles(x.after, warp, i);
    // dg at the first token of a block, and behind the last, without what comes from queries within the chunk: of this
    // lane's column.
    float passing = 0.0F;
    if (gates) {
      float both[2] = {};  // <S_0, dS_N> of channels lane / 4 and 8 behind it
      FLA_UNROLL
      for (int i = 0; i < D / 16; ++i) {
        const Vec<std::uint32_t, 4> before = tiles(x.before, warp, i);
        FLA_UNROLL
        for (int w = 0; w < 4; ++w) both[w % 2] += word_product<T>(before.x[w], after[i].x[w]);
      }
      both[0] = warp_sum<4>(both[0]);
      both[1] = warp_sum<4>(both[1]);
      const float low = shuffle(both[0], column % 8 * 4), high = shuffle(both[1], column % 8 * 4);
      const int at = channel + column;
      passing = (column < 8 ? low : high) * behind.load(at) * exp2_approx(-starts.load(at));
      FLA_UNROLL
      for (int block = 0; block < kBlocks; ++block) passing *= decays.load(block * D + at);
      for (int i = lane; i < (kBlocks + 1) * 16; i += 32) sums.store(i, 0.0F);
      sync_warp();
      add_to_sums(0, passing);
    }
    FLA_ROLL
    for (int c = 0; c < kBlocks; ++c) {
      BlockOperands<T> here;
      here.ask(p, a, c, channel);
      FragC y[2];
      state_part(y, v, c, after);
      float L[2][4];
      closed |= here.running_sums(p.gk.type, starts + (c * D + channel), L) << (8 * c);
      float arriving[2][2] = {};  // what the block's keys add to `passing`
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const int at = channel + 8 * n + frag_col(0);
        const Vec<float, 2> left = behind.template load_vec<2>(at), end = ends.template load_vec<2>(c * D + at),
                            fall_behind = between(c + 1, kBlocks, n);
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          y[n].x[e] *= left.x[e % 2];
          arriving[n][e % 2] += exp2_approx(end.x[e % 2] - L[n][e]) * here.key(n, e) * y[n].x[e];
        }
        arriving[n][0] *= fall_behind.x[0];
        arriving[n][1] *= fall_behind.x[1];
      }
      if (gates) {
        passing += column_sums(arriving);
        add_to_sums(c + 1, passing);
      }
      FragC inner[2];
      clear(inner[0]);
      clear(inner[1]);
      const bool exact = is_bad(c);
      if (exact) {
        exact_gradient<T, true>(B, c, L, here.q, inner);
      } else {
        FragB<T> queries[2], rest[2];
        load_rows(queries, q + (16 * c * kLd + channel), kLd);
        load_rows(rest, rest_q + (16 * c * kLd + channel), kLd);
        add_near_block<true>(inner, B, c, c, queries, rest);
      }
      FLA_ROLL
      for (int i = kBlocks - 1; i > c; --i) {
        decay_block(y, i);
        FragB<T> queries[2];
        load_rows(queries, q + (16 * i * kLd + channel), kLd);
        if (i > c + 1) {
          add_block(y, B.template load<true>(B.high(i, c)), queries);
        } else {
          FragB<T> rest[2];
          load_rows(rest, rest_q + (16 * i * kLd + channel), kLd);
          add_near_block<true>(y, B, i, c, queries, rest);
        }
      }
      FragC dk[2];
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const int at = channel + 8 * n + frag_col(0);
        const Vec<float, 2> end = ends.template load_vec<2>(c * D + at);
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          const float fall = exp2_approx(end.x[e % 2] - L[n][e]), raise = exact ? 1.0F : exp2_approx(-L[n][e]);
          const float sum = fall * y[n].x[e] + raise * inner[n].x[e];
          dk[n].x[e] = sum + own.load(16 * c + frag_row(e)) * here.query(n, e);
          inner[n].x[e] = sum * here.key(n, e);
        }
      }
      if (gates) {
        sync_warp();
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) {
          const FragC& w = inner[n];
          change_of(c, n).template store_vec<4>(0, Vec<float, 4>{{w.x[0], w.x[1], w.x[2], w.x[3]}});
        }
      }
      store_block(p, a, x.dk, x.vector_out, c, channel, p.K, dk);
    }
    sync_warp();
  }
  if (x.dq.present() || gates) {
    Vec<std::uint32_t, 4> before[D / 16];
    FLA_UNROLL
    for (int i = 0; i < D / 16; ++i) before[i] = tiles(x.before, warp, i);
    FragB<T> rest_before[2] = {};  // of the block before
    FLA_ROLL
    for (int i = 0; i < kBlocks; ++i) {
      BlockOperands<T> here;
      here.ask(p, a, i, channel);
      FragC o[2];
      state_part(o, up, i, before);
      float L[2][4], fall[2][4], key[2][4];
      (void)here.running_sums(p.gk.type, starts + (i * D + channel), L);
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const int at = channel + 8 * n + frag_col(0);
        const Vec<float, 2> start = starts.template load_vec<2>(at), end = ends.template load_vec<2>(i * D + at);
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          fall[n][e] = exp2_approx(L[n][e]);
          key[n][e] = exp2_approx(end.x[e % 2] - L[n][e]) * here.key(n, e);
          o[n].x[e] *= p.scale * exp2_approx(-start.x[e % 2]);
        }
      }
      FragB<T> rest[2];
      rest_of_rows(rest, key, k + (16 * i * kLd + channel), kLd);
      FLA_ROLL
      for (int c = 0; c <= i; ++c) {
        if (gates) {
          // What the queries take from the state at this boundary.
          float known[2][2];
          FLA_UNROLL
          for (int n = 0; n < 2; ++n) {
            const Vec<float, 2> all = between(c, i, n);
            FLA_UNROLL
            for (int e = 0; e < 2; ++e) {
              known[n][e] = all.x[e] * (fall[n][e] * here.query(n, e) * o[n].x[e] +
                                        fall[n][2 + e] * here.query(n, 2 + e) * o[n].x[2 + e]);
            }
          }
          add_to_sums(c, column_sums(known));
        }
        if (c == i) break;
        decay_block(o, c);
        FragB<T> keys[2];
        load_rows(keys, k + (16 * c * kLd + channel), kLd);
        if (c + 1 < i) {
          add_block(o, B.template load<false>(B.high(i, c)), keys);
        } else {
          add_near_block<false>(o, B, i, c, keys, rest_before);
        }
      }
      FragC inner[2];
      clear(inner[0]);
      clear(inner[1]);
      const bool exact = is_bad(i);
      if (exact) {
        exact_gradient<T, false>(B, i, L, here.k, inner);
      } else {
        FragB<T> keys[2];
        load_rows(keys, k + (16 * i * kLd + channel), kLd);
        add_near_block<false>(inner, B, i, i, keys, rest);
      }
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) rest_before[n] = rest[n];
      FragC dq[2], change[2];
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const Vec<float, 2> end = ends.template load_vec<2>(i * D + channel + 8 * n + frag_col(0));
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          const float raise = exact ? 1.0F : exp2_approx(L[n][e] - end.x[e % 2]);
          const float sum = fall[n][e] * o[n].x[e] + raise * inner[n].x[e];
          dq[n].x[e] = sum + own.load(16 * i + frag_row(e)) * here.key(n, e);
          change[n].x[e] = sum * here.query(n, e);
        }
      }
      if (gates) {
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) {
          const Shared<float> to = change_of(i, n);
          const Vec<float, 4> w = to.template load_vec<4>(0);
          FLA_UNROLL
          for (int e = 0; e < 4; ++e) change[n].x[e] -= w.x[e];
          const FragC& d = change[n];
          to.template store_vec<4>(0, Vec<float, 4>{{d.x[0], d.x[1], d.x[2], d.x[3]}});
        }
      }
      store_block(p, a, x.dq, x.vector_out, i, channel, p.K, dq);
    }
    sync_warp();
  }
  if (!gates) return;
  FLA_ROLL
  for (int c = 0; c < kBlocks; ++c) {
    FragC dg[2];
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      const Vec<float, 4> change = change_of(c, n).template load_vec<4>(0);
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * n + frag_col(e);
        const float left = sums.load(c * 16 + at), right = sums.load((c + 1) * 16 + at);
        float later[2] = {change.x[e], change.x[2 + e]};
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
          const bool shut = (closed >> (8 * c + 4 * n + 2 * half + e) & 1U) != 0;
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
