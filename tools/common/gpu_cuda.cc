#include "fla/kernels/cuda/launch.h"
#include "tools/common/gpu.h"

namespace fla::tools::gpu {

Result<std::unique_ptr<cuda::Memory>> allocate(std::size_t bytes, int device) { return cuda::allocate(bytes, device); }
std::unique_ptr<cuda::Timer> make_timer(Stream stream) { return cuda::make_timer(stream); }
Status synchronize(int device) { return cuda::synchronize(device); }
Result<cuda::DeviceText> device_text(int index) { return cuda::device_text(index); }
Result<DeviceInfo> device_info(int index) { return cuda::device_info(index); }

}  // namespace fla::tools::gpu
