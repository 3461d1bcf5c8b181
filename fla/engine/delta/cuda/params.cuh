// What the kernels of the delta engine share: the problem as a kernel gets it, and its front end.
#pragma once

#include <cmath>
#include <cstdint>

#include "fla/engine/delta/problem.h"
#include "fla/kernels/cuda/sequences.cuh"
#include "fla/kernels/cuda/toolbox.cuh"

namespace fla::cuda {

// A tensor whose element type is known at run time only.
struct TypedView {
  View view;
  DType type = DType::F32;

  FLA_HOST_DEVICE bool present() const { return view.present(); }
  FLA_DEVICE std::int64_t offset(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3,
                                 std::int64_t i4 = 0) const {
    return i0 * view.stride[0] + i1 * view.stride[1] + i2 * view.stride[2] + i3 * view.stride[3] + i4 * view.stride[4];
  }
  FLA_DEVICE float load(std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0) const {
    return load_any(view.data, type, offset(i0, i1, i2, i3));
  }
  FLA_DEVICE void store(float x, std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0,
                        std::int64_t i4 = 0) const {
    store_any(view.data, type, offset(i0, i1, i2, i3, i4), x);
  }
};

inline TypedView typed(const TensorView& t) { return {view(t), t.dtype}; }

struct DeltaArgs {
  TypedView q, k, v, beta, g, gk, gv, A_log, dt_bias, h0, o, ht, h, cu_seqlens;
  TypedView slot_indices, accepted, steps;  // the SlotTable
  std::int64_t T = 0, N = 0, h_chunk = 64;
  int H = 0, HV = 0, K = 0, V = 0;
  float scale = 1.0F, beta_sigmoid = 0.0F, lower_bound = 0.0F;
  GateActivation::Kind gate = GateActivation::Kind::None;
  bool gate_of_g = false;  // else of gk
  bool normalize_q = false, normalize_k = false, reverse = false, decayed = false, beta_per_value = false;
  bool slots_by_token = false;
};
struct DeltaBackwardArgs : DeltaArgs {
  TypedView do_, dht, dq, dk, dv, dbeta, dg, dA_log, ddt_bias, dh0;  // dg: of g, or of gk where g is absent
};

// Fills what the host knows; for kernels.
inline DeltaArgs delta_args(const DeltaProblem& p) {
  DeltaArgs a;
  a.q = typed(p.q);
  a.k = typed(p.k);
  a.v = typed(p.v);
  a.beta = typed(p.beta);
  a.g = typed(p.g);
  a.gk = typed(p.gk);
  a.gv = typed(p.gv);
  a.A_log = typed(p.gate.A_log);
  a.dt_bias = typed(p.gate.dt_bias);
  a.h0 = typed(p.h0);
  a.o = typed(p.o);
  a.ht = typed(p.ht);
  a.h = typed(p.h);
  a.cu_seqlens = typed(p.cu_seqlens);
  a.slot_indices = typed(p.slots().indices);
  a.slots_by_token = p.slots().by_token();
  a.accepted = typed(p.slots().accepted);
  a.steps = typed(p.slots().steps);
  a.T = p.T;
  a.N = p.N;
  a.h_chunk = p.h_chunk;
  a.H = static_cast<int>(p.H);
  a.HV = static_cast<int>(p.HV);
  a.K = static_cast<int>(p.K);
  a.V = static_cast<int>(p.V);
  a.scale = static_cast<float>(p.scale);
  a.beta_sigmoid = static_cast<float>(p.beta_sigmoid);
  a.lower_bound = static_cast<float>(p.gate.lower_bound);
  a.gate = p.gate.kind;
  a.gate_of_g = p.g.present();
  a.normalize_q = p.normalize_q;
  a.normalize_k = p.normalize_k;
  a.reverse = p.reverse;
  a.decayed = p.erase == Erase::Decayed;
  a.beta_per_value = p.beta.ndim == 4;
  return a;
}

inline DeltaBackwardArgs delta_args(const DeltaBackwardProblem& p) {
  DeltaBackwardArgs a{delta_args(static_cast<const DeltaProblem&>(p)), {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  a.do_ = typed(p.do_);
  a.dht = typed(p.dht);
  a.dq = typed(p.dq);
  a.dk = typed(p.dk);
  a.dv = typed(p.dv);
  a.dbeta = typed(p.dbeta);
  a.dg = typed(p.g ? p.dg : p.dgk);
  a.dA_log = typed(p.dA_log);
  a.ddt_bias = typed(p.ddt_bias);
  a.dh0 = typed(p.dh0);
  return a;
}

template <typename T>
FLA_DEVICE float low_half(std::uint32_t x) {
  return to_f32(T{static_cast<std::uint16_t>(x)});
}
template <typename T>
FLA_DEVICE float high_half(std::uint32_t x) {
  return to_f32(T{static_cast<std::uint16_t>(x >> 16)});
}
// Elements of 16 bits, two in a word; what is kept as elements moves in several accesses.
template <typename T, int N>
FLA_DEVICE float element(const Vec<std::uint32_t, N>& words, int i) {
  return i % 2 == 0 ? low_half<T>(words.x[i / 2]) : high_half<T>(words.x[i / 2]);
}
using EightElements = Vec<std::uint32_t, 4>;
template <typename T>
FLA_DEVICE EightElements load_elements(const T* p) {
  return load_global<4>(reinterpret_cast<const std::uint32_t*>(p));
}
template <typename T>
FLA_DEVICE void store_elements(T* p, const EightElements& x) {
  store_global<4>(reinterpret_cast<std::uint32_t*>(p), x);
}

FLA_DEVICE std::int64_t boundary(const DeltaArgs& p, std::int64_t i) {
  return boundary_at(p.cu_seqlens.view, p.cu_seqlens.type, i);
}
FLA_DEVICE Sequence sequence(const DeltaArgs& p, std::int64_t n) {
  if (!p.cu_seqlens.present()) return {n, 0, p.T};
  const std::int64_t begin = boundary(p, n);
  return {0, begin, boundary(p, n + 1) - begin};
}

FLA_DEVICE float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

// A_log of a head, and e^{A_log}, finite, as an infinite one times a softplus of 0 is NaN.
struct GateScale {
  float A_log, multiplier;
  // Where the multiplier is 0, x may be infinite.
  FLA_DEVICE float times(float x) const { return multiplier == 0.0F ? 0.0F : multiplier * x; }
};

// The log gate of a raw one.
FLA_DEVICE float activate(const DeltaArgs& p, float raw, float bias, GateScale scale) {
  if (p.gate == GateActivation::Kind::None) return raw;
  const float y = raw + bias;
  if (p.gate == GateActivation::Kind::Softplus) {
    // Far below 0 a softplus is e^y, which alone is 0 where its product with a large multiplier is not.
    if (y < -20.0F) return -expf(y + scale.A_log);
    return -scale.times(y > 20.0F ? y : log1pf(expf(y)));
  }
  return p.lower_bound * sigmoid(scale.times(y));
}
// e^g is 0 in fp32 below this.
inline constexpr float kZeroDecay = -104.0F;
// The log gate's derivatives by the raw gate and by A_log. The latter grows with the raw gate where nothing depends on
// it any more: it is 0 there, as the product is in the limit, so that an infinite raw gate has gradients too. Both are
// finite, as the gradient of g that they multiply may be 0.
inline constexpr float kLargest = 0x1.fffffep127F;
struct GateSlopes {
  float raw, A_log;
};
FLA_DEVICE float at_least(float x, float least) { return x < least ? least : x; }
FLA_DEVICE GateSlopes gate_slopes(const DeltaArgs& p, float raw, float bias, GateScale scale) {
  if (p.gate == GateActivation::Kind::None) return {1.0F, 0.0F};
  const float y = raw + bias;
  if (p.gate == GateActivation::Kind::Softplus) {
    const float g = activate(p, raw, bias, scale);
    return {y < -20.0F ? at_least(g, -kLargest) : -scale.multiplier * sigmoid(y), g < kZeroDecay ? 0.0F : g};
  }
  // s (1 - s) = e / (1 + e)^2 with e = e^-|x|: 0 at both ends, and no difference to lose digits in. Bound and multiplier
  // come after it, as their product may be no float.
  const float x = scale.times(y), e = expf(-fabsf(x)), by_x = p.lower_bound * (e / ((1.0F + e) * (1.0F + e)));
  return {at_least(by_x * scale.multiplier, -kLargest), by_x == 0.0F ? 0.0F : by_x * x};
}
FLA_DEVICE GateScale gate_scale(const DeltaArgs& p, int hv) {
  if (!p.A_log.present()) return {0.0F, 1.0F};
  const float A = p.A_log.load(hv), e = expf(A);
  return {A, e > 0x1p127F ? 0x1p127F : e};
}
FLA_DEVICE float gate_bias(const DeltaArgs& p, int hv, int channel) {
  return p.dt_bias.present() ? p.dt_bias.load(hv, channel) : 0.0F;
}

FLA_DEVICE float load_beta(const DeltaArgs& p, std::int64_t row, std::int64_t t, int hv, int column) {
  if (!p.beta.present()) return 1.0F;
  const float x = p.beta.load(row, t, hv, p.beta_per_value ? column : 0);
  return p.beta_sigmoid > 0.0F ? p.beta_sigmoid * sigmoid(x) : x;
}

// 1 / |x|, with the operator's epsilon.
FLA_DEVICE float inverse_norm(float sum_of_squares) { return 1.0F / sqrtf(sum_of_squares + 1e-6F); }
// The same of a row whose squares may leave fp32, a part of it in each lane of the warp: then they are summed again of a
// row that is a power of two shorter, beside which the epsilon is nothing.
inline constexpr float kLongSquares = 0x1p120F;
template <typename Squares>  // Squares(by): this lane's sum of the squares of by x
FLA_DEVICE float inverse_norm_of_any(float sum_of_squares, Squares squares) {
  if (!(sum_of_squares >= kLongSquares)) return inverse_norm(sum_of_squares);
  constexpr float kShrink = 0x1p-96F;
  return kShrink / sqrtf(warp_sum(squares(kShrink)));
}

// Index in h of the first entering state of sequence n: the states of the sequences before it come first. Every thread
// of the block calls; `sums` has an element per warp.
FLA_DEVICE std::int64_t first_state(const DeltaArgs& p, std::int64_t n, Shared<std::int64_t> sums) {
  if (!p.cu_seqlens.present()) return 0;
  std::int64_t mine = 0;
  for (std::int64_t m = thread_id(); m < n; m += block_threads()) {
    mine += (boundary(p, m + 1) - boundary(p, m) + p.h_chunk - 1) / p.h_chunk;
  }
  for (int by = 16; by > 0; by /= 2) mine += shuffle_xor(mine, by);
  if (lane_id() == 0) sums.store(warp_id(), mine);
  sync_threads();
  std::int64_t all = 0;
  for (int w = 0; w < block_threads() / 32; ++w) all += sums.load(w);
  sync_threads();
  return all;
}

}  // namespace fla::cuda
