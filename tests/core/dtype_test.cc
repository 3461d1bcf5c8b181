#include "fla/core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace fla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

static_assert(to_float(to_bf16(1.0F)) == 1.0F && to_float(to_f16(-2.5F)) == -2.5F, "usable at compile time");

// An independent value of the bits: sign, exponent and mantissa put together in double.
double value_of(std::uint32_t bits, int exponent_bits, int mantissa_bits) {
  const std::uint32_t mantissa = bits & ((1U << mantissa_bits) - 1);
  const std::uint32_t top = (1U << exponent_bits) - 1;
  const std::uint32_t exponent = (bits >> mantissa_bits) & top;
  const int bias = static_cast<int>(top >> 1);
  double x = 0;
  if (exponent == top) {
    x = mantissa != 0 ? std::nan("") : HUGE_VAL;
  } else if (exponent == 0) {
    x = std::ldexp(static_cast<double>(mantissa), 1 - bias - mantissa_bits);
  } else {
    x = std::ldexp(static_cast<double>(mantissa + (1U << mantissa_bits)),
                   static_cast<int>(exponent) - bias - mantissa_bits);
  }
  return (bits >> (exponent_bits + mantissa_bits)) != 0 ? -x : x;
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::BF16), 2U);
  EXPECT_EQ(size_of(DType::F16), 2U);
  EXPECT_EQ(size_of(DType::F32), 4U);
  EXPECT_EQ(size_of(DType::I32), 4U);
  EXPECT_EQ(size_of(DType::F64), 8U);
  EXPECT_EQ(size_of(DType::I64), 8U);
  EXPECT_STREQ(name_of(DType::BF16), "BF16");
  EXPECT_TRUE(is_float(DType::F16));
  EXPECT_FALSE(is_float(DType::I32));
  EXPECT_FALSE(is_float(DType::I64));
}

TEST(DType, EveryHalfGoesThereAndBack) {
  for (std::uint32_t b = 0; b <= 0xffffU; ++b) {
    const f16 h{static_cast<std::uint16_t>(b)};
    const float x = to_float(h);
    const double want = value_of(b, 5, 10);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(x)) << b;
      ASSERT_TRUE(std::isnan(to_float(to_f16(x)))) << b;
      ASSERT_EQ(to_f16(x).bits & 0x8000U, b & 0x8000U);
    } else {
      ASSERT_EQ(x, want) << b;
      ASSERT_EQ(std::signbit(x), std::signbit(want)) << b;
      ASSERT_EQ(to_f16(x).bits, b);
    }
  }
}

TEST(DType, EveryBf16GoesThereAndBack) {
  for (std::uint32_t b = 0; b <= 0xffffU; ++b) {
    const bf16 h{static_cast<std::uint16_t>(b)};
    const float x = to_float(h);
    const double want = value_of(b, 8, 7);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(x)) << b;
      ASSERT_TRUE(std::isnan(to_float(to_bf16(x)))) << b;
      ASSERT_EQ(to_bf16(x).bits & 0x8000U, b & 0x8000U);
    } else {
      ASSERT_EQ(x, want) << b;
      ASSERT_EQ(std::signbit(x), std::signbit(want)) << b;
      ASSERT_EQ(to_bf16(x).bits, b);
    }
  }
}

// Between each pair of neighbours: the middle goes to the even one, the floats beside it to the nearer one.
template <typename To>
void check_rounding(std::uint32_t infinity_bits, int exponent_bits, int mantissa_bits, To to) {
  for (std::uint32_t b = 0; b + 1 < infinity_bits; ++b) {
    const double low = value_of(b, exponent_bits, mantissa_bits), high = value_of(b + 1, exponent_bits, mantissa_bits);
    const auto middle = static_cast<float>((low + high) / 2);  // exact: one bit more than the format has
    for (const float sign : {1.0F, -1.0F}) {
      const std::uint32_t s = sign < 0 ? 0x8000U : 0U;
      ASSERT_EQ(to(sign * middle), s | (b % 2 == 0 ? b : b + 1)) << middle;
      ASSERT_EQ(to(sign * std::nextafterf(middle, 0.0F)), s | b) << middle;
      ASSERT_EQ(to(sign * std::nextafterf(middle, kInf)), s | (b + 1)) << middle;
    }
  }
}

TEST(DType, HalfRoundsToNearestTiesToEven) {
  check_rounding(0x7c00, 5, 10, [](float x) -> std::uint32_t { return to_f16(x).bits; });
}

TEST(DType, Bf16RoundsToNearestTiesToEven) {
  check_rounding(0x7f80, 8, 7, [](float x) -> std::uint32_t { return to_bf16(x).bits; });
}

TEST(DType, HalfOverflow) {
  EXPECT_EQ(to_f16(65504.0F).bits, 0x7bff);
  EXPECT_EQ(to_f16(std::nextafterf(65520.0F, 0.0F)).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0F).bits, 0x7c00);
  EXPECT_EQ(to_f16(-65520.0F).bits, 0xfc00);
  EXPECT_EQ(to_f16(1e30F).bits, 0x7c00);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::max()).bits, 0x7c00);
  EXPECT_EQ(to_f16(kInf).bits, 0x7c00);
  EXPECT_EQ(to_f16(-kInf).bits, 0xfc00);
}

TEST(DType, Bf16Overflow) {
  const float largest = to_float(bf16{0x7f7f});
  const float tie = std::bit_cast<float>(0x7f7f8000U);
  EXPECT_EQ(to_bf16(largest).bits, 0x7f7f);
  EXPECT_EQ(to_bf16(std::nextafterf(tie, 0.0F)).bits, 0x7f7f);
  EXPECT_EQ(to_bf16(tie).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-tie).bits, 0xff80);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(kInf).bits, 0x7f80);
}

TEST(DType, HalfUnderflow) {
  EXPECT_EQ(to_f16(0x1p-24F).bits, 0x0001);
  EXPECT_EQ(to_f16(0x1p-25F).bits, 0x0000);  // a tie with zero
  EXPECT_EQ(to_f16(std::nextafterf(0x1p-25F, 1.0F)).bits, 0x0001);
  EXPECT_EQ(to_f16(-0x1p-26F).bits, 0x8000);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
  EXPECT_EQ(to_f16(-0.0F).bits, 0x8000);
}

// A NaN whose only mantissa bits are those that the short format drops must not become infinity.
TEST(DType, NanStaysNan) {
  for (const std::uint32_t bits : {0x7f800001U, 0xff800001U, 0x7fc00000U, 0x7fffffffU, 0xffffffffU, 0x7f80ffffU}) {
    const auto x = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(to_float(to_bf16(x)))) << bits;
    EXPECT_TRUE(std::isnan(to_float(to_f16(x)))) << bits;
    EXPECT_EQ(to_bf16(x).bits >> 15, bits >> 31);
    EXPECT_EQ(to_f16(x).bits >> 15, bits >> 31);
  }
}

}  // namespace
}  // namespace fla
