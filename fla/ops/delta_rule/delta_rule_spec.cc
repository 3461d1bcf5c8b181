#include "fla/ops/common/delta_spec.h"
#include "fla/ops/delta_rule/delta_rule.h"

namespace fla {

namespace {

using A = DeltaRuleArgs;
using G = DeltaRuleBackwardArgs;
using Spec = OpSpec<A, G>;

Spec begin(FunctionId<A> f, FunctionId<G> b, bool chunk, const char* doc) {
  Spec s(f, b, "delta_rule");
  add_queries_keys(s);
  add_values(s, "B T H V");
  if (chunk) {
    add_beta(s, "H");
  } else {
    add_recurrent_beta(s, "H", false);
  }
  add_scale_and_output(s, "B T H V");
  add_delta_states(s, "N H K V", "");
  add_l2norm(s, &A::use_qk_l2norm_in_kernel);
  s.tolerance(0.008, {{"o", 0.006}, {"final_state", 0.006}}).flops(delta_forward_flops, delta_backward_flops);
  s.doc(doc, "Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, 2024");
  return s;
}

Spec begin_chunk(FunctionId<A> f, FunctionId<G> b, const char* doc) {
  Spec s = begin(f, b, true, doc);
  add_host_boundaries(s, &A::cu_seqlens_cpu);
  add_chunk_size(s, &A::chunk_size, 16, 64);
  return s;
}

}  // namespace

void register_delta_rule_spec(Registry& r) {
  {
    Spec s = begin_chunk(kChunkDeltaRule, kChunkDeltaRuleBackward, "Delta rule, chunkwise: for training and prefill.");
    r.add(s);
  }
  {
    Spec s = begin_chunk(kFusedChunkDeltaRule, kFusedChunkDeltaRuleBackward,
                         "Deprecated name of chunk_delta_rule, which serves it.");
    s.deprecated(kChunkDeltaRule.name);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentDeltaRule, kFusedRecurrentDeltaRuleBackward, false,
                   "Delta rule, token by token: for decoding and short sequences.");
    s.max_dim("K", 0).without("cu_seqlens_cpu", &A::cu_seqlens_cpu).without("chunk_size", &A::chunk_size, 64);
    s.positive("scale");
    r.add(s);
  }
}

}  // namespace fla
