// PaTH attention: softmax attention whose product of query and key passes through the Householder-like steps between
// them. With R_s = I - beta_s w_s w_s^T and C the running sum of g:
//   x_ij = q_i^T R_i R_{i-1} ... R_{j+1} k_j + (C_i - C_j), o_i = sum_j softmax_j(scale x_ij) v_j over j <= i (1)
//   k^_j = R_T ... R_{j+1} k_j                                                                              (2)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/attn/problem.h"

namespace fla {

// q, k, v, g, boundaries and their gradients as in AttnProblem, which has a window, a sink or a second query for
// others; gate_scale is scale.
struct PathProblem : AttnProblem {
  TensorView w;        // [B, T, H, K] directions
  TensorView beta;     // [B, T, H] steps
  TensorView k_cache;  // [B, T, H, K] output: (2)
  TensorView dw;       // [B, T, H, K]
  TensorView dbeta;    // [B, T, H]

  PathProblem() = default;
  explicit PathProblem(const AttnProblem& p) : AttnProblem(p) {}
};

namespace reference {
Status path_forward(const PathProblem& p, ThreadPool& pool);
Status path_backward(const PathProblem& p, ThreadPool& pool);
}  // namespace reference

namespace cpu {
std::size_t path_forward_workspace(const PathProblem& p, int threads);
Status path_forward(const PathProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
std::size_t path_backward_workspace(const PathProblem& p, int threads);
Status path_backward(const PathProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
}  // namespace cpu

}  // namespace fla
