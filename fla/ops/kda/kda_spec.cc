#include "fla/ops/kda/kda.h"
#include "fla/ops/spec/delta_spec.h"
#include "fla/ops/spec/pool_spec.h"

namespace fla {

namespace {

using A = KdaArgs;
using G = KdaBackwardArgs;
using Spec = OpSpec<A, G>;

constexpr const char* kSource = "Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, 2025";

Status check(const A& a, const Dims& d) {
  if (Status s = check_head_groups(d); !s) return s;
  if (Status s = check_channel_gate(a, false); !s) return s;
  if (Status s = check_beta_flags(a.beta, a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval); !s) return s;
  return check_intermediate_states(a.h, a.disable_recompute);
}

Spec begin(FunctionId<A> f, FunctionId<G> b, bool chunk, const char* doc) {
  Spec s(f, b, "kda");
  add_queries_keys(s);
  add_values(s, "B T HV V");
  s.in("g", &A::g, "B T HV K", &G::dg, gate_input("log gate per key channel, or its raw input"));
  if (chunk) {
    add_beta(s, "HV");
  } else {
    add_recurrent_beta(s, "HV", true);
  }
  add_channel_gate_parameters(s, "HV");
  add_scale_and_output(s, "B T HV V");
  add_delta_states(s, "N HV K V", "state_v_first", chunk ? Types::Acc : Types::Float);
  add_l2norm(s, &A::use_qk_l2norm_in_kernel);
  add_channel_gate_flags(s);
  add_beta_flags(s);
  add_v_first(s, &A::state_v_first);
  s.tolerance(0.008, {{"o", 0.005}, {"final_state", 0.005}, {"dg", 0.02}, {"dbeta", 0.02}});
  s.flops(delta_forward_flops, delta_backward_flops);
  s.check([](const A& a, const Dims& d) { return check(a, d); });
  s.doc(doc, kSource);
  return s;
}

// What the forms over a pool share.
template <typename S>
void add_inputs(OpSpec<S>& s) {
  ArgOptions beta = strength_input("write strength, also per value channel"),
             A_log = extra_input("gate parameter, with use_gate_in_kernel"),
             bias = extra_input("gate bias, row-major (head, channel), with use_gate_in_kernel; absent = 0");
  beta.other_dims = {"B T HV V"};
  A_log.other_dims = {"1 1 HV 1"};
  bias.other_dims = {"HV K"};
  s.in("q", &S::q, "B T H K", nullptr, {.doc = "queries"})
      .in("k", &S::k, "B T H K", nullptr, {.gen = unit_rows(), .doc = "keys"})
      .in("v", &S::v, "B T HV V", nullptr, {.doc = "values"})
      .in("g", &S::g, "B T HV K", nullptr, gate_input("log gate per key channel, or its raw input"))
      .in("beta", &S::beta, "B T HV", nullptr, beta)
      .opt_in("A_log", &S::A_log, "HV", nullptr, A_log)
      .opt_in("dt_bias", &S::dt_bias, "HV*K", nullptr, bias)
      .flag("scale", &S::scale, "multiplies q; default K^(-1/2)")
      .out("o", &S::o, "B T HV V", nullptr, {.doc = "output"});
  add_l2norm(s, &S::use_qk_l2norm_in_kernel);
  add_channel_gate_flags(s);
  add_beta_flags(s);
  s.flag("state_v_first", &S::state_v_first, false, "states have V before K");
  s.tolerance(
      0.008,
      {{"o", 0.005}, {"state_out", 0.005}, {"step_states", 0.005}, {"state_pool", 0.005}, {"final_state", 0.005}});
}

template <typename S>
Status check_gates(const S& a, const Dims& d) {
  if (Status s = check_head_groups(d); !s) return s;
  if (Status s = check_unpromised_gate(a, false); !s) return s;
  return check_beta_flags(a.beta, a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval);
}

OpSpec<KdaStepArgs> step() {
  using S = KdaStepArgs;
  OpSpec<S> s(kKdaStep, "kda");
  add_inputs(s);
  add_state_pool(s, "HV", "state_v_first");
  s.max_dim("K", 0).check([](const S& a, const Dims& d) {
    if (Status r = check_gates(a, d); !r) return r;
    return check_state_pool(a, d);
  });
  s.doc("Kimi Delta Attention on a pool of states, 1 to 8 tokens a sequence: for serving.", kSource);
  return s;
}

Status check_pool(const KdaPoolArgs& a, const Dims& d) {
  if (Status s = check_gates(a, d); !s) return s;
  if (a.ssm_state_indices && a.ssm_state_indices.ndim == 1) {
    const char* needs = "with one axis it is for one token per sequence, ";
    if (!a.cu_seqlens && d["T"] > 1) return refused("ssm_state_indices", needs + ("got " + std::to_string(d["T"])));
    for (std::int64_t n = 0; a.cu_seqlens && a.cu_seqlens.device.type == DeviceType::Cpu && n < d["N"]; ++n)
      if (const auto L = sequence_at(a.cu_seqlens, d["T"], n).length; L > 1)
        return refused("ssm_state_indices", needs + ("sequence " + std::to_string(n) + " has " + std::to_string(L)));
  }
  return check_slots({"initial_state", "ssm_state_indices", "num_accepted_tokens"},
                     {a.ssm_state_indices, a.num_accepted_tokens, {}}, a.cu_seqlens, d, a.inplace_final_state,
                     !a.state_pool || a.state_pool.data == a.initial_state.data);
}

OpSpec<KdaPoolArgs> pool() {
  using S = KdaPoolArgs;
  OpSpec<S> s(kFusedRecurrentKdaFwd, "kda");
  add_inputs(s);
  ArgOptions indices = slot_table("slots of each sequence, -1 first for padding; absent: sequence n has slot n");
  indices.other_dims = {"N S"};
  s.in("initial_state", &S::initial_state, "P HV K V", nullptr,
       {.types = Types::Acc, .swapped_by = "state_v_first", .doc = "pool of P slots; written in place by default"})
      .opt_in("cu_seqlens", &S::cu_seqlens, "N+1", nullptr,
              {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"})
      .opt_in("ssm_state_indices", &S::ssm_state_indices, "N", nullptr, indices)
      .opt_in("num_accepted_tokens", &S::num_accepted_tokens, "N", nullptr,
              slot_table("start from this column of ssm_state_indices, counted from 1; absent = 1"))
      .flag("inplace_final_state", &S::inplace_final_state, true, "states go back into the pool")
      .derive("F", [](const S& a, const Dims& d) {
        return a.ssm_state_indices ? d["B"] * d["T"] : a.cu_seqlens ? a.cu_seqlens.dim(0) - 1 : d["B"];
      });
  s.out("final_state", &S::final_state, "F HV K V", nullptr,
        {.types = Types::Acc,
         .requested_by = "output_final_state",
         .swapped_by = "state_v_first",
         .doc = "of each sequence; with ssm_state_indices after every token; not with inplace_final_state"})
      .only_when(
          "final_state", [](const S& a) { return !a.inplace_final_state; }, "inplace_final_state to be false")
      .output_flag("output_final_state", "return final_state, without inplace_final_state");
  s.out("state_pool", &S::state_pool, "P HV K V", nullptr,
        {.types = Types::Acc,
         .swapped_by = "state_v_first",
         .starts_as = "initial_state",
         .doc = "the pool after the call, with inplace_final_state"})
      .only_when(
          "state_pool", [](const S& a) { return a.inplace_final_state; }, "inplace_final_state");
  s.max_dim("K", 0).flops(step_flops, {}).family_export().check(check_pool);
  s.doc("Kimi Delta Attention, token by token on a pool of states: for serving.", kSource);
  return s;
}

}  // namespace

void register_kda_spec(Registry& r) {
  {
    Spec s = begin(kChunkKda, kChunkKdaBackward, true, "Kimi Delta Attention, chunkwise: for training and prefill.");
    add_chunk_promises(s);
    add_intermediate_states<A, G>(s, "HV", "state_v_first", [](const A& a) { return a.chunk_size; });
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    add_chunk_size(s, &A::chunk_size, 32, 64);
    r.add(s);
  }
  {
    Spec s = begin(kFusedRecurrentKda, kFusedRecurrentKdaBackward, false,
                   "Kimi Delta Attention, token by token: for decoding and short sequences.");
    s.max_dim("K", 0).without("safe_gate", &A::safe_gate).without("disable_recompute", &A::disable_recompute);
    s.without("h", &A::h).without("cu_seqlens_cpu", &A::cu_seqlens_cpu).without("chunk_size", &A::chunk_size, 64);
    r.add(s);
  }
  {
    OpSpec<KdaStepArgs> s = step();
    r.add(s);
  }
  {
    OpSpec<KdaPoolArgs> s = pool();
    r.add(s);
  }
}

}  // namespace fla
