#include "fla/ops/abc/abc.h"
#include "fla/ops/spec/diag_spec.h"

namespace fla {

namespace {

// As gsa.
double forward_flops(const Dims& d) {
  const double rows = static_cast<double>(d["B"] * d["T"] * d["H"]), K = static_cast<double>(d["K"]),
               V = static_cast<double>(d["V"]), M = static_cast<double>(d["M"]);
  return rows * least_of(d, 4.0 * M * (K + V), 2.0 * (K + V + 2.0 * M));
}
double backward_flops(const Dims& d) { return 2.5 * forward_flops(d); }

}  // namespace

void register_abc_spec(Registry& r) {
  using A = AbcArgs;
  using G = AbcBackwardArgs;
  OpSpec<A, G> s(kChunkAbc, kChunkAbcBackward, "abc");
  s.in("q", &A::q, "B T H K", &G::dq, {.doc = "queries"})
      .in("k", &A::k, "B T H K", &G::dk, {.doc = "keys"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"})
      .in("s", &A::s, "B T H M", &G::ds, {.doc = "slot logits"})
      .opt_in("initial_state", &A::initial_state, "B H K M", &G::dh0,
              {.types = Types::Float, .gen = {.kind = Gen::Kind::None}, .doc = "keys by slots; absent = zeros"})
      .opt_in("initial_state.1", &A::initial_values, "B H M V", &G::dh0_values,
              {.types = Types::Float, .gen = {.kind = Gen::Kind::None}, .doc = "values by slots; absent = zeros"})
      .out("o", &A::o, "B T H V", &G::do_, {.doc = "output"})
      .out("final_state", &A::final_state, "B H K M", &G::dht,
           {.types = Types::Acc, .requested_by = "output_final_state", .doc = "keys by slots after the last token"})
      .out("final_state.1", &A::final_values, "B H M V", &G::dht_values,
           {.types = Types::Acc, .requested_by = "output_final_state", .doc = "values by slots after the last token"})
      .output_flag("output_final_state", "return both states after the last token")
      .pair_state([](const A&) { return true; })
      .max_dim("V", 0)
      .tolerance(0.005, {{"ds", 0.008}})
      .flops(forward_flops, backward_flops)
      .doc("Attention with bounded memory control, chunkwise: for training and prefill.",
           "Peng et al., ABC: Attention with Bounded-memory Control, 2022");
  r.add(s);
}

}  // namespace fla
