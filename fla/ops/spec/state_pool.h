// States of many sequences in one pool, as a server keeps them: what the step functions of all families take beside
// their own inputs.
#pragma once

#include "fla/core/tensor.h"

namespace fla {

struct StatePoolArgs {
  TensorView state;                // [P, HV, K, V] any float type: P slots; written in place unless state_out is given
  TensorView state_indices;        // [B] or [B, S] I32 or I64: the slots of sequence b; absent: P = B, b has slot b
  TensorView num_accepted_tokens;  // [B] I32 or I64, 1 to S, with [B, S] only: start from column accepted_b - 1
  TensorView state_out;            // as state; slots that no sequence writes keep their bits
  TensorView step_states;          // [B, T, HV, K, V] as state: the state after every token
};
// With [B] the state after the last token goes to the sequence's slot. With [B, S], S >= T, the state after token i
// goes to column i, and the first token starts from column 0 or, with num_accepted_tokens, from column accepted_b - 1.
// A sequence whose first entry is -1 is padding: its o and step_states are zero and no slot changes.

}  // namespace fla
