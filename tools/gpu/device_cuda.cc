#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include "fla/kernels/cuda/launch.h"
#include "tools/gpu/device.h"

namespace fla::tools::gpu {

namespace {

Status failed(const char* what, cudaError_t e) {
  static_cast<void>(cudaGetLastError());  // told here; the caller's next question is about something else
  return {e == cudaErrorMemoryAllocation ? Code::OutOfMemory : Code::DeviceError,
          std::string(what) + ": " + cudaGetErrorString(e)};
}

class CudaMemory final : public Memory {
 public:
  CudaMemory(void* p, std::size_t bytes, int device) : p_(static_cast<std::byte*>(p)), bytes_(bytes), device_(device) {}
  ~CudaMemory() override {
    const cuda::OnDevice here(device_);
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
    const cuda::OnDevice here(device_);
    if (!here.status()) return here.status();
    const auto s = static_cast<cudaStream_t>(stream.handle);
    const cudaError_t e = bytes == 0 ? cudaSuccess : cudaMemsetAsync(p_ + at, std::to_integer<int>(value), bytes, s);
    return e == cudaSuccess ? Status() : failed("fill", e);
  }

 private:
  Status copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) const {
    const cuda::OnDevice here(device_);
    if (!here.status()) return here.status();
    cudaError_t e = cudaDeviceSynchronize();
    if (e == cudaSuccess) e = cudaMemcpy(to, from, bytes, kind);
    return e == cudaSuccess ? Status() : failed("copy", e);
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
    if (e != cudaSuccess && status_.ok()) static_cast<void>(status_ = failed("timer", e));
  }
  cudaStream_t stream_;
  cudaEvent_t events_[2] = {};
  Status status_;
};

}  // namespace

Result<std::unique_ptr<Memory>> allocate(std::size_t bytes, int device) {
  const cuda::OnDevice here(device);
  if (!here.status()) return here.status();
  void* p = nullptr;
  const cudaError_t e = cudaMalloc(&p, bytes == 0 ? 1 : bytes);
  if (e != cudaSuccess) return failed("memory", e);
  return std::unique_ptr<Memory>(std::make_unique<CudaMemory>(p, bytes, device));
}

std::unique_ptr<Timer> make_timer(Stream stream) { return std::make_unique<CudaTimer>(stream); }

Status synchronize(int device) {
  const cuda::OnDevice here(device);
  if (!here.status()) return here.status();
  const cudaError_t e = cudaDeviceSynchronize();
  return e == cudaSuccess ? Status() : failed("device", e);
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
    if (e != cudaSuccess) return failed("device", e);
  }
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  return DeviceText{p.name, version(driver),  version(runtime),
                    count,  p.totalGlobalMem, 2.0 * clock * 1e3 * bits / 8 * 1e-9,
                    pci,    info->sm};
}

Result<DeviceInfo> device_info(int index) { return cuda::device_info(index); }

namespace {
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("fla");
  return handle;
}
}  // namespace

Range::Range(const std::string& name) {
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = name.c_str();
  nvtxDomainRangePushEx(domain(), &event);
}
Range::~Range() { nvtxDomainRangePop(domain()); }

}  // namespace fla::tools::gpu
