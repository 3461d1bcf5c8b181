// Gates of the diagonal-decay kernels: one a head and token, or one a channel.
#pragma once

#include <cstdint>

#include "fla/engine/diag/cuda/params.cuh"

namespace fla::cuda {

FLA_DEVICE float base2_gate(float x) {
  x *= kLog2e;
  return x > kLeastGate ? x : kLeastGate;
}

// A gate as it lies in memory, so that nothing waits for it before it is needed.
FLA_DEVICE std::uint32_t load_bits(const void* p, DType type, std::int64_t i) {
  return type == DType::F32 ? static_cast<const std::uint32_t*>(p)[i] : static_cast<const std::uint16_t*>(p)[i];
}
FLA_DEVICE float from_bits(DType type, std::uint32_t x) {
  if (type == DType::F32) return bits_to_float(x);
  const auto half = static_cast<std::uint16_t>(x);
  return type == DType::BF16 ? to_f32(bf16{half}) : to_f32(f16{half});
}

// The gate of a head that no token changes.
FLA_DEVICE float head_gate(const DiagParams& p, std::int64_t h) {
  switch (p.head) {
    case HeadDecay::Kind::None: return 0.0F;
    case HeadDecay::Kind::Tensor: return base2_gate(load_any(p.gamma.at.data, p.gamma.type, h * p.gamma.at.stride[0]));
    case HeadDecay::Kind::Retention: {
      // log1p(-x), x = 2^(-5 - h) <= 1 / 32, by its series
      const float x = exp2_approx(-5.0F - static_cast<float>(h));
      return base2_gate(-x * (1.0F + x * (1.0F / 2 + x * (1.0F / 3 + x * (1.0F / 4 + x * (1.0F / 5 + x / 6))))));
    }
    case HeadDecay::Kind::Lightning: return base2_gate(p.slope * static_cast<float>(h));
  }
  return 0.0F;
}

// Running sums of the gates of BT tokens by a warp, of one gate per head and token or none.
template <int BT>
struct HeadGates {
  const DiagParams& p;
  const DiagTask& a;
  float constant;
  std::uint32_t next[BT / 32] = {};  // as they lie in memory, or whether the constant acts

  FLA_DEVICE HeadGates(const DiagParams& params, const DiagTask& task)
      : p(params), a(task), constant(head_gate(params, task.h)) {}

  // Asks for those of the tokens from t on, so that nothing waits for them before they are taken.
  FLA_DEVICE void ask(std::int64_t t) {
    const std::int64_t end = a.to - (p.shift ? 1 : 0);
    FLA_UNROLL
    for (int i = 0; i < BT / 32; ++i) {
      const std::int64_t at = t + 32 * i + lane_id() - (p.shift ? 1 : 0);
      const auto& s = p.g.at.stride;
      if (at < 0 || at >= end) {
        next[i] = 0;
      } else if (p.g.present()) {
        next[i] = load_bits(p.g.at.data, p.g.type, a.row * s[0] + a.token(p, at) * s[1] + a.h * s[2]);
      } else {
        next[i] = 1;
      }
    }
  }
  // G[i]: at token 32 i + lane
  FLA_DEVICE void take(float (&G)[BT / 32], float& sum) const {
    sum = 0.0F;
    FLA_UNROLL
    for (int i = 0; i < BT / 32; ++i) {
      const float held = next[i] != 0 ? constant : 0.0F;
      G[i] = warp_prefix_sum(p.g.present() ? base2_gate(from_bits(p.g.type, next[i])) : held) + sum;
      sum = shuffle(G[i], 31);
    }
  }
};

// Which gate acts on state element (i, j) before token t of the recurrence's order, 0 <= t <= length: with shift that
// of the token before it.
FLA_DEVICE float gate_before(const DiagParams& p, const DiagTask& a, std::int64_t t, int i, int j) {
  const std::int64_t at = p.shift ? t - 1 : t;
  if (at < 0 || at >= a.length) return 0.0F;
  const std::int64_t token = a.token(p, at);
  const auto load = [&](const Operand& x, std::int64_t last) {
    const auto& s = x.at.stride;
    return base2_gate(load_any(x.at.data, x.type, a.row * s[0] + token * s[1] + a.h * s[2] + last * s[3]));
  };
  float gate = p.gk.present() ? load(p.gk, i) : p.g.present() ? load(p.g, 0) : head_gate(p, a.h);
  if (p.gv.present()) gate += load(p.gv, j);
  return gate;
}

// ---- gates per channel: a tile holds them as they come (16-byte rows) or as F32, with a row pitch of LD floats

template <int LD>
FLA_DEVICE float gate_at(const DiagParams& p, DType type, Shared<float> tile, int r, int c) {
  if (!p.vector_gate || type == DType::F32) return base2_gate(tile.load(r * LD + c));
  if (type == DType::BF16) return base2_gate(to_f32(tile.template as<bf16>().load(r * 2 * LD + c)));
  return base2_gate(to_f32(tile.template as<f16>().load(r * 2 * LD + c)));
}
template <int LD>
FLA_DEVICE Vec<float, 2> gate_pair(const DiagParams& p, DType type, Shared<float> tile, int r, int c) {
  Vec<float, 2> x;
  if (!p.vector_gate || type == DType::F32) {
    x = tile.template load_vec<2>(r * LD + c);
  } else if (type == DType::BF16) {
    const Vec<bf16, 2> w = tile.template as<bf16>().template load_vec<2>(r * 2 * LD + c);
    x = {{to_f32(w.x[0]), to_f32(w.x[1])}};
  } else {
    const Vec<f16, 2> w = tile.template as<f16>().template load_vec<2>(r * 2 * LD + c);
    x = {{to_f32(w.x[0]), to_f32(w.x[1])}};
  }
  return {{base2_gate(x.x[0]), base2_gate(x.x[1])}};
}
template <int ROWS, int COLS, int LD>
FLA_DEVICE void load_gates(const DiagParams& p, const DiagTask& a, const Operand& g, std::int64_t t, int c0, int cols,
                           Shared<float> dst, int id = thread_id(), int count = block_threads()) {
  const int shift = p.shift ? 1 : 0;
  if (p.vector_gate && g.type == DType::F32) {
    load_tokens<ROWS, COLS>(p, a, g.at, true, t, shift, c0, cols, dst, LD, id, count);
  } else if (p.vector_gate) {
    load_tokens<ROWS, COLS>(p, a, g.at, true, t, shift, c0, cols, dst.template as<bf16>(), 2 * LD, id, count);
  } else {
    const auto& s = g.at.stride;
    for (int i = id; i < ROWS * COLS; i += count) {
      const int r = i / COLS, c = i % COLS;
      const bool inside = t + r < a.to && t + r >= shift && c < cols;
      dst.store(r * LD + c,
                inside ? load_any(g.at.data, g.type,
                                  a.row * s[0] + a.token(p, t + r - shift) * s[1] + a.h * s[2] + (c0 + c) * s[3])
                       : 0.0F);
    }
  }
}

}  // namespace fla::cuda
