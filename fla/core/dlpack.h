// DLPack tensors in and out. Only the struct of DLPack 0.6 is used, which every later version still contains.
#pragma once

#include <dlpack/dlpack.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "fla/core/dtype.h"
#include "fla/core/status.h"
#include "fla/core/tensor.h"

namespace fla {

// A view of the tensor's memory; nothing is copied and ownership stays where it was.
inline Result<TensorView> from_dlpack(const DLTensor& t) {
  const auto bad = [](const std::string& what) { return Status(Code::InvalidArgument, "dlpack: " + what); };
  TensorView v;

  switch (static_cast<int>(t.device.device_type)) {
    case kDLCPU:
    case kDLCUDAHost:  // pinned, but the host's memory; device_id means nothing
      v.device = {DeviceType::Cpu, 0};
      break;
    case kDLCUDA:
    case kDLCUDAManaged: v.device = {DeviceType::Cuda, t.device.device_id}; break;
    default:
      return bad("device: expected CPU (1), CUDA (2), CUDA host (3) or CUDA managed (13), got " +
                 std::to_string(static_cast<int>(t.device.device_type)));
  }

  const auto is = [&t](int code, int bits) {
    return t.dtype.code == code && t.dtype.bits == bits && t.dtype.lanes == 1;
  };
  if (is(kDLFloat, 32)) {
    v.dtype = DType::F32;
  } else if (is(kDLFloat, 16)) {
    v.dtype = DType::F16;
  } else if (is(kDLFloat, 64)) {
    v.dtype = DType::F64;
  } else if (is(kDLBfloat, 16)) {
    v.dtype = DType::BF16;
  } else if (is(kDLInt, 32)) {
    v.dtype = DType::I32;
  } else if (is(kDLInt, 64)) {
    v.dtype = DType::I64;
  } else {
    return bad("dtype: expected float 16, 32 or 64, bfloat 16, int 32 or 64 with 1 lane, got code " +
               std::to_string(t.dtype.code) + ", bits " + std::to_string(t.dtype.bits) + ", lanes " +
               std::to_string(t.dtype.lanes));
  }

  if (t.ndim < 0 || t.ndim > kMaxDims) {
    return bad("rank: expected 0 to " + std::to_string(kMaxDims) + ", got " + std::to_string(t.ndim));
  }
  if (t.ndim > 0 && t.shape == nullptr) return bad("shape: expected " + std::to_string(t.ndim) + " sizes, got null");
  v.ndim = t.ndim;
  const auto element = static_cast<std::int64_t>(size_of(v.dtype));
  std::int64_t stride = 1;  // of a contiguous tensor; zero sizes count as 1, as in TensorView
  for (int i = t.ndim - 1; i >= 0; --i) {
    const std::int64_t n = t.shape[i];
    const auto at = static_cast<std::size_t>(i);
    if (n < 0) return bad("shape[" + std::to_string(i) + "]: expected at least 0, got " + std::to_string(n));
    v.shape[at] = n;
    v.stride[at] = t.strides != nullptr ? t.strides[i] : stride;
    if (std::max<std::int64_t>(n, 1) > std::numeric_limits<std::int64_t>::max() / element / stride) {
      return bad("shape: expected a size in bytes that fits 64 bits, got more at shape[" + std::to_string(i) +
                 "] = " + std::to_string(n));
    }
    stride *= std::max<std::int64_t>(n, 1);
  }

  if (t.data == nullptr) {
    if (v.numel() > 0) return bad("data: expected memory of " + std::to_string(v.numel()) + " elements, got null");
    return v;
  }
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(t.data) + static_cast<std::uintptr_t>(t.byte_offset);
  if (address % size_of(v.dtype) != 0) {
    return bad("data: expected an address that is a multiple of " + std::to_string(size_of(v.dtype)) + " for " +
               name_of(v.dtype) + ", got one " + std::to_string(address % size_of(v.dtype)) + " past (byte_offset " +
               std::to_string(t.byte_offset) + ")");
  }
  v.data = t.data == nullptr ? nullptr : static_cast<std::byte*>(t.data) + t.byte_offset;
  return v;
}

// Shape and strides point into the view, which must be present and outlive the result.
inline DLTensor to_dlpack(TensorView& v) {
  DLTensor t{};
  t.data = v.data;
  t.device.device_type = v.device.type == DeviceType::Cuda ? kDLCUDA : kDLCPU;
  t.device.device_id = v.device.index;
  t.ndim = v.ndim;
  t.dtype.code = static_cast<std::uint8_t>(v.dtype == DType::BF16 ? kDLBfloat : is_float(v.dtype) ? kDLFloat : kDLInt);
  t.dtype.bits = static_cast<std::uint8_t>(size_of(v.dtype) * 8);
  t.dtype.lanes = 1;
  t.shape = v.shape.data();
  t.strides = v.stride.data();
  return t;
}

}  // namespace fla
