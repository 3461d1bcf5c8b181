#include "fla/ops/lightning_attn/lightning_attn.h"
#include "fla/ops/spec/diag_spec.h"
#include "fla/ops/spec/pool_spec.h"

namespace fla {

namespace {

using A = LightningAttnArgs;
using G = LightningAttnBackwardArgs;
using Spec = OpSpec<A, G>;

constexpr const char* kSource = "Qin et al., Lightning Attention-2, 2024";

template <typename Args>
Status check_layer(const Args& a) {
  if (*a.layer_idx > *a.num_layers)
    return {Code::InvalidArgument, "layer_idx: expected 0 to num_layers = " + std::to_string(*a.num_layers) + ", got " +
                                       std::to_string(*a.layer_idx) + " (the gate would be positive)"};
  return {};
}

template <typename Args, typename Gradients>
void add_layer(OpSpec<Args, Gradients>& s) {
  s.flag("layer_idx", &Args::layer_idx, {.required = true, .min = 0}, "this layer's index, from 0")
      .flag("num_layers", &Args::num_layers, {.required = true, .min = 1}, "layers of the model");
  s.bench_flag("layer_idx", std::int64_t{0}).bench_flag("num_layers", std::int64_t{12});
}

Spec begin(FunctionId<A> f, FunctionId<G> b, const char* doc) {
  Spec s(f, b, "lightning_attn");
  add_qkv(s, false);
  add_layer(s);
  s.flag("scale", &A::scale, "multiplies q; default K^(-1/2)");
  add_state_args(s, "");
  s.tolerance(0.005).flops(diag_forward_flops, diag_backward_flops);
  s.check([](const A& a, const Dims&) { return check_layer(a); });
  s.doc(doc, kSource);
  return s;
}

OpSpec<LightningStepArgs> step() {
  using S = LightningStepArgs;
  OpSpec<S> s(kLightningStep, "lightning_attn");
  add_step_qkv(s);
  add_layer(s);
  s.flag("scale", &S::scale, "multiplies q; default K^(-1/2)");
  add_state_pool(s, "H", "");
  s.tolerance(0.005).check([](const S& a, const Dims& d) {
    if (Status r = check_layer(a); !r) return r;
    return check_state_pool(a, d);
  });
  s.doc("Lightning attention on a pool of states, 1 to 8 tokens a sequence: for serving.", kSource);
  return s;
}

}  // namespace

void register_lightning_attn_spec(Registry& r) {
  {
    Spec s = begin(kChunkLightningAttn, kChunkLightningAttnBackward,
                   "Lightning attention, chunkwise: for training and prefill.");
    s.without("reverse", &A::reverse);
    add_chunk_size(s, &A::chunk_size);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentLightningAttn, kFusedRecurrentLightningAttnBackward,
                   "Lightning attention, token by token: for decoding and short sequences.");
    add_reverse(s, &A::reverse);
    s.without("chunk_size", &A::chunk_size, 64);
    r.add(s);
  }
  {
    OpSpec<LightningStepArgs> s = step();
    r.add(s);
  }
}

}  // namespace fla
