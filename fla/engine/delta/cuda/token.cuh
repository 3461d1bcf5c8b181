// What the token kernels share: the rows of a few tokens in shared memory as fp32, and what a forward keeps.
#pragma once

#include "fla/engine/delta/cuda/launches.h"
#include "fla/engine/delta/cuda/params.cuh"

namespace fla::cuda {

// Of the backward's kernels: 256 threads serve 32 value channels, 8 lanes share one, each keeps every eighth key
// channel of its state.
inline constexpr int kTokenColumns = 32, kTokenThreads = 8 * kTokenColumns, kTokenWarps = kTokenThreads / 32;

// What a forward keeps for the backward: z_t = v_t - S^T k_t and the state before every kKeptTokens tokens and at the
// end. Sequence n's states begin at a place that needs no sum over the sequences before it.
inline constexpr std::int64_t kKeptTokens = 64;
struct TokenKept {
  float* z = nullptr;       // [B T, HV, V]
  float* states = nullptr;  // [places, HV, K, V]
};
inline std::int64_t kept_places(const DeltaProblem& p) {
  return p.cu_seqlens ? p.T / kKeptTokens + 2 * p.N : p.N * ((p.T + kKeptTokens - 1) / kKeptTokens + 1);
}
FLA_DEVICE std::int64_t first_kept(const DeltaArgs& p, const Sequence& s, std::int64_t n) {
  return p.cu_seqlens.present() ? s.begin / kKeptTokens + 2 * n : n * ((p.T + kKeptTokens - 1) / kKeptTokens + 1);
}
Status launch_token_forward(const DeltaProblem& p, const TokenKept& kept, Stream stream);

// The block's place: sequence or slot, value head, value channels.
struct TokenBlock {
  std::int64_t outer;
  int hv, hk, part, local, column, own;
  bool real;
};
FLA_DEVICE TokenBlock token_block(const DeltaArgs& p) {
  const int parts = (p.V + kTokenColumns - 1) / kTokenColumns;
  TokenBlock b;
  b.part = block_x() % parts;
  b.hv = block_x() / parts % p.HV;
  b.outer = block_x() / parts / p.HV;
  b.hk = b.hv / (p.HV / p.H);
  b.local = thread_id() / 8;
  b.own = thread_id() % 8;
  b.column = b.part * kTokenColumns + b.local;
  b.real = b.column < p.V;
  return b;
}

FLA_DEVICE std::int64_t token_at(const DeltaArgs& p, const Sequence& s, std::int64_t t) {
  return s.begin + (p.reverse ? s.length - 1 - t : t);
}

// Entry of the table of slots.
FLA_DEVICE std::int64_t slot_of(const DeltaArgs& p, std::int64_t n, std::int64_t column) {
  const View& v = p.slot_indices.view;
  return load_index(v.data, p.slot_indices.type, n * v.stride[0] + (p.slots_by_token ? column * v.stride[1] : 0));
}
// Where sequence n starts; negative: it is padding.
FLA_DEVICE std::int64_t source_slot(const DeltaArgs& p, std::int64_t n) {
  if (!p.slot_indices.present()) return n;
  const std::int64_t slot = slot_of(p, n, 0);
  if (slot < 0 || !p.accepted.present()) return slot;
  return slot_of(p, n, load_index(p.accepted.view.data, p.accepted.type, n * p.accepted.view.stride[0]) - 1);
}

// A lane's elements of one row, channels lane_id() + 32 i; all of them are asked for before the first is waited for.
template <typename T, int N>
FLA_DEVICE void load_lanes(const TypedView& x, std::int64_t offset, int count, float (&r)[N]) {
  const T* from = static_cast<const T*>(x.view.data) + offset;
  FLA_UNROLL
  for (int i = 0; i < N; ++i) {
    const int c = lane_id() + 32 * i;
    r[i] = c < count ? to_f32(from[c * x.view.stride[3]]) : 0.0F;
  }
}
template <int N>
FLA_DEVICE void load_lanes(const TypedView& x, std::int64_t row, std::int64_t t, int head, int count, float (&r)[N]) {
  const std::int64_t offset = x.offset(row, t, head, 0);
  switch (x.type) {
    case DType::F32: load_lanes<float>(x, offset, count, r); break;
    case DType::BF16: load_lanes<bf16>(x, offset, count, r); break;
    case DType::F16: load_lanes<f16>(x, offset, count, r); break;
    default:
      FLA_UNROLL
      for (int i = 0; i < N; ++i) {
        const int c = lane_id() + 32 * i;
        r[i] = c < count ? load_any(x.view.data, x.type, offset + c * x.view.stride[3]) : 0.0F;
      }
  }
}

// Reads one token of q or k by a warp, normalised if asked, times `by`.
template <int KP>
FLA_DEVICE void stage_row(const TypedView& x, std::int64_t row, std::int64_t t, int head, int K, bool unit,
                          Shared<float> to, float by = 1.0F) {
  float r[KP / 32] = {};
  load_lanes(x, row, t, head, K, r);
  const auto squares = [&](float shrink) {
    float sum = 0.0F;
    FLA_UNROLL
    for (const float y : r) sum += shrink * y * (shrink * y);
    return sum;
  };
  if (unit) by *= inverse_norm_of_any(warp_sum(squares(1.0F)), squares);
  FLA_UNROLL
  for (int i = 0; i < KP / 32; ++i) to.store(lane_id() + 32 * i, r[i] * by);
}

// e^{g + gk} of one token by a warp.
template <int KP>
FLA_DEVICE void stage_decay(const DeltaArgs& p, std::int64_t row, std::int64_t t, int hv, GateScale multiplier,
                            Shared<float> to) {
  const float head = !p.g.present() ? 0.0F
                     : p.gate_of_g  ? activate(p, p.g.load(row, t, hv), gate_bias(p, hv, 0), multiplier)
                                    : p.g.load(row, t, hv);
  float raw[KP / 32] = {};
  if (p.gk.present()) load_lanes(p.gk, row, t, hv, p.K, raw);
  FLA_UNROLL
  for (int i = 0; i < KP / 32; ++i) {
    const int c = lane_id() + 32 * i;
    float gate = head;
    if (p.gk.present() && c < p.K) {
      gate += p.gate_of_g ? raw[i] : activate(p, raw[i], gate_bias(p, hv, c), multiplier);
    }
    to.store(c, expf(gate));
  }
}

}  // namespace fla::cuda
