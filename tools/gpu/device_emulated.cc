#include <chrono>
#include <cstring>

#include "fla/kernels/cuda/emulated/emulator.h"
#include "tools/gpu/device.h"

namespace fla::tools::gpu {

namespace {

class EmulatedMemory final : public Memory {
 public:
  explicit EmulatedMemory(std::size_t bytes) : buffer_(bytes) {}
  void* data() const override { return buffer_.data(); }
  std::size_t size() const override { return buffer_.size(); }
  Status upload(std::size_t at, const void* from, std::size_t bytes) override {
    const cuda::emulator::OpenDeviceMemory open;
    if (bytes > 0) std::memcpy(start() + at, from, bytes);
    return {};
  }
  Status download(std::size_t at, void* to, std::size_t bytes) const override {
    const cuda::emulator::OpenDeviceMemory open;
    if (bytes > 0) std::memcpy(to, start() + at, bytes);
    return {};
  }
  Status fill(std::size_t at, std::size_t bytes, std::byte value, Stream /*stream*/) override {
    const cuda::emulator::OpenDeviceMemory open;
    if (bytes > 0) std::memset(start() + at, std::to_integer<int>(value), bytes);
    return {};
  }

 private:
  std::byte* start() const { return static_cast<std::byte*>(buffer_.data()); }
  cuda::emulator::DeviceBuffer buffer_;
};

// An emulated launch has ended when it returns.
class EmulatedTimer final : public Timer {
 public:
  void start() override { from_ = std::chrono::steady_clock::now(); }
  void stop() override { to_ = std::chrono::steady_clock::now(); }
  Result<double> milliseconds() override { return std::chrono::duration<double, std::milli>(to_ - from_).count(); }

 private:
  std::chrono::steady_clock::time_point from_, to_;
};

}  // namespace

Result<std::unique_ptr<Memory>> allocate(std::size_t bytes, int /*device*/) {
  return std::unique_ptr<Memory>(std::make_unique<EmulatedMemory>(bytes));
}

std::unique_ptr<Timer> make_timer(Stream /*stream*/) { return std::make_unique<EmulatedTimer>(); }

Status synchronize(int /*device*/) { return {}; }

Result<DeviceText> device_text(int index) {
  const Result<DeviceInfo> info = cuda::device_info(index);
  if (!info) return info.status();
  return DeviceText{"emulator on the CPU", "none", "none", 1, 0, 0.0, "emulated", info->sm};
}

Result<DeviceInfo> device_info(int index) { return cuda::device_info(index); }

Range::Range(const std::string& /*name*/) {}
Range::~Range() = default;

}  // namespace fla::tools::gpu
