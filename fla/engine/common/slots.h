// Which rows of a problem's h0 and ht the sequences of a call use, for the stepwise forms of both engines.
#pragma once

#include <cstdint>

#include "fla/core/index_table.h"
#include "fla/core/tensor.h"

namespace fla {

struct SlotTable {
  TensorView indices;   // [N] or [N, S] I32 or I64 on the host; absent: sequence n has row n of h0 and of ht
  TensorView accepted;  // [N] I32 or I64 on the host, with [N, S] only
  TensorView steps;     // [B, T, HV, K, V] by strides: the state after every token; absent: not kept

  bool by_token() const { return indices && indices.ndim == 2; }
  bool padding(std::int64_t n) const { return indices && slot(n, 0) < 0; }
  // Where sequence n starts.
  std::int64_t source(std::int64_t n) const {
    if (!indices) return n;
    return slot(n, accepted ? read_index(accepted, n) - 1 : 0);
  }
  // Where the state after the sequence's token i of `length` goes; -1: nowhere.
  std::int64_t target(std::int64_t n, std::int64_t i, std::int64_t length) const {
    if (by_token()) return slot(n, i);
    if (i + 1 < length) return -1;
    return indices ? slot(n, 0) : n;
  }

 private:
  std::int64_t slot(std::int64_t n, std::int64_t column) const {
    return by_token() ? read_index(indices, n, column) : read_index(indices, n);
  }
};

inline constexpr SlotTable kNoSlots;

// A problem P of a stepwise form together with its slots. P has the member `const SlotTable* pool`, which is nullptr in
// the problems of all other calls, so that those do not carry a table.
template <typename P>
struct WithSlots : P {
  SlotTable table;

  explicit WithSlots(const P& problem) : P(problem) { this->pool = &table; }
  WithSlots(const WithSlots& other) : P(other), table(other.table) { this->pool = &table; }
  WithSlots& operator=(const WithSlots& other) {
    P::operator=(other);
    table = other.table;
    this->pool = &table;
    return *this;
  }
};

}  // namespace fla
