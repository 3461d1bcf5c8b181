// Where sequences are cut into segments of whole chunks, exactly: over a segment the state goes from S to M S + N.
//   delta_chunk_kernel  in mode Transfer: M and N of all segments but a sequence's last, in parallel: (2) and (3) of
//                       chunk_forward.cuh for K columns that start from the identity and have v = 0, and for V
//                       columns that start from 0. The first segment starts from h0 and needs no M.
//   delta_join_kernel   S <- M S + N, segment after segment, in the place of N
//   delta_chunk_kernel  in mode Output: every segment from its own state, in parallel
// falls     A token's map of the state has norm at most e^g max(1, |1 - beta |k|^2|). Where the product of these over
//           the tokens from a chunk to its segment's end is below 2^-256, a finite state that enters the chunk ends
//           below 2^-128, outside fp32's normal numbers: N starts there from 0, M is 0 and is not formed. Gates per
//           head that decay within a segment so save most of the transfers, with the same result.
// numerics  M and the state that it meets are pairs of bf16, 16 bits together; their products and all else as there
// causality a segment's state is a function of the tokens before it, and segments start at fixed tokens of a sequence
#pragma once

#include "fla/engine/delta/cuda/chunk.cuh"

namespace fla::cuda {

inline constexpr float kForgotten = -256.0F;

// log2 of max(1, |1 - x|). NaN remains.
FLA_DEVICE float log2_rise(float x) {
  const float norm = x > 1.0F ? x - 1.0F : 1.0F - x;
  return norm <= 1.0F ? 0.0F : log2_approx(norm);
}

// Of a segment, the first chunk that shows at its end; whether the state that enters the segment does.
struct Reach {
  int first = 0;
  bool passes = true;
};

// `falls` of the segment's first chunk; the next chunk's is `stride` further.
FLA_DEVICE Reach find_reach(const float* falls, std::int64_t stride, int chunks) {
  float after = 0.0F;
  for (int end = chunks; end > 0; end -= 32) {
    const int c = end - 1 - lane_id();
    const float to_end = after + warp_prefix_sum(c < 0 ? 0.0F : falls[c * stride]);
    const std::uint32_t forgotten = ballot(c >= 0 && to_end <= kForgotten);
    if (forgotten != 0) return {end - 1 - lowest_bit(forgotten), false};
    after = shuffle(to_end, 31);
  }
  return {};
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
  wait_for_previous();
  const int tiles = (p.V + 15) / 16, tile = block_x() % tiles, hv = block_x() / tiles % p.HV;
  const std::int64_t n = block_x() / tiles / p.HV, tokens = w.segment * kBT;
  const Sequence s = sequence(p, n);
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
  // Whether the segment's end depends on the one before it; asked for one after the other. Bit i of `passing` is
  // segment 32 n + i.
  std::uint32_t passing = 0;
  const auto passes = [&](std::int64_t segment) {
    if (segment >= segments - 1) return false;
    if (segment == 1 || segment % 32 == 0) {
      const std::int64_t mine = segment / 32 * 32 + lane_id();
      passing = ballot(mine > 0 && mine < segments - 1 && w.passes[(slot + mine) * p.HV + hv] != 0);
    }
    return ((passing >> (segment % 32)) & 1) != 0;
  };
  const auto load = [&](std::int64_t segment) {
    load_ends(segment, N);
    load_transfers(segment, M);
  };
  bool now = passes(1), held = false;  // whether S is the state that enters the segment
  int turn = 0;
  if (now) load(1);
  for (std::int64_t segment = 1; segment < segments - 1; ++segment) {
    const bool next = passes(segment + 1);
    if (!now) {
      if (next) load(segment + 1);
      now = next;
      held = false;
      continue;
    }
    if (!held) load_ends(segment - 1, S);
    held = true;
    if (next) {
      load_ends(segment + 1, next_N);
      load_transfers(segment + 1, next_M);
    }
    const int buffer = turn * 4 * kJoinTile<KP>;
    turn ^= 1;
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
    now = next;
  }
}

// ---- host

template <typename T, int KP>
Status launch_join(const DeltaProblem& p, const DeltaChunkSpace<T>& w, Stream stream) {
  return launch<delta_join_kernel<T, KP>>({.name = "delta_join_kernel",
                                           .grid = {p.N * p.HV * ((p.V + 15) / 16)},
                                           .threads = 2 * KP,
                                           .shared_bytes = std::size_t{8} * kJoinTile<KP>,
                                           .overlapped = true},
                                          stream, delta_args(p), w);
}

}  // namespace fla::cuda
