#include "fla/ops/comba/comba.h"
#include "fla/ops/spec/delta_spec.h"

namespace fla {

namespace {

using A = CombaArgs;
using G = CombaBackwardArgs;
using Spec = OpSpec<A, G>;

// The two forms take v and p in different positions, and only the recurrent one has more value heads than key heads.
Spec begin(FunctionId<A> f, FunctionId<G> b, bool chunk, const char* doc) {
  Spec s(f, b, "comba");
  add_queries_keys(s);
  const ArgOptions p = {.gen = unit_rows(), .doc = "erase keys; absent = k"};
  if (chunk) add_values(s, "B T H V");
  s.opt_in("p", &A::p, "B T H K", &G::dp, p);
  if (!chunk) add_values(s, "B T HV V");
  s.in("g", &A::g, chunk ? "B T H" : "B T HV", &G::dg, gate_input("log gate"));
  if (chunk) {
    add_beta(s, "H");
  } else {
    add_recurrent_beta(s, "HV", false);
  }
  add_scale_and_output(s, chunk ? "B T H V" : "B T HV V");
  add_delta_states(s, chunk ? "N H K V" : "N HV K V", "");
  s.flag("use_qk_l2norm_in_kernel", &A::use_qk_l2norm_in_kernel, false, "x / sqrt(sum x^2 + 1e-6) on q, k and p first");
  s.tolerance(0.005, {{"dk", 0.008}, {"dp", 0.008}, {"dinitial_state", 0.008}, {"dg", 0.02}});
  s.flops(delta_forward_flops, delta_backward_flops);
  s.doc(doc, "Hu et al., Comba: Improving Bilinear RNNs with Closed-loop Control, 2025");
  return s;
}

}  // namespace

void register_comba_spec(Registry& r) {
  {
    Spec s = begin(kChunkComba, kChunkCombaBackward, true, "Comba, chunkwise: for training and prefill.");
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentComba, kFusedRecurrentCombaBackward, false,
                   "Comba, token by token: for decoding and short sequences.");
    s.max_dim("K", 0).without("cu_seqlens_cpu", &A::cu_seqlens_cpu);
    s.check([](const A&, const Dims& d) { return check_head_groups(d); });
    r.add(s);
  }
}

}  // namespace fla
