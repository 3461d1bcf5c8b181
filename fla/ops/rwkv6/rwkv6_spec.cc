#include "fla/ops/rwkv6/rwkv6.h"
#include "fla/ops/spec/diag_spec.h"
#include "fla/ops/spec/pool_spec.h"

namespace fla {

namespace {

using A = Rwkv6Args;
using G = Rwkv6BackwardArgs;
using Spec = OpSpec<A, G>;

constexpr const char* kSource =
    "Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, 2024";

ArgOptions decay() {
  return {.types = Types::Float,
          .gen = {.kind = Gen::Kind::LogSigmoid, .min = -5.0},
          .doc = "log decay of the key channels"};
}
ArgOptions bonus() { return {.types = Types::Float, .doc = "bonus for the current token"}; }

Spec begin(FunctionId<A> f, FunctionId<G> b, const char* doc) {
  Spec s(f, b, "rwkv6");
  s.in("r", &A::r, "B T H K", &G::dr, {.doc = "receptances: what queries are elsewhere"})
      .in("k", &A::k, "B T H K", &G::dk, {.doc = "keys"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"})
      .in("w", &A::w, "B T H K", &G::dw, decay())
      .in("u", &A::u, "H K", &G::du, bonus())
      .flag("scale", &A::scale, "multiplies r; default K^(-1/2)")
      .out("o", &A::o, "B T H V", &G::do_, {.doc = "output"})
      .opt_in(
          "cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
          {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"});
  add_state_args(s, "");
  s.max_dim("K", 0).max_dim("V", 0).tolerance(0.005, {{"o", 0.004}}).flops(diag_forward_flops, diag_backward_flops);
  s.doc(doc, kSource);
  return s;
}

OpSpec<Rwkv6StepArgs> step() {
  using S = Rwkv6StepArgs;
  OpSpec<S> s(kRwkv6Step, "rwkv6");
  s.in("r", &S::r, "B T H K", nullptr, {.doc = "receptances"})
      .in("k", &S::k, "B T H K", nullptr, {.doc = "keys"})
      .in("v", &S::v, "B T H V", nullptr, {.doc = "values"})
      .in("w", &S::w, "B T H K", nullptr, decay())
      .in("u", &S::u, "H K", nullptr, bonus())
      .out("o", &S::o, "B T H V", nullptr, {.doc = "output"})
      .flag("scale", &S::scale, "multiplies r; default K^(-1/2)");
  add_state_pool(s, "H", "");
  s.max_dim("K", 0).max_dim("V", 0).tolerance(0.005, {{"o", 0.004}});
  s.check([](const S& a, const Dims& d) { return check_state_pool(a, d); });
  s.doc("RWKV-6 on a pool of states, 1 to 8 tokens a sequence: for serving.", kSource);
  return s;
}

}  // namespace

void register_rwkv6_spec(Registry& r) {
  {
    Spec s = begin(kChunkRwkv6, kChunkRwkv6Backward, "RWKV-6, chunkwise: for training and prefill.");
    s.without("reverse", &A::reverse);
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    add_chunk_size(s, &A::chunk_size);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentRwkv6, kFusedRecurrentRwkv6Backward,
                   "RWKV-6, token by token: for decoding and short sequences.");
    s.without("cu_seqlens_cpu", &A::cu_seqlens_cpu).without("chunk_size", &A::chunk_size, 64);
    add_reverse(s, &A::reverse);
    r.add(s);
  }
  {
    OpSpec<Rwkv6StepArgs> s = step();
    r.add(s);
  }
}

}  // namespace fla
