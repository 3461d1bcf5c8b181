// The comparison of the correctness gate: R = rms(x - y) / (rms(x) + 1e-8), reference x first, with an absolute floor;
// beside it the largest error and the worst block of rows, which one number per tensor hides.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fla/core/tensor.h"

namespace fla::tools {

inline constexpr std::int64_t kBlockRows = 64;  // rows of the flattened [..., last axis] per block
inline constexpr double kBlockFraction =
    1.0 / 16;  // a block's error is taken relative to at least this share of rms(x)

struct Limits {
  double R = 1e-4;
  double floor = 1e-6;  // a largest error up to this passes, nothing else is looked at
  double zero = 0.0;    // largest absolute value where the reference is identically zero; below floor: the floor
  double block = std::numeric_limits<double>::infinity();  // of block_R; infinite: reported only
};

struct Difference {
  bool ok = false;
  double R = 0.0;  // NaN when either side has a NaN
  double max_abs = 0.0;
  std::vector<std::int64_t> index;  // where max_abs is; the first NaN when there is one
  double block_R = 0.0;  // of the worst block: rms(x - y) / max(rms(x) of the block, kBlockFraction * rms(x))
  std::int64_t block = 0;
  bool zero_reference = false;  // the reference is identically zero: max_abs decides, R means nothing
  double limit = 0.0;           // what decided: on R, or on max_abs where the reference is zero
  std::string reason;           // empty when ok
};

// Shapes must be equal; types and strides may differ.
Difference compare(const TensorView& reference, const TensorView& candidate, const Limits& limits);

double rms(const TensorView& t);

}  // namespace fla::tools
