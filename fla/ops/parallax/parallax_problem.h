// What parallax asks of the attention engine.
#pragma once

#include <tuple>

#include "fla/engine/attn/problem.h"
#include "fla/engine/common/functions.h"
#include "fla/ops/parallax/parallax.h"

namespace fla {

inline constexpr std::tuple kParallaxFunctions{chunk_form(kParallelParallax, kParallelParallaxBackward),
                                               step_form(kParallaxDecode), step_form(kParallaxDecodeOneStep)};

inline AttnProblem to_problem(const ParallaxArgs& a) {
  AttnProblem p = attn_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.r = a.r;
  p.window = a.window_size.value_or(kNoWindow);
  p.o = a.o;
  return p;
}

inline AttnProblem to_problem(const ParallaxBackwardArgs& a) {
  AttnProblem p = to_problem(static_cast<const ParallaxArgs&>(a));
  p.o = TensorView();
  p.do_ = a.do_;
  p.dq = a.dq;
  p.dr = a.dr;
  p.dk = a.dk;
  p.dv = a.dv;
  return p;
}

inline AttnProblem to_problem(const ParallaxDecodeArgs& a) {
  AttnProblem p = attn_problem(a.q, a.k, a.v, a.scale, {});
  p.r = a.r;
  p.window = a.window_size.value_or(kNoWindow);
  p.first_key = a.cache_start;
  p.o = a.o;
  return p;
}

}  // namespace fla
