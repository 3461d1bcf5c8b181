#include "fla/ops/common/delta_spec.h"
#include "fla/ops/gated_delta_rule/gated_delta_rule.h"

namespace fla {

namespace {

using A = GatedDeltaRuleArgs;
using G = GatedDeltaRuleBackwardArgs;
using Spec = OpSpec<A, G>;

constexpr const char* kSource = "Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024";

Status check(const A& a, const Dims& d) {
  if (Status s = check_head_groups(d); !s) return s;
  if (Status s = check_gate_parameters(a.use_gate_in_kernel, a.g, a.A_log, a.dt_bias); !s) return s;
  if (a.use_gate_in_kernel && !a.A_log) return refused("A_log", "required by use_gate_in_kernel, but not given");
  if (Status s = check_beta_flags(a.beta, a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval); !s) return s;
  return check_chunk_indices(a.chunk_indices, a.cu_seqlens, a.chunk_size);
}

void finish(Spec& s) {
  s.opt_in("A_log", &A::A_log, "HV", &G::dA_log, extra_input("gate parameter, with use_gate_in_kernel"))
      .opt_in("dt_bias", &A::dt_bias, "HV", &G::ddt_bias,
              extra_input("gate bias, with use_gate_in_kernel; absent = 0"));
  add_scale_and_output(s, "B T HV V");
  add_delta_states(s, "N HV K V", "state_v_first");
  add_l2norm(s, &A::use_qk_l2norm_in_kernel);
  s.flag("use_gate_in_kernel", &A::use_gate_in_kernel, false,
         "g is raw: the log gate is -e^A_log softplus(g + dt_bias)");
  s.together("use_gate_in_kernel", "A_log")
      .together("A_log", "use_gate_in_kernel")
      .together("dt_bias", "use_gate_in_kernel");
  add_beta_flags(s);
  add_v_first(s, &A::state_v_first);
  s.flops(delta_forward_flops, delta_backward_flops);
  s.check([](const A& a, const Dims& d) { return check(a, d); });
}

Spec chunk(FunctionId<A> f, FunctionId<G> b) {
  Spec s(f, b, "gated_delta_rule");
  add_queries_keys(s);
  add_values(s, "B T HV V");
  s.in("g", &A::g, "B T HV", &G::dg, gate_input("log gate, or its raw input"));
  add_beta(s, "HV");
  finish(s);
  add_host_boundaries(s, &A::cu_seqlens_cpu);
  add_chunk_indices<A, G>(s, &A::chunk_indices, [](const A& a) { return a.chunk_size; });
  add_chunk_size(s, &A::chunk_size, 16, 64);
  s.without("gk", &A::gk).without("gv", &A::gv);
  s.tolerance(
      0.008,
      {{"o", 0.005}, {"final_state", 0.005}, {"dg", 0.02}, {"dbeta", 0.02}, {"dA_log", 0.02}, {"ddt_bias", 0.02}});
  s.doc("Gated delta rule, chunkwise: for training and prefill.", kSource);
  return s;
}

Spec recurrent(FunctionId<A> f, FunctionId<G> b) {
  Spec s(f, b, "gated_delta_rule");
  add_queries_keys(s);
  add_values(s, "B T HV V");
  s.opt_in("g", &A::g, "B T HV", &G::dg, gate_input("log gate, or its raw input; absent = 0"));
  s.opt_in("gk", &A::gk, "B T HV K", &G::dgk, extra_input("a further log gate per key channel; absent = 0"));
  s.opt_in("gv", &A::gv, "B T HV V", &G::dgv, extra_input("a further log gate per value channel; absent = 0"));
  add_recurrent_beta(s, "HV", false);
  finish(s);
  s.max_dim("K", 0).without("cu_seqlens_cpu", &A::cu_seqlens_cpu).without("chunk_indices", &A::chunk_indices);
  s.without("chunk_size", &A::chunk_size, 64);
  s.tolerance(0.008, {{"o", 0.005},
                      {"final_state", 0.005},
                      {"dg", 0.02},
                      {"dgk", 0.02},
                      {"dgv", 0.02},
                      {"dbeta", 0.02},
                      {"dA_log", 0.02},
                      {"ddt_bias", 0.02}});
  s.doc("Gated delta rule, token by token: for decoding and short sequences.", kSource);
  return s;
}

}  // namespace

void register_gated_delta_rule_spec(Registry& r) {
  {
    Spec s = chunk(kChunkGatedDeltaRule, kChunkGatedDeltaRuleBackward);
    r.add(s);
  }
  {
    Spec s = chunk(kChunkGdn, kChunkGdnBackward);
    s.alias_of(kChunkGatedDeltaRule.name);
    r.add(s);
  }
  {
    Spec s = recurrent(kFusedRecurrentGatedDeltaRule, kFusedRecurrentGatedDeltaRuleBackward);
    r.add(s);
  }
  {
    Spec s = recurrent(kFusedRecurrentGdn, kFusedRecurrentGdnBackward);
    s.alias_of(kFusedRecurrentGatedDeltaRule.name);
    r.add(s);
  }
}

}  // namespace fla
