// What lightning_attn asks of the diagonal-decay engine: simple_gla with a constant gate per head and layer.
#pragma once

#include <tuple>

#include "fla/engine/common/functions.h"
#include "fla/engine/diag/problem.h"
#include "fla/ops/lightning_attn/lightning_attn.h"

namespace fla {

// The functions that the engine serves.
inline constexpr std::tuple kLightningAttnFunctions{
    chunk_form(kChunkLightningAttn, kChunkLightningAttnBackward),
    step_form(kFusedRecurrentLightningAttn, kFusedRecurrentLightningAttnBackward), step_form(kLightningStep)};

// All but states and boundaries.
template <typename A>
DiagProblem lightning_attn_problem(const A& a, const TensorView& cu_seqlens) {
  DiagProblem p = diag_problem(a.q, a.k, a.v, a.scale, cu_seqlens);
  p.head.kind = HeadDecay::Kind::Lightning;
  p.head.slope = -(8.0 / static_cast<double>(p.H)) *
                 (1.0 - static_cast<double>(*a.layer_idx) / static_cast<double>(*a.num_layers));
  return p;
}

inline DiagProblem to_problem(const LightningAttnArgs& a) {
  DiagProblem p = lightning_attn_problem(a, a.cu_seqlens);
  p.reverse = a.reverse;
  p.h0 = a.initial_state;
  p.ht = a.final_state;
  p.o = a.o;
  p.chunk = chunk_limit(a.chunk_size);
  return p;
}

inline DiagStepProblem to_problem(const LightningStepArgs& a) {
  DiagStepProblem p(lightning_attn_problem(a, {}));
  set_state_pool(p, a, false);
  return p;
}

inline DiagBackwardProblem to_problem(const LightningAttnBackwardArgs& a) {
  DiagBackwardProblem p(to_problem(static_cast<const LightningAttnArgs&>(a)));
  set_gradients(p, a, false);
  return p;
}

}  // namespace fla
