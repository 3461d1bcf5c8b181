#include <string>

#include "fla/ops/gsa/gsa.h"
#include "fla/ops/spec/diag_spec.h"

namespace fla {

namespace {

using A = GsaArgs;
using G = GsaBackwardArgs;
using Spec = OpSpec<A, G>;

// The two passes, each with the operations of the diagonal-decay form.
double forward_flops(const Dims& d) {
  const double rows = static_cast<double>(d["B"] * d["T"] * d["HQ"]), K = static_cast<double>(d["K"]),
               V = static_cast<double>(d["V"]), M = static_cast<double>(d["M"]);
  return rows * least_of(d, 4.0 * M * (K + V), 2.0 * (K + V + 2.0 * M));
}
double backward_flops(const Dims& d) { return 2.5 * forward_flops(d); }

Status check(const A& a, const Dims& d) {
  if (d["H"] > 0 && d["HQ"] % d["H"] != 0)
    return refused(
        "q", "expected a multiple of the " + std::to_string(d["H"]) + " heads of k, got " + std::to_string(d["HQ"]));
  if (a.checkpoint_level < 0 || a.checkpoint_level > 2)
    return refused("checkpoint_level", "expected 0 to 2, got " + std::to_string(a.checkpoint_level));
  return {};
}

Spec begin(FunctionId<A> f, FunctionId<G> b, const char* doc) {
  Spec s(f, b, "gsa");
  s.in("q", &A::q, "B T HQ K", &G::dq, {.doc = "queries"})
      .in("k", &A::k, "B T H K", &G::dk, {.doc = "keys"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"})
      .in("s", &A::s, "B T H M", &G::ds, {.doc = "how strongly each slot is written"})
      .in("g", &A::g, "B T H M", &G::dg,
          {.types = Types::Float,
           .gen = {.kind = Gen::Kind::LogSigmoid, .min = -5.0},
           .doc = "log gate of the slots; chunk_abc has none"})
      .flag("scale", &A::scale, "multiplies q; default K^(-1/2)")
      .opt_in("initial_state", &A::initial_state, "N H K M", &G::dh0,
              {.types = Types::Float, .gen = {.kind = Gen::Kind::None}, .doc = "keys by slots; absent = zeros"})
      .opt_in("initial_state.1", &A::initial_values, "N H M V", &G::dh0_values,
              {.types = Types::Float, .gen = {.kind = Gen::Kind::None}, .doc = "values by slots; absent = zeros"})
      .out("o", &A::o, "B T HQ V", &G::do_, {.doc = "output"})
      .out("final_state", &A::final_state, "N H K M", &G::dht,
           {.types = Types::Acc, .requested_by = "output_final_state", .doc = "keys by slots after the last token"})
      .out("final_state.1", &A::final_values, "N H M V", &G::dht_values,
           {.types = Types::Acc, .requested_by = "output_final_state", .doc = "values by slots after the last token"})
      .output_flag("output_final_state", "return both states after the last token")
      .opt_in(
          "cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
          {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"});
  s.pair_state([](const A&) { return true; })
      .max_dim("V", 0)
      .tolerance(0.005, {{"ds", 0.008}, {"dg", 0.008}})
      .flops(forward_flops, backward_flops)
      .check(check)
      .doc(doc, "Zhang et al., Gated Slot Attention for Efficient Linear-Time Sequence Modeling, 2024");
  return s;
}

}  // namespace

void register_gsa_spec(Registry& r) {
  {
    Spec s = begin(kChunkGsa, kChunkGsaBackward, "Gated slot attention, chunkwise: for training and prefill.");
    s.without("reverse", &A::reverse)
        .flag("checkpoint_level", &A::checkpoint_level, {.def = std::int64_t{2}, .min = 0, .max = 2},
              "memory against recomputation; changes no value");
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    add_chunk_size(s, &A::chunk_size);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentGsa, kFusedRecurrentGsaBackward,
                   "Gated slot attention, token by token: for decoding and short sequences.");
    s.without("cu_seqlens_cpu", &A::cu_seqlens_cpu)
        .without("chunk_size", &A::chunk_size, 64)
        .without("checkpoint_level", &A::checkpoint_level, 2);
    add_reverse(s, &A::reverse);
    r.add(s);
  }
}

}  // namespace fla
