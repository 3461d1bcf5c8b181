// Pieces of a specification that the delta-rule families share. A and G are a family's forward and backward args.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "fla/core/index_table.h"
#include "fla/ops/spec/diag_spec.h"
#include "fla/registry/registry.h"
#include "fla/registry/spec.h"

namespace fla {

// Un-normalised keys make the recurrence grow without bound, so tools draw keys of unit length.
inline Gen unit_rows() { return {.kind = Gen::Kind::UnitRows}; }
inline ArgOptions gate_input(std::string doc) {
  return {.types = Types::Float, .gen = {.kind = Gen::Kind::LogSigmoid}, .doc = std::move(doc)};
}
inline ArgOptions strength_input(std::string doc) {
  return {.types = Types::Float, .gen = {.kind = Gen::Kind::Sigmoid}, .doc = std::move(doc)};
}
// An optional input that tools leave out of plain runs.
inline ArgOptions extra_input(std::string doc, Types types = Types::Float) {
  return {.types = types, .gen = {.kind = Gen::Kind::None}, .doc = std::move(doc)};
}

template <typename A, typename G>
OpSpec<A, G>& add_queries_keys(OpSpec<A, G>& s) {
  return s.in("q", &A::q, "B T H K", &G::dq, {.doc = "queries"})
      .in("k", &A::k, "B T H K", &G::dk, {.gen = unit_rows(), .doc = "keys"});
}
// v_dims: "B T H V", or "B T HV V" where values may have more heads than keys.
template <typename A, typename G>
OpSpec<A, G>& add_values(OpSpec<A, G>& s, const char* v_dims) {
  return s.in("v", &A::v, v_dims, &G::dv, {.doc = "values"});
}

// beta per value head; the recurrent forms also take it per value channel, and ones when it is absent.
template <typename A, typename G>
OpSpec<A, G>& add_beta(OpSpec<A, G>& s, const char* heads) {
  return s.in("beta", &A::beta, std::string("B T ") + heads, &G::dbeta, strength_input("write strength"));
}
template <typename A, typename G>
OpSpec<A, G>& add_recurrent_beta(OpSpec<A, G>& s, const char* heads, bool required) {
  const std::string dims = std::string("B T ") + heads;
  ArgOptions o = strength_input(required ? "write strength, also per value channel"
                                         : "write strength, also per value channel; absent = ones");
  o.other_dims = {dims + " V"};
  return required ? s.in("beta", &A::beta, dims, &G::dbeta, o) : s.opt_in("beta", &A::beta, dims, &G::dbeta, o);
}

// scale, boundaries, output.
template <typename A, typename G>
OpSpec<A, G>& add_scale_and_output(OpSpec<A, G>& s, const char* o_dims) {
  s.flag("scale", &A::scale, "multiplies q; default K^(-1/2)");
  return s.out("o", &A::o, o_dims, &G::do_, {.doc = "output"})
      .opt_in(
          "cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
          {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"});
}

// initial_state in, final_state out, both `dims`. v_first names the flag that swaps their last two axes, or is empty.
template <typename A, typename G>
OpSpec<A, G>& add_delta_states(OpSpec<A, G>& s, const char* dims, const char* v_first, Types initial = Types::Float) {
  s.opt_in("initial_state", &A::initial_state, dims, &G::dh0,
           {.types = initial, .gen = {.kind = Gen::Kind::None}, .swapped_by = v_first, .doc = "absent = zeros"});
  s.out("final_state", &A::final_state, dims, &G::dht,
        {.types = Types::Acc,
         .requested_by = "output_final_state",
         .swapped_by = v_first,
         .doc = "state after the last token"});
  return s.output_flag("output_final_state", "return the state after the last token");
}

template <typename A, typename G>
OpSpec<A, G>& add_l2norm(OpSpec<A, G>& s, bool A::*member, bool def = false) {
  return s.flag("use_qk_l2norm_in_kernel", member, def, "x / sqrt(sum x^2 + 1e-6) on q and k first");
}

template <typename A, typename G>
OpSpec<A, G>& add_chunk_size(OpSpec<A, G>& s, std::int64_t A::*member, std::int64_t least, std::int64_t most) {
  return s.flag("chunk_size", member,
                {.def = std::int64_t{64},
                 .min = static_cast<double>(least),
                 .max = static_cast<double>(most),
                 .power_of_two = true},
                "most tokens per chunk; changes rounding only");
}

template <typename A, typename G>
OpSpec<A, G>& add_beta_flags(OpSpec<A, G>& s) {
  s.flag("use_beta_sigmoid_in_kernel", &A::use_beta_sigmoid_in_kernel, false, "beta is a logit: sigmoid(beta) is used");
  return s
      .flag("allow_neg_eigval", &A::allow_neg_eigval, false, "2 sigmoid(beta); with use_beta_sigmoid_in_kernel only")
      .together("allow_neg_eigval", "use_beta_sigmoid_in_kernel");
}

// A_log and dt_bias of a gate per channel.
template <typename A, typename G>
OpSpec<A, G>& add_channel_gate_parameters(OpSpec<A, G>& s, const std::string& heads) {
  ArgOptions a = extra_input("gate parameter, with use_gate_in_kernel"), b = a;
  a.other_dims = {"1 1 " + heads + " 1"};
  b.doc = "gate bias, row-major (head, channel), with use_gate_in_kernel; absent = 0";
  b.other_dims = {heads + " K"};
  return s.opt_in("A_log", &A::A_log, heads, &G::dA_log, a)
      .opt_in("dt_bias", &A::dt_bias, heads + "*K", &G::ddt_bias, b);
}
template <typename A, typename G>
OpSpec<A, G>& add_channel_gate_flags(OpSpec<A, G>& s) {
  s.flag("use_gate_in_kernel", &A::use_gate_in_kernel, false,
         "g is raw: -e^A_log softplus(g + dt_bias), or lower_bound sigmoid(e^A_log (g + dt_bias))");
  s.flag("lower_bound", &A::lower_bound, "below 0: the bounded gate; with use_gate_in_kernel only")
      .negative("lower_bound");
  return s.together("lower_bound", "use_gate_in_kernel")
      .together("use_gate_in_kernel", "A_log")
      .together("A_log", "use_gate_in_kernel")
      .together("dt_bias", "use_gate_in_kernel");
}
// Promises and storage choices of the chunk forms: no value depends on them.
template <typename A, typename G>
OpSpec<A, G>& add_chunk_promises(OpSpec<A, G>& s) {
  s.flag("safe_gate", &A::safe_gate, false, "a promise that log gates are at least -5; changes no value");
  return s.flag("disable_recompute", &A::disable_recompute, false,
                "keep intermediates for the backward; changes no value");
}

// The preconditioner's states and parameters.
template <typename A, typename G>
OpSpec<A, G>& add_precond_states(OpSpec<A, G>& s, const std::string& heads) {
  s.opt_in("initial_A_state", &A::initial_A_state, "N " + heads + " K", &G::dA0,
           extra_input("key statistics before the first token, not negative; absent = zeros"));
  return s.out(
      "final_A_state", &A::final_A_state, "N " + heads + " K", &G::dAt,
      {.types = Types::Acc, .requested_by = "output_final_state", .doc = "key statistics after the last token"});
}
template <typename A, typename G>
OpSpec<A, G>& add_precond_flags(OpSpec<A, G>& s, const std::string& heads) {
  s.flag("x", &A::x, {.def = 1.5}, "above 0: write keys are between k / x and k x").positive("x");
  s.flag("eps", &A::eps, {.def = 1e-6}, "above 0: inside the logarithm of the key statistics").positive("eps");
  s.opt_in("log_atk_scale", &A::log_atk_scale, heads, &G::dlog_atk_scale,
           extra_input("centre of that logarithm; absent = -0.2", Types::Acc));
  return s.flag("transpose_state_layout", &A::transpose_state_layout, false, "the main states have V before K");
}

// ---- sizes that no input's shape tells

// Chunks over all sequences; -1 when the boundaries cannot be read or make no sense.
inline std::int64_t count_chunks(const TensorView& cu_seqlens, const Dims& d, std::int64_t chunk) {
  const std::int64_t T = d["T"];
  if (T < 0 || chunk < 1) return -1;
  if (!cu_seqlens) return (T + chunk - 1) / chunk;
  if (cu_seqlens.device.type != DeviceType::Cpu || cu_seqlens.data == nullptr || cu_seqlens.ndim != 1) return -1;
  std::int64_t chunks = 0;
  for (std::int64_t i = 0; i + 1 < cu_seqlens.dim(0); ++i) {
    const std::int64_t lo = read_index(cu_seqlens, i), hi = read_index(cu_seqlens, i + 1);
    if (lo < 0 || hi < lo || hi > T) return -1;
    chunks += (hi - lo + chunk - 1) / chunk;
  }
  return chunks;
}

// The boundaries that the host can read: those of a device tensor may lie in host memory, too.
template <typename A>
const TensorView& readable_boundaries(const A& a) {
  if constexpr (requires { a.cu_seqlens_cpu; }) {
    if (a.cu_seqlens && a.cu_seqlens.device.type != DeviceType::Cpu && a.cu_seqlens_cpu) return a.cu_seqlens_cpu;
  }
  return a.cu_seqlens;
}

// h: the state that enters each chunk. `chunk` tells a call's tokens per chunk.
template <typename A, typename G>
OpSpec<A, G>& add_intermediate_states(OpSpec<A, G>& s, const char* heads, const char* v_first,
                                      std::int64_t (*chunk)(const A&)) {
  s.derive("NT", [chunk](const A& a, const Dims& d) { return count_chunks(readable_boundaries(a), d, chunk(a)); });
  s.out(
      "h", &A::h, std::string("B NT ") + heads + " K V", nullptr,
      {.requested_by = "return_intermediate_states", .swapped_by = v_first, .doc = "state entering each chunk, as q"});
  return s
      .output_flag("return_intermediate_states", "return the state entering every chunk; not with disable_recompute")
      .excludes("return_intermediate_states", "disable_recompute");
}

// A precomputed list of (sequence, chunk in sequence): changes no value, so all that is left is to see that it is
// right.
template <typename A, typename G>
OpSpec<A, G>& add_chunk_indices(OpSpec<A, G>& s, TensorView A::*member, std::int64_t (*chunk)(const A&)) {
  s.derive("NT", [chunk](const A& a, const Dims& d) { return count_chunks(readable_boundaries(a), d, chunk(a)); });
  return s.opt_in("chunk_indices", member, "NT 2", nullptr,
                  {.types = Types::Index,
                   .gen = {.kind = Gen::Kind::None},
                   .doc = "(sequence, chunk) of every chunk; changes no value"});
}

// ---- checks

inline Status check_head_groups(const Dims& d) {
  if (d["H"] > 0 && d["HV"] % d["H"] != 0)
    return refused("v", "expected a head count that is a multiple of q's " + std::to_string(d["H"]) + ", got " +
                            std::to_string(d["HV"]));
  return {};
}

inline Status check_beta_flags(const TensorView& beta, bool sigmoid, bool allow_neg_eigval) {
  if (allow_neg_eigval && !sigmoid)
    return refused("allow_neg_eigval", "needs use_beta_sigmoid_in_kernel, which is false");
  if (sigmoid && !beta) return refused("use_beta_sigmoid_in_kernel", "needs beta, which was not given");
  return {};
}

// A parameter without the flag that uses it would be ignored, so it is refused.
inline Status check_gate_parameters(bool in_kernel, const TensorView& g, const TensorView& A_log,
                                    const TensorView& dt_bias) {
  if (in_kernel && !g) return refused("g", "required by use_gate_in_kernel, but not given");
  if (!in_kernel && A_log) return refused("A_log", "given without use_gate_in_kernel, which uses it");
  if (!in_kernel && dt_bias) return refused("dt_bias", "given without use_gate_in_kernel, which uses it");
  return {};
}

// Of a kda-like family's args.
template <typename A>
Status check_unpromised_gate(const A& a, bool needs_A_log) {
  if (Status s = check_gate_parameters(a.use_gate_in_kernel, a.g, a.A_log, a.dt_bias); !s) return s;
  if (!a.use_gate_in_kernel) {
    if (a.lower_bound) return refused("lower_bound", "given without use_gate_in_kernel, which uses it");
    return {};
  }
  if (!a.A_log && needs_A_log) return refused("A_log", "required by use_gate_in_kernel, but not given");
  if (!a.A_log && !a.lower_bound)
    return refused("A_log", "required by use_gate_in_kernel without lower_bound, but not given");
  return {};
}
// The same with safe_gate.
template <typename A>
Status check_channel_gate(const A& a, bool needs_A_log) {
  if (Status s = check_unpromised_gate(a, needs_A_log); !s || !a.use_gate_in_kernel) return s;
  if (a.safe_gate && !a.lower_bound)
    return refused("lower_bound", "required by safe_gate with use_gate_in_kernel, but not given");
  if (a.lower_bound && a.safe_gate && (*a.lower_bound < -5.0 || *a.lower_bound >= 0.0))
    return refused("lower_bound",
                   "expected -5 or more and below 0 with safe_gate, got " + to_string(FlagValue{*a.lower_bound}));
  return {};
}

inline Status check_intermediate_states(const TensorView& h, bool disable_recompute) {
  if (h && disable_recompute)
    return refused("return_intermediate_states", "expected without disable_recompute, got both");
  return {};
}

inline Status check_chunk_indices(const TensorView& list, const TensorView& cu_seqlens, std::int64_t chunk) {
  if (!list) return {};
  if (!cu_seqlens) return refused("chunk_indices", "given without cu_seqlens");
  if (list.device.type != DeviceType::Cpu) return {};
  std::int64_t row = 0;
  for (std::int64_t n = 0; n + 1 < cu_seqlens.dim(0); ++n) {
    const std::int64_t length = read_index(cu_seqlens, n + 1) - read_index(cu_seqlens, n);
    for (std::int64_t c = 0; c * chunk < length; ++c, ++row)
      if (read_index(list, row, 0) != n || read_index(list, row, 1) != c)
        return refused("chunk_indices",
                       "entry " + std::to_string(row) + " is (" + std::to_string(read_index(list, row, 0)) + ", " +
                           std::to_string(read_index(list, row, 1)) + "), but chunks of " + std::to_string(chunk) +
                           " tokens make it (" + std::to_string(n) + ", " + std::to_string(c) + ")");
  }
  return {};
}

// As in diag_spec.h. A token reads the state twice and changes it once; the backward makes the states again and has six
// products more. Scores: of q and of k with k, which value heads of one key head share, and what each is multiplied
// with. Of several rows a token (R) each changes the state, and one is read out.
inline double delta_flops(const Dims& d, double changes, double reads, double scores, double values) {
  const double heads = static_cast<double>(d.has("HV") ? d["HV"] : d["H"]), H = static_cast<double>(d["H"]);
  const double tokens = static_cast<double>(d["B"] * d["T"]), R = static_cast<double>(d.has("R") ? d["R"] : 1);
  const double K = static_cast<double>(d["K"]), V = static_cast<double>(d["V"]);
  return tokens * least_of(d, heads * (changes * R + reads) * K * V, R * (scores * H * K + values * heads * V));
}
inline double delta_forward_flops(const Dims& d) { return delta_flops(d, 4.0, 2.0, 4.0, 4.0); }
inline double delta_backward_flops(const Dims& d) { return delta_flops(d, 12.0, 4.0, 10.0, 10.0); }
// With two vectors that write: one more product in the forward, and its two gradients and the states in the backward.
inline double general_forward_flops(const Dims& d) { return delta_flops(d, 6.0, 2.0, 8.0, 8.0); }
inline double general_backward_flops(const Dims& d) { return delta_flops(d, 18.0, 4.0, 20.0, 20.0); }

}  // namespace fla
