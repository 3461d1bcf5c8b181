// One element of any float type, for what is read and written one at a time.
#pragma once

#include <cstddef>

#include "fla/core/dtype.h"

namespace fla::cpu {

inline double load_element(const std::byte* at, DType type) {
  switch (type) {
    case DType::F32: return static_cast<double>(*reinterpret_cast<const float*>(at));
    case DType::F64: return *reinterpret_cast<const double*>(at);
    case DType::F16: return static_cast<double>(to_float(*reinterpret_cast<const f16*>(at)));
    case DType::BF16: return static_cast<double>(to_float(*reinterpret_cast<const bf16*>(at)));
    default: return 0.0;
  }
}

// With one rounding to 16 bits, of x as a float.
inline void store_element(std::byte* at, DType type, double x) {
  switch (type) {
    case DType::F32: *reinterpret_cast<float*>(at) = static_cast<float>(x); return;
    case DType::F64: *reinterpret_cast<double*>(at) = x; return;
    case DType::F16: *reinterpret_cast<f16*>(at) = to_f16(static_cast<float>(x)); return;
    case DType::BF16: *reinterpret_cast<bf16*>(at) = to_bf16(static_cast<float>(x)); return;
    default: return;
  }
}

}  // namespace fla::cpu
