#include "fla/ops/common/diag_spec.h"
#include "fla/ops/gla/gla.h"

namespace fla {

namespace {

using A = GlaArgs;
using G = GlaBackwardArgs;
using Spec = OpSpec<A, G>;

Spec begin(FunctionId<A> f, FunctionId<G> b, const char* doc) {
  Spec s(f, b, "gla");
  add_qkv(s, false);
  s.max_dim("K", 0).max_dim("V", 0).tolerance(0.005, {{"o", 0.004}}).flops(diag_forward_flops, diag_backward_flops);
  s.doc(doc, "Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2024");
  return s;
}

}  // namespace

void register_gla_spec(Registry& r) {
  const auto chunk = [&](FunctionId<A> f, FunctionId<G> b, const char* doc) {
    Spec s = begin(f, b, doc);
    s.in("g", &A::g, "B T H K", &G::dg,
         {.types = Types::Float,
          .gen = {.kind = Gen::Kind::LogSigmoid, .min = -5.0},
          .doc = "log gate on key channels"});
    s.flag("scale", &A::scale, "multiplies q; default K^(-1/2)");
    add_state_args(s, "state_v_first").without("reverse", &A::reverse).without("gv", &A::gv);
    add_v_first(s, &A::state_v_first);
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    return s;
  };
  {
    Spec s = chunk(kChunkGla, kChunkGlaBackward, "Gated linear attention, chunkwise: for training and prefill.");
    r.add(s);
  }
  {
    Spec s = chunk(kFusedChunkGla, kFusedChunkGlaBackward, "Deprecated name of chunk_gla, which serves it.");
    s.deprecated(kChunkGla.name);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentGla, kFusedRecurrentGlaBackward,
                   "Gated linear attention, token by token: for decoding and short sequences.");
    s.opt_in("gk", &A::g, "B T H K", &G::dg,
             {.types = Types::Float,
              .gen = {.kind = Gen::Kind::LogSigmoid, .min = -5.0},
              .doc = "log gate on key channels; absent = 0"});
    s.opt_in(
        "gv", &A::gv, "B T H V", &G::dgv,
        {.types = Types::Float, .gen = {.kind = Gen::Kind::None}, .doc = "log gate on value channels; absent = 0"});
    s.flag("scale", &A::scale, "multiplies q; default K^(-1/2)");
    add_state_args(s, "state_v_first").without("cu_seqlens_cpu", &A::cu_seqlens_cpu);
    add_reverse(s, &A::reverse);
    add_v_first(s, &A::state_v_first);
    r.add(s);
  }
}

}  // namespace fla
