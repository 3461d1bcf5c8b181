// Rows of somebody's memory as the CPU kernels see them, and what tiles are padded to. Nothing here is vector code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fla/core/dtype.h"
#include "fla/kernels/cpu/element.h"

namespace fla::cpu {

// Tiles are padded to the widest vector (16 floats), on every target, so that workspace sizes do not depend on it.
inline constexpr std::int64_t kPad = 16;
constexpr std::int64_t pad_up(std::int64_t n, std::int64_t to = kPad) { return (n + to - 1) / to * to; }

// A matrix in somebody's memory: row t, column c. Steps may be negative.
struct Rows {
  std::byte* base = nullptr;
  DType dtype = DType::F32;
  std::int64_t step = 0;  // bytes from row to row
  std::int64_t last = 1;  // elements from column to column
  bool stream = false;    // store_rows goes past the caches: for results that are larger than these

  explicit operator bool() const { return base != nullptr; }
  std::byte* at(std::int64_t t, std::int64_t c) const {
    return base + t * step + c * last * static_cast<std::int64_t>(size_of(dtype));
  }
};

inline double scalar_at(const Rows& x, std::int64_t t, std::int64_t c = 0) { return load_element(x.at(t, c), x.dtype); }

}  // namespace fla::cpu
