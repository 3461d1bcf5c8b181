// Between the translation units of the CUDA delta engine.
#pragma once

#include <cstdint>
#include <span>

#include "fla/engine/delta/cuda/entry.h"
#include "fla/kernels/cuda/launch.h"

namespace fla::cuda {

Status delta_token_forward(const DeltaProblem& p, Stream stream);
// At most 8 tokens on states that can be moved 16 bytes at a time.
bool delta_decode_serves(const DeltaProblem& p);
Status delta_decode_forward(const DeltaProblem& p, Stream stream);
std::size_t delta_token_backward_workspace(const DeltaBackwardProblem& p);
Status delta_token_backward(const DeltaBackwardProblem& p, Stream stream, std::span<std::byte> workspace);

// Tokens of a chunk of the tensor-core kernels; value channels of a block, and of one for so many key channels.
inline constexpr std::int64_t kDeltaBT = 32, kDeltaColumns = 32, kDeltaWide = 64, kDeltaWideKeys = 128;

// Shared memory of a stage of the chunk kernel, and what a block takes beside its stages.
constexpr std::int64_t delta_chunk_stage_bytes(std::int64_t width, std::int64_t columns, bool channel) {
  const std::int64_t BT = kDeltaBT;
  return 2 * BT * ((channel ? 3 : 2) * (width + 8) + (2 * BT + 8) + (columns + 8)) +
         4 * (channel ? BT + width : 5 * BT);
}
// Blocks that a multiprocessor has at a time, by registers and by two stages of shared memory each.
constexpr int delta_chunk_blocks(std::int64_t width, std::int64_t columns, bool channel) {
  if (width == 256) return channel ? 1 : 2;
  return width == 128 && (channel || columns == kDeltaWide) ? 2 : 3;
}
constexpr std::int64_t delta_chunk_extra_bytes(std::int64_t columns) { return 4 * (112 * columns + 256); }
// With which the chunk kernel runs at all.
constexpr std::int64_t delta_chunk_least_bytes(std::int64_t width, std::int64_t columns, bool channel) {
  return 2 * delta_chunk_stage_bytes(width, columns, channel) + delta_chunk_extra_bytes(columns);
}

// Places of chunks in the workspace: sequence n's chunk c has number begin / BT + n + c, so that nobody needs to know
// the sequences before it; some numbers stay unused.
inline std::int64_t delta_chunk_slots(const DeltaProblem& p) {
  return p.cu_seqlens ? p.T / kDeltaBT + p.N : p.N * ((p.T + kDeltaBT - 1) / kDeltaBT);
}

// Chunks in the workspace at a time.
inline std::int64_t delta_chunk_places(const DeltaProblem& p, const DeltaPlan& plan) {
  return plan.round > 0 ? p.N * plan.round : delta_chunk_slots(p);
}

// Places of segments in the workspace, in the way of delta_chunk_slots.
inline std::int64_t delta_segment_slots(const DeltaProblem& p, std::int64_t chunks) {
  const std::int64_t tokens = chunks * kDeltaBT;
  return p.cu_seqlens ? p.T / tokens + p.N : p.N * ((p.T + tokens - 1) / tokens);
}
// The plan of a forward by the chunk kernels, where they serve it, with blocks of so many value channels and time cut
// every `chunks` chunks, or not where that is 0.
DeltaPlan delta_chunk_plan(const DeltaProblem& p, const DeviceInfo& device, std::int64_t columns, std::int64_t chunks);

template <typename T>
std::size_t delta_chunk_forward_workspace(const DeltaProblem& p, const DeltaPlan& plan);
template <typename T>
Status delta_chunk_forward(const DeltaProblem& p, const DeltaPlan& plan, Stream stream, std::span<std::byte> workspace);
// Shared memory of a block of the kernel that forms the gradients.
template <typename T>
std::int64_t delta_gradient_bytes(const DeltaBackwardProblem& p, const DeltaPlan& plan);
template <typename T>
std::size_t delta_chunk_backward_workspace(const DeltaBackwardProblem& p, const DeltaPlan& plan);
template <typename T>
Status delta_chunk_backward(const DeltaBackwardProblem& p, const DeltaPlan& plan, Stream stream,
                            std::span<std::byte> workspace);

struct DeltaArgs;
template <typename T>
struct DeltaChunkSpace;
// The prologue and the forward, which other translation units of the same T have.
template <typename T>
Status launch_chunk(const DeltaProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w, Stream stream);
// What of the backward is parallel over chunks, after the states, adjoints, E and dVbar are there.
template <typename T>
Status launch_gradient(const DeltaBackwardProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w,
                       Stream stream);

// dA_log and ddt_bias from sums over the slots' chunks: [slots, HV, 1 + C], C = 1 for a gate per head, else K.
Status delta_parameter_gradients(const DeltaBackwardProblem& p, const float* partials, std::int64_t slots,
                                 Stream stream);

}  // namespace fla::cuda
