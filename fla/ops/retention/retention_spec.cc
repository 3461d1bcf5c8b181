#include "fla/ops/retention/retention.h"
#include "fla/ops/spec/diag_spec.h"

namespace fla {

namespace {

using A = RetentionArgs;
using G = RetentionBackwardArgs;
using Spec = OpSpec<A, G>;

Spec begin(FunctionId<A> f, FunctionId<G> b, const char* doc) {
  Spec s(f, b, "retention");
  add_qkv(s);
  s.max_dim("V", 512).tolerance(0.005, {{"o", 0.004}}).flops(diag_forward_flops, diag_backward_flops);
  s.doc(doc, "Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, 2023");
  return s;
}

Spec& add_states(Spec& s, const char* v_first) { return add_state_args(s, v_first); }

}  // namespace

void register_retention_spec(Registry& r) {
  {
    Spec s = begin(kChunkRetention, kChunkRetentionBackward, "Retention, chunkwise: for training and prefill.");
    add_states(s, "").without("reverse", &A::reverse).without("state_v_first", &A::state_v_first);
    add_chunk_size(s.without("attn", &A::attn), &A::chunk_size);
    r.add(s);
  }
  {
    Spec s = begin(kFusedChunkRetention, kFusedChunkRetentionBackward,
                   "Retention, chunkwise, under the name of the fused kernel.");
    add_states(s, "").without("reverse", &A::reverse).without("state_v_first", &A::state_v_first);
    s.without("attn", &A::attn).without("chunk_size", &A::chunk_size, 64);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentRetention, kFusedRecurrentRetentionBackward,
                   "Retention, token by token: for decoding and short sequences.");
    add_states(s, "state_v_first");
    add_reverse(s, &A::reverse);
    add_v_first(s, &A::state_v_first);
    s.without("attn", &A::attn).without("chunk_size", &A::chunk_size, 64);
    r.add(s);
  }
  {
    Spec s = begin(kParallelRetention, kParallelRetentionBackward,
                   "Retention without states; can write the attention scores. Their gradient is not propagated.");
    add_attentions(s, &A::attn);
    s.without("initial_state", &A::initial_state).without("final_state", &A::final_state);
    s.without("reverse", &A::reverse).without("state_v_first", &A::state_v_first);
    s.without("chunk_size", &A::chunk_size, 64);
    s.check([](const A& a, const Dims&) { return check_attentions(a.attn, a.cu_seqlens); });
    r.add(s);
  }
}

}  // namespace fla
