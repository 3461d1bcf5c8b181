// Pieces of a specification that all functions over a pool of states share: the arguments of the step functions, and
// the checks that a table of slots needs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "fla/engine/common/sequences.h"
#include "fla/engine/common/slots.h"
#include "fla/ops/spec/diag_spec.h"
#include "fla/ops/spec/state_pool.h"

namespace fla {

// What the caller calls the pool and its tables.
struct SlotNames {
  const char *state, *indices, *accepted;
};

namespace detail {

struct SlotCheck {
  const SlotNames& name;
  const SlotTable& slots;
  const TensorView& cu_seqlens;  // absent: N sequences of T tokens
  std::int64_t N, T, P;

  std::int64_t length(std::int64_t n) const { return sequence_at(cu_seqlens, T, n).length; }
  // Columns of sequence n that its tokens use.
  std::int64_t columns(std::int64_t n) const { return slots.by_token() ? length(n) : length(n) > 0 ? 1 : 0; }
  std::int64_t entry(std::int64_t n, std::int64_t column) const {
    return slots.by_token() ? read_index(slots.indices, n, column) : read_index(slots.indices, n);
  }
  static std::string at(std::int64_t n, std::int64_t column) {
    return "sequence " + std::to_string(n) + ", column " + std::to_string(column);
  }

  Status row(std::int64_t n) const {
    const auto in_pool = [&](std::int64_t column) -> Status {
      const std::int64_t slot = entry(n, column);
      if (slot >= 0 && slot < P) return {};
      return refused(name.indices, at(n, column) + ": expected a slot from 0 to " + std::to_string(P - 1) +
                                       (column == 0 ? " or -1 for padding" : "") + ", got " + std::to_string(slot));
    };
    if (entry(n, 0) == -1) return {};
    for (std::int64_t i = 0; i < std::max<std::int64_t>(columns(n), 1); ++i)
      if (Status s = in_pool(i); !s) return s;
    if (!slots.accepted) return {};
    const std::int64_t accepted = read_index(slots.accepted, n), S = slots.indices.dim(1);
    if (accepted < 1 || accepted > S)
      return refused(name.accepted, "sequence " + std::to_string(n) + ": expected 1 to " + std::to_string(S) +
                                        ", the columns of " + name.indices + ", got " + std::to_string(accepted));
    return in_pool(accepted - 1);
  }

  // No slot may be written twice, nor, where the pool is written in place, be where another sequence starts: the result
  // would depend on which comes first. By windows of slots, so that no memory is needed.
  Status disjoint(bool in_place) const {
    constexpr std::int64_t kWindow = 32768;
    std::array<std::uint64_t, kWindow / 64> seen;
    for (std::int64_t lo = 0; lo < P;) {
      seen.fill(0);
      std::int64_t next = P;
      const auto inside = [&](std::int64_t slot) {
        if (slot >= lo + kWindow) next = std::min(next, slot);
        return slot >= lo && slot < lo + kWindow;
      };
      for (std::int64_t n = 0; n < N; ++n) {
        if (slots.padding(n)) continue;
        for (std::int64_t i = 0; i < columns(n); ++i) {
          const std::int64_t slot = entry(n, i);
          if (!inside(slot)) continue;
          std::uint64_t& word = seen[static_cast<std::size_t>((slot - lo) / 64)];
          const std::uint64_t bit = std::uint64_t{1} << ((slot - lo) % 64);
          if ((word & bit) != 0)
            return refused(name.indices, at(n, i) + ": slot " + std::to_string(slot) + " is written twice");
          word |= bit;
        }
      }
      for (std::int64_t n = 0; in_place && slots.accepted && n < N; ++n) {
        if (slots.padding(n) || length(n) == 0) continue;
        const std::int64_t slot = slots.source(n);
        if (!inside(slot) || (seen[static_cast<std::size_t>((slot - lo) / 64)] >> ((slot - lo) % 64) & 1) == 0)
          continue;
        bool own = false;
        for (std::int64_t i = 0; i < columns(n) && !own; ++i) own = entry(n, i) == slot;
        if (!own)
          return refused(name.indices, "sequence " + std::to_string(n) + " starts from slot " + std::to_string(slot) +
                                           ", which another sequence writes");
      }
      lo = next;
    }
    return {};
  }
};

}  // namespace detail

// Shapes are checked already; tables on a device cannot be looked into. P: slots of the pool. writes: the call writes
// slots of a pool, in_place: of the one it reads.
inline Status check_slots(const SlotNames& name, const SlotTable& slots, const TensorView& cu_seqlens, const Dims& d,
                          bool writes, bool in_place) {
  const detail::SlotCheck c{name, slots, cu_seqlens, d["N"], d["T"], d["P"]};
  if (!slots.indices) {
    if (slots.accepted)
      return refused(name.accepted,
                     std::string("given without ") + name.indices + " of two axes, which it selects from");
    if (c.P != c.N)
      return refused(name.state, "expected a slot per sequence, " + std::to_string(c.N) + ", without " + name.indices +
                                     ", got " + std::to_string(c.P));
    return {};
  }
  if (slots.accepted && !slots.by_token())
    return refused(name.accepted, std::string("needs ") + name.indices + " of two axes, got one");
  if (slots.indices.device.type != DeviceType::Cpu || (cu_seqlens && cu_seqlens.device.type != DeviceType::Cpu))
    return {};
  for (std::int64_t n = 0; n < c.N; ++n)
    if (slots.by_token() && c.length(n) > slots.indices.dim(1))
      return refused(name.indices, "expected a column per token, " + std::to_string(c.length(n)) + " for sequence " +
                                       std::to_string(n) + ", got " + std::to_string(slots.indices.dim(1)));
  for (std::int64_t n = 0; n < c.N; ++n)
    if (Status s = c.row(n); !s) return s;
  return writes ? c.disjoint(in_place) : Status();
}

// ---- the step functions: B sequences of 1 to kStepTokens tokens

inline constexpr std::int64_t kStepTokens = 8;

inline ArgOptions slot_table(std::string doc) {
  return {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = std::move(doc)};
}

// Token by token what all of these need: the rank-one write and the output, two per multiply-add.
inline double step_flops(const Dims& d) {
  const double heads = static_cast<double>(d.has("HV") ? d["HV"] : d["H"]);
  return static_cast<double>(d["B"] * d["T"] * d["K"] * d["V"]) * heads * 4.0;
}

// Queries, keys, values and output of the diagonal-decay families.
template <typename A>
void add_step_qkv(OpSpec<A>& s) {
  s.in("q", &A::q, "B T H K", nullptr, {.doc = "queries"})
      .in("k", &A::k, "B T H K", nullptr, {.doc = "keys"})
      .in("v", &A::v, "B T H V", nullptr, {.doc = "values"})
      .out("o", &A::o, "B T H V", nullptr, {.doc = "output"});
}

// v_first names the flag that swaps the last two axes of the states, or is empty.
template <typename A>
OpSpec<A>& add_state_pool(OpSpec<A>& s, const std::string& heads, const char* v_first) {
  ArgOptions indices = slot_table("the slots of each sequence, -1 for padding; absent: sequence b has slot b");
  indices.other_dims = {"B S"};
  s.in("state", &A::state, "P " + heads + " K V", nullptr,
       {.types = Types::Float, .swapped_by = v_first, .doc = "pool of P slots; written in place without state_out"});
  s.opt_in("state_indices", &A::state_indices, "B", nullptr, indices);
  s.opt_in("num_accepted_tokens", &A::num_accepted_tokens, "B", nullptr,
           slot_table("start from this column of state_indices, counted from 1; absent = 1"));
  s.out("state_out", &A::state_out, "P " + heads + " K V", nullptr,
        {.types = Types::Like, .like = "state", .swapped_by = v_first, .starts_as = "state", .doc = "the pool after"});
  s.out("step_states", &A::step_states, "B T " + heads + " K V", nullptr,
        {.types = Types::Like,
         .like = "state",
         .requested_by = "output_step_states",
         .swapped_by = v_first,
         .doc = "the state after every token, as state"});
  s.output_flag("output_step_states", "return the state after every token");
  return s.max_dim("T", kStepTokens).flops(step_flops, {}).family_export();
}

template <typename A>
Status check_state_pool(const A& a, const Dims& d) {
  return check_slots({"state", "state_indices", "num_accepted_tokens"},
                     {a.state_indices, a.num_accepted_tokens, a.step_states}, {}, d, true,
                     !a.state_out || a.state_out.data == a.state.data);
}

}  // namespace fla
