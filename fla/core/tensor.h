// TensorView: a strided, non-owning view of somebody's memory. DLPack (core/dlpack.h) is the interchange.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "fla/core/dtype.h"
#include "fla/core/export.h"

namespace fla {

inline constexpr int kMaxDims = 6;
// ndim of a view made with more axes than that: present to nobody, refused by checks.
inline constexpr int kTooManyDims = -2;

enum class DeviceType : std::uint8_t { Cpu, Cuda };

struct Device {
  DeviceType type = DeviceType::Cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

template <typename T>
struct dtype_of;
template <>
struct dtype_of<float> : std::integral_constant<DType, DType::F32> {};
template <>
struct dtype_of<double> : std::integral_constant<DType, DType::F64> {};
template <>
struct dtype_of<bf16> : std::integral_constant<DType, DType::BF16> {};
template <>
struct dtype_of<f16> : std::integral_constant<DType, DType::F16> {};
template <>
struct dtype_of<std::int32_t> : std::integral_constant<DType, DType::I32> {};
template <>
struct dtype_of<std::int64_t> : std::integral_constant<DType, DType::I64> {};

// Sizes and strides are in elements and 64 bits wide. A default-constructed view is absent: an optional argument that
// was not given, an output that was not asked for. A present view of zero elements may have a null pointer.
// The library writes through a view only where the argument is an output.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::F32;
  Device device;
  int ndim = -1;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> stride{};

  TensorView() = default;
  // A contiguous view, row-major: TensorView(ptr, {B, T, H, K}).
  template <typename T>
  TensorView(T* p, std::initializer_list<std::int64_t> dims, Device dev = {})
      : TensorView(const_cast<std::remove_const_t<T>*>(p), dtype_of<std::remove_const_t<T>>::value,
                   std::span<const std::int64_t>(dims.begin(), dims.size()), dev) {}
  TensorView(void* p, DType t, std::span<const std::int64_t> dims, Device dev = {}) : data(p), dtype(t), device(dev) {
    ndim = static_cast<int>(dims.size()) <= kMaxDims ? static_cast<int>(dims.size()) : kTooManyDims;
    std::int64_t s = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      shape[i] = dims[i];
      stride[i] = s;
      s *= dims[i] > 0 ? dims[i] : 1;
    }
  }

  bool present() const { return ndim >= 0; }
  explicit operator bool() const { return present(); }
  std::int64_t dim(int i) const { return shape[static_cast<std::size_t>(i)]; }
  std::span<const std::int64_t> dims() const { return {shape.data(), static_cast<std::size_t>(ndim < 0 ? 0 : ndim)}; }
  std::int64_t numel() const {
    std::int64_t n = ndim < 0 ? 0 : 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  bool contiguous() const {
    std::int64_t s = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      if (shape[i] != 1 && stride[i] != s) return false;
      s *= shape[i];
    }
    return true;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  // The address of element (i0, i1, ...); missing trailing indices are 0.
  template <typename... I>
  std::byte* at(I... idx) const {
    const std::int64_t is[] = {static_cast<std::int64_t>(idx)...};
    std::int64_t off = 0;
    for (std::size_t i = 0; i < sizeof...(I); ++i) off += is[i] * stride[i];
    return static_cast<std::byte*>(data) + off * static_cast<std::int64_t>(size_of(dtype));
  }
};

// Tensors of one shape and element type, each with memory and strides of its own: one argument that is a list.
using TensorList = std::span<const TensorView>;

// "[2,128,4,64]"
FLA_API std::string shape_string(std::span<const std::int64_t> dims);

}  // namespace fla
