// The GPU of this build, for tests and tools: in one without CUDA code there is none, and each answer says so.
#pragma once

#include <cstddef>
#include <memory>

#include "fla/core/status.h"
#include "fla/kernels/cuda/memory.h"

namespace fla::tools::gpu {

Result<std::unique_ptr<cuda::Memory>> allocate(std::size_t bytes, int device);
// Only where there is one.
std::unique_ptr<cuda::Timer> make_timer(Stream stream);
Status synchronize(int device);
Result<cuda::DeviceText> device_text(int index);
Result<DeviceInfo> device_info(int index);

}  // namespace fla::tools::gpu
