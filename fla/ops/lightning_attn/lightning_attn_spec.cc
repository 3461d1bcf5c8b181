#include "fla/ops/common/diag_spec.h"
#include "fla/ops/lightning_attn/lightning_attn.h"

namespace fla {

namespace {

using A = LightningAttnArgs;
using G = LightningAttnBackwardArgs;
using Spec = OpSpec<A, G>;

Status check_layer(const A& a) {
  if (*a.layer_idx > *a.num_layers)
    return {Code::InvalidArgument, "layer_idx: expected 0 to num_layers = " + std::to_string(*a.num_layers) + ", got " +
                                       std::to_string(*a.layer_idx) + " (the gate would be positive)"};
  return {};
}

Spec begin(FunctionId<A> f, FunctionId<G> b, const char* doc) {
  Spec s(f, b, "lightning_attn");
  add_qkv(s, false);
  s.flag("layer_idx", &A::layer_idx, {.required = true, .min = 0}, "this layer's index, from 0")
      .flag("num_layers", &A::num_layers, {.required = true, .min = 1}, "layers of the model");
  s.flag("scale", &A::scale, "multiplies q; default K^(-1/2)");
  add_state_args(s, "");
  s.tolerance(0.005).flops(diag_forward_flops, diag_backward_flops);
  s.check([](const A& a, const Dims&) { return check_layer(a); });
  s.bench_flag("layer_idx", std::int64_t{0}).bench_flag("num_layers", std::int64_t{12});
  s.doc(doc, "Qin et al., Lightning Attention-2, 2024");
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
}

}  // namespace fla
