#include "fla/ops/gla/gla.h"
#include "fla/ops/spec/diag_spec.h"
#include "fla/ops/spec/pool_spec.h"

namespace fla {

namespace {

using A = GlaArgs;
using G = GlaBackwardArgs;
using Spec = OpSpec<A, G>;

constexpr const char* kSource =
    "Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2024";

Spec begin(FunctionId<A> f, FunctionId<G> b, const char* doc) {
  Spec s(f, b, "gla");
  add_qkv(s, false);
  s.max_dim("K", 0).max_dim("V", 0).tolerance(0.005, {{"o", 0.004}}).flops(diag_forward_flops, diag_backward_flops);
  s.doc(doc, kSource);
  return s;
}

OpSpec<GlaStepArgs> step() {
  using S = GlaStepArgs;
  OpSpec<S> s(kGlaStep, "gla");
  add_step_qkv(s);
  s.opt_in("gk", &S::gk, "B T H K", nullptr,
           {.types = Types::Float,
            .gen = {.kind = Gen::Kind::LogSigmoid, .min = -5.0},
            .doc = "log gate on key channels; absent = 0"});
  s.opt_in("gv", &S::gv, "B T H V", nullptr,
           {.types = Types::Float, .gen = {.kind = Gen::Kind::None}, .doc = "log gate on value channels; absent = 0"});
  s.flag("scale", &S::scale, "multiplies q; default K^(-1/2)");
  s.flag("state_v_first", &S::state_v_first, false, "states are [P, H, V, K]");
  add_state_pool(s, "H", "state_v_first");
  s.max_dim("K", 0).max_dim("V", 0).tolerance(0.005, {{"o", 0.004}});
  s.check([](const S& a, const Dims& d) { return check_state_pool(a, d); });
  s.doc("Gated linear attention on a pool of states, 1 to 8 tokens a sequence: for serving.", kSource);
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
  {
    OpSpec<GlaStepArgs> s = step();
    r.add(s);
  }
}

}  // namespace fla
