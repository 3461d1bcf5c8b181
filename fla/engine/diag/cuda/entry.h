// The CUDA engine of the diagonal-decay recurrence, for compute capability 8.0 and newer, K and V up to 256.
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
#include "fla/engine/diag/problem.h"
#include "fla/registry/kernel_name.h"

namespace fla::cuda {

// How a problem runs: a pure function of shapes, types, strides and the device's limits, never of contents.
struct DiagPlan {
  enum class Kind : std::uint8_t {
    Step,     // token by token, state in registers, fp32 arithmetic: every gate, type and stride
    Head,     // chunks on tensor cores, one gate per head and token, or none
    Channel,  // chunks on tensor cores, one gate per key channel
    Value,    // chunks on tensor cores, one gate per value channel
    States,   // states at chunks and their adjoints, on tensor cores, for gradients chunk by chunk
    Decode,   // as Step for at most 8 tokens, states of rows that can be moved 16 bytes at a time
  };
  Kind kind = Kind::Step;
  int chunk = 1;   // tokens of a tile
  int key = 64;    // K padded
  int value = 64;  // value columns of a block
  int warps = 4;
  int v_blocks = 1;                     // blocks across V
  int segments = 1;                     // parts of each sequence that run side by side
  bool boundaries = false;              // states are kept, or summed, between tiles: for gradients of gates
  const char* name() const;             // of its CUDA kernel
  KernelName kernel(DType type) const;  // the plan's own name: "diag.head.bf16.k128.v64"
  std::string text() const;
};
// A plan without segments for every kernel that could run what `chosen` runs.
std::vector<DiagPlan> diag_alternatives(const DiagProblem& p, const DiagPlan& chosen);

// Plans a forward; see CudaPass. cu_seqlens, slots, gates and states are on the device. With slots.indices, sequence n
// reads and writes that row of h0 and ht; a negative one is padding, whose outputs are zeros.
bool diag_plan_forward(const DiagProblem& p, const DeviceInfo& d, std::string_view wanted, DiagPlan& plan,
                       std::string* why);
KernelName diag_forward_kernel(const DiagProblem& p, const DiagPlan& f);
std::string diag_forward_text(const DiagProblem& p, const DiagPlan& f);
std::vector<std::string> diag_forward_kernels(const DeviceInfo& d);
std::vector<std::string> diag_forward_kernels(const DeviceInfo& d, bool gates);  // of families that may have gates
DiagPlan diag_forward_plan(const DiagProblem& p, const DeviceInfo& d);

std::size_t diag_forward_workspace(const DiagProblem& p, const DeviceInfo& d);
Status diag_forward(const DiagProblem& p, const DeviceInfo& d, Stream stream, std::span<std::byte> workspace);
// With a plan of the caller's choice among the kernels that exist, for measuring.
std::size_t diag_forward_workspace(const DiagProblem& p, const DiagPlan& plan);
Status diag_forward(const DiagProblem& p, const DiagPlan& plan, Stream stream, std::span<std::byte> workspace);

// The backward, without gates per value channel. By chunk: the states before each chunk and their adjoints behind it,
// then every gradient of a chunk at once. Else dq and dk come from runs whose states have K and V in other roles, dv
// and dh0 from one with the forward's.
struct DiagBackwardPlan {
  bool by_chunk = false;
  DiagPlan states;
  DiagPlan by_key, by_value;
  std::string text() const;
};
bool diag_plan_backward(const DiagBackwardProblem& p, const DeviceInfo& d, std::string_view wanted,
                        DiagBackwardPlan& plan, std::string* why);
KernelName diag_backward_kernel(const DiagBackwardProblem& p, const DiagBackwardPlan& f);
std::string diag_backward_text(const DiagBackwardProblem& p, const DiagBackwardPlan& f);
std::vector<std::string> diag_backward_kernels(const DeviceInfo& d);
std::vector<std::string> diag_backward_kernels(const DeviceInfo& d, bool gates);
DiagBackwardPlan diag_backward_plan(const DiagBackwardProblem& p, const DeviceInfo& d);
// Every way that could run the problem.
std::vector<DiagBackwardPlan> diag_backward_alternatives(const DiagBackwardProblem& p, const DeviceInfo& d);
std::size_t diag_backward_workspace(const DiagBackwardProblem& p, const DeviceInfo& d);
Status diag_backward(const DiagBackwardProblem& p, const DeviceInfo& d, Stream stream, std::span<std::byte> workspace);
std::size_t diag_backward_workspace(const DiagBackwardProblem& p, const DiagBackwardPlan& plan);
Status diag_backward(const DiagBackwardProblem& p, const DiagBackwardPlan& plan, Stream stream,
                     std::span<std::byte> workspace);

}  // namespace fla::cuda
