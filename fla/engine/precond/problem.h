// The diagonal key preconditioner: what precond_gated_delta_rule and precond_kda do before the delta rule. Per head and
// key channel, on k after its L2 norm,
//   A_t = e^{g_atk_t} A_{t-1} + beta_atk_t k_t^2                                                          (1)
//   r = ln(A_t + eps) - c,   s = r / (1 + |r|),   w_t = k_t x^{-s}                                        (2)
// w is the write key of the recurrence, which erases with k.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/core/status.h"
#include "fla/core/tensor.h"
#include "fla/core/threads.h"
#include "fla/engine/common/sequences.h"

namespace fla {

struct PrecondProblem {
  std::int64_t B = 0, T = 0, H = 0, K = 0, N = 0;
  std::int64_t HA = 0;    // heads of the statistics: H, or one per value head; head j reads key head j / (HA / H)
  TensorView cu_seqlens;  // [N + 1] on the host
  bool normalize = true;  // k / sqrt(sum k^2 + 1e-6) first
  double x = 1.5, eps = 1e-6;

  TensorView k;                // [B, T, H, K]
  TensorView g_atk, beta_atk;  // [B, T, HA]
  TensorView log_atk_scale;    // [HA]: c; absent = -0.2
  TensorView a0;               // [N, HA, K]: A before the first token; absent = 0
  TensorView w;                // [B, T, HA, K]
  TensorView at;               // [N, HA, K]: A after the last token; may be exactly a0's memory

  std::int64_t group() const { return HA / H; }
  Sequence sequence(std::int64_t n) const { return sequence_at(cu_seqlens, T, n); }
};

struct PrecondBackwardProblem : PrecondProblem {
  TensorView dw;        // [B, T, HA, K] gradient of w
  TensorView dk_erase;  // [B, T, H, K] gradient of k through everything else, added to dk
  TensorView dat;       // [N, HA, K]
  TensorView dk, dg_atk, dbeta_atk, dlog_atk_scale, da0;

  explicit PrecondBackwardProblem(const PrecondProblem& forward) : PrecondProblem(forward) {}
};

// Sizes are upper bounds for a pool of `threads`; memory need not be initialised or aligned.
namespace reference {
Status precond_forward(const PrecondProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
std::size_t precond_forward_workspace(const PrecondProblem& p, int threads);
Status precond_backward(const PrecondBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
std::size_t precond_backward_workspace(const PrecondBackwardProblem& p, int threads);
}  // namespace reference

namespace cpu {
Status precond_forward(const PrecondProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
std::size_t precond_forward_workspace(const PrecondProblem& p, int threads);
Status precond_backward(const PrecondBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
std::size_t precond_backward_workspace(const PrecondBackwardProblem& p, int threads);
}  // namespace cpu

}  // namespace fla
