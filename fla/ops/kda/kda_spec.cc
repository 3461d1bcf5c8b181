#include "fla/ops/common/delta_spec.h"
#include "fla/ops/kda/kda.h"

namespace fla {

namespace {

using A = KdaArgs;
using G = KdaBackwardArgs;
using Spec = OpSpec<A, G>;

Status check(const A& a, const Dims& d) {
  if (Status s = check_head_groups(d); !s) return s;
  if (Status s = check_channel_gate(a, false); !s) return s;
  if (Status s = check_beta_flags(a.beta, a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval); !s) return s;
  return check_intermediate_states(a.h, a.disable_recompute);
}

Spec begin(FunctionId<A> f, FunctionId<G> b, bool chunk, const char* doc) {
  Spec s(f, b, "kda");
  add_queries_keys(s);
  add_values(s, "B T HV V");
  s.in("g", &A::g, "B T HV K", &G::dg, gate_input("log gate per key channel, or its raw input"));
  if (chunk) {
    add_beta(s, "HV");
  } else {
    add_recurrent_beta(s, "HV", true);
  }
  add_channel_gate_parameters(s, "HV");
  add_scale_and_output(s, "B T HV V");
  add_delta_states(s, "N HV K V", "state_v_first", chunk ? Types::Acc : Types::Float);
  add_l2norm(s, &A::use_qk_l2norm_in_kernel);
  add_channel_gate_flags(s);
  add_beta_flags(s);
  add_v_first(s, &A::state_v_first);
  s.tolerance(0.008, {{"o", 0.005}, {"final_state", 0.005}, {"dg", 0.02}, {"dbeta", 0.02}});
  s.flops(delta_forward_flops, delta_backward_flops);
  s.check([](const A& a, const Dims& d) { return check(a, d); });
  s.doc(doc, "Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, 2025");
  return s;
}

}  // namespace

void register_kda_spec(Registry& r) {
  {
    Spec s = begin(kChunkKda, kChunkKdaBackward, true, "Kimi Delta Attention, chunkwise: for training and prefill.");
    add_chunk_promises(s);
    add_intermediate_states<A, G>(s, "HV", "state_v_first", [](const A& a) { return a.chunk_size; });
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    add_chunk_size(s, &A::chunk_size, 32, 64);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentKda, kFusedRecurrentKdaBackward, false,
                   "Kimi Delta Attention, token by token: for decoding and short sequences.");
    s.max_dim("K", 0).without("safe_gate", &A::safe_gate).without("disable_recompute", &A::disable_recompute);
    s.without("h", &A::h).without("cu_seqlens_cpu", &A::cu_seqlens_cpu).without("chunk_size", &A::chunk_size, 64);
    r.add(s);
  }
}

}  // namespace fla
