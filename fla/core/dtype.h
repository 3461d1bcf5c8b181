// Element types a tensor may have, and the scalar conversions between them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fla {

enum class DType : std::uint8_t { F32, F16, BF16, F64, I32, I64 };

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::F16:
    case DType::BF16: return 2;
    case DType::F32:
    case DType::I32: return 4;
    case DType::F64:
    case DType::I64: return 8;
  }
  return 0;
}

// The name used in messages, JSON and safetensors headers ("F32", "BF16", ...).
constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::F32: return "F32";
    case DType::F16: return "F16";
    case DType::BF16: return "BF16";
    case DType::F64: return "F64";
    case DType::I32: return "I32";
    case DType::I64: return "I64";
  }
  return "?";
}

constexpr bool is_float(DType t) { return t != DType::I32 && t != DType::I64; }

// Storage types for the 16-bit formats: bits only, arithmetic is always done in float or double.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

constexpr float to_float(bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

constexpr bf16 to_bf16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffU) > 0x7f800000U) return {static_cast<std::uint16_t>((u >> 16) | 0x40U)};  // NaN stays NaN
  return {static_cast<std::uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16)};                  // nearest, ties to even
}

constexpr float to_float(f16 x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x8000U} << 16;
  const std::uint32_t exp = (x.bits >> 10) & 0x1fU;
  const std::uint32_t man = x.bits & 0x3ffU;
  if (exp == 31) return std::bit_cast<float>(sign | 0x7f800000U | (man << 13));
  if (exp != 0) return std::bit_cast<float>(sign | ((exp + 112U) << 23) | (man << 13));
  const float sub = static_cast<float>(man) * 0x1p-24F;  // subnormal halves are exact in float
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(sub));
}

constexpr f16 to_f16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000U);
  const std::uint32_t a = u & 0x7fffffffU;
  if (a > 0x7f800000U) return {static_cast<std::uint16_t>(sign | 0x7e00U)};
  if (a >= 0x477ff000U) return {static_cast<std::uint16_t>(sign | 0x7c00U)};  // rounds to or past 65536: infinity
  if (a < 0x38800000U) {  // below 2^-14: a multiple of 2^-24; adding 0.5 leaves it in the low mantissa bits, rounded
    const float shifted = std::bit_cast<float>(a) + 0.5F;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U))};
  }
  const std::uint32_t r = a + 0xfffU + ((a >> 13) & 1U);
  return {static_cast<std::uint16_t>(sign | ((r - 0x38000000U) >> 13))};
}

}  // namespace fla
