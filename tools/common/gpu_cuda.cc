#ifdef FLA_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

#include "fla/kernels/cuda/launch.h"
#include "tools/common/gpu.h"

namespace fla::tools::gpu {

Result<std::unique_ptr<cuda::Memory>> allocate(std::size_t bytes, int device) { return cuda::allocate(bytes, device); }
std::unique_ptr<cuda::Timer> make_timer(Stream stream) { return cuda::make_timer(stream); }
Status synchronize(int device) { return cuda::synchronize(device); }
Result<cuda::DeviceText> device_text(int index) { return cuda::device_text(index); }
Result<DeviceInfo> device_info(int index) { return cuda::device_info(index); }

#ifdef FLA_NVTX
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
#else
Range::Range(const std::string& /*name*/) {}
Range::~Range() = default;
#endif

}  // namespace fla::tools::gpu
