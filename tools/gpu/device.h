// The GPU of this build, for tests and tools: its memory, its times, what it is. In a build without CUDA code there is
// none, and each answer says so; in one with the emulator it is the CPU. The library itself allocates nothing and waits
// for nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "fla/core/device.h"
#include "fla/core/status.h"

namespace fla::tools::gpu {

class Memory {
 public:
  Memory() = default;
  virtual ~Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual void* data() const = 0;
  virtual std::size_t size() const = 0;
  // Bytes from offset `at` on; both wait until the device has done what it was asked for before, and report how that
  // went.
  virtual Status upload(std::size_t at, const void* from, std::size_t bytes) = 0;
  virtual Status download(std::size_t at, void* to, std::size_t bytes) const = 0;
  virtual Status fill(std::size_t at, std::size_t bytes, std::byte value, Stream stream) = 0;  // in the stream's order
};
Result<std::unique_ptr<Memory>> allocate(std::size_t bytes, int device);

// The time that the device takes from start to stop.
class Timer {
 public:
  Timer() = default;
  virtual ~Timer() = default;
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  virtual void start() = 0;
  virtual void stop() = 0;
  virtual Result<double> milliseconds() = 0;  // waits
};
// Only where there is a GPU.
std::unique_ptr<Timer> make_timer(Stream stream);

// Waits for all that the device was asked to do.
Status synchronize(int device);

struct DeviceText {
  std::string name, driver, runtime;
  int devices = 0;
  std::size_t memory_bytes = 0;
  double peak_gbytes = 0.0;  // of its memory, a second; 0: not known
  std::string pci;           // its address, "0000:1B:00.0"
  int sm = 0;                // compute capability times ten
};
Result<DeviceText> device_text(int index);
Result<DeviceInfo> device_info(int index);

// A range on a profiler's time line (NVTX, domain "fla") while it lives; nothing in a build without CUDA.
class Range {
 public:
  explicit Range(const std::string& name);
  ~Range();  // NOLINT(performance-trivially-destructible): with CUDA it ends the range
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace fla::tools::gpu
