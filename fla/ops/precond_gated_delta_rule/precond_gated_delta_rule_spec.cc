#include "fla/ops/precond_gated_delta_rule/precond_gated_delta_rule.h"
#include "fla/ops/spec/delta_spec.h"

namespace fla {

namespace {

using A = PrecondGatedDeltaRuleArgs;
using G = PrecondGatedDeltaRuleBackwardArgs;
using Spec = OpSpec<A, G>;

void add_statistics(Spec& s) {
  s.in("beta_atk", &A::beta_atk, "B T H", &G::dbeta_atk,
       strength_input("weight of k^2 in the statistics, not negative"));
}
void add_statistics_decay(Spec& s) {
  s.in("g_atk", &A::g_atk, "B T H", &G::dg_atk, gate_input("log decay of the key statistics"));
}

void finish(Spec& s, const char* doc) {
  add_scale_and_output(s, "B T HV V");
  add_delta_states(s, "N HV K V", "transpose_state_layout");
  add_precond_states(s, "H");
  add_l2norm(s, &A::use_qk_l2norm_in_kernel, true);
  add_precond_flags(s, "H");
  s.tolerance(0.02, {{"o", 0.005},
                     {"final_state", 0.005},
                     {"final_A_state", 0.005},
                     {"dq", 0.008},
                     {"dk", 0.008},
                     {"dv", 0.008},
                     {"dinitial_state", 0.008}});
  s.flops(delta_forward_flops, delta_backward_flops);
  s.check([](const A&, const Dims& d) { return check_head_groups(d); });
  s.doc(doc, "flash-linear-attention, precond_gated_delta_rule");
}

}  // namespace

void register_precond_gated_delta_rule_spec(Registry& r) {
  {
    Spec s(kChunkPrecondGatedDeltaRule, kChunkPrecondGatedDeltaRuleBackward, "precond_gated_delta_rule");
    add_queries_keys(s);
    add_values(s, "B T HV V");
    add_statistics_decay(s);
    s.in("g", &A::g, "B T HV", &G::dg, gate_input("log gate"));
    add_statistics(s);
    add_beta(s, "HV");
    finish(s, "Gated delta rule with preconditioned write keys, chunkwise: for training and prefill.");
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    s.without("gk", &A::gk).without("gv", &A::gv);
    r.add(s);
  }
  {
    Spec s(kFusedRecurrentPrecondGatedDeltaRule, kFusedRecurrentPrecondGatedDeltaRuleBackward,
           "precond_gated_delta_rule");
    add_queries_keys(s);
    add_values(s, "B T HV V");
    s.opt_in("g", &A::g, "B T HV", &G::dg, gate_input("log gate; absent = 0"));
    s.opt_in("gk", &A::gk, "B T HV K", &G::dgk, extra_input("a further log gate per key channel; absent = 0"));
    s.opt_in("gv", &A::gv, "B T HV V", &G::dgv, extra_input("a further log gate per value channel; absent = 0"));
    add_recurrent_beta(s, "HV", false);
    add_statistics_decay(s);
    add_statistics(s);
    finish(s, "Gated delta rule with preconditioned write keys, token by token: for decoding and short sequences.");
    s.max_dim("K", 0).without("cu_seqlens_cpu", &A::cu_seqlens_cpu);
    r.add(s);
  }
}

}  // namespace fla
