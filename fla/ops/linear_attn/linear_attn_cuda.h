// Normalised linear attention on a GPU: README.md (3) to (7) around the diagonal-decay engine. Nothing is read on the
// host, nothing waits.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "fla/core/device.h"
#include "fla/core/status.h"
#include "fla/ops/linear_attn/linear_attn.h"

namespace fla::cuda {

std::string normalised_refusal(const LinearAttnArgs& a, const DeviceInfo& d);
std::string normalised_plan(const LinearAttnArgs& a, const DeviceInfo& d);
std::size_t normalised_workspace(const LinearAttnArgs& a, const DeviceInfo& d);
Status normalised(const LinearAttnArgs& a, const DeviceInfo& d, Stream stream, std::span<std::byte> workspace);

std::string normalised_refusal(const LinearAttnBackwardArgs& a, const DeviceInfo& d);
std::string normalised_plan(const LinearAttnBackwardArgs& a, const DeviceInfo& d);
std::size_t normalised_workspace(const LinearAttnBackwardArgs& a, const DeviceInfo& d);
Status normalised(const LinearAttnBackwardArgs& a, const DeviceInfo& d, Stream stream, std::span<std::byte> workspace);

}  // namespace fla::cuda
