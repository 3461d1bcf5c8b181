// The CUDA engine of the delta-rule recurrences. Serves the erase policies Plain and Decayed with one row per token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "fla/core/device.h"
#include "fla/core/status.h"
#include "fla/engine/delta/problem.h"

namespace fla::cuda {

enum class DeltaKernel : std::uint8_t { Chunk, Token, Decode };

// What a call runs: a pure function of the problem's shape and of the device.
struct DeltaPlan {
  DeltaKernel kernel = DeltaKernel::Token;
  const char* name = "";
  std::string why_token;      // why the tensor cores cannot serve the problem; empty where they do
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

// Why the engine cannot serve the problem; empty where it can.
std::string delta_refusal(const DeltaProblem& p, const DeviceInfo& device);
DeltaPlan delta_forward_plan(const DeltaProblem& p, const DeviceInfo& device);

// cu_seqlens is read on the device only. The workspace may start at any address and need not be initialised.
std::size_t delta_forward_workspace(const DeltaProblem& p, const DeviceInfo& device);
Status delta_forward(const DeltaProblem& p, const DeviceInfo& device, Stream stream, std::span<std::byte> workspace);

// Why the engine has no backward for the problem; empty where it has.
std::string delta_backward_refusal(const DeltaBackwardProblem& p, const DeviceInfo& device);
DeltaPlan delta_backward_plan(const DeltaBackwardProblem& p, const DeviceInfo& device);
std::size_t delta_backward_workspace(const DeltaBackwardProblem& p, const DeviceInfo& device);
Status delta_backward(const DeltaBackwardProblem& p, const DeviceInfo& device, Stream stream,
                      std::span<std::byte> workspace);

}  // namespace fla::cuda
