#include "fla/ops/gated_delta_product/gated_delta_product.h"
#include "fla/ops/spec/delta_spec.h"

namespace fla {

namespace {

using A = GatedDeltaProductArgs;
using G = GatedDeltaProductBackwardArgs;
using Spec = OpSpec<A, G>;

}  // namespace

void register_gated_delta_product_spec(Registry& r) {
  Spec s(kChunkGatedDeltaProduct, kChunkGatedDeltaProductBackward, "gated_delta_product");
  s.derive("R", [](const A& a, const Dims&) { return a.num_householder.value_or(-1); });
  s.in("q", &A::q, "B T H K", &G::dq, {.doc = "queries"})
      .in("k", &A::k, "B T*R H K", &G::dk, {.gen = unit_rows(), .doc = "keys, R rows per token"})
      .in("v", &A::v, "B T*R H V", &G::dv, {.doc = "values, R rows per token"})
      .opt_in("g", &A::g, "B T H", &G::dg, gate_input("log gate, before a token's first row; absent = 0"))
      .in("beta", &A::beta, "B T*R H", &G::dbeta, strength_input("write strength, R rows per token"));
  s.flag("num_householder", &A::num_householder, {.required = true, .min = 1, .max = 1024}, "R: rows per token");
  add_scale_and_output(s, "B T H V");
  add_delta_states(s, "N H K V", "");
  add_l2norm(s, &A::use_qk_l2norm_in_kernel);
  add_host_boundaries(s, &A::cu_seqlens_cpu);
  s.tolerance(0.008, {{"o", 0.005}, {"final_state", 0.005}, {"dbeta", 0.02}, {"dg", 0.02}});
  // The rows of k and v do the work of the delta rule's tokens.
  s.flops(delta_forward_flops, delta_backward_flops);
  s.bench_flag("num_householder", std::int64_t{2}).family_export();
  s.doc("Several delta steps per token, chunkwise: for training and prefill.",
        "Siems et al., DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products, 2025");
  r.add(s);
}

}  // namespace fla
