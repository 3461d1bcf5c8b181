#include "fla/ops/hgrn/hgrn.h"
#include "fla/registry/registry.h"
#include "fla/registry/spec.h"

namespace fla {

namespace {

using A = HgrnArgs;
using G = HgrnBackwardArgs;
using Spec = OpSpec<A, G>;

double elements(const Dims& d) { return static_cast<double>(d["B"] * d["T"]) * static_cast<double>(d["D"]); }

// The exponential counts as one operation. The backward carries the state again.
double forward_flops(const Dims& d) { return 3.0 * elements(d); }
double backward_flops(const Dims& d) { return 6.0 * elements(d); }

Spec begin(FunctionId<A> f, FunctionId<G> b, const char* doc, ArgOptions final_state) {
  Spec s(f, b, "hgrn");
  s.in("x", &A::x, "B T D", &G::dx, {.doc = "input, already multiplied by 1 - e^g if wanted"})
      .in("g", &A::g, "B T D", &G::dg,
          {.types = Types::Float, .gen = {.kind = Gen::Kind::LogSigmoid}, .doc = "log forget gate"})
      .opt_in("initial_state", &A::initial_state, "N D", &G::dh0,
              {.types = Types::Float, .gen = {.kind = Gen::Kind::None}, .doc = "absent = zeros"})
      .out("o", &A::o, "B T D", &G::do_, {.doc = "the state after each token"});
  final_state.requested_by = "output_final_state";
  s.out("final_state", &A::final_state, "N D", &G::dht, std::move(final_state))
      .output_flag("output_final_state", "return the state after the last token")
      .tolerance(0.005)
      .flops(forward_flops, backward_flops)
      .doc(doc, "Qin et al., Hierarchically Gated Recurrent Neural Network for Sequence Modeling, 2023");
  return s;
}

}  // namespace

void register_hgrn_spec(Registry& r) {
  {
    Spec s = begin(kFusedRecurrentHgrn, kFusedRecurrentHgrnBackward,
                   "Element-wise gated recurrence, token by token; parallel over sequences and channels.",
                   {.types = Types::Like, .like = "x", .doc = "as x"});
    s.opt_in("cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
             {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"});
    r.add(s);
  }
  {
    Spec s = begin(kChunkHgrn, kChunkHgrnBackward,
                   "Element-wise gated recurrence, chunks of time side by side: for long sequences of few channels.",
                   {.types = Types::Acc, .doc = "output"});
    s.without("cu_seqlens", &A::cu_seqlens).family_export();
    r.add(s);
  }
}

}  // namespace fla
