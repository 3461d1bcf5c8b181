// Shared by the translation units of the CPU engine; nothing here is vector code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "fla/engine/diag/problem.h"
#include "fla/kernels/cpu/rows.h"

namespace fla::cpu {

// What decays the state: nothing, one number per head and token, or one per key channel.
enum class KeyGate { None, Head, Channel };

inline KeyGate key_gate(const DiagProblem& p) {
  if (p.gk) return KeyGate::Channel;
  return p.g || p.head.kind != HeadDecay::Kind::None ? KeyGate::Head : KeyGate::None;
}

// What a query meets: the state after its token's update, or the one before it and the bonus of its token.
enum class Read { After, Before };

// The state is held as panels of kBV value columns, [pad_up(K), kBV] each: at K = 128 one is 16 KB, so that it stays in
// L1 while a chunk is applied to it.
inline constexpr std::int64_t kBV = 32;

// A tile whose columns are the chunk's tokens has this many: overhang of a transpose that starts at any token, and no
// power of two between rows.
constexpr std::int64_t token_ld(std::int64_t BT) { return BT + kPad; }
// Token-major tiles have spare rows that a transpose may read.
constexpr std::int64_t token_rows_padded(std::int64_t BT) { return BT + 4; }

// Tokens of sequence s of a [B, T, H, D] tensor, head h, in the order of the recurrence.
inline Rows token_rows(const TensorView& x, const DiagProblem& p, const Sequence& s, std::int64_t h) {
  if (!x || s.length == 0) return {};
  const std::int64_t size = static_cast<std::int64_t>(size_of(x.dtype));
  const std::int64_t first = p.reverse ? s.begin + s.length - 1 : s.begin;
  return {x.at(s.row, first, h), x.dtype, (p.reverse ? -1 : 1) * x.stride[1] * size, x.ndim > 3 ? x.stride[3] : 1};
}

// [K, V] of one sequence and head.
inline Rows state_rows(const TensorView& x, std::int64_t n, std::int64_t h) {
  if (!x) return {};
  return {x.at(n, h), x.dtype, x.stride[2] * static_cast<std::int64_t>(size_of(x.dtype)), x.stride[3]};
}

// The same as [V, K].
inline Rows transposed_state_rows(const TensorView& x, std::int64_t n, std::int64_t h) {
  if (!x) return {};
  return {x.at(n, h), x.dtype, x.stride[3] * static_cast<std::int64_t>(size_of(x.dtype)), x.stride[2]};
}

// The bonus of a head, as one row.
inline Rows bonus_row(const DiagProblem& p, std::int64_t h) {
  if (!p.u) return {};
  return {p.u.at(h), p.u.dtype, 0, p.u.stride[1]};
}

// Of a sequence and head, where a stepwise form starts and what wants the state after a token. The recurrence then runs
// in the memory of the first that it can write to as rows of floats.
struct StateRows {
  const SlotTable& slots;
  const TensorView& ht;
  std::int64_t n, row, begin, length, h;  // row and begin of the sequence's tokens
  bool padding = false;
  Rows start;

  template <typename P>
  StateRows(const P& p, std::int64_t sequence, std::int64_t head)
      : slots(p.slots()), ht(p.ht), n(sequence), h(head), padding(p.slots().padding(sequence)) {
    const auto s = p.sequence(n);
    row = s.row;
    begin = s.begin;
    length = s.length;
    if (!padding) start = state_rows(p.h0, slots.source(n), h);
  }
  // Of token t; none for padding.
  Rows slot(std::int64_t t) const {
    const std::int64_t to = ht && !padding ? slots.target(n, t, length) : -1;
    return to < 0 ? Rows{} : state_rows(ht, to, h);
  }
  Rows step(std::int64_t t) const {
    const TensorView& x = slots.steps;
    if (!x) return {};
    return {x.at(row, begin + t, h), x.dtype, x.stride[3] * static_cast<std::int64_t>(size_of(x.dtype)), x.stride[4]};
  }
  // Where the state of a sequence without tokens goes.
  Rows untouched() const { return ht && length == 0 && !slots.indices ? state_rows(ht, n, h) : Rows{}; }
};

// Gradients of this size leave the caches before anybody reads them. Stored past these, their memory is not read first.
inline bool beyond_caches(std::initializer_list<const TensorView*> gradients) {
  std::int64_t bytes = 0;
  for (const TensorView* x : gradients) {
    if (*x) bytes += x->numel() * static_cast<std::int64_t>(size_of(x->dtype));
  }
  return bytes >= std::int64_t{64} << 20;
}

inline bool rows_of_floats(const Rows& x) {
  return x && x.dtype == DType::F32 && x.last == 1 && x.step % static_cast<std::int64_t>(sizeof(float)) == 0;
}

// Heads that one task interleaves, chunk by chunk. A token's heads are neighbours in memory and a head's tokens are
// H * K apart: one head after the other would touch every page of the inputs once per head. At B 1, T 4096, H 16, D 128
// (AVX-512, 4 KB pages in a virtual machine) 1, 2, 4, 8 heads take 84, 81, 78, 75 ms, with prefetch 89, 90, 79, 73.
inline constexpr std::int64_t kHeadGroup = 8;
// e^g is 0 in fp32 below this and a step forgets everything, down to -inf, which masks use; a sum with a smaller gate
// in it would lose the digits of the gates beside it, or become NaN in a difference. A NaN stays one.
inline constexpr double kLeastGate = -1024.0;
inline double bounded_gate(double g) { return g < kLeastGate ? kLeastGate : g; }

// Prefetching pays from this much in one piece; below, page walks hold up the arithmetic's own loads.
inline constexpr std::int64_t kPrefetchBytes = 2048;

// Heads per task: only as many as leave the threads evenly loaded and the states, of so many floats, in L2.
inline std::int64_t head_group(const DiagProblem& p, std::int64_t state_size, int threads, std::int64_t limit) {
  std::int64_t group = 1;
  for (std::int64_t g = 2; g <= std::min(limit, p.H); g *= 2) {
    const std::int64_t tasks = p.N * ((p.H + g - 1) / g);
    const bool even = tasks >= std::int64_t{4} * threads || (tasks % threads == 0 && p.H % g == 0);
    if (even && g * state_size * 4 <= std::int64_t{512} * 1024) group = g;
  }
  return group;
}

}  // namespace fla::cpu
