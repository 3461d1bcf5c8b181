// The part of the machine (simt.cuh) that host code and both of its forms share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fla/core/device.h"
#include "fla/core/dtype.h"
#include "fla/core/status.h"

namespace fla::cuda {

struct Dim3 {
  std::int64_t x = 1, y = 1, z = 1;
};

// Most blocks of a grid's axes; y and z are short, so large counts belong into x.
inline constexpr std::int64_t kMaxGridX = 2147483647;
inline constexpr std::int64_t kMaxGridYZ = 65535;

struct Launch {
  const char* name;  // of the kernel, for messages
  Dim3 grid;
  int threads = 128;             // per block, a multiple of 32
  std::size_t shared_bytes = 0;  // dynamic shared memory of a block
  // Its blocks may start while those of the launch before it on the stream end, from compute capability 9.0 on: every
  // thread of the kernel calls wait_for_previous, and that launch is one of ours.
  bool overlapped = false;
};

// N elements that are loaded and stored as one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T x[N];
};

// The limits of a device; Unsupported without a driver.
Result<DeviceInfo> device_info(int index);
// The same for a call's way: they are asked for once and stay where they are, without a lock. nullptr: no such device.
const DeviceInfo* device_limits(int index);

// Copies to the host what the device has there when all that was queued on the stream is done. Waits for it.
Status read_memory(void* to, const void* from, std::size_t bytes, Stream stream);

// Makes a device the calling thread's for as long as it lives: kernels start on that one.
class OnDevice {
 public:
  explicit OnDevice(int index);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  const Status& status() const { return status_; }

 private:
  int before_ = -1;  // -1: nothing to put back
  Status status_;
};

}  // namespace fla::cuda
