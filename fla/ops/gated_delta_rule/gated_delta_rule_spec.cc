#include "fla/ops/gated_delta_rule/gated_delta_rule.h"
#include "fla/ops/spec/delta_spec.h"
#include "fla/ops/spec/pool_spec.h"

namespace fla {

namespace {

using A = GatedDeltaRuleArgs;
using G = GatedDeltaRuleBackwardArgs;
using Spec = OpSpec<A, G>;

constexpr const char* kSource = "Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024";

// What the step function shares.
template <typename Args>
Status check_gates(const Args& a, const Dims& d) {
  if (Status s = check_head_groups(d); !s) return s;
  if (Status s = check_gate_parameters(a.use_gate_in_kernel, a.g, a.A_log, a.dt_bias); !s) return s;
  if (a.use_gate_in_kernel && !a.A_log) return refused("A_log", "required by use_gate_in_kernel, but not given");
  return check_beta_flags(a.beta, a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval);
}

Status check(const A& a, const Dims& d) {
  if (Status s = check_gates(a, d); !s) return s;
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

OpSpec<GdnStepArgs> step() {
  using S = GdnStepArgs;
  OpSpec<S> s(kGdnStep, "gated_delta_rule");
  ArgOptions beta = strength_input("write strength, also per value channel; absent = ones");
  beta.other_dims = {"B T HV V"};
  s.in("q", &S::q, "B T H K", nullptr, {.doc = "queries"})
      .in("k", &S::k, "B T H K", nullptr, {.gen = unit_rows(), .doc = "keys"})
      .in("v", &S::v, "B T HV V", nullptr, {.doc = "values"})
      .opt_in("g", &S::g, "B T HV", nullptr, gate_input("log gate, or its raw input; absent = 0"))
      .opt_in("gk", &S::gk, "B T HV K", nullptr, extra_input("a further log gate per key channel; absent = 0"))
      .opt_in("gv", &S::gv, "B T HV V", nullptr, extra_input("a further log gate per value channel; absent = 0"))
      .opt_in("beta", &S::beta, "B T HV", nullptr, beta)
      .opt_in("A_log", &S::A_log, "HV", nullptr, extra_input("gate parameter, with use_gate_in_kernel"))
      .opt_in("dt_bias", &S::dt_bias, "HV", nullptr, extra_input("gate bias, with use_gate_in_kernel; absent = 0"))
      .flag("scale", &S::scale, "multiplies q; default K^(-1/2)")
      .out("o", &S::o, "B T HV V", nullptr, {.doc = "output"});
  add_l2norm(s, &S::use_qk_l2norm_in_kernel);
  s.flag("use_gate_in_kernel", &S::use_gate_in_kernel, false,
         "g is raw: the log gate is -e^A_log softplus(g + dt_bias)")
      .together("use_gate_in_kernel", "A_log")
      .together("A_log", "use_gate_in_kernel")
      .together("dt_bias", "use_gate_in_kernel");
  add_beta_flags(s);
  s.flag("state_v_first", &S::state_v_first, false, "states have V before K");
  add_state_pool(s, "HV", "state_v_first");
  s.max_dim("K", 0).tolerance(0.008, {{"o", 0.005}, {"state_out", 0.005}, {"step_states", 0.005}});
  s.check([](const S& a, const Dims& d) {
    if (Status r = check_gates(a, d); !r) return r;
    return check_state_pool(a, d);
  });
  s.doc("Gated delta rule on a pool of states, 1 to 8 tokens a sequence: for serving.", kSource);
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
  {
    OpSpec<GdnStepArgs> s = step();
    r.add(s);
  }
}

}  // namespace fla
