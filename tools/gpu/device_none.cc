#include "tools/gpu/device.h"

namespace fla::tools::gpu {
namespace {
Status none() { return {Code::Unsupported, "this build has no CUDA code (FLA_CUDA=OFF)"}; }
}  // namespace

Result<std::unique_ptr<Memory>> allocate(std::size_t /*bytes*/, int /*device*/) { return none(); }
std::unique_ptr<Timer> make_timer(Stream /*stream*/) { return nullptr; }
Status synchronize(int /*device*/) { return none(); }
Result<DeviceText> device_text(int /*index*/) { return none(); }
Result<DeviceInfo> device_info(int /*index*/) { return none(); }
Range::Range(const std::string& /*name*/) {}
Range::~Range() = default;

}  // namespace fla::tools::gpu
