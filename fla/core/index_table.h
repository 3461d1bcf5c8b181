// Tables of indices in host memory: boundaries of packed sequences, slots of a pool, lists of chunks.
#pragma once

#include <cstdint>

#include "fla/core/tensor.h"

namespace fla {

// An entry of a table of I32 or I64.
inline std::int64_t read_index(const TensorView& table, std::int64_t i, std::int64_t j = 0) {
  return table.dtype == DType::I32 ? *reinterpret_cast<const std::int32_t*>(table.at(i, j))
                                   : *reinterpret_cast<const std::int64_t*>(table.at(i, j));
}

}  // namespace fla
