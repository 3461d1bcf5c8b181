// Pieces of a specification that the families of softmax-like attention share. A and G are a family's forward and
// backward args.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "fla/ops/spec/diag_spec.h"
#include "fla/registry/registry.h"
#include "fla/registry/spec.h"

namespace fla {

// An optional input that tools leave out unless asked.
inline ArgOptions left_out(const char* doc, Types types = Types::Float) {
  return {.types = types, .gen = {.kind = Gen::Kind::None}, .doc = doc};
}

template <typename A, typename G>
OpSpec<A, G>& add_boundaries(OpSpec<A, G>& s) {
  return s.opt_in("cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
                  left_out("boundaries of packed sequences, B = 1", Types::Index));
}

template <typename A, typename G>
OpSpec<A, G>& add_grouped_qkv(OpSpec<A, G>& s) {
  s.in("q", &A::q, "B T HQ K", &G::dq, {.doc = "queries; query head h reads key head h / (HQ / H)"})
      .in("k", &A::k, "B T H K", &G::dk, {.doc = "keys"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"});
  s.out("o", &A::o, "B T HQ V", &G::do_, {.doc = "output"});
  return s;
}

template <typename A, typename G>
OpSpec<A, G>& add_window(OpSpec<A, G>& s, std::int64_t least) {
  return s.flag("window_size", &A::window_size, {.min = static_cast<double>(least)},
                "keys that a query sees, itself included; default all up to itself");
}

inline Status check_query_groups(const Dims& d, const char* keys = "k") {
  if (d["H"] > 0 && d["HQ"] % d["H"] != 0)
    return refused("q", "expected a head count that is a multiple of " + std::string(keys) + "'s " +
                            std::to_string(d["H"]) + ", got " + std::to_string(d["HQ"]));
  return {};
}

// Useful operations: pairs of the causal half, two per multiply-add. `by_key` and `by_value` products have width K and
// V.
inline double attn_flops(const Dims& d, double by_key, double by_value) {
  const double T = static_cast<double>(d["T"]), V = static_cast<double>(d.has("V") ? d["V"] : d["K"]);
  return static_cast<double>(d["B"] * d["HQ"]) * T * (T + 1.0) * (by_key * static_cast<double>(d["K"]) + by_value * V);
}
inline double attn_forward_flops(const Dims& d) { return attn_flops(d, 1.0, 1.0); }
inline double attn_backward_flops(const Dims& d) { return attn_flops(d, 3.0, 2.0); }

}  // namespace fla
