#include "fla/ops/delta_rule/delta_rule.h"
#include "fla/ops/spec/delta_spec.h"
#include "fla/ops/spec/pool_spec.h"

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

OpSpec<DeltaStepArgs> step() {
  using S = DeltaStepArgs;
  OpSpec<S> s(kDeltaRuleStep, "delta_rule");
  ArgOptions beta = strength_input("write strength, also per value channel; absent = ones");
  beta.other_dims = {"B T H V"};
  s.in("q", &S::q, "B T H K", nullptr, {.doc = "queries"})
      .in("k", &S::k, "B T H K", nullptr, {.gen = unit_rows(), .doc = "keys"})
      .in("v", &S::v, "B T H V", nullptr, {.doc = "values"})
      .opt_in("beta", &S::beta, "B T H", nullptr, beta)
      .flag("scale", &S::scale, "multiplies q; default K^(-1/2)")
      .out("o", &S::o, "B T H V", nullptr, {.doc = "output"});
  add_l2norm(s, &S::use_qk_l2norm_in_kernel);
  add_state_pool(s, "H", "");
  s.max_dim("K", 0).tolerance(0.008, {{"o", 0.006}, {"state_out", 0.006}, {"step_states", 0.006}});
  s.positive("scale").check([](const S& a, const Dims& d) { return check_state_pool(a, d); });
  s.doc("Delta rule on a pool of states, 1 to 8 tokens a sequence: for serving.",
        "Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, 2024");
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
  {
    OpSpec<DeltaStepArgs> s = step();
    r.add(s);
  }
}

}  // namespace fla
