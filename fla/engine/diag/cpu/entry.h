// The CPU engine of the diagonal-decay recurrence: chunkwise and stepwise, forward and backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/diag/problem.h"

namespace fla::cpu {

// Workspace sizes are exact upper bounds for a pool of `threads`; memory need not be initialised or aligned.
// `chunk` is the tokens per chunk: 16, 32, 64, or 0 for the engine's choice (a pure function of gate kind, K and V,
// never of T: appending tokens must not move earlier bits).
// The chunk form serves every gate but gv; the step form serves all.
std::size_t diag_chunk_forward_workspace(const DiagProblem& p, std::int64_t chunk, int threads);
Status diag_chunk_forward(const DiagProblem& p, std::int64_t chunk, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t diag_chunk_backward_workspace(const DiagBackwardProblem& p, std::int64_t chunk, int threads);
Status diag_chunk_backward(const DiagBackwardProblem& p, std::int64_t chunk, ThreadPool& pool,
                           std::span<std::byte> workspace);

std::size_t diag_step_forward_workspace(const DiagProblem& p, int threads);
Status diag_step_forward(const DiagProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

std::size_t diag_step_backward_workspace(const DiagBackwardProblem& p, int threads);
Status diag_step_backward(const DiagBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace);

// attn[b, h, i, j] = scale <q_i, k_j> e^{G_i - G_j} for j <= i, exactly 0 above; dense problems, no gk, no gv.
std::size_t diag_scores_workspace(const DiagProblem& p, int threads);
Status diag_scores(const DiagProblem& p, const TensorView& attn, ThreadPool& pool, std::span<std::byte> workspace);

// The instruction set that run-time dispatch selects here ("AVX3", "AVX2", "NEON", ...).
const char* isa_name();

}  // namespace fla::cpu
