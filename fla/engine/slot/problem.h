// Attention over memory slots, the problem that gsa and abc hand to a backend: two linked passes of the diagonal-decay
// recurrence with a softmax over the M slots between them.
//   Hk_t = Hk_{t-1} diag(e^{g_t}) + k_t s_t^T,   y_t = scale * Hk_t^T q_t,   p_t = softmax(y_t)        (1)
//   Hv_t = diag(e^{g_t}) Hv_{t-1} + s_t v_t^T,   o_t = Hv_t^T p_t                                      (2)
// The transpose of Hk decays by rows, as Hv does, so the engine of the diagonal decay serves both: with keys s, values
// k and upstream gradient q the gradient of its queries is y.
#pragma once

#include <cstdint>

#include "fla/core/tensor.h"
#include "fla/engine/common/sequences.h"

namespace fla {

struct SlotProblem {
  std::int64_t B = 0, T = 0, H = 0, K = 0, V = 0, M = 0;
  std::int64_t G = 1;     // queries per head: query head i belongs to head i / G
  std::int64_t N = 0;     // sequences
  TensorView cu_seqlens;  // [N + 1] I32 or I64 on the host; absent: dense
  bool reverse = false;
  double scale = 1.0;  // on q
  std::int64_t chunk = 0;

  // Inputs, any float type, any strides; of q the type decides whether a kernel serves the call.
  TensorView q;         // [B, T, H G, K]
  TensorView k;         // [B, T, H, K]
  TensorView v;         // [B, T, H, V]
  TensorView s, g;      // [B, T, H, M]
  TensorView hk0, hv0;  // [N, H, K, M], [N, H, M, V]; absent = zeros

  // Outputs; an absent one is not computed.
  TensorView o;         // [B, T, H G, V]
  TensorView hkt, hvt;  // as hk0, hv0

  Sequence sequence(std::int64_t n) const { return sequence_at(cu_seqlens, T, n); }
};

struct SlotBackwardProblem : SlotProblem {
  TensorView do_;         // as o; absent = zeros
  TensorView dhkt, dhvt;  // as hk0, hv0; absent = zeros
  TensorView dq, dk, dv, ds, dg, dhk0, dhv0;
  TensorView path;  // [B, T, H, M] F32: y o dy + p o dp, summed over the queries of a head

  SlotBackwardProblem() = default;
  explicit SlotBackwardProblem(const SlotProblem& forward) : SlotProblem(forward) {}
};

}  // namespace fla
