// What attn asks of the attention engine.
#pragma once

#include <tuple>

#include "fla/engine/attn/problem.h"
#include "fla/engine/common/functions.h"
#include "fla/ops/attn/attn.h"

namespace fla {

inline constexpr std::tuple kAttnFunctions{chunk_form(kParallelAttn, kParallelAttnBackward),
                                           step_form(kAttnDecodingOneStep), step_form(kAttnDecode)};

inline AttnProblem to_problem(const AttnArgs& a) {
  AttnProblem p = attn_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.g = a.g;
  p.window = a.window_size.value_or(kNoWindow);
  p.sink = a.sink_bias;
  p.o = a.o;
  return p;
}

inline AttnProblem to_problem(const AttnBackwardArgs& a) {
  AttnProblem p = to_problem(static_cast<const AttnArgs&>(a));
  p.o = TensorView();
  p.do_ = a.do_;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dg = a.dg;
  p.dsink = a.dsink_bias;
  return p;
}

inline AttnProblem to_problem(const AttnDecodeArgs& a) {
  AttnProblem p = attn_problem(a.q, a.k, a.v, a.scale, {});
  p.cu_seqlens_k = a.cu_seqlens;
  p.N = a.cu_seqlens.dim(0) - 1;
  p.one_query = true;
  p.g = a.g;
  if (a.do_gate_scale) p.gate_scale = p.scale;
  p.sink = a.sink_bias;
  p.o = a.o;
  return p;
}

inline AttnProblem to_problem(const AttnCacheArgs& a) {
  AttnProblem p = attn_problem(a.q, a.k_cache, a.v_cache, a.scale, {});
  p.cached = true;
  p.B = p.N = a.q.dim(0);
  if (a.block_table) p.TK *= a.block_table.dim(1);
  p.pages = a.block_table;
  p.lengths = a.lengths;
  p.g = a.g_cache;
  p.window = a.window_size.value_or(kNoWindow);
  p.sink = a.sink_bias;
  p.o = a.o;
  return p;
}

}  // namespace fla
