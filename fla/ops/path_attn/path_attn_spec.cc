#include "fla/ops/path_attn/path_attn.h"
#include "fla/ops/spec/attn_spec.h"

namespace fla {

namespace {

// Beside attention's own products the two that take a query past a block; the gradients walk twice.
double forward_flops(const Dims& d) { return attn_flops(d, 3.0, 1.0); }
double backward_flops(const Dims& d) { return attn_flops(d, 10.0, 2.0); }

}  // namespace

void register_path_attn_spec(Registry& r) {
  using A = PathAttnArgs;
  using G = PathAttnBackwardArgs;
  OpSpec<A, G> s(kParallelPathAttn, kParallelPathAttnBackward, "path_attn");
  add_grouped_qkv(s);
  s.in("w", &A::w, "B T H K", &G::dw,
       {.types = Types::Acc, .gen = {.kind = Gen::Kind::UnitRows}, .doc = "directions, of unit length"})
      .in("beta", &A::beta, "B T H", &G::dbeta,
          {.types = Types::Acc, .gen = {.kind = Gen::Kind::Sigmoid}, .doc = "steps, 0 to 2"})
      .opt_in("g", &A::g, "B T HQ", &G::dg, left_out("natural log gate, scaled; absent = 0", Types::Acc));
  s.flag("scale", &A::scale, "multiplies products and gate; default K^(-1/2)");
  add_boundaries(s);
  s.out("k_cache", &A::k_cache, "B T H K", nullptr,
        {.requested_by = "use_cache", .doc = "keys carried to the end of their sequence"});
  s.output_flag("use_cache", "return the carried keys");
  s.tolerance(0.005, {{"dq", 0.008}, {"dk", 0.008}, {"dv", 0.008}, {"dw", 0.015}, {"dbeta", 0.02}, {"dg", 0.02}});
  s.flops(forward_flops, backward_flops);
  s.check([](const A&, const Dims& d) { return check_query_groups(d); });
  s.doc("Softmax attention through the Householder-like steps between query and key.",
        "Yang et al., PaTH Attention: Position Encoding via Accumulating Householder Transformations, 2025");
  r.add(s);
}

}  // namespace fla
