// Strided tensors as kernel parameters, and tiles between global and shared memory.
#pragma once

#include <cstdint>

#include "fla/core/tensor.h"
#include "fla/kernels/cuda/simt.cuh"

namespace fla::cuda {

// A tensor view as a kernel gets it: no host type, 64-bit strides in elements, nullptr when absent.
struct View {
  void* data = nullptr;
  std::int64_t stride[5] = {};

  FLA_HOST_DEVICE bool present() const { return data != nullptr; }
  template <typename T>
  FLA_DEVICE T* at(std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0,
                   std::int64_t i4 = 0) const {
    return static_cast<T*>(data) + (i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3] + i4 * stride[4]);
  }
};

// An empty tensor has no element to touch and counts as absent.
inline View view(const TensorView& t) {
  View v;
  if (!t.present() || t.numel() == 0) return v;
  v.data = t.data;
  for (int i = 0; i < t.ndim && i < 5; ++i) v.stride[i] = t.stride[static_cast<std::size_t>(i)];
  return v;
}

// Whether every row of the last axis may be read and written in 16-byte pieces: unit stride, and address and other
// strides multiples of 16 bytes. The row's length need not be one: its last piece is partial.
inline bool vectorizable(const TensorView& t) {
  if (!t.present() || t.numel() == 0) return true;
  const auto bytes = static_cast<std::int64_t>(size_of(t.dtype));
  if (reinterpret_cast<std::uintptr_t>(t.data) % 16 != 0) return false;
  for (int i = 0; i < t.ndim; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (t.shape[at] == 1) continue;
    if (i == t.ndim - 1 ? t.stride[at] != 1 : t.stride[at] * bytes % 16 != 0) return false;
  }
  return true;
}

// Element types that differ from one call to the next, read one at a time: gates, states, boundaries.
FLA_DEVICE float load_any(const void* p, DType type, std::int64_t i) {
  switch (type) {
    case DType::F32: return static_cast<const float*>(p)[i];
    case DType::F16: return to_f32(static_cast<const f16*>(p)[i]);
    case DType::BF16: return to_f32(static_cast<const bf16*>(p)[i]);
    case DType::F64: return static_cast<float>(static_cast<const double*>(p)[i]);
    default: return 0.0F;
  }
}
FLA_DEVICE void store_any(void* p, DType type, std::int64_t i, float x) {
  switch (type) {
    case DType::F32: static_cast<float*>(p)[i] = x; break;
    case DType::F16: static_cast<f16*>(p)[i] = from_f32<f16>(x); break;
    case DType::BF16: static_cast<bf16*>(p)[i] = from_f32<bf16>(x); break;
    case DType::F64: static_cast<double*>(p)[i] = static_cast<double>(x); break;
    default: break;
  }
}
FLA_DEVICE std::int64_t load_index(const void* p, DType type, std::int64_t i) {
  return type == DType::I32 ? static_cast<std::int64_t>(static_cast<const std::int32_t*>(p)[i])
                            : static_cast<const std::int64_t*>(p)[i];
}

// Starts the copy of a ROWS x COLS tile of T to dst (row pitch ld) by `count` threads of which this one is `id`. Rows
// past `rows` and columns past `cols` become zeros. src is the tile's first element, strides in elements. VECTOR: the
// source is vectorizable() and its columns start at a multiple of 16 bytes; then the copy is asynchronous and the
// caller commits and waits. Otherwise elements are copied one by one, at once.
template <bool VECTOR, int ROWS, int COLS, typename T>
FLA_DEVICE void copy_tile(Shared<T> dst, int ld, const T* src, std::int64_t row_stride, std::int64_t col_stride,
                          int rows, int cols, int id, int count) {
  if constexpr (VECTOR) {
    constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
    static_assert(COLS % kPiece == 0);
    constexpr int kPieces = COLS / kPiece;
    for (int i = id; i < ROWS * kPieces; i += count) {
      const int r = i / kPieces, c = i % kPieces * kPiece;
      const int left = r < rows ? cols - c : 0;
      const int valid = left <= 0 ? 0 : left >= kPiece ? 16 : left * static_cast<int>(sizeof(T));
      cp_async<16>(dst + (r * ld + c), valid > 0 ? src + (r * row_stride + c) : src, valid);
    }
  } else {
    for (int i = id; i < ROWS * COLS; i += count) {
      const int r = i / COLS, c = i % COLS;
      dst.store(r * ld + c, r < rows && c < cols ? src[r * row_stride + c * col_stride] : from_f32<T>(0.0F));
    }
  }
}

// Writes the first `rows` x `cols` of a ROWS x COLS tile of S, converted to T, to dst.
template <bool VECTOR, int ROWS, int COLS, typename S, typename T>
FLA_DEVICE void store_tile(T* dst, std::int64_t row_stride, std::int64_t col_stride, Shared<S> src, int ld, int rows,
                           int cols, int id, int count) {
  if constexpr (VECTOR) {
    constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
    static_assert(COLS % kPiece == 0);
    constexpr int kPieces = COLS / kPiece;
    for (int i = id; i < ROWS * kPieces; i += count) {
      const int r = i / kPieces, c = i % kPieces * kPiece;
      if (r >= rows || c >= cols) continue;
      Vec<T, kPiece> piece;
      FLA_UNROLL
      for (int e = 0; e < kPiece; ++e) piece.x[e] = from_f32<T>(to_f32(src.load(r * ld + c + e)));
      T* to = dst + (r * row_stride + c);
      if (c + kPiece <= cols) {
        store_global<kPiece>(to, piece);
      } else {
        FLA_UNROLL
        for (int e = 0; e < kPiece; ++e) {
          if (c + e < cols) to[e] = piece.x[e];
        }
      }
    }
  } else {
    for (int i = id; i < ROWS * COLS; i += count) {
      const int r = i / COLS, c = i % COLS;
      if (r < rows && c < cols) dst[r * row_stride + c * col_stride] = from_f32<T>(to_f32(src.load(r * ld + c)));
    }
  }
}

}  // namespace fla::cuda
