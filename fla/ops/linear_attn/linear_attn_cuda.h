// Normalised linear attention on a GPU: README.md (3) to (7) around the diagonal-decay engine. Nothing is read on the
// host, nothing waits.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fla/core/device.h"
#include "fla/core/status.h"
#include "fla/engine/diag/cuda/entry.h"
#include "fla/ops/linear_attn/linear_attn.h"

namespace fla::cuda {

// What is decided once for a call: the engine's part of it.
struct NormalisedPlan {
  DiagPlan forward;  // of the forward, and in the backward of the outputs that the denominator's gradient needs
  DiagBackwardPlan backward;
};

bool normalised_plan(const LinearAttnArgs& a, const DeviceInfo& d, std::string_view wanted, NormalisedPlan& plan,
                     std::string* why);
KernelName normalised_kernel(const LinearAttnArgs& a, const NormalisedPlan& plan);
std::string normalised_text(const LinearAttnArgs& a, const NormalisedPlan& plan);
std::size_t normalised_workspace(const LinearAttnArgs& a, const NormalisedPlan& plan);
Status normalised(const LinearAttnArgs& a, const NormalisedPlan& plan, Stream stream, std::span<std::byte> workspace);
std::vector<std::string> normalised_forward_kernels(const DeviceInfo& d);

bool normalised_plan(const LinearAttnBackwardArgs& a, const DeviceInfo& d, std::string_view wanted,
                     NormalisedPlan& plan, std::string* why);
KernelName normalised_kernel(const LinearAttnBackwardArgs& a, const NormalisedPlan& plan);
std::string normalised_text(const LinearAttnBackwardArgs& a, const NormalisedPlan& plan);
std::size_t normalised_workspace(const LinearAttnBackwardArgs& a, const NormalisedPlan& plan);
Status normalised(const LinearAttnBackwardArgs& a, const NormalisedPlan& plan, Stream stream,
                  std::span<std::byte> workspace);
std::vector<std::string> normalised_backward_kernels(const DeviceInfo& d);

}  // namespace fla::cuda
