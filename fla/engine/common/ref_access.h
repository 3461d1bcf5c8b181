// Element access for references: any float type read as double, written with one rounding.
#pragma once

#include <cstdint>

#include "fla/core/tensor.h"

namespace fla::reference {

template <typename... I>
double load(const TensorView& t, I... idx) {
  const void* p = t.at(idx...);
  switch (t.dtype) {
    case DType::F32: return *static_cast<const float*>(p);
    case DType::F64: return *static_cast<const double*>(p);
    case DType::F16: return to_float(*static_cast<const f16*>(p));
    case DType::BF16: return to_float(*static_cast<const bf16*>(p));
    case DType::I32: return *static_cast<const std::int32_t*>(p);
    case DType::I64: return static_cast<double>(*static_cast<const std::int64_t*>(p));
  }
  return 0.0;
}

template <typename... I>
void store(const TensorView& t, double x, I... idx) {
  void* p = t.at(idx...);
  switch (t.dtype) {
    case DType::F32: *static_cast<float*>(p) = static_cast<float>(x); break;
    case DType::F64: *static_cast<double*>(p) = x; break;
    case DType::F16: *static_cast<f16*>(p) = to_f16(static_cast<float>(x)); break;
    case DType::BF16: *static_cast<bf16*>(p) = to_bf16(static_cast<float>(x)); break;
    default: break;
  }
}

}  // namespace fla::reference
