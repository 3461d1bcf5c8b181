// The host side of simt.cuh on a GPU: device limits, texts of errors.
#include <array>
#include <mutex>
#include <string>

#include "fla/kernels/cuda/simt.cuh"

namespace fla::cuda {

Status launch_error(const char* kernel, cudaError_t e) {
  return {e == cudaErrorMemoryAllocation ? Code::OutOfMemory : Code::DeviceError,
          std::string(kernel) + ": " + cudaGetErrorString(e)};
}

Status fill_zero(void* p, std::size_t bytes, Stream stream) {
  if (bytes == 0) return {};
  const cudaError_t e = cudaMemsetAsync(p, 0, bytes, static_cast<cudaStream_t>(stream.handle));
  return e == cudaSuccess ? Status{} : launch_error("memset", e);
}

Result<DeviceInfo> device_info(int index) {
  constexpr int kMost = 64;
  static std::mutex mutex;
  static std::array<DeviceInfo, kMost> known;  // sm = 0: not yet asked
  if (index < 0 || index >= kMost) return Status(Code::InvalidArgument, "device: got index " + std::to_string(index));
  const std::lock_guard lock(mutex);
  DeviceInfo& info = known[static_cast<std::size_t>(index)];
  if (info.sm != 0) return info;

  int count = 0;
  const cudaError_t e = cudaGetDeviceCount(&count);
  if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice || (e == cudaSuccess && count == 0)) {
    return Status(Code::Unsupported, std::string("device: no usable NVIDIA driver or GPU: ") + cudaGetErrorString(e));
  }
  if (e != cudaSuccess) return launch_error("device", e);
  if (index >= count) {
    return Status(Code::InvalidArgument,
                  "device: got index " + std::to_string(index) + " of " + std::to_string(count) + " devices");
  }
  int major = 0, minor = 0, sms = 0, block = 0, sm = 0, reserved = 0, l2 = 0;
  for (const auto& [value, attribute] : {std::pair{&major, cudaDevAttrComputeCapabilityMajor},
                                         {&minor, cudaDevAttrComputeCapabilityMinor},
                                         {&sms, cudaDevAttrMultiProcessorCount},
                                         {&block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                                         {&sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                                         {&reserved, cudaDevAttrReservedSharedMemoryPerBlock},
                                         {&l2, cudaDevAttrL2CacheSize}}) {
    const cudaError_t failed = cudaDeviceGetAttribute(value, attribute, index);
    if (failed != cudaSuccess) return launch_error("device", failed);
  }
  info = {.index = index,
          .sm = major * 10 + minor,
          .sm_count = sms,
          .shared_per_block = static_cast<std::size_t>(block),
          .shared_per_sm = static_cast<std::size_t>(sm),
          .shared_reserved_block = static_cast<std::size_t>(reserved),
          .l2_bytes = static_cast<std::size_t>(l2)};
  return info;
}

}  // namespace fla::cuda
