// The tensor-core forward of the delta rule over sequences that are cut into segments of whole chunks, exactly. Over a
// segment the state goes from S to M S + N.
//   delta_transfer_kernel  M and N of all segments but a sequence's last, in parallel: (2) and (3) of
//                          delta_cuda_chunk_fwd.cuh for K columns that start from the identity and have v = 0, and for
//                          V columns that start from 0. The first segment starts from h0 and needs no M.
//   delta_join_kernel      S <- M S + N, segment after segment, in the place of N
//   delta_segment_kernel   (1) to (3) for every segment from its own state, in parallel
// A warp has 32 columns, twice those of delta_chunk_kernel: each operand from shared memory serves two products.
// numerics  M and the state that it meets are pairs of bf16, 16 bits together; their products and all else as there
// causality a segment's state is a function of the tokens before it, and segments start at fixed tokens of a sequence
#pragma once

#include <algorithm>

#include "fla/ops/common/delta_cuda_chunk.cuh"

namespace fla::cuda {

inline constexpr int kWide = static_cast<int>(kDeltaWide);  // columns of a block at most, a thread for each
inline constexpr int kOwn = 32, kTiles = kOwn / 16;         // columns of a warp

template <int KP, bool CHANNEL, bool OUTPUT>
struct SegmentLayout {
  static constexpr int kWidthM = (OUTPUT ? 2 : 1) * kBT;
  static constexpr int kLdK = KP + 8, kLdM = kWidthM + 8, kLdV = kWide + 8;
  static constexpr int kKey = 2 * kBT * kLdK, kSquare = 2 * kBT * kLdM, kValue = 2 * kBT * kLdV;  // bytes
  static constexpr int kK = 0, kA = CHANNEL ? kKey : kK, kQ = kA + kKey, kM = OUTPUT ? kQ + kKey : kQ;
  static constexpr int kV = kM + kSquare, kS = kV + kValue, kStage = kS + 4 * kScalars<KP, CHANNEL>;
  static_assert(kStage % 16 == 0 && kStage == delta_segment_stage_bytes(KP, CHANNEL, OUTPUT));
};

struct Segment {
  std::int64_t n, row, begin;  // sequence; row of the batch and first token
  std::int64_t before, slot;   // chunks of the sequence before it; the first chunk's place in the workspace
  int tokens, chunks;
  bool real, last;  // whether there is such a segment; whether it ends its sequence
};

FLA_DEVICE Segment find_segment(const DeltaArgs& p, std::int64_t chunks, std::int64_t number) {
  Segment g;
  const std::int64_t tokens = chunks * kBT;
  g.n = sequence_of(p, number, tokens);
  const Span s = sequence(p, g.n);
  g.before = (number - first_slot(p, s, g.n, tokens)) * chunks;
  const std::int64_t left = s.length - g.before * kBT;
  g.row = s.row;
  g.begin = s.begin + g.before * kBT;
  g.slot = first_slot(p, s, g.n) + g.before;
  g.real = g.before == 0 || left > 0;
  g.last = left <= tokens;
  g.tokens = static_cast<int>(g.last ? left : tokens);
  g.chunks = (g.tokens + kBT - 1) / kBT;
  return g;
}

// Place of a 16 x 8 tile of 128 words in an array of [item, rows of tiles, KP / 8] of them; this lane's four.
template <int KP>
FLA_DEVICE std::int64_t tile_at(std::int64_t item, int rows, int row, int j) {
  return ((item * rows + row) * (KP / 8) + j) * 128 + 4 * lane_id();
}

template <typename T, int KP, bool CHANNEL, bool OUTPUT>
struct SegmentTiles {
  using L = SegmentLayout<KP, CHANNEL, OUTPUT>;
  Shared<T> k, q, a, m, v;
  Shared<float> scalars;

  FLA_DEVICE explicit SegmentTiles(int stage) {
    const auto tile = [&](int offset, int bytes) { return shared<T>(stage * L::kStage + offset, bytes / 2); };
    k = tile(L::kK, L::kKey);
    a = tile(L::kA, L::kKey);
    if constexpr (OUTPUT) q = tile(L::kQ, L::kKey);
    m = tile(L::kM, L::kSquare);
    v = tile(L::kV, L::kValue);
    scalars = shared<float>(stage * L::kStage + L::kS, kScalars<KP, CHANNEL>);
  }

  // Starts the copies of a chunk by all threads; without values where v_count is 0.
  FLA_DEVICE void fetch(const DeltaArgs& p, const DeltaChunkSpace<T>& w, const Segment& g, int ic, int hv, int v_begin,
                        int v_count) const {
    constexpr int kCount = kScalars<KP, CHANNEL>;
    const int id = thread_id(), count = block_threads(), hk = hv / (p.HV / p.H);
    const std::int64_t first = g.begin + ic * kBT, at = (g.slot + ic) * p.HV + hv;
    const int left = g.tokens - ic * kBT, rows = left < kBT ? left : kBT;
    if constexpr (CHANNEL) {
      const std::int64_t from = at * (kBT * KP);
      copy_tile<true, kBT, KP>(k, L::kLdK, w.k + from, KP, 1, kBT, KP, id, count);
      copy_tile<true, kBT, KP>(a, L::kLdK, w.a + from, KP, 1, kBT, KP, id, count);
      if constexpr (OUTPUT) copy_tile<true, kBT, KP>(q, L::kLdK, w.q + from, KP, 1, kBT, KP, id, count);
    } else {
      const View &from_k = p.k.view, &from_q = p.q.view;
      copy_tile<true, kBT, KP>(k, L::kLdK, from_k.at<T>(g.row, first, hk), from_k.stride[1], 1, rows, p.K, id, count);
      if constexpr (OUTPUT) {
        copy_tile<true, kBT, KP>(q, L::kLdK, from_q.at<T>(g.row, first, hk), from_q.stride[1], 1, rows, p.K, id, count);
      }
    }
    copy_tile<true, kBT, L::kWidthM>(m, L::kLdM, w.squares + at * (2 * kBT * kBT), 2 * kBT, 1, kBT, L::kWidthM, id,
                                     count);
    if (v_count > 0) {
      copy_tile<true, kBT, kWide>(v, L::kLdV, p.v.view.at<T>(g.row, first, hv, v_begin), p.v.view.stride[1], 1, rows,
                                  v_count, id, count);
    }
    copy_tile<true, 1, kCount>(scalars, kCount, w.scalars + at * kCount, 0, 1, 1, kCount, id, count);
  }

  // c = a square's lower triangle times x, added.
  static FLA_DEVICE void times_lower(FragC (&c)[kTiles][4], const FragA<T> (&x)[kTiles][2], Shared<T> square) {
    FLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      FLA_UNROLL
      for (int e = 0; e <= i; ++e) {
        FragB<T> b0, b1;
        load_b(b0, b1, square + (16 * i * L::kLdM + 16 * e), L::kLdM);
        FLA_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          mma(c[t][2 * i], x[t][e], b0);
          mma(c[t][2 * i + 1], x[t][e], b1);
        }
      }
    }
  }
  // c = S^T times the rows of a tile of keys
  static FLA_DEVICE void times_rows(FragC (&c)[kTiles][4], const FragC (&S)[kTiles][KP / 8], Shared<T> rows) {
    FLA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      FLA_UNROLL
      for (FragC& x : c[t]) clear(x);
    }
    FLA_UNROLL
    for (int j = 0; j < KP / 16; ++j) {
      FragA<T> x[kTiles];
      FLA_UNROLL
      for (int t = 0; t < kTiles; ++t) x[t] = to_a<T>(S[t][2 * j], S[t][2 * j + 1]);
      FLA_UNROLL
      for (int i = 0; i < 4; i += 2) {
        FragB<T> b0, b1;
        load_b(b0, b1, rows + (8 * i * L::kLdK + 16 * j), L::kLdK);
        FLA_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          mma(c[t][i], x[t], b0);
          mma(c[t][i + 1], x[t], b1);
        }
      }
    }
  }
  static FLA_DEVICE void pack(FragA<T> (&a)[kTiles][2], const FragC (&c)[kTiles][4]) {
    FLA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      a[t][0] = to_a<T>(c[t][0], c[t][1]);
      a[t][1] = to_a<T>(c[t][2], c[t][3]);
    }
  }

  // E^T of this warp's columns; v = 0 where there are no values.
  FLA_DEVICE void erase(FragC (&x)[kTiles][4], const FragC (&S)[kTiles][KP / 8], bool values) const {
    times_rows(x, S, a);
    FLA_UNROLL
    for (int i = 0; i < 4; i += 2) {
      std::uint32_t words[kTiles][4] = {};
      FLA_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        if (!values) break;
        ldmatrix_x4<true>(words[t], v + ((8 * i + 8 * (lane_id() / 16) + lane_id() % 8) * L::kLdV + kOwn * warp_id() +
                                         16 * t + 8 * (lane_id() / 8 % 2)));
      }
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int token = 8 * (i + e) + frag_col(0);
        const Vec<float, 2> beta = scalars.load_vec<2>((CHANNEL ? 0 : kBT) + token);
        Vec<float, 2> by = {{1.0F, 1.0F}};
        if constexpr (!CHANNEL) by = scalars.load_vec<2>(token);
        FLA_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          FragC& y = x[t][i + e];
          FLA_UNROLL
          for (int f = 0; f < 2; ++f) {
            const std::uint32_t word = words[t][2 * e + f];
            y.x[2 * f] = beta.x[0] * low_half<T>(word) - by.x[0] * y.x[2 * f];
            y.x[2 * f + 1] = beta.x[1] * high_half<T>(word) - by.x[1] * y.x[2 * f + 1];
          }
        }
      }
    }
    FragA<T> packed[kTiles][2];
    pack(packed, x);
    times_lower(x, packed, m);
  }
  // Row i of x by scalars[at + i].
  FLA_DEVICE void scale(FragC (&x)[kTiles][4], int at) const {
    FLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Vec<float, 2> by = scalars.load_vec<2>(at + 8 * i + frag_col(0));
      FLA_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) x[t][i].x[f] *= by.x[f & 1];
      }
    }
  }
  // S <- decay o S + k^T e
  FLA_DEVICE void update(FragC (&S)[kTiles][KP / 8], const FragA<T> (&e)[kTiles][2]) const {
    Vec<float, 2> decay = {};
    if constexpr (!CHANNEL) decay.x[0] = decay.x[1] = exp2_approx(scalars.load(5 * kBT - 1));
    FLA_UNROLL
    for (int j = 0; j < KP / 8; j += 2) {
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        if constexpr (CHANNEL) decay = scalars.load_vec<2>(kBT + 8 * (j + i) + frag_col(0));
        FLA_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          FLA_UNROLL
          for (int f = 0; f < 4; ++f) S[t][j + i].x[f] *= decay.x[f & 1];
        }
      }
      FLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, k + (16 * i * L::kLdK + 8 * j), L::kLdK);
        FLA_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          mma(S[t][j], e[t][i], b0);
          mma(S[t][j + 1], e[t][i], b1);
        }
      }
    }
  }
};

// What both kernels do around a chunk: `step` gets the chunk's number and its tiles, for warps that have columns.
template <typename T, int KP, bool CHANNEL, bool OUTPUT, typename Step>
FLA_DEVICE void walk_segment(const DeltaArgs& p, const DeltaChunkSpace<T>& w, const Segment& g, int hv, int v_begin,
                             int v_count, int stages, bool computes, Step&& step) {
  using Tiles = SegmentTiles<T, KP, CHANNEL, OUTPUT>;
  for (int i = 0; i < stages - 1; ++i) {
    if (i < g.chunks) Tiles(i).fetch(p, w, g, i, hv, v_begin, v_count);
    cp_async_commit();
  }
  int stage = stages - 1;
  for (int i = 0; i < g.chunks; ++i) {
    const int free = stage;
    stage = stage + 1 == stages ? 0 : stage + 1;
    wait_for_stage(stages);
    sync_threads();
    if (i + stages - 1 < g.chunks) Tiles(free).fetch(p, w, g, i + stages - 1, hv, v_begin, v_count);
    cp_async_commit();
    if (computes) step(i, Tiles(stage));
  }
}

// ---- delta_transfer_kernel
// grid     segments * HV * (value blocks + 1) in x: the last block of a head forms M
// shared   stages of (a, if decayed per channel,) k, squares, v, scalars

template <typename T, int KP, bool CHANNEL>
FLA_KERNEL(kWide, 2)
delta_transfer_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w, int stages) {
  const int parts = (p.V + kWide - 1) / kWide + 1, part = block_x() % parts, hv = block_x() / parts % p.HV;
  const std::int64_t number = block_x() / parts / p.HV;
  const Segment g = find_segment(p, w.segment, number);
  const bool keys = part == parts - 1;
  if (!g.real || g.last || (keys && g.before == 0)) return;
  const int begin = keys ? 0 : part * kWide, own = kOwn * warp_id(), width = keys ? KP : p.V;
  const int count = width - begin < kWide ? width - begin : kWide;

  FragC S[kTiles][KP / 8];  // [32, KP] of the transposed state
  FLA_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    FLA_UNROLL
    for (int j = 0; j < KP / 8; ++j) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int column = own + 16 * t + frag_row(i), c = 8 * j + frag_col(i);
        float x = keys && column == c ? 1.0F : 0.0F;
        if (!keys && g.before == 0 && p.h0.present() && column < count && c < p.K) {
          x = p.h0.load(g.n, hv, c, begin + column);
        }
        S[t][j].x[i] = x;
      }
    }
  }
  walk_segment<T, KP, CHANNEL, false>(p, w, g, hv, begin, keys ? 0 : count, stages, own < count,
                                      [&](int, const SegmentTiles<T, KP, CHANNEL, false>& tiles) {
                                        FragC x[kTiles][4];
                                        tiles.erase(x, S, !keys);
                                        if constexpr (!CHANNEL) tiles.scale(x, 3 * kBT);
                                        FragA<T> e[kTiles][2];
                                        tiles.pack(e, x);
                                        tiles.update(S, e);
                                      });
  if (own >= count) return;
  const std::int64_t item = number * p.HV + hv;
  FLA_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    FLA_UNROLL
    for (int j = 0; j < KP / 8; ++j) {
      const FragC& x = S[t][j];
      if (keys) {
        FragC rest;
        FLA_UNROLL
        for (int i = 0; i < 4; ++i) rest.x[i] = x.x[i] - to_f32(from_f32<bf16>(x.x[i]));
        const FragB<bf16> high = to_b<bf16>(x), low = to_b<bf16>(rest);
        store_global<4>(w.transfers + tile_at<KP>(item, KP / 16, 2 * warp_id() + t, j),
                        Vec<std::uint32_t, 4>{{high.x[0], high.x[1], low.x[0], low.x[1]}});
      } else {
        store_global<4>(w.ends + tile_at<KP>(item, w.value_tiles, (begin + own) / 16 + t, j),
                        Vec<float, 4>{{x.x[0], x.x[1], x.x[2], x.x[3]}});
      }
    }
  }
}

// ---- delta_join_kernel
// grid     N * HV * tiles of 16 value channels in x; a warp has 16 key channels of the transposed state [16, KP]
// shared   the state as two tiles of bf16, twice, as a warp needs all of it for its keys

template <int KP>
inline constexpr int kJoinTile = 16 * (KP + 8);

template <typename T, int KP>
FLA_KERNEL(2 * KP, 1)
delta_join_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w) {
  constexpr int kLd = KP + 8, kKeyTiles = KP / 16;
  const int tiles = (p.V + 15) / 16, tile = block_x() % tiles, hv = block_x() / tiles % p.HV;
  const std::int64_t n = block_x() / tiles / p.HV, tokens = w.segment * kBT;
  const Span s = sequence(p, n);
  const std::int64_t segments = (s.length + tokens - 1) / tokens, slot = first_slot(p, s, n, tokens);
  if (segments < 3) return;

  using Transfers = Vec<std::uint32_t, 4>[2][kKeyTiles];
  const auto load_transfers = [&](std::int64_t segment, Transfers& to) {
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      FLA_UNROLL
      for (int i = 0; i < kKeyTiles; ++i) {
        to[e][i] =
            load_global<4>(w.transfers + tile_at<KP>((slot + segment) * p.HV + hv, kKeyTiles, i, 2 * warp_id() + e));
      }
    }
  };
  const auto end_at = [&](std::int64_t segment, int e) {
    return w.ends + tile_at<KP>((slot + segment) * p.HV + hv, w.value_tiles, tile, 2 * warp_id() + e);
  };
  FragC S[2], N[2], next_N[2];
  Transfers M, next_M;
  const auto load_ends = [&](std::int64_t segment, FragC(&to)[2]) {
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      const Vec<float, 4> x = load_global<4>(end_at(segment, e));
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) to[e].x[i] = x.x[i];
    }
  };
  load_ends(0, S);
  load_ends(1, N);
  load_transfers(1, M);
  for (std::int64_t segment = 1; segment < segments - 1; ++segment) {
    if (segment + 1 < segments - 1) {
      load_ends(segment + 1, next_N);
      load_transfers(segment + 1, next_M);
    }
    const int buffer = static_cast<int>(segment % 2) * 4 * kJoinTile<KP>;
    const Shared<bf16> high = shared<bf16>(buffer, kJoinTile<KP>),
                       low = shared<bf16>(buffer + 2 * kJoinTile<KP>, kJoinTile<KP>);
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      FragC rest;
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) rest.x[i] = S[e].x[i] - to_f32(from_f32<bf16>(S[e].x[i]));
      store_c(high + (16 * warp_id() + 8 * e), kLd, S[e]);
      store_c(low + (16 * warp_id() + 8 * e), kLd, rest);
    }
    sync_threads();
    FragC sums[2][3];  // apart, as a product waits for the one before it in the same sum
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      FLA_UNROLL
      for (FragC& x : sums[e]) clear(x);
    }
    FLA_UNROLL
    for (int i = 0; i < kKeyTiles; ++i) {
      FragA<bf16> a, rest;
      load_a(a, high + 16 * i, kLd);
      load_a(rest, low + 16 * i, kLd);
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const FragB<bf16> b{{M[e][i].x[0], M[e][i].x[1]}}, b_rest{{M[e][i].x[2], M[e][i].x[3]}};
        mma(sums[e][0], a, b);
        mma(sums[e][1], a, b_rest);
        mma(sums[e][2], rest, b);
      }
    }
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        S[e].x[i] = N[e].x[i] + (sums[e][0].x[i] + (sums[e][1].x[i] + sums[e][2].x[i]));
      }
      store_global<4>(end_at(segment, e), Vec<float, 4>{{S[e].x[0], S[e].x[1], S[e].x[2], S[e].x[3]}});
      N[e] = next_N[e];
      FLA_UNROLL
      for (int i = 0; i < kKeyTiles; ++i) M[e][i] = next_M[e][i];
    }
  }
}

// ---- delta_segment_kernel
// grid     segments * HV * value blocks in x
// shared   stages of (a, if decayed per channel,) k, q, squares, v, scalars

template <typename T, int KP, bool CHANNEL>
FLA_KERNEL(kWide, 2)
delta_segment_kernel(const DeltaArgs p, const DeltaChunkSpace<T> w, int stages) {
  using Tiles = SegmentTiles<T, KP, CHANNEL, true>;
  using L = typename Tiles::L;
  const int parts = (p.V + kWide - 1) / kWide, part = block_x() % parts, hv = block_x() / parts % p.HV;
  const std::int64_t number = block_x() / parts / p.HV;
  const Segment g = find_segment(p, w.segment, number);
  if (!g.real) return;
  const int begin = part * kWide, own = kOwn * warp_id(), count = p.V - begin < kWide ? p.V - begin : kWide;

  FragC S[kTiles][KP / 8];  // [32, KP] of S^T
  const auto each_state = [&](auto&& f) {
    FLA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      FLA_UNROLL
      for (int j = 0; j < KP / 8; ++j) {
        FLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int column = own + 16 * t + frag_row(i), c = 8 * j + frag_col(i);
          if (column < count && c < p.K) f(S[t][j].x[i], c, begin + column);
        }
      }
    }
  };
  FLA_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    FLA_UNROLL
    for (int j = 0; j < KP / 8; ++j) {
      clear(S[t][j]);
      if (g.before == 0 || own >= count) continue;
      const Vec<float, 4> x =
          load_global<4>(w.ends + tile_at<KP>((number - 1) * p.HV + hv, w.value_tiles, (begin + own) / 16 + t, j));
      FLA_UNROLL
      for (int i = 0; i < 4; ++i) S[t][j].x[i] = x.x[i];
    }
  }
  if (g.before == 0 && p.h0.present()) {
    each_state([&](float& x, int c, int column) { x = p.h0.load(g.n, hv, c, column); });
  }

  walk_segment<T, KP, CHANNEL, true>(p, w, g, hv, begin, count, stages, own < count, [&](int ic, const Tiles& tiles) {
    const Shared<T> mine = tiles.v + own;  // this warp's columns of v: after those E as P meets it, then o
    FragA<T> e[kTiles][2];                 // E as k meets it
    {
      FragC x[kTiles][4];
      tiles.erase(x, S, true);
      if (p.o.present()) {
        sync_warp();
        FLA_UNROLL
        for (int t = 0; t < kTiles; ++t) put_transposed(x[t], mine + 16 * t, L::kLdV);
      }
      if constexpr (!CHANNEL) tiles.scale(x, 3 * kBT);
      tiles.pack(e, x);
    }
    if (p.o.present()) {
      FragC o[kTiles][4];
      tiles.times_rows(o, S, tiles.q);
      if constexpr (!CHANNEL) tiles.scale(o, 2 * kBT);
      sync_warp();
      FragA<T> seen[kTiles][2];
      FLA_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        FLA_UNROLL
        for (int i = 0; i < 2; ++i) load_a_trans(seen[t][i], mine + (16 * i * L::kLdV + 16 * t), L::kLdV);
      }
      tiles.times_lower(o, seen, tiles.m + kBT);
      sync_warp();
      FLA_UNROLL
      for (int t = 0; t < kTiles; ++t) put_transposed(o[t], mine + 16 * t, L::kLdV);
      sync_warp();
      const int left = g.tokens - ic * kBT;
      T* out = p.o.view.at<T>(g.row, g.begin + ic * kBT, hv, begin + own);
      FLA_ROLL
      for (int i = lane_id(); i < kBT * kOwn / 8; i += 32) {
        const int r = i / (kOwn / 8), column = i % (kOwn / 8) * 8;
        if (r < left && own + column < count) {
          store_global<8>(out + (r * p.o.view.stride[1] + column), mine.template load_vec<8>(r * L::kLdV + column));
        }
      }
    }
    tiles.update(S, e);
  });
  if (g.last && own < count && p.ht.present()) {
    each_state([&](float& x, int c, int column) { p.ht.store(x, g.n, hv, c, column); });
  }
}

// ---- host

template <typename T, int KP, bool CHANNEL>
Status launch_segments_of(const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w, Stream stream) {
  const DeltaArgs a = delta_args(p);
  const std::int64_t slots = delta_segment_slots(p, plan.segment), parts = plan.parts;
  const int threads = static_cast<int>(std::min<std::int64_t>((p.V + kOwn - 1) / kOwn * kOwn, kWide));
  if (plan.segments > 1) {
    const int stages = plan.stages + 1;  // a chunk takes less room without q
    const Status formed = launch<delta_transfer_kernel<T, KP, CHANNEL>>(
        {.name = "delta_transfer_kernel",
         .grid = {slots * p.HV * (parts + 1)},
         .threads = std::max(threads, KP),
         .shared_bytes = static_cast<std::size_t>(stages * SegmentLayout<KP, CHANNEL, false>::kStage)},
        stream, a, w, stages);
    if (!formed) return formed;
    const Status joined = launch<delta_join_kernel<T, KP>>({.name = "delta_join_kernel",
                                                            .grid = {p.N * p.HV * ((p.V + 15) / 16)},
                                                            .threads = 2 * KP,
                                                            .shared_bytes = std::size_t{8} * kJoinTile<KP>},
                                                           stream, a, w);
    if (!joined) return joined;
  }
  return launch<delta_segment_kernel<T, KP, CHANNEL>>(
      {.name = "delta_segment_kernel",
       .grid = {slots * p.HV * parts},
       .threads = threads,
       .shared_bytes = static_cast<std::size_t>(plan.stages * SegmentLayout<KP, CHANNEL, true>::kStage)},
      stream, a, w, plan.stages);
}

template <typename T>
Status launch_segments(const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w, Stream stream) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (plan.width == 64) {
      return p.gk ? launch_segments_of<T, 64, true>(p, plan, w, stream)
                  : launch_segments_of<T, 64, false>(p, plan, w, stream);
    }
  }
  return p.gk ? launch_segments_of<T, 128, true>(p, plan, w, stream)
              : launch_segments_of<T, 128, false>(p, plan, w, stream);
}

}  // namespace fla::cuda
