// Runs calls whose tensors lie in host memory, on any device. For an accelerator all that the tensors reach, gaps
// between their elements included, is copied there and back, so that whoever made the host memory can judge both alike.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fla/core/context.h"
#include "fla/kernels/cuda/memory.h"
#include "fla/registry/dynamic.h"

namespace fla::tools {

// Where the one backend that a context allows computes; the CPU where dispatch decides.
Device device_of(const Context& ctx);
// Why nothing can run there; empty: it can.
std::string device_problem(Device device);
inline constexpr Device kGpu{DeviceType::Cuda, 0};

// The tensors of some calls on an accelerator: the calls' views point there for as long as this lives. Tensors that
// share host memory share the copy. A workspace for any one of the calls lies beside them; everything is between
// guards, the workspace and what outputs' host memory was poisoned with is NaN.
class Placement {
 public:
  Placement(std::vector<DynamicCall*> calls, Device device);
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  Status place(const Context& ctx, std::size_t workspace_offset = 0);
  std::span<std::byte> workspace() const { return workspace_; }
  // Waits, then copies everything back to where it came from. Faults name what was written and should not have been.
  Status fetch(std::vector<std::string>& faults);

 private:
  struct View {
    TensorView* at;
    TensorView host;
    std::string name;
    bool written;
    std::size_t region = 0;
  };
  struct Region {
    std::byte *begin, *end;  // on the host
    std::size_t offset = 0;  // on the device, from the base
    bool written = false;
    std::string names;
  };
  Status reserve(std::size_t bytes);
  void point_views();
  void restore();

  std::vector<DynamicCall*> calls_;
  Device device_;
  std::vector<View> views_;
  std::vector<Region> regions_;
  std::size_t used_ = 0;  // bytes of the image
  std::vector<std::byte> image_;
  std::unique_ptr<cuda::Memory> memory_;
  std::byte* base_ = nullptr;
  std::size_t shift_ = 0;  // of the base from the memory's start
  std::span<std::byte> workspace_;
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
