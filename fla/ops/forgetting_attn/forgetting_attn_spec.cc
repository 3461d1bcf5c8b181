#include "fla/ops/forgetting_attn/forgetting_attn.h"
#include "fla/ops/spec/attn_spec.h"

namespace fla {

void register_forgetting_attn_spec(Registry& r) {
  using A = ForgettingAttnArgs;
  using G = ForgettingAttnBackwardArgs;
  OpSpec<A, G> s(kParallelForgettingAttn, kParallelForgettingAttnBackward, "forgetting_attn");
  add_grouped_qkv(s);
  s.in("g", &A::g, "B T HQ", &G::dg,
       {.types = Types::Float, .gen = {.kind = Gen::Kind::LogSigmoid}, .doc = "natural log forget gate"});
  s.flag("scale", &A::scale, "multiplies <q, k>; default K^(-1/2)");
  add_window(s, 1);
  add_boundaries(s);
  s.max_dim("V", 0).tolerance(0.005, {{"o", 0.004}}).flops(attn_forward_flops, attn_backward_flops);
  s.check([](const A&, const Dims& d) { return check_query_groups(d); });
  s.doc("Softmax attention whose weights decay by a forget gate.",
        "Lin et al., Forgetting Transformer: Softmax Attention with a Forget Gate, 2025");
  r.add(s);
}

}  // namespace fla
