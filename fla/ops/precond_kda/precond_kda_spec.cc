#include "fla/ops/precond_kda/precond_kda.h"
#include "fla/ops/spec/delta_spec.h"

namespace fla {

namespace {

using A = PrecondKdaArgs;
using G = PrecondKdaBackwardArgs;
using Spec = OpSpec<A, G>;

Status check(const A& a, const Dims& d) {
  if (d.has("HV"))
    if (Status s = check_head_groups(d); !s) return s;
  if (Status s = check_channel_gate(a, true); !s) return s;
  if (Status s = check_intermediate_states(a.h, a.disable_recompute); !s) return s;
  return check_chunk_indices(a.chunk_indices, a.cu_seqlens, 64);
}

Spec begin(FunctionId<A> f, FunctionId<G> b, bool chunk, const char* doc) {
  const std::string heads = chunk ? "H" : "HV", rows = "B T " + heads;
  Spec s(f, b, "precond_kda");
  add_queries_keys(s);
  add_values(s, chunk ? "B T H V" : "B T HV V");
  s.in("g", &A::g, rows + " K", &G::dg, gate_input("log gate per key channel, or its raw input"));
  s.in("g_atk", &A::g_atk, rows, &G::dg_atk, gate_input("log decay of the key statistics"));
  s.in("beta_atk", &A::beta_atk, rows, &G::dbeta_atk, strength_input("weight of k^2 in the statistics, not negative"));
  if (chunk) {
    add_beta(s, "H");
  } else {
    add_recurrent_beta(s, "HV", true);
  }
  add_channel_gate_parameters(s, heads);
  add_scale_and_output(s, chunk ? "B T H V" : "B T HV V");
  add_delta_states(s, chunk ? "N H K V" : "N HV K V", "transpose_state_layout", chunk ? Types::Acc : Types::Float);
  add_precond_states(s, heads);
  if (chunk) {
    s.without("use_qk_l2norm_in_kernel", &A::use_qk_l2norm_in_kernel, true);
  } else {
    add_l2norm(s, &A::use_qk_l2norm_in_kernel, true);
  }
  add_channel_gate_flags(s);
  add_precond_flags(s, heads);
  s.tolerance(0.02, {{"o", 0.005},
                     {"final_state", 0.005},
                     {"final_A_state", 0.005},
                     {"dq", 0.008},
                     {"dk", 0.008},
                     {"dv", 0.008},
                     {"dinitial_state", 0.008},
                     {"ddt_bias", 0.008}});
  s.flops(delta_forward_flops, delta_backward_flops);
  s.check([](const A& a, const Dims& d) { return check(a, d); });
  s.doc(doc, "flash-linear-attention, precond_kda");
  return s;
}

}  // namespace

void register_precond_kda_spec(Registry& r) {
  {
    Spec s = begin(kChunkPrecondKda, kChunkPrecondKdaBackward, true,
                   "Kimi Delta Attention with preconditioned write keys, chunkwise: for training and prefill.");
    const auto chunk = [](const A&) { return std::int64_t{64}; };
    add_chunk_promises(s);
    add_intermediate_states<A, G>(s, "H", "transpose_state_layout", chunk);
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    add_chunk_indices<A, G>(s, &A::chunk_indices, chunk);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentPrecondKda, kFusedRecurrentPrecondKdaBackward, false,
                   "Kimi Delta Attention with preconditioned write keys, token by token: for decoding.");
    s.max_dim("K", 0).without("safe_gate", &A::safe_gate).without("disable_recompute", &A::disable_recompute);
    s.without("h", &A::h).without("cu_seqlens_cpu", &A::cu_seqlens_cpu).without("chunk_indices", &A::chunk_indices);
    r.add(s);
  }
}

}  // namespace fla
