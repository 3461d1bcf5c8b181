#include "fla/ops/rwkv7/rwkv7.h"
#include "fla/ops/spec/delta_spec.h"
#include "fla/ops/spec/pool_spec.h"

namespace fla {

namespace {

constexpr const char* kSource = "Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025";

template <typename A, typename G>
OpSpec<A, G> begin(FunctionId<A> f, FunctionId<G> b) {
  OpSpec<A, G> s(f, b, "rwkv7");
  s.in("r", &A::r, "B T H K", &G::dr, {.doc = "receptance: queries"})
      .in("w", &A::w, "B T H K", &G::dw, gate_input("log decay per key channel"))
      .in("k", &A::k, "B T H K", &G::dk, {.gen = unit_rows(), .doc = "keys"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"});
  return s;
}

template <typename A, typename G>
void add_a_b(OpSpec<A, G>& s) {
  s.in("a", &A::a, "B T H K", &G::da, {.gen = unit_rows(), .doc = "reads the state before its decay"})
      // Short rows: <a, b> of independent vectors has either sign, and above 1 the state would grow.
      .in("b", &A::b, "B T H K", &G::db, {.gen = {.scale = 0.1}, .doc = "writes what a read"});
}

template <typename A, typename G>
void finish(OpSpec<A, G>& s, bool state_by_default, const char* doc) {
  s.out("o", &A::o, "B T H V", &G::do_, {.doc = "output"})
      .opt_in("cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
              {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"})
      .opt_in("initial_state", &A::initial_state, "N H K V", &G::dh0, extra_input("absent = zeros"))
      .out("final_state", &A::final_state, "N H K V", &G::dht,
           {.types = Types::Acc, .requested_by = "output_final_state", .doc = "state after the last token"})
      .output_flag("output_final_state", "return the state after the last token", state_by_default);
  s.tolerance(0.008, {{"o", 0.007}}).flops(general_forward_flops, general_backward_flops).doc(doc, kSource);
}

OpSpec<Rwkv7StepArgs> step() {
  using S = Rwkv7StepArgs;
  OpSpec<S> s(kRwkv7Step, "rwkv7");
  s.in("r", &S::r, "B T H K", nullptr, {.doc = "receptance: queries"})
      .in("w", &S::w, "B T H K", nullptr, gate_input("log decay per key channel"))
      .in("k", &S::k, "B T H K", nullptr, {.gen = unit_rows(), .doc = "keys"})
      .in("v", &S::v, "B T H V", nullptr, {.doc = "values"})
      .in("a", &S::a, "B T H K", nullptr, {.gen = unit_rows(), .doc = "reads the state before its decay"})
      .in("b", &S::b, "B T H K", nullptr, {.gen = {.scale = 0.1}, .doc = "writes what a read"})
      .flag("scale", &S::scale, "multiplies r; default K^(-1/2)")
      .out("o", &S::o, "B T H V", nullptr, {.doc = "output"});
  add_state_pool(s, "H", "");
  s.max_dim("K", 0).max_dim("V", 0).tolerance(0.008, {{"o", 0.007}});
  s.check([](const S& a, const Dims& d) { return check_state_pool(a, d); });
  s.doc("RWKV-7 on a pool of states, 1 to 8 tokens a sequence: for serving.", kSource);
  return s;
}

}  // namespace

void register_rwkv7_spec(Registry& r) {
  {
    using A = Rwkv7Args;
    auto s = begin(kChunkRwkv7, kChunkRwkv7Backward);
    add_a_b(s);
    s.flag("scale", &A::scale, {.def = 1.0}, "multiplies r; none = K^(-1/2)");
    finish(s, false, "RWKV-7, chunkwise: for training and prefill.");
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    s.flag("safe_gate", &A::safe_gate, false, "a promise that w is at least -5; changes no value");
    s.flag("chunk_size", &A::chunk_size, {.def = std::int64_t{16}, .min = 16, .max = 64, .power_of_two = true},
           "most tokens per chunk; changes rounding only");
    s.flag("disable_recompute", &A::disable_recompute, false, "keep intermediates for the backward; changes no value");
    s.flag("lower_bound", &A::lower_bound, "below 0: a promise that w is at least this; changes no value");
    s.negative("lower_bound");
    r.add(s);
  }
  {
    using A = RecurrentRwkv7Args;
    auto s = begin(kFusedRecurrentRwkv7, kFusedRecurrentRwkv7Backward);
    add_a_b(s);
    s.flag("scale", &A::scale, "multiplies r; default K^(-1/2)");
    finish(s, true, "RWKV-7, token by token: for decoding and short sequences.");
    s.max_dim("K", 0).max_dim("V", 0);
    r.add(s);
  }
  {
    using A = FusedMulRwkv7Args;
    using G = FusedMulRwkv7BackwardArgs;
    auto s = begin(kFusedMulRecurrentRwkv7, kFusedMulRecurrentRwkv7Backward);
    s.in("kk", &A::kk, "B T H K", &G::dkk, {.gen = unit_rows(), .doc = "-kk reads the state before its decay"})
        .in("a", &A::a, "B T H K", &G::da, {.gen = {.kind = Gen::Kind::Sigmoid}, .doc = "kk o a writes what was read"});
    s.flag("scale", &A::scale, {.def = 1.0}, "multiplies r; none = K^(-1/2)");
    finish(s, false, "RWKV-7, token by token, with the rank-one vectors made from kk and a.");
    add_reverse(s, &A::reverse);
    s.max_dim("K", 0).max_dim("V", 0).family_export();
    r.add(s);
  }
  {
    OpSpec<Rwkv7StepArgs> s = step();
    r.add(s);
  }
}

}  // namespace fla
