// Packed sequences on a device: reading a table of boundaries, and finding the sequence that a piece of work belongs
// to. Pieces of all sequences are numbered in such a way that nobody needs to know the sequences before his own.
#pragma once

#include <cstdint>

#include "fla/kernels/cuda/tile.cuh"

namespace fla::cuda {

// Entry i of a table whose first stride counts entries.
FLA_DEVICE std::int64_t boundary_at(const View& table, DType type, std::int64_t i) {
  return load_index(table.data, type, i * table.stride[0]);
}

// The last of N packed sequences whose first piece is not behind `slot`. first(n, begin): the number of the first piece
// of sequence n, which starts at token `begin`; it grows strictly with n.
template <typename First>
FLA_DEVICE std::int64_t find_sequence(const View& table, DType type, std::int64_t N, std::int64_t slot, First&& first) {
  std::int64_t n = 0, above = N;
  while (above - n > 1) {
    const std::int64_t middle = (n + above) / 2;
    if (first(middle, boundary_at(table, type, middle)) <= slot) {
      n = middle;
    } else {
      above = middle;
    }
  }
  return n;
}

}  // namespace fla::cuda
