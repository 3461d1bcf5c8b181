// Rows of tokens from global to shared memory.
#pragma once

#include <cstdint>

#include "fla/engine/diag/cuda/params.cuh"

namespace fla::cuda {

// A tile of an operand of elements T; row r is token t + r - shift. Rows past the segment and before the sequence, and
// all rows of an absent operand, are zeros. By `count` threads, of which this one is `id`.
template <int ROWS, int COLS, typename T>
FLA_DEVICE void load_tokens(const DiagParams& p, const DiagTask& a, const View& x, bool vector, std::int64_t t,
                            int shift, int c0, int cols, Shared<T> dst, int ld, int id = thread_id(),
                            int count = block_threads()) {
  const std::int64_t left = a.to - t, first = t - shift;
  const int rows = left < ROWS ? static_cast<int>(left) : ROWS;
  if (first < 0 || !x.present()) {
    const std::int64_t lead = -first;
    for (int i = id; i < ROWS * COLS; i += count) {
      const int r = i / COLS, c = i % COLS;
      const bool inside = x.present() && r >= lead && r < rows && c < cols;
      dst.store(r * ld + c, inside ? *x.at<const T>(a.row, a.token(p, first + r), a.h, c0 + c) : from_f32<T>(0.0F));
    }
    return;
  }
  const std::int64_t step = p.reverse ? -x.stride[1] : x.stride[1];
  const T* src = x.at<const T>(a.row, a.token(p, first), a.h, c0);
  if (vector) {
    copy_tile<true, ROWS, COLS>(dst, ld, src, step, 1, rows, cols, id, count);
  } else {
    copy_tile<false, ROWS, COLS>(dst, ld, src, step, x.stride[3], rows, cols, id, count);
  }
}

// The same for a tile whose rows all exist, in pieces of 16 bytes.
template <int COLS, int COUNT, typename T>
struct RowPieces {
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(T)), kPieces = COLS / kPiece, kEach = COUNT / kPieces;
  static_assert(COUNT % kPieces == 0);
};
template <int ROWS, int COLS, int COUNT, typename T>
FLA_DEVICE void copy_rows(const DiagParams& p, const DiagTask& a, const View& x, std::int64_t t, int c0, Shared<T> dst,
                          int ld, int id) {
  using Pieces = RowPieces<COLS, COUNT, T>;
  constexpr int kEach = Pieces::kEach;
  static_assert(ROWS % kEach == 0);
  const int r = id / Pieces::kPieces, c = id % Pieces::kPieces * Pieces::kPiece;
  const std::int64_t step = p.reverse ? -x.stride[1] : x.stride[1];
  const T* src = x.at<const T>(a.row, a.token(p, t), a.h, c0) + (r * step + c);
  FLA_UNROLL
  for (int i = 0; i < ROWS; i += kEach, src += kEach * step) cp_async<16>(dst + ((r + i) * ld + c), src, 16);
}

// A thread's pieces of one tile after another from the segment's start on, so that no address is formed anew.
struct RowWalk {
  std::uintptr_t at;
  std::int64_t step;  // bytes between the thread's rows
  int to;             // element of the tile

  template <int COLS, int COUNT, typename T>
  FLA_DEVICE static RowWalk of(const DiagParams& p, const DiagTask& a, const View& x, int c0, int ld, int id) {
    using Pieces = RowPieces<COLS, COUNT, T>;
    const int r = id / Pieces::kPieces, c = id % Pieces::kPieces * Pieces::kPiece;
    const std::int64_t row = p.reverse ? -x.stride[1] : x.stride[1], size = sizeof(T);
    const std::int64_t first = a.row * x.stride[0] + a.token(p, a.from) * x.stride[1] + a.h * x.stride[2] + c0;
    return {reinterpret_cast<std::uintptr_t>(x.data) + static_cast<std::uintptr_t>((first + r * row + c) * size),
            Pieces::kEach * row * size, r * ld + c};
  }
  template <int ROWS, int COLS, int COUNT, typename T>
  FLA_DEVICE void copy(Shared<T> dst, int ld) {
    constexpr int kEach = RowPieces<COLS, COUNT, T>::kEach;
    static_assert(ROWS % kEach == 0);
    FLA_UNROLL
    for (int i = 0; i < ROWS; i += kEach, at += static_cast<std::uintptr_t>(step)) {
      cp_async<16>(dst + (to + i * ld), reinterpret_cast<const T*>(at), 16);
    }
  }
  // Leaves a tile out.
  template <int ROWS, int COLS, int COUNT, typename T>
  FLA_DEVICE void skip() {
    at += static_cast<std::uintptr_t>(step * (ROWS / RowPieces<COLS, COUNT, T>::kEach));
  }
};

}  // namespace fla::cuda
