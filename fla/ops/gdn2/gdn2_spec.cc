#include "fla/ops/gdn2/gdn2.h"
#include "fla/ops/spec/delta_spec.h"

namespace fla {

namespace {

using A = Gdn2Args;
using G = Gdn2BackwardArgs;
using Spec = OpSpec<A, G>;

Status check(const A& a) {
  if (Status s = check_channel_gate(a, false); !s) return s;
  return check_intermediate_states(a.h, a.disable_recompute);
}

Spec begin(FunctionId<A> f, FunctionId<G> b, bool chunk, const char* doc) {
  Spec s(f, b, "gdn2");
  add_queries_keys(s);
  add_values(s, "B T H V");
  s.in("g", &A::g, "B T H K", &G::dg, gate_input("log gate per key channel, or its raw input"));
  s.in("b", &A::b, "B T H K", &G::db, strength_input("erase gate per key channel"));
  s.in("w", &A::w, "B T H V", &G::dw, strength_input("write gate per value channel"));
  add_channel_gate_parameters(s, "H");
  add_scale_and_output(s, "B T H V");
  add_delta_states(s, "N H K V", "state_v_first", chunk ? Types::Acc : Types::Float);
  add_l2norm(s, &A::use_qk_l2norm_in_kernel);
  add_channel_gate_flags(s);
  add_v_first(s, &A::state_v_first);
  s.tolerance(0.01, {{"o", 0.005},
                     {"final_state", 0.005},
                     {"db", 0.02},
                     {"dw", 0.02},
                     {"dg", 0.02},
                     {"dA_log", 0.02},
                     {"ddt_bias", 0.02}});
  s.flops(delta_forward_flops, delta_backward_flops).family_export();
  s.check([](const A& a, const Dims&) { return check(a); });
  s.doc(doc, "flash-linear-attention, gdn2");
  return s;
}

}  // namespace

void register_gdn2_spec(Registry& r) {
  {
    Spec s = begin(kChunkGdn2, kChunkGdn2Backward, true, "Gated DeltaNet 2, chunkwise: for training and prefill.");
    add_chunk_promises(s);
    add_intermediate_states<A, G>(s, "H", "state_v_first", [](const A& a) { return a.chunk_size; });
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    add_chunk_size(s, &A::chunk_size, 64, 64);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentGdn2, kFusedRecurrentGdn2Backward, false,
                   "Gated DeltaNet 2, token by token: for decoding and short sequences.");
    s.max_dim("K", 0).without("safe_gate", &A::safe_gate).without("disable_recompute", &A::disable_recompute);
    s.without("h", &A::h).without("cu_seqlens_cpu", &A::cu_seqlens_cpu).without("chunk_size", &A::chunk_size, 64);
    r.add(s);
  }
}

}  // namespace fla
