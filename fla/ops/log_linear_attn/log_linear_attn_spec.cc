#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "fla/ops/log_linear_attn/log_linear_attn_sequence.h"
#include "fla/ops/spec/diag_spec.h"

namespace fla {

namespace {

using A = LogLinearAttnArgs;
using G = LogLinearAttnBackwardArgs;

std::int64_t levels_of(std::int64_t tokens) {
  return tokens <= 1 ? 1 : std::bit_width(static_cast<std::uint64_t>(tokens - 1)) + 1;
}

bool on_host(const TensorView& t) { return !t || t.device.type == DeviceType::Cpu; }

Status check(const A& a, const Dims& d) {
  if (a.past_state && !a.past_tokens) return refused("past_state", "expected with past_tokens, got it alone");
  if (a.past_tokens && !a.past_state) return refused("past_tokens", "expected with past_state, got it alone");
  if (!on_host(a.cu_seqlens) || !on_host(a.past_tokens)) return {};
  const std::int64_t L = d["L"];
  for (std::int64_t n = 0; n < d["N"]; ++n) {
    const LogLinearSequence s(a, n);
    if (s.past < 0)
      return refused("past_tokens",
                     "sequence " + std::to_string(n) + ": expected 0 or more, got " + std::to_string(s.past));
    if (s.past > (std::int64_t{1} << 60) || levels_of(s.past + s.length) > L)
      return refused("level_scales", "expected " +
                                         std::to_string(levels_of(std::min(s.past, std::int64_t{1} << 60) + s.length)) +
                                         " levels or more for the tokens of sequence " + std::to_string(n) + ", got " +
                                         std::to_string(L));
  }
  return {};
}

// The least that any form needs: half of the levels above a chunk of 64 read per token, one state update; or scores.
double forward_flops(const Dims& d) {
  const double rows = static_cast<double>(d["B"] * d["T"] * d["H"]), K = static_cast<double>(d["K"]),
               V = static_cast<double>(d["V"]);
  const double above = 0.5 * static_cast<double>(std::max<std::int64_t>(levels_of(d["T"]) - 7, 0));
  return rows * least_of(d, (2.0 * above + 2.0) * K * V, 2.0 * (K + V));
}
double backward_flops(const Dims& d) { return 2.5 * forward_flops(d); }

}  // namespace

void register_log_linear_attn_spec(Registry& r) {
  OpSpec<A, G> s(kChunkLogLinearAttn, kChunkLogLinearAttnBackward, "log_linear_attn");
  s.in("q", &A::q, "B T 1 K", &G::dq, {.doc = "queries of all heads, not scaled"})
      .in("k", &A::k, "B T 1 K", &G::dk, {.doc = "keys of all heads"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"})
      .in("g", &A::g, "B T H", &G::dg,
          {.types = Types::Float, .gen = {.kind = Gen::Kind::LogSigmoid}, .doc = "log gate per head"})
      .in("level_scales", &A::level_scales, "B T H L", &G::dlevel_scales,
          {.types = Types::Float, .doc = "weight of each level for the reading token"})
      .opt_in("past_state", &A::past_state, "N H L K V", nullptr,
              {.types = Types::Float,
               .gen = {.kind = Gen::Kind::None},
               .doc = "final_state of the call before; no gradient; absent = none"})
      .out("o", &A::o, "B T H V", &G::do_, {.doc = "output"})
      .out("final_state", &A::final_state, "N H L K V", nullptr,
           {.types = Types::Acc,
            .requested_by = "output_final_state",
            .doc = "buckets of 1, 2, 4, ... tokens after the last token"})
      .output_flag("output_final_state", "return the buckets after the last token")
      .opt_in("past_tokens", &A::past_tokens, "N", nullptr,
              {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "tokens that past_state stands for"})
      .opt_in("cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
              {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"})
      .together("past_state", "past_tokens")
      .max_dim("V", 0)
      .tolerance(0.008, {{"o", 0.004}, {"dq", 0.007}, {"dv", 0.007}, {"dg", 0.015}, {"dlevel_scales", 0.015}})
      .flops(forward_flops, backward_flops)
      .check(check)
      .doc("Log-linear attention, chunkwise: for training and prefill.", "Guo et al., Log-Linear Attention, 2025");
  r.add(s);
}

}  // namespace fla
