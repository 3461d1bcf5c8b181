// attnres: softmax over sources of a residual stream (arXiv 2603.15031). There is no time: every token is alone.
//   z_l = <v_l, query o rms_weight> / rms(v_l),  p = softmax_l(scale z),  o = sum_l p_l v_l, normalised where asked for
#pragma once

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct AttnresArgs {
  TensorView query;                   // [D] or [D, 1] any float type
  TensorList residuals;               // L >= 1 of [..., D], up to 5 axes: F32, F16, BF16 (F64: reference only)
  TensorView rms_weight;              // [D] any float type
  TensorView output_rms_weight;       // [D] any float type; absent = o is not normalised
  double rms_eps = 1e-6;              // of both normalisations
  double scale = 1.0;                 // multiplies z
  std::int64_t checkpoint_level = 1;  // 0 or 1: the same results; what a backward needs is computed again
  TensorView o;                       // [..., D] as residuals
  TensorView p;                       // [L, ...] F32: not differentiable
};

struct AttnresBackwardArgs : AttnresArgs {  // o and p are not read
  TensorView do_;                           // [..., D]; absent = zeros
  TensorView dquery;                        // as query
  TensorList dresiduals;                    // none, or L of [..., D] as residuals; absent ones are not computed
  TensorView drms_weight;                   // [D] as rms_weight
  TensorView doutput_rms_weight;            // [D] as output_rms_weight
};

inline constexpr FunctionId<AttnresArgs> kFusedAttnres{"fused_attnres"};
inline constexpr FunctionId<AttnresBackwardArgs> kFusedAttnresBackward{"fused_attnres_backward"};

FLA_API extern const Function<AttnresArgs> fused_attnres;
FLA_API extern const Function<AttnresBackwardArgs> fused_attnres_backward;

}  // namespace fla
