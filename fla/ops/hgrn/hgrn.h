// hgrn: element-wise gated recurrence (Qin et al., "Hierarchically Gated Recurrent Neural Network for Sequence
// Modeling", 2023).
//   h_t = e^{g_t} o h_{t-1} + x_t,   o_t = h_t
#pragma once

#include "fla/core/tensor.h"
#include "fla/registry/function.h"

namespace fla {

struct HgrnArgs {
  TensorView x;              // [B, T, D] F32, F16, BF16 (F64: reference only)
  TensorView g;              // [B, T, D] any float type: log forget gate
  TensorView initial_state;  // [N, D] any float type; absent = zeros
  TensorView cu_seqlens;     // [N + 1] I32 or I64, B = 1; fused_recurrent only
  TensorView o;              // [B, T, D] as x
  TensorView final_state;    // [N, D]: x's type in fused_recurrent, F32 in chunk
};

struct HgrnBackwardArgs : HgrnArgs {  // o and final_state are not read
  TensorView do_;                     // [B, T, D]; absent = zeros
  TensorView dht;                     // [N, D]; absent = zeros
  TensorView dx;                      // [B, T, D] as x
  TensorView dg;                      // [B, T, D] as g
  TensorView dh0;                     // [N, D] as initial_state
};

inline constexpr FunctionId<HgrnArgs> kFusedRecurrentHgrn{"fused_recurrent_hgrn"};
inline constexpr FunctionId<HgrnBackwardArgs> kFusedRecurrentHgrnBackward{"fused_recurrent_hgrn_backward"};
inline constexpr FunctionId<HgrnArgs> kChunkHgrn{"chunk_hgrn"};
inline constexpr FunctionId<HgrnBackwardArgs> kChunkHgrnBackward{"chunk_hgrn_backward"};

// Token by token; parallel over sequences and channels.
FLA_API extern const Function<HgrnArgs> fused_recurrent_hgrn;
FLA_API extern const Function<HgrnBackwardArgs> fused_recurrent_hgrn_backward;
// Dense batches only, time cut into chunks that run side by side: for long T with few channels. The final state is F32.
FLA_API extern const Function<HgrnArgs> chunk_hgrn;
FLA_API extern const Function<HgrnBackwardArgs> chunk_hgrn_backward;

}  // namespace fla
