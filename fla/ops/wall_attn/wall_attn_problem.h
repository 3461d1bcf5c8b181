// What wall_attn asks of the attention engine.
#pragma once

#include <tuple>

#include "fla/engine/attn/problem.h"
#include "fla/engine/attn/wall_cache.h"
#include "fla/engine/common/functions.h"
#include "fla/ops/wall_attn/wall_attn.h"

namespace fla {

inline constexpr std::tuple kWallAttnFunctions{chunk_form(kParallelWallAttn, kParallelWallAttnBackward)};

inline DType first_wide(const WallCacheArgs& a) { return a.k.dtype; }

inline AttnProblem to_problem(const WallAttnArgs& a) {
  AttnProblem p = attn_problem(a.q, a.k, a.v, a.scale, a.cu_seqlens);
  p.gk = a.g;
  p.g = a.g_scalar;
  p.sink = a.sink_bias;
  p.window = a.window_size.value_or(kNoWindow);
  p.o = a.o;
  return p;
}

inline AttnProblem to_problem(const WallAttnBackwardArgs& a) {
  AttnProblem p = to_problem(static_cast<const WallAttnArgs&>(a));
  p.o = TensorView();
  p.do_ = a.do_;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dgk = a.dg;
  p.dg = a.dg_scalar;
  p.dsink = a.dsink_bias;
  return p;
}

inline WallDecodeProblem to_problem(const WallAttnDecodeArgs& a) {
  return {.q = a.q,
          .v = a.v,
          .p = a.p_curr,
          .k = a.k_tilde,
          .r = a.r_cache,
          .sink = a.sink_bias,
          .c = a.g_scalar_cumsum,
          .scale = a.scale.value_or(1.0),
          .chunk = a.cache_chunk_size,
          .o = a.o,
          .lse = a.lse};
}

inline WallCacheProblem to_problem(const WallCacheArgs& a) {
  return {.q = a.k, .p = a.g_cumsum, .chunk = a.chunk_size, .k_tilde = a.k_tilde, .r = a.r_cache};
}

}  // namespace fla
