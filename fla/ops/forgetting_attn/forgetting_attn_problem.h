// What forgetting_attn asks of the attention engine.
#pragma once

#include <tuple>

#include "fla/engine/attn/problem.h"
#include "fla/engine/common/functions.h"
#include "fla/ops/forgetting_attn/forgetting_attn.h"

namespace fla {

inline constexpr std::tuple kForgettingAttnFunctions{
    chunk_form(kParallelForgettingAttn, kParallelForgettingAttnBackward)};

inline AttnProblem to_problem(const ForgettingAttnArgs& a) {
  AttnProblem p = attn_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.g = a.g;
  p.window = a.window_size.value_or(kNoWindow);
  p.o = a.o;
  return p;
}

inline AttnProblem to_problem(const ForgettingAttnBackwardArgs& a) {
  AttnProblem p = to_problem(static_cast<const ForgettingAttnArgs&>(a));
  p.o = TensorView();
  p.do_ = a.do_;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dg = a.dg;
  return p;
}

}  // namespace fla
