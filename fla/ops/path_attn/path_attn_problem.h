// What path_attn asks of its engine.
#pragma once

#include <tuple>

#include "fla/engine/attn/path.h"
#include "fla/engine/common/functions.h"
#include "fla/ops/path_attn/path_attn.h"

namespace fla {

inline constexpr std::tuple kPathAttnFunctions{chunk_form(kParallelPathAttn, kParallelPathAttnBackward)};

inline PathProblem to_problem(const PathAttnArgs& a) {
  PathProblem p(attn_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens));
  p.w = a.w;
  p.beta = a.beta;
  p.g = a.g;
  p.gate_scale = p.scale;
  p.o = a.o;
  p.k_cache = a.k_cache;
  return p;
}

inline PathProblem to_problem(const PathAttnBackwardArgs& a) {
  PathProblem p = to_problem(static_cast<const PathAttnArgs&>(a));
  p.o = p.k_cache = TensorView();
  p.do_ = a.do_;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dw = a.dw;
  p.dbeta = a.dbeta;
  p.dg = a.dg;
  return p;
}

}  // namespace fla
