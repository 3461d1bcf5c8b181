// Pieces of a specification that the diagonal-decay families share. A and G are a family's forward and backward args.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "fla/registry/registry.h"
#include "fla/registry/spec.h"

namespace fla {

template <typename A, typename G>
OpSpec<A, G>& add_qkv(OpSpec<A, G>& s, bool with_scale = true) {
  s.in("q", &A::q, "B T H K", &G::dq, {.doc = "queries"})
      .in("k", &A::k, "B T H K", &G::dk, {.doc = "keys"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"});
  if (with_scale) s.flag("scale", &A::scale, "multiplies q; default K^(-1/2)");
  return s.out("o", &A::o, "B T H V", &G::do_, {.doc = "output"})
      .opt_in(
          "cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
          {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"});
}

// initial_state in, final_state out. v_first names the flag that stores them as [N, H, V, K], or is empty.
template <typename A, typename G>
OpSpec<A, G>& add_state_args(OpSpec<A, G>& s, const char* v_first) {
  s.opt_in("initial_state", &A::initial_state, "N H K V", &G::dh0,
           {.types = Types::Float, .gen = {.kind = Gen::Kind::None}, .swapped_by = v_first, .doc = "absent = zeros"});
  s.out("final_state", &A::final_state, "N H K V", &G::dht,
        {.types = Types::Acc,
         .requested_by = "output_final_state",
         .swapped_by = v_first,
         .doc = "state after the last token"});
  return s.output_flag("output_final_state", "return the state after the last token");
}

template <typename A, typename G>
OpSpec<A, G>& add_v_first(OpSpec<A, G>& s, bool A::*member) {
  s.flag("state_v_first", member, false, "states are [N, H, V, K]");
  return s.retired_flag("transpose_state_layout", "state_v_first");
}

template <typename A, typename G>
OpSpec<A, G>& add_reverse(OpSpec<A, G>& s, bool A::*member) {
  return s.flag("reverse", member, false, "run from each sequence's last token to its first");
}

template <typename A, typename G>
OpSpec<A, G>& add_chunk_size(OpSpec<A, G>& s, std::int64_t A::*member) {
  return s.flag("chunk_size", member, {.def = std::int64_t{64}, .min = 1, .power_of_two = true},
                "most tokens per chunk, a power of two; changes rounding only");
}

template <typename A, typename G>
OpSpec<A, G>& add_host_boundaries(OpSpec<A, G>& s, TensorView A::*member) {
  return s.opt_in("cu_seqlens_cpu", member, "N+1", nullptr,
                  {.types = Types::Index,
                   .gen = {.kind = Gen::Kind::None},
                   .host_of = "cu_seqlens",
                   .doc = "cu_seqlens in host memory"});
}

template <typename A, typename G>
OpSpec<A, G>& add_attentions(OpSpec<A, G>& s, TensorView A::*member) {
  s.out("attn", member, "B H T T", nullptr,
        {.requested_by = "output_attentions", .doc = "scores, 0 above the diagonal"});
  return s.output_flag("output_attentions", "return the scores; not with cu_seqlens");
}

// A refusal's text starts with the argument; the function's name is put before it.
inline Status refused(const char* arg, const std::string& text) {
  return {Code::InvalidArgument, std::string(arg) + ": " + text};
}

inline Status check_attentions(const TensorView& attn, const TensorView& cu_seqlens) {
  if (attn && cu_seqlens) return {Code::InvalidArgument, "output_attentions: expected without cu_seqlens, got both"};
  return {};
}

// The least operations that any form needs, two per multiply-add, so that no kernel can be faster than they allow: token
// by token the products with a state, or, while the sequences are short and start from nothing, the scores of the causal
// half and their products. One token starts from a state. Gates are not counted: between chunks they cost little.
inline double least_of(const Dims& d, double with_states, double with_scores) {
  const double length = static_cast<double>(d["B"] * d["T"]) / static_cast<double>(d.has("N") ? d["N"] : d["B"]);
  return length <= 1.0 ? with_states : std::min(with_states, (length + 1.0) / 2.0 * with_scores);
}
inline double diag_forward_flops(const Dims& d) {
  const double rows = static_cast<double>(d["B"] * d["T"] * d["H"]), K = static_cast<double>(d["K"]),
               V = static_cast<double>(d["V"]);
  return rows * least_of(d, 4.0 * K * V, 2.0 * (K + V));
}
inline double diag_backward_flops(const Dims& d) {
  const double rows = static_cast<double>(d["B"] * d["T"] * d["H"]), K = static_cast<double>(d["K"]),
               V = static_cast<double>(d["V"]);
  return rows * least_of(d, 10.0 * K * V, 2.0 * (3.0 * K + 2.0 * V));
}

}  // namespace fla
