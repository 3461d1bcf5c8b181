// Between the translation units of the CUDA diagonal-decay engine.
#pragma once

#include <cstddef>
#include <initializer_list>

#include "fla/engine/common/visitor.h"
#include "fla/engine/diag/cuda/entry.h"
#include "fla/engine/diag/cuda/params.cuh"
#include "fla/kernels/cuda/launch.h"

namespace fla::cuda {

inline bool empty(const DiagProblem& p) { return p.N == 0 || p.H == 0; }

// Whether the operands that are present have the type of the first, one of 16 bits, and the results that or F32.
bool diag_one_half_type(std::initializer_list<const TensorView*> operands,
                        std::initializer_list<const TensorView*> results);
DiagPlan diag_step_plan(const DiagProblem& p);
DiagPlan diag_token_plan(const DiagProblem& p);  // Step or Decode
// The fastest. boundaries: of runs that keep or sum states at boundaries.
DiagPlan diag_chunk_plan(const DiagProblem& p, const DeviceInfo& d, bool boundaries);
DiagPlan diag_states_plan(const DiagProblem& p, const DeviceInfo& d);
// All of them, each with its milliseconds. always: time may be cut where that does not pay.
using DiagPlanVisitor = Visitor<const DiagPlan&, double>;
void diag_each_chunk_plan(const DiagProblem& p, const DeviceInfo& d, bool boundaries, bool always, DiagPlanVisitor fn);
void diag_each_states_plan(const DiagProblem& p, const DeviceInfo& d, bool always, DiagPlanVisitor fn);
// Whether the engine runs the problem on this device, forwards.
bool diag_serves(const DiagProblem& p, const DeviceInfo& d, const Why& why);

// Problems that together reach every kernel: shapes and types, no memory.
enum class DiagGate : std::uint8_t { None, Head, Channel, Value };
DiagBackwardProblem diag_sample(DType type, std::int64_t K, std::int64_t V, std::int64_t T, DiagGate gate);
// Samples of what a family may ask for: with `gates` those with gates, too.
template <typename Fn>
void diag_each_sample(bool gates, Fn&& fn) {
  for (const DType type : {DType::BF16, DType::F16, DType::F32})
    for (const std::int64_t K : {64, 128, 256})
      for (const std::int64_t V : {64, 128, 256})
        for (const std::int64_t T : {1, 4096})
          for (const DiagGate gate : {DiagGate::None, DiagGate::Head, DiagGate::Channel, DiagGate::Value})
            if (gates || gate == DiagGate::None) fn(diag_sample(type, K, V, T, gate));
}
// Whether a block of the kernel that forms gradients from such states has room on this device.
bool diag_gradient_fits(const DiagProblem& p, const DiagPlan& states, const DeviceInfo& d);
DiagParams diag_parameters(const DiagProblem& p, const DiagPlan& plan);
// One pass over the problem, with segments three; workspace as diag_run_bytes.
std::size_t diag_run_bytes(const DiagProblem& p, const DiagPlan& f);
Status diag_run(DiagParams a, const DiagPlan& f, Stream stream, void* workspace);

// ---- launches, one file per kernel and element type

// Step: a block of 128 threads, each with 32 keys of a value column.
inline constexpr int kStepThreads = 128, kStepRows = 32;
// Decode: 64 values a block fill memory's bursts with 2 or 4 bytes each and leave blocks enough for a few sequences.
inline constexpr int kDecodeThreads = 256, kDecodeValue = 64, kDecodeTokens = 8;

Status launch_diag_step(const DiagParams& p, const DiagPlan& plan, Stream stream);
Status launch_diag_decode(const DiagParams& p, const DiagPlan& plan, Stream stream);
template <typename T>
Status launch_diag_head(const DiagParams& p, const DiagPlan& plan, Stream stream);
template <typename T>
Status launch_diag_value(const DiagParams& p, const DiagPlan& plan, Stream stream);
template <typename T>
Status launch_diag_channel(const DiagParams& p, const DiagPlan& plan, Stream stream);

}  // namespace fla::cuda
