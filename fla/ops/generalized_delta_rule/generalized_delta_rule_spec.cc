#include "fla/ops/generalized_delta_rule/generalized_delta_rule.h"
#include "fla/ops/spec/delta_spec.h"

namespace fla {

namespace {

constexpr const char* kFamily = "generalized_delta_rule";
constexpr const char* kSource = "Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025";

template <typename A, typename G>
void add_vectors(OpSpec<A, G>& s) {
  s.in("q", &A::q, "B T H K", &G::dq, {.doc = "queries"})
      .in("k", &A::k, "B T H K", &G::dk, {.gen = unit_rows(), .doc = "keys"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"})
      .in("a", &A::a, "B T H K", &G::da, {.gen = unit_rows(), .doc = "reads the state before its decay"})
      // Against a, so that I + b a^T contracts: independent vectors would make the state grow without bound.
      .in("b", &A::b, "B T H K", &G::db, {.gen = {.kind = Gen::Kind::Against, .of = "a"}, .doc = "writes what a read"});
}

using IplrSpec = OpSpec<IplrDeltaRuleArgs, IplrDeltaRuleBackwardArgs>;
using DplrSpec = OpSpec<DplrDeltaRuleArgs, DplrDeltaRuleBackwardArgs>;

IplrSpec begin(FunctionId<IplrDeltaRuleArgs> f, FunctionId<IplrDeltaRuleBackwardArgs> b, const char* doc) {
  IplrSpec s(f, b, kFamily);
  add_vectors(s);
  add_scale_and_output(s, "B T H V");
  add_delta_states(s, "N H K V", "");
  s.tolerance(0.008, {{"o", 0.007}}).flops(general_forward_flops, general_backward_flops).doc(doc, kSource);
  return s;
}

DplrSpec begin(FunctionId<DplrDeltaRuleArgs> f, FunctionId<DplrDeltaRuleBackwardArgs> b, const char* doc) {
  DplrSpec s(f, b, kFamily);
  add_vectors(s);
  s.in("gk", &DplrDeltaRuleArgs::gk, "B T H K", &DplrDeltaRuleBackwardArgs::dgk,
       gate_input("log gate per key channel"));
  add_scale_and_output(s, "B T H V");
  add_delta_states(s, "N H K V", "");
  s.tolerance(0.008, {{"o", 0.007}}).flops(general_forward_flops, general_backward_flops).doc(doc, kSource);
  return s;
}

}  // namespace

void register_generalized_delta_rule_spec(Registry& r) {
  {
    using A = IplrDeltaRuleArgs;
    IplrSpec s = begin(kChunkIplrDeltaRule, kChunkIplrDeltaRuleBackward,
                       "Identity plus rank one, chunkwise: for training and prefill.");
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    add_chunk_size(s, &A::chunk_size);
    r.add(s);
  }
  {
    using A = IplrDeltaRuleArgs;
    IplrSpec s = begin(kFusedRecurrentIplrDeltaRule, kFusedRecurrentIplrDeltaRuleBackward,
                       "Identity plus rank one, token by token: for decoding and short sequences.");
    s.max_dim("K", 0).without("cu_seqlens_cpu", &A::cu_seqlens_cpu).without("chunk_size", &A::chunk_size, 64);
    s.positive("scale");
    r.add(s);
  }
  {
    using A = DplrDeltaRuleArgs;
    DplrSpec s = begin(kChunkDplrDeltaRule, kChunkDplrDeltaRuleBackward,
                       "Diagonal plus rank one, chunkwise: for training and prefill.");
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    s.flag("chunk_size", &A::chunk_size, {.def = std::int64_t{16}, .min = 16, .max = 64, .power_of_two = true},
           "most tokens per chunk; changes rounding only");
    add_chunk_promises(s);
    s.flag("lower_bound", &A::lower_bound, "below 0: a promise that gk is at least this; changes no value");
    s.without("reverse", &A::reverse);
    s.negative("lower_bound");
    r.add(s);
  }
  {
    using A = DplrDeltaRuleArgs;
    DplrSpec s = begin(kFusedRecurrentDplrDeltaRule, kFusedRecurrentDplrDeltaRuleBackward,
                       "Diagonal plus rank one, token by token: for decoding and short sequences.");
    add_reverse(s, &A::reverse);
    s.max_dim("K", 0).without("cu_seqlens_cpu", &A::cu_seqlens_cpu).without("chunk_size", &A::chunk_size, 16);
    s.without("safe_gate", &A::safe_gate).without("lower_bound", &A::lower_bound);
    s.without("disable_recompute", &A::disable_recompute);
    r.add(s);
  }
}

}  // namespace fla
