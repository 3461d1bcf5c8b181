// Rows of unit length. Per-target code: include after hwy/highway.h, inside the foreach_target pattern.
#if defined(FLA_KERNELS_CPU_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_KERNELS_CPU_NORM_INL_H_
#undef FLA_KERNELS_CPU_NORM_INL_H_
#else
#define FLA_KERNELS_CPU_NORM_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// x / sqrt(sum x^2 + 1e-6), whole padded rows; keeps the factor. Squares of a long row leave fp32: it is scaled by a
// power of two first, beside which the 1e-6 is nothing. Squares that underflow are nothing beside the 1e-6.
inline HWY_NOINLINE void normalize_rows(float* x, std::int64_t ld, std::int64_t rows, float* inverse) {
  constexpr float kLongest = 0x1p120F, kShrink = 0x1p-96F;
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto squares = [&](const float* r) HWY_ATTR {
    auto s = hn::Zero(d);
    for (std::int64_t c = 0; c < ld; c += lanes) {
      const auto v = hn::LoadU(d, r + c);
      s = hn::MulAdd(v, v, s);
    }
    return hn::GetLane(hn::SumOfLanes(d, s));
  };
  const auto multiply = [&](float* r, float by) HWY_ATTR {
    for (std::int64_t c = 0; c < ld; c += lanes) hn::StoreU(hn::Mul(hn::Set(d, by), hn::LoadU(d, r + c)), d, r + c);
  };
  for (std::int64_t i = 0; i < rows; ++i) {
    float* r = x + i * ld;
    const float sum = squares(r);
    if (sum < kLongest || std::isnan(sum)) {
      inverse[i] = 1.0F / std::sqrt(sum + 1e-6F);
      multiply(r, inverse[i]);
    } else {
      multiply(r, kShrink);
      const float f = 1.0F / std::sqrt(squares(r));
      multiply(r, f);
      inverse[i] = f * kShrink;
    }
  }
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
