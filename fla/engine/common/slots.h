// Which rows of a problem's h0 and ht the sequences of a call use, for the stepwise forms of both engines.
#pragma once

#include <cstdint>

#include "fla/core/tensor.h"

namespace fla {

struct SlotTable {
  TensorView indices;   // [N] or [N, S] I32 or I64 on the host; absent: sequence n has row n of h0 and of ht
  TensorView accepted;  // [N] I32 or I64 on the host, with [N, S] only
  TensorView steps;     // [B, T, HV, K, V] by strides: the state after every token; absent: not kept

  static std::int64_t entry(const TensorView& t, std::int64_t i, std::int64_t j = 0) {
    return t.dtype == DType::I32 ? *reinterpret_cast<const std::int32_t*>(t.at(i, j))
                                 : *reinterpret_cast<const std::int64_t*>(t.at(i, j));
  }
  bool by_token() const { return indices && indices.ndim == 2; }
  bool padding(std::int64_t n) const { return indices && slot(n, 0) < 0; }
  // Where sequence n starts.
  std::int64_t source(std::int64_t n) const {
    if (!indices) return n;
    return slot(n, accepted ? entry(accepted, n) - 1 : 0);
  }
  // Where the state after the sequence's token i of `length` goes; -1: nowhere.
  std::int64_t target(std::int64_t n, std::int64_t i, std::int64_t length) const {
    if (by_token()) return slot(n, i);
    if (i + 1 < length) return -1;
    return indices ? slot(n, 0) : n;
  }

 private:
  std::int64_t slot(std::int64_t n, std::int64_t column) const {
    return by_token() ? entry(indices, n, column) : entry(indices, n);
  }
};

}  // namespace fla
