// The GPU of this build, for tests and tools: in one without CUDA code there is none, and each answer says so.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "fla/core/status.h"
#include "fla/kernels/cuda/memory.h"

namespace fla::tools::gpu {

Result<std::unique_ptr<cuda::Memory>> allocate(std::size_t bytes, int device);
// Only where there is one.
std::unique_ptr<cuda::Timer> make_timer(Stream stream);
Status synchronize(int device);
Result<cuda::DeviceText> device_text(int index);
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
