// The host side of simt.cuh on a GPU: device limits, texts of errors.
#include <atomic>
#include <string>

#include "fla/kernels/cuda/simt.cuh"

namespace fla::cuda {

Status launch_error(const char* kernel, cudaError_t e) {
  static_cast<void>(cudaGetLastError());  // told here; the caller's next question is about something else
  return {e == cudaErrorMemoryAllocation ? Code::OutOfMemory : Code::DeviceError,
          std::string(kernel) + ": " + cudaGetErrorString(e)};
}

Status fill_zero(void* p, std::size_t bytes, Stream stream) {
  if (bytes == 0) return {};
  const cudaError_t e = cudaMemsetAsync(p, 0, bytes, static_cast<cudaStream_t>(stream.handle));
  return e == cudaSuccess ? Status{} : launch_error("memset", e);
}

namespace {

constexpr int kMostDevices = 64;

// What the driver says of a device.
Result<DeviceInfo> ask_device(int index) {
  int count = 0;
  const cudaError_t e = cudaGetDeviceCount(&count);
  if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice || (e == cudaSuccess && count == 0)) {
    return Status(Code::Unsupported, std::string("device: no usable NVIDIA driver or GPU: ") + cudaGetErrorString(e));
  }
  if (e != cudaSuccess) return launch_error("device", e);
  if (index < 0 || index >= count || index >= kMostDevices) {
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
  return DeviceInfo{.index = index,
                    .sm = major * 10 + minor,
                    .sm_count = sms,
                    .shared_per_block = static_cast<std::size_t>(block),
                    .shared_per_sm = static_cast<std::size_t>(sm),
                    .shared_reserved_block = static_cast<std::size_t>(reserved),
                    .l2_bytes = static_cast<std::size_t>(l2)};
}

// Each device's limits once they are known. Two threads that ask at once store the same; the later one's copy is let go.
std::atomic<const DeviceInfo*> known[kMostDevices];

}  // namespace

Result<DeviceInfo> device_info(int index) {
  if (index >= 0 && index < kMostDevices)
    if (const DeviceInfo* d = known[index].load(std::memory_order_acquire)) return *d;
  Result<DeviceInfo> asked = ask_device(index);
  if (!asked) return asked;
  const auto* made = new DeviceInfo(*asked);  // stays: calls may come from static destructors
  const DeviceInfo* none = nullptr;
  if (!known[index].compare_exchange_strong(none, made, std::memory_order_acq_rel)) delete made;
  return asked;
}

const DeviceInfo* device_limits(int index) {
  if (index < 0 || index >= kMostDevices) return nullptr;
  if (const DeviceInfo* d = known[index].load(std::memory_order_acquire)) return d;
  return device_info(index) ? known[index].load(std::memory_order_acquire) : nullptr;
}

OnDevice::OnDevice(int index) {
  int current = 0;
  cudaError_t e = cudaGetDevice(&current);
  if (e == cudaSuccess && current != index) {
    e = cudaSetDevice(index);
    if (e == cudaSuccess) before_ = current;
  }
  if (e != cudaSuccess) static_cast<void>(status_ = launch_error("device", e));  // nvcc takes the result for a value
}

OnDevice::~OnDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

Status read_memory(void* to, const void* from, std::size_t bytes, Stream stream) {
  const OnDevice here(stream.device);
  if (!here.status()) return here.status();
  const auto s = static_cast<cudaStream_t>(stream.handle);
  cudaError_t e = bytes == 0 ? cudaSuccess : cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, s);
  if (e == cudaSuccess) e = cudaStreamSynchronize(s);
  return e == cudaSuccess ? Status() : launch_error("read", e);
}

}  // namespace fla::cuda
