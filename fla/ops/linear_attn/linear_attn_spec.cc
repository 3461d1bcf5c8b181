#include <string>
#include <utility>

#include "fla/ops/linear_attn/linear_attn.h"
#include "fla/ops/spec/diag_spec.h"

namespace fla {

namespace {

using A = LinearAttnArgs;
using G = LinearAttnBackwardArgs;
using Spec = OpSpec<A, G>;

Status refuse(const char* arg, const char* text) { return {Code::InvalidArgument, std::string(arg) + ": " + text}; }

Status check_forward(bool normalize, const A& a) {
  if (normalize) return {};
  if (a.initial_z) return refuse("initial_state", "expected [N,H,K,V] alone, got a pair, but normalize is false");
  if (a.final_z) return refuse("final_state.1", "expected none, as normalize is false, got an output");
  return {};
}

Status check_backward(bool normalize, const G& a) {
  if (Status s = check_forward(normalize, a); !s) return s;
  if (!normalize && a.dzt)
    return refuse("dfinal_state.1", "expected none, as normalize is false, got an upstream gradient");
  return {};
}

void add(Registry& r, FunctionId<A> f, FunctionId<G> b, bool normalize, bool reverse, const char* doc) {
  Spec s(f, b, "linear_attn");
  s.in("q", &A::q, "B T H K", &G::dq, {.gen = {.kind = Gen::Kind::AbsNormal}, .doc = "queries, features applied"})
      .in("k", &A::k, "B T H K", &G::dk, {.gen = {.kind = Gen::Kind::AbsNormal}, .doc = "keys, features applied"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"})
      .flag("scale", &A::scale, "multiplies q; default K^(-1/2)")
      .out("o", &A::o, "B T H V", &G::do_, {.doc = "output"});
  add_state_args(s, "");
  s.opt_in("initial_state.1", &A::initial_z, "N 1 H K", &G::dz0,
           {.types = Types::Float,
            .gen = {.kind = Gen::Kind::None},
            .doc = "running sum of past keys, with normalize only; absent = zeros"})
      .out("final_state.1", &A::final_z, "N 1 H K", &G::dzt,
           {.types = Types::Acc, .doc = "running sum of keys, always returned with normalize"});
  if (reverse) {
    add_reverse(s, &A::reverse);
  } else {
    s.without("reverse", &A::reverse);
  }
  s.flag("normalize", &A::normalize, normalize, "divide o by scale <q_t, z_t> + 1e-10, z the running sum of keys")
      .opt_in(
          "cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
          {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"});
  const auto in_effect = [normalize](const A& a) { return a.normalize.value_or(normalize); };
  s.pair_state(in_effect)
      .tolerance(0.001)
      .flops(diag_forward_flops, diag_backward_flops)
      .check([in_effect](const A& a, const Dims&) { return check_forward(in_effect(a), a); })
      .doc(doc,
           "Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention, "
           "2020");
  r.add_function(s.take_forward());
  FunctionSpec back = s.take_backward();
  back.check = [in_effect](const void* p, const Dims&) {
    const G& a = *static_cast<const G*>(p);
    return check_backward(in_effect(a), a);
  };
  r.add_function(std::move(back));
}

}  // namespace

void register_linear_attn_spec(Registry& r) {
  add(r, kChunkLinearAttn, kChunkLinearAttnBackward, true, false,
      "Linear attention, optionally normalised, chunkwise: for training and prefill.");
  add(r, kFusedChunkLinearAttn, kFusedChunkLinearAttnBackward, true, false,
      "Linear attention, optionally normalised, chunkwise with the state kept in fast memory; as chunk_linear_attn.");
  add(r, kFusedRecurrentLinearAttn, kFusedRecurrentLinearAttnBackward, false, true,
      "Linear attention, optionally normalised, token by token: for decoding and short sequences.");
}

}  // namespace fla
