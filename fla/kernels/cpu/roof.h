// Loops that do nothing but compute or read, compiled as the kernels are: what a processor can do at most.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fla::cpu {

// `rounds` rounds of multiply-adds in registers; the number of operations, two each, comes back, a value of them in
// *sink.
double register_products(std::int64_t rounds, float* sink);

// A product of matrices in the first cache, `rounds` times over, through the kernels' own tiles. x: kTileFloats floats.
inline constexpr std::int64_t kTileFloats = std::int64_t{3} * 48 * 48;
double tile_products(std::int64_t rounds, float* x);

// The sum of n floats, a multiple of 256.
float read_all(const float* x, std::size_t n);

}  // namespace fla::cpu
