#include "fla/ops/mesa_net/mesa_net.h"
#include "fla/ops/spec/delta_spec.h"

namespace fla {

namespace {

constexpr const char* kSource =
    "von Oswald et al., MesaNet: Sequence Modeling by Locally Optimal Test-Time Training, 2025";

// The least that any form needs, token by token: 30 steps that multiply with a state, two states to change, one to read.
// How many steps the backward's exact solves take depends on the data: counted are two of each, the states once more and
// the gradients' products with them.
double least_flops(const Dims& d, double steps, double others) {
  const double rows = static_cast<double>(d["B"] * d["T"] * d["H"]), K = static_cast<double>(d["K"]);
  return rows * (2.0 * steps + 2.0 * others) * K * K;
}
double forward_flops(const Dims& d) { return least_flops(d, 30.0, 3.0); }
double backward_flops(const Dims& d) { return least_flops(d, 4.0, 10.0); }

// How the solve went, per token.
template <typename A, typename G>
void add_statistics(OpSpec<A, G>& s, std::string_view dims) {
  ArgOptions o = {.types = Types::Acc, .requested_by = "output_cg_statistics"};
  o.doc = "steps with a residual to reduce: 0 for a zero query, else max_CG_iteration";
  s.out("cg_iterations", &A::cg_iterations, dims, nullptr, o);
  o.doc = "length of the residual after the last step";
  s.out("cg_residual", &A::cg_residual, dims, nullptr, o);
  s.output_flag("output_cg_statistics", "return the solve's step counts and residuals");
}

// A regulariser must be above 0.
Gen regulariser() { return {.kind = Gen::Kind::AbsNormal}; }

}  // namespace

void register_mesa_net_spec(Registry& r) {
  {
    using A = MesaNetArgs;
    using G = MesaNetBackwardArgs;
    OpSpec<A, G> s(kChunkMesaNet, kChunkMesaNetBackward, "mesa_net");
    s.in("q", &A::q, "B T H K", &G::dq, {.gen = {.scale = 0.1}, .doc = "queries, not scaled"})
        .in("k", &A::k, "B T H K", &G::dk, {.gen = unit_rows(), .doc = "keys, of unit length"})
        .in("v", &A::v, "B T H K", &G::dv, {.gen = {.scale = 0.1}, .doc = "values, as wide as keys"})
        .in("g", &A::g, "B T H", &G::dg, gate_input("log decay"))
        .in("beta", &A::beta, "B T H", &G::dbeta, strength_input("weight of a token"))
        .in("lamb", &A::lamb, "H K", &G::dlamb,
            {.types = Types::Float,
             .gen = regulariser(),
             .doc = "diagonal regulariser, above 0; 0.25 or more advised"});
    const ArgOptions state = extra_input("absent = zeros", Types::Acc);
    ArgOptions moment = extra_input("symmetric, positive semidefinite; absent = zeros", Types::Acc);
    moment.gen.kind = Gen::Kind::Moment;
    const ArgOptions last = {.types = Types::Acc, .requested_by = "output_final_state", .doc = "after the last token"};
    s.opt_in("h_kk_init", &A::h_kk_init, "N H K K", &G::dh_kk0, moment)
        .opt_in("h_kv_init", &A::h_kv_init, "N H K K", &G::dh_kv0, state)
        .out("o", &A::o, "B T H K", &G::do_, {.doc = "output"})
        .out("h_kk_final", &A::h_kk_final, "N H K K", &G::dh_kkt, last)
        .out("h_kv_final", &A::h_kv_final, "N H K K", &G::dh_kvt, last)
        .output_flag("output_final_state", "return both states after the last token");
    add_statistics(s, "B T H");
    s.flag("max_CG_iteration", &A::max_CG_iteration, {.def = std::int64_t{30}, .min = 1, .max = 4096},
           "steps of conjugate gradients, always all of them")
        .opt_in(
            "cu_seqlens", &A::cu_seqlens, "N+1", nullptr,
            {.types = Types::Index, .gen = {.kind = Gen::Kind::None}, .doc = "boundaries of packed sequences, B = 1"});
    add_l2norm(s, &A::use_qk_l2norm_in_kernel);
    add_host_boundaries(s, &A::cu_seqlens_cpu);
    s.max_dim("K", 128).tolerance(0.008, {{"o", 0.006}, {"dlamb", 0.015}}).flops(forward_flops, backward_flops);
    s.doc("MesaNet, chunkwise: for training and prefill.", kSource);
    r.add(s);
  }
  {
    using A = MesaNetStepArgs;
    // No gradient, so no backward is registered.
    OpSpec<A, A> s(kMesaNetDecodingOneStep, FunctionId<A>{""}, "mesa_net");
    s.in("q", &A::q, "B H K", nullptr, {.gen = {.scale = 0.1}, .doc = "query, not scaled"})
        .in("k", &A::k, "B H K", nullptr, {.gen = unit_rows(), .doc = "key, of unit length"})
        .in("v", &A::v, "B H V", nullptr, {.gen = {.scale = 0.1}, .doc = "value"})
        .in("g", &A::g, "B H", nullptr, gate_input("log decay"))
        .in("lamb", &A::lamb, "H K", nullptr,
            {.types = Types::Float, .gen = regulariser(), .doc = "diagonal regulariser, above 0"})
        .in("beta", &A::beta, "B H", nullptr, strength_input("weight of the token"))
        .in("prev_h_kk", &A::prev_h_kk, "B H K K", nullptr,
            {.types = Types::Acc, .gen = {.kind = Gen::Kind::Moment}, .doc = "symmetric, positive semidefinite"})
        .in("prev_h_kv", &A::prev_h_kv, "B H K V", nullptr, {.types = Types::Acc, .doc = "the other state"})
        .out("o", &A::o, "B H V", nullptr, {.doc = "output"})
        .out("h_kk", &A::h_kk, "B H K K", nullptr, {.types = Types::Acc, .doc = "after the token"})
        .out("h_kv", &A::h_kv, "B H K V", nullptr, {.types = Types::Acc, .doc = "after the token"});
    add_statistics(s, "B H");
    s.flag("max_CG_iteration", &A::max_CG_iteration, {.def = std::int64_t{30}, .min = 1, .max = 4096},
           "steps of conjugate gradients, always all of them");
    s.max_dim("K", 128).max_dim("V", 128).tolerance(0.005).family_export();
    s.doc("MesaNet, one token: for decoding.", kSource);
    FunctionSpec f = s.take_forward();
    f.backward.clear();
    r.add_function(std::move(f));
  }
}

}  // namespace fla
