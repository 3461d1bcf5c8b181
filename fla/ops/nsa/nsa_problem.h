// What nsa asks of its engine, and the compressed branch of the attention engine.
#pragma once

#include <tuple>

#include "fla/engine/attn/nsa.h"
#include "fla/engine/common/functions.h"
#include "fla/ops/nsa/nsa.h"

namespace fla {

inline constexpr std::tuple kNsaFunctions{chunk_form(kParallelNsa, kParallelNsaBackward)};
inline constexpr std::tuple kNsaCompressionFunctions{
    chunk_form(kParallelNsaCompression, kParallelNsaCompressionBackward)};
inline constexpr std::tuple kNsaTopkFunctions{step_form(kParallelNsaTopk)};

inline NsaProblem to_problem(const NsaArgs& a) {
  NsaProblem p(attn_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens));
  if (a.cu_seqlens_q) {
    p.cu_seqlens_q = a.cu_seqlens_q;
    p.cu_seqlens_k = a.cu_seqlens_k;
    p.N = a.cu_seqlens_q.dim(0) - 1;
  }
  p.block = a.block_size;
  p.swa = a.window_size;
  p.g_cmp = a.g_cmp;
  p.g_slc = a.g_slc;
  p.g_swa = a.g_swa;
  p.indices = a.block_indices;
  p.counts = a.block_counts;
  p.slots = a.block_indices ? a.block_indices.dim(3) : a.block_count;
  p.o = a.o;
  return p;
}

inline NsaProblem to_problem(const NsaBackwardArgs& a) {
  NsaProblem p = to_problem(static_cast<const NsaArgs&>(a));
  p.o = TensorView();
  p.do_ = a.do_;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dg_cmp = a.dg_cmp;
  p.dg_slc = a.dg_slc;
  p.dg_swa = a.dg_swa;
  return p;
}

inline AttnProblem to_problem(const NsaCompressionArgs& a) {
  AttnProblem p = attn_problem(a.q, a.k_cmp, a.v_cmp, a.scale, a.cu_seqlens);
  p.pool = a.block_size;
  p.tokens = a.TK.value_or(p.TQ);
  p.o = a.o;
  p.lse = a.lse;
  return p;
}

inline AttnProblem to_problem(const NsaCompressionBackwardArgs& a) {
  AttnProblem p = to_problem(static_cast<const NsaCompressionArgs&>(a));
  p.o = p.lse = TensorView();
  p.do_ = a.do_;
  p.dq = a.dq;
  p.dk = a.dk_cmp;
  p.dv = a.dv_cmp;
  return p;
}

inline NsaProblem to_problem(const NsaTopkArgs& a) {
  NsaProblem p(attn_problem(a.q, a.k_cmp, a.k_cmp, a.scale, a.cu_seqlens));
  p.pooled_keys = true;
  p.TK = a.TK.value_or(p.TQ);
  p.block = a.block_size;
  p.slots = a.block_count;
  p.chosen = a.block_indices;
  return p;
}

}  // namespace fla
