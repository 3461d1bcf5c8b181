#include "fla/ops/gated_oja_rule/gated_oja_rule.h"
#include "fla/ops/spec/delta_spec.h"

namespace fla {

namespace {

using A = GatedOjaRuleArgs;
using G = GatedOjaRuleBackwardArgs;
using Spec = OpSpec<A, G>;

Spec begin(FunctionId<A> f, FunctionId<G> b, bool chunk, const char* doc) {
  const std::string rows = chunk ? "B T H" : "B T HV";
  Spec s(f, b, "gated_oja_rule");
  s.in("q", &A::q, "B T H K", &G::dq, {.doc = "queries"})
      .in("k", &A::k, "B T H K", &G::dk, {.doc = "keys, which the state predicts from v"})
      .in("v", &A::v, rows + " V", &G::dv, {.gen = unit_rows(), .doc = "values, of unit length"});
  const ArgOptions gate = gate_input(chunk ? "log gate per value channel" : "log gate per value channel; absent = 0"),
                   beta = strength_input(chunk ? "write strength" : "write strength; absent = ones");
  if (chunk) {
    s.in("gv", &A::gv, rows + " V", &G::dgv, gate).in("beta", &A::beta, rows, &G::dbeta, beta);
  } else {
    s.opt_in("gv", &A::gv, rows + " V", &G::dgv, gate).opt_in("beta", &A::beta, rows, &G::dbeta, beta);
  }
  add_scale_and_output(s, chunk ? "B T H V" : "B T HV V");
  add_delta_states(s, chunk ? "N H K V" : "N HV K V", "");
  s.flag("use_q_l2norm", &A::use_q_l2norm, false, "x / sqrt(sum x^2 + 1e-6) on q first");
  s.flag("use_k_l2norm", &A::use_k_l2norm, false, "x / sqrt(sum x^2 + 1e-6) on k first");
  s.tolerance(0.008, {{"o", 0.005}, {"final_state", 0.005}, {"dbeta", 0.02}, {"dgv", 0.015}});
  s.flops(delta_forward_flops, delta_backward_flops).family_export();
  s.doc(doc, "flash-linear-attention, gated_oja_rule");
  return s;
}

}  // namespace

void register_gated_oja_rule_spec(Registry& r) {
  {
    Spec s = begin(kChunkGatedOjaRule, kChunkGatedOjaRuleBackward, true,
                   "Gated Oja rule, chunkwise: for training and prefill.");
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    add_chunk_size(s, &A::chunk_size, 16, 64);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentGatedOjaRule, kFusedRecurrentGatedOjaRuleBackward, false,
                   "Gated Oja rule, token by token: for decoding and short sequences.");
    s.max_dim("K", 0).max_dim("V", 128).without("cu_seqlens_cpu", &A::cu_seqlens_cpu);
    s.without("chunk_size", &A::chunk_size, 64);
    s.check([](const A&, const Dims& d) { return check_head_groups(d); });
    r.add(s);
  }
}

}  // namespace fla
