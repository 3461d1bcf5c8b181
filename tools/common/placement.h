// Runs calls whose tensors lie in host memory, on any device.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fla/core/context.h"
#include "fla/registry/dynamic.h"
#include "tools/common/device_image.h"

namespace fla::tools {

// Where the one backend that a context allows computes; the CPU where dispatch decides.
Device device_of(const Context& ctx);
// Why nothing can run there; empty: it can.
std::string device_problem(Device device);
inline constexpr Device kGpu{DeviceType::Cuda, 0};

// The tensors of some calls on an accelerator: the calls' views point there for as long as this lives. A workspace for
// any one of the calls lies beside them and is NaN.
class Placement {
 public:
  Placement(std::vector<DynamicCall*> calls, Device device);
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  Status place(const Context& ctx, std::size_t workspace_offset = 0);
  std::span<std::byte> workspace() const { return image_.workspace(); }
  // Waits, then copies everything back to where it came from. Faults name what was written and should not have been.
  Status fetch(std::vector<std::string>& faults) { return image_.fetch(faults); }

 private:
  struct View {
    TensorView* at;
    TensorView host;
  };
  void point_views();

  std::vector<DynamicCall*> calls_;
  DeviceImage image_;
  std::vector<View> views_;
};

struct Executed {
  Status status;
  std::size_t workspace_bytes = 0;
  LastRoute route;
  std::vector<std::string> faults;  // "workspace: written outside its 512 bytes"
};
// Runs the call on the device in a poisoned, guarded workspace.
Executed execute(const Context& ctx, DynamicCall& call, Device device, std::size_t workspace_offset = 0);

}  // namespace fla::tools
