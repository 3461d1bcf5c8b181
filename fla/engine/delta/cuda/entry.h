// The CUDA engine of the delta-rule recurrences. Serves the erase policies Plain and Decayed with one row per token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fla/core/device.h"
#include "fla/core/status.h"
#include "fla/engine/common/why.h"
#include "fla/engine/delta/problem.h"
#include "fla/registry/kernel_name.h"

namespace fla::cuda {

enum class DeltaKernel : std::uint8_t { Chunk, Token, Decode };

// What a call runs: a pure function of the problem's shape and of the device.
struct DeltaPlan {
  DeltaKernel kernel = DeltaKernel::Token;
  std::int64_t width = 0;     // key channels that a block is compiled for
  std::int64_t columns = 0;   // value channels of a block
  std::int64_t parts = 0;     // blocks that share the value channels of a head
  int stages = 0;             // chunks in shared memory at a time
  std::int64_t segment = 0;   // chunks after which time is cut; 0: the kernel knows no segments
  std::int64_t segments = 1;  // that a sequence has at most
  int transfer_stages = 0;    // chunks in shared memory at a time where segments' transfers are formed
  std::int64_t round = 0;     // chunks of each sequence that are in the workspace at a time; 0: all
  std::string text() const;   // as `fla explain` prints it
};

// Plans a forward; see CudaPass.
bool delta_plan_forward(const DeltaProblem& p, const DeviceInfo& device, std::string_view wanted, DeltaPlan& plan,
                        std::string* why);
KernelName delta_forward_kernel(const DeltaProblem& p, const DeltaPlan& plan);
std::string delta_forward_text(const DeltaProblem& p, const DeltaPlan& plan);
std::vector<std::string> delta_forward_kernels(const DeviceInfo& device);
// cu_seqlens is read on the device only. The workspace may start at any address and need not be initialised.
std::size_t delta_forward_workspace(const DeltaProblem& p, const DeltaPlan& plan);
Status delta_forward(const DeltaProblem& p, const DeltaPlan& plan, Stream stream, std::span<std::byte> workspace);

bool delta_plan_backward(const DeltaBackwardProblem& p, const DeviceInfo& device, std::string_view wanted,
                         DeltaPlan& plan, std::string* why);
KernelName delta_backward_kernel(const DeltaBackwardProblem& p, const DeltaPlan& plan);
std::string delta_backward_text(const DeltaBackwardProblem& p, const DeltaPlan& plan);
std::vector<std::string> delta_backward_kernels(const DeviceInfo& device);
std::size_t delta_backward_workspace(const DeltaBackwardProblem& p, const DeltaPlan& plan);
Status delta_backward(const DeltaBackwardProblem& p, const DeltaPlan& plan, Stream stream,
                      std::span<std::byte> workspace);

// The same in one step, planned on the way.
DeltaPlan delta_forward_plan(const DeltaProblem& p, const DeviceInfo& device);
std::size_t delta_forward_workspace(const DeltaProblem& p, const DeviceInfo& device);
Status delta_forward(const DeltaProblem& p, const DeviceInfo& device, Stream stream, std::span<std::byte> workspace);
DeltaPlan delta_backward_plan(const DeltaBackwardProblem& p, const DeviceInfo& device);
std::size_t delta_backward_workspace(const DeltaBackwardProblem& p, const DeviceInfo& device);
Status delta_backward(const DeltaBackwardProblem& p, const DeviceInfo& device, Stream stream,
                      std::span<std::byte> workspace);

}  // namespace fla::cuda
