#include "fla/ops/simple_gla/simple_gla.h"
#include "fla/ops/spec/diag_spec.h"
#include "fla/ops/spec/pool_spec.h"

namespace fla {

namespace {

using A = SimpleGlaArgs;
using G = SimpleGlaBackwardArgs;
using Spec = OpSpec<A, G>;

constexpr const char* kSource =
    "Dao and Gu, Transformers are SSMs, 2024; Yang et al., Gated Linear Attention Transformers, 2024";

template <typename Args>
Status check_one_gate(const Args& a) {
  if (a.g && a.g_gamma) return refused("g_gamma", "expected at most one of g and g_gamma, got both");
  return {};
}

Spec begin(FunctionId<A> f, FunctionId<G> b, bool constant_gate, const char* doc) {
  Spec s(f, b, "simple_gla");
  add_qkv(s, false);
  s.opt_in("g", &A::g, "B T H", &G::dg,
           {.types = Types::Float, .gen = {.kind = Gen::Kind::LogSigmoid}, .doc = "log gate; absent = 0"});
  if (constant_gate) {
    s.opt_in(
        "g_gamma", &A::g_gamma, "H", nullptr,
        {.types = Types::Acc, .gen = {.kind = Gen::Kind::None}, .doc = "constant log gate per head, instead of g"});
    s.check([](const A& a, const Dims&) { return check_one_gate(a); });
  }
  s.flag("scale", &A::scale, "multiplies q; default K^(-1/2)");
  s.max_dim("K", 0).max_dim("V", 0).tolerance(0.005, {{"o", 0.004}}).flops(diag_forward_flops, diag_backward_flops);
  s.doc(doc, kSource);
  return s;
}

OpSpec<SimpleGlaStepArgs> step() {
  using S = SimpleGlaStepArgs;
  OpSpec<S> s(kSimpleGlaStep, "simple_gla");
  add_step_qkv(s);
  s.opt_in("g", &S::g, "B T H", nullptr,
           {.types = Types::Float, .gen = {.kind = Gen::Kind::LogSigmoid}, .doc = "log gate; absent = 0"});
  s.opt_in("g_gamma", &S::g_gamma, "H", nullptr,
           {.types = Types::Acc, .gen = {.kind = Gen::Kind::None}, .doc = "constant log gate per head, instead of g"});
  s.flag("scale", &S::scale, "multiplies q; default K^(-1/2)");
  s.flag("state_v_first", &S::state_v_first, false, "states are [P, H, V, K]");
  add_state_pool(s, "H", "state_v_first");
  s.max_dim("K", 0).max_dim("V", 0).tolerance(0.005, {{"o", 0.004}});
  s.check([](const S& a, const Dims& d) {
    if (Status r = check_one_gate(a); !r) return r;
    return check_state_pool(a, d);
  });
  s.doc("Simple GLA on a pool of states, 1 to 8 tokens a sequence: for serving.", kSource);
  return s;
}

}  // namespace

void register_simple_gla_spec(Registry& r) {
  {
    Spec s = begin(kChunkSimpleGla, kChunkSimpleGlaBackward, true, "Simple GLA, chunkwise: for training and prefill.");
    add_state_args(s, "state_v_first").without("reverse", &A::reverse).without("attn", &A::attn);
    add_v_first(s, &A::state_v_first);
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    add_chunk_size(s, &A::chunk_size);
    r.add(s);
  }
  {
    Spec s = begin(kFusedChunkSimpleGla, kFusedChunkSimpleGlaBackward, true,
                   "Simple GLA, chunkwise, under the name of the fused kernel.");
    add_state_args(s, "").without("reverse", &A::reverse).without("attn", &A::attn);
    s.without("state_v_first", &A::state_v_first).without("cu_seqlens_cpu", &A::cu_seqlens_cpu);
    s.without("chunk_size", &A::chunk_size, 64);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentSimpleGla, kFusedRecurrentSimpleGlaBackward, true,
                   "Simple GLA, token by token: for decoding and short sequences.");
    add_state_args(s, "state_v_first").without("attn", &A::attn).without("cu_seqlens_cpu", &A::cu_seqlens_cpu);
    add_reverse(s, &A::reverse);
    add_v_first(s, &A::state_v_first);
    s.without("chunk_size", &A::chunk_size, 64);
    r.add(s);
  }
  {
    Spec s = begin(kParallelSimpleGla, kParallelSimpleGlaBackward, false,
                   "Simple GLA without states; can write the attention scores. Their gradient is not propagated.");
    s.max_dim("K", 256).max_dim("V", 256).tolerance(0.005, {{"dg", 0.015}});
    add_attentions(s, &A::attn);
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    s.without("g_gamma", &A::g_gamma).without("initial_state", &A::initial_state);
    s.without("final_state", &A::final_state).without("reverse", &A::reverse);
    s.without("state_v_first", &A::state_v_first).without("chunk_size", &A::chunk_size, 64);
    s.check([](const A& a, const Dims&) { return check_attentions(a.attn, a.cu_seqlens); });
    r.add(s);
  }
  {
    OpSpec<SimpleGlaStepArgs> s = step();
    r.add(s);
  }
}

}  // namespace fla
