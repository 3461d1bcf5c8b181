// The number of a block, or of a grid's blocks. Included by both forms of the machine (simt.cuh) only.
#pragma once

#include <cstdint>

namespace fla::cuda {

// Divided like an int, which is quick; in any other arithmetic a number of 64 bits, as what it counts lies further apart
// than 32 bits reach: with 2^18 blocks and 64 KB for each, offsets pass 2^32 bytes.
struct BlockIndex {
  int at;

  FLA_DEVICE operator std::int64_t() const { return at; }  // NOLINT(google-explicit-constructor): stands for a number
  FLA_DEVICE BlockIndex operator/(int by) const { return {at / by}; }
  FLA_DEVICE int operator%(int by) const { return at % by; }
  FLA_DEVICE std::int64_t operator/(std::int64_t by) const { return at / by; }
  FLA_DEVICE std::int64_t operator%(std::int64_t by) const { return at % by; }
};

}  // namespace fla::cuda
