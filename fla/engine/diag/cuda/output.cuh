// Results between the registers of a warp and memory.
#pragma once

#include <cstdint>

#include "fla/engine/diag/cuda/params.cuh"

namespace fla::cuda {

// Writes o^T (16 values from j0 on x 8 tokens from t on) as o.
template <typename T>
FLA_DEVICE void store_output(const DiagParams& p, const DiagTask& a, std::int64_t t, int j0, const FragC& o) {
  if (p.o.type == DType::F32) {
    FLA_UNROLL
    for (int e = 0; e < 4; ++e) {
      const std::int64_t at = t + frag_col(e);
      const int j = j0 + frag_row(e);
      if (at < 0 || at >= a.to || j >= p.V) continue;
      p.o.at.at<float>(a.row, a.token(p, at), a.h)[j * p.o.at.stride[3]] = o.x[e];
    }
    return;
  }
  const std::uint32_t word[2] = {transpose_8x8(pack2<T>(o.x[0], o.x[1])), transpose_8x8(pack2<T>(o.x[2], o.x[3]))};
  t += lane_id() / 4;
  if (t < 0 || t >= a.to) return;
  T* to = p.o.at.at<T>(a.row, a.token(p, t), a.h);
  FLA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int j = j0 + 8 * i + 2 * (lane_id() % 4);
    const Vec<T, 2> pair = {{T{static_cast<std::uint16_t>(word[i])}, T{static_cast<std::uint16_t>(word[i] >> 16U)}}};
    if (p.vector_o && j + 1 < p.V) {
      store_global<2>(to + j, pair);
    } else {
      if (j < p.V) to[j * p.o.at.stride[3]] = pair.x[0];
      if (j + 1 < p.V) to[(j + 1) * p.o.at.stride[3]] = pair.x[1];
    }
  }
}

// What a block's loops need now and then. It stays in shared memory, as the loops have no register to spare.
struct alignas(128) KeptTask {
  DiagTask task;
  char* o = nullptr;      // the block's first token and value
  std::int64_t step = 0;  // bytes between tokens
  int from = 0, to = 0;   // of the pieces that have all their tokens, where all values can be written

  // Where it lies behind `bytes` of shared memory.
  static constexpr int offset(int bytes) { return (bytes + 127) / 128 * 128; }
  // For pieces of so many tokens and so many values of a block.
  FLA_DEVICE static KeptTask of(const DiagParams& p, const DiagTask& a, int tokens, int values) {
    KeptTask k;
    k.task = a;
    if (!p.o.present() || !p.vector_o || a.v0 + values > p.V || a.from >= a.to) return k;
    k.from = a.from < 0 ? static_cast<int>((tokens - 1 - a.from) / tokens) : 0;
    k.to = static_cast<int>((a.to - a.from) / tokens);
    const int size = p.o.type == DType::F32 ? 4 : 2;
    const auto& s = p.o.at.stride;
    k.step = (p.reverse ? -s[1] : s[1]) * size;
    k.o = static_cast<char*>(p.o.at.data) + (a.row * s[0] + a.token(p, a.from) * s[1] + a.h * s[2] + a.v0) * size;
    return k;
  }
};

// Writes o, 16 R tokens x 16 WM values from the block's value `row` on at a time.
template <typename T, int R, int WM>
struct OutputRows {
  const DiagParams& p;
  Shared<KeptTask> kept;
  int row;

  // The piece-th 16 R tokens of the block's.
  FLA_DEVICE void store(int piece, const FragC (&o)[R][2 * WM]) const {
    const KeptTask k = kept.load(0);
    if (piece < k.from || piece >= k.to) {
      store_one_by_one(piece, o);
      return;
    }
    const int lane = lane_id(), size = p.o.type == DType::F32 ? 4 : 2;
    // Two lanes exchange words of 16 bits, so that each has four values beside each other.
    const int j = row + (p.o.type == DType::F32 ? frag_col(0) : lane % 2 * 8 + lane % 4 / 2 * 4);
    const std::int64_t step = k.step;
    char* at = k.o + (std::int64_t{piece} * (16 * R) + lane / 4) * step + j * size;
    if (p.o.type == DType::F32) {
      FLA_UNROLL
      for (int r = 0; r < 2 * R; ++r, at += 8 * step) {
        FLA_UNROLL
        for (int n = 0; n < 2 * WM; ++n) {
          const FragC& c = o[r / 2][n];
          store_global<2>(reinterpret_cast<float*>(at) + 8 * n, Vec<float, 2>{{c.x[r % 2 * 2], c.x[r % 2 * 2 + 1]}});
        }
      }
      return;
    }
    const bool odd = lane_id() % 2 != 0;
    FLA_UNROLL
    for (int r = 0; r < 2 * R; ++r, at += 8 * step) {
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        const FragC &l = o[r / 2][2 * m], &h = o[r / 2][2 * m + 1];
        const int e = r % 2 * 2;
        const std::uint32_t low = pack2<T>(l.x[e], l.x[e + 1]), high = pack2<T>(h.x[e], h.x[e + 1]);
        const std::uint32_t other = shuffle_xor(odd ? low : high, 1);
        store_global<2>(reinterpret_cast<std::uint32_t*>(at) + 8 * m,
                        Vec<std::uint32_t, 2>{{odd ? other : low, odd ? high : other}});
      }
    }
  }

  FLA_DEVICE void store_one_by_one(int piece, const FragC (&o)[R][2 * WM]) const {
    const DiagTask a = kept.load(0).task;
    const std::int64_t t = a.from + std::int64_t{piece} * (16 * R);
    const int j0 = a.v0 + row;
    const auto& s = p.o.at.stride;
    FLA_UNROLL
    for (int r = 0; r < 2 * R; ++r) {
      const std::int64_t at = t + 8 * r + lane_id() / 4;
      if (at < 0 || at >= a.to) continue;
      const std::int64_t token = a.row * s[0] + a.token(p, at) * s[1] + a.h * s[2];
      FLA_UNROLL
      for (int n = 0; n < 4 * WM; ++n) {
        const int j = j0 + 8 * (n / 2) + frag_col(n % 2);
        const float x = o[r / 2][n / 2].x[r % 2 * 2 + n % 2];
        if (j >= p.V) continue;
        if (p.o.type == DType::F32) {
          static_cast<float*>(p.o.at.data)[token + j * s[3]] = x;
        } else {
          static_cast<T*>(p.o.at.data)[token + j * s[3]] = from_f32<T>(x);
        }
      }
    }
  }
};

}  // namespace fla::cuda
