// The host side of simt.cuh on a GPU: device limits, texts of errors.
#include <atomic>
#include <memory>
#include <string>

#include "fla/kernels/cuda/memory.h"
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

// ---- memory of tests and tools

namespace {

class CudaMemory final : public Memory {
 public:
  CudaMemory(void* p, std::size_t bytes, int device) : p_(static_cast<std::byte*>(p)), bytes_(bytes), device_(device) {}
  ~CudaMemory() override {
    const OnDevice here(device_);
    cudaFree(p_);
  }
  void* data() const override { return p_; }
  std::size_t size() const override { return bytes_; }
  Status upload(std::size_t at, const void* from, std::size_t bytes) override {
    return copy(p_ + at, from, bytes, cudaMemcpyHostToDevice);
  }
  Status download(std::size_t at, void* to, std::size_t bytes) const override {
    return copy(to, p_ + at, bytes, cudaMemcpyDeviceToHost);
  }
  Status fill(std::size_t at, std::size_t bytes, std::byte value, Stream stream) override {
    const OnDevice here(device_);
    if (!here.status()) return here.status();
    const auto s = static_cast<cudaStream_t>(stream.handle);
    const cudaError_t e = bytes == 0 ? cudaSuccess : cudaMemsetAsync(p_ + at, std::to_integer<int>(value), bytes, s);
    return e == cudaSuccess ? Status() : launch_error("fill", e);
  }

 private:
  Status copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) const {
    const OnDevice here(device_);
    if (!here.status()) return here.status();
    cudaError_t e = cudaDeviceSynchronize();
    if (e == cudaSuccess) e = cudaMemcpy(to, from, bytes, kind);
    return e == cudaSuccess ? Status() : launch_error("copy", e);
  }
  std::byte* p_;
  std::size_t bytes_;
  int device_;
};

class CudaTimer final : public Timer {
 public:
  explicit CudaTimer(Stream stream) : stream_(static_cast<cudaStream_t>(stream.handle)) {
    for (cudaEvent_t& e : events_) note(cudaEventCreate(&e));
  }
  ~CudaTimer() override {
    for (const cudaEvent_t e : events_) cudaEventDestroy(e);
  }
  void start() override { note(cudaEventRecord(events_[0], stream_)); }
  void stop() override { note(cudaEventRecord(events_[1], stream_)); }
  Result<double> milliseconds() override {
    float ms = 0.0F;
    note(cudaEventSynchronize(events_[1]));
    note(cudaEventElapsedTime(&ms, events_[0], events_[1]));
    if (!status_) return status_;
    return static_cast<double>(ms);
  }

 private:
  void note(cudaError_t e) {
    if (e != cudaSuccess && status_.ok()) static_cast<void>(status_ = launch_error("timer", e));
  }
  cudaStream_t stream_;
  cudaEvent_t events_[2] = {};
  Status status_;
};

}  // namespace

Result<std::unique_ptr<Memory>> allocate(std::size_t bytes, int device) {
  const OnDevice here(device);
  if (!here.status()) return here.status();
  void* p = nullptr;
  const cudaError_t e = cudaMalloc(&p, bytes == 0 ? 1 : bytes);
  if (e != cudaSuccess) {
    cudaGetLastError();
    return launch_error("memory", e);
  }
  return std::unique_ptr<Memory>(std::make_unique<CudaMemory>(p, bytes, device));
}

std::unique_ptr<Timer> make_timer(Stream stream) { return std::make_unique<CudaTimer>(stream); }

Status synchronize(int device) {
  const OnDevice here(device);
  if (!here.status()) return here.status();
  const cudaError_t e = cudaDeviceSynchronize();
  return e == cudaSuccess ? Status() : launch_error("device", e);
}

Result<DeviceText> device_text(int index) {
  const Result<DeviceInfo> info = device_info(index);
  if (!info) return info.status();
  cudaDeviceProp p{};
  int runtime = 0, driver = 0, count = 0, clock = 0, bits = 0;
  char pci[32] = "";
  for (const cudaError_t e :
       {cudaGetDeviceProperties(&p, index), cudaRuntimeGetVersion(&runtime), cudaDriverGetVersion(&driver),
        cudaGetDeviceCount(&count), cudaDeviceGetAttribute(&clock, cudaDevAttrMemoryClockRate, index),
        cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, index),
        cudaDeviceGetPCIBusId(pci, sizeof pci, index)}) {
    if (e != cudaSuccess) return launch_error("device", e);
  }
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  return DeviceText{p.name, version(driver),  version(runtime),
                    count,  p.totalGlobalMem, 2.0 * clock * 1e3 * bits / 8 * 1e-9,
                    pci,    info->sm};
}

}  // namespace fla::cuda
