// The delta-rule families: which are special cases of which, grouped value heads, keys that are not of unit length.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

Buffer map(const TensorView& x, const std::function<double(double)>& fn) {
  std::vector<double> values = tools::values(x);
  std::ranges::transform(values, values.begin(), fn);
  Buffer b(x.dtype, {x.dims().begin(), x.dims().end()});
  tools::assign(b.view(), values);
  return b;
}

// x[b, t, h, c] times y[b, t, h], or times y[b, t, h, c].
Buffer times(const TensorView& x, const TensorView& y, double sign = 1.0) {
  std::vector<double> a = tools::values(x);
  const std::vector<double> f = tools::values(y);
  const std::size_t per = a.size() / std::max<std::size_t>(f.size(), 1);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] *= sign * f[i / per];
  Buffer b(x.dtype, {x.dims().begin(), x.dims().end()});
  tools::assign(b.view(), a);
  return b;
}

// Outputs alone: the gradients belong to other inputs.
void expect_equal_outputs(const Case& a, const Case& b) {
  Outcome x = a.run(context("cpu")), y = b.run(context("cpu"));
  common(x, y);
  expect_close(x, y, kClose, a.text() + " = " + b.text());
}

const std::string kForms[] = {"chunk_", "fused_recurrent_"};

TEST(Kda, EqualChannelsAreGatedDeltaRule) {
  for (const std::string& form : kForms)
    for (const GateRegime r : tools::kGateRegimes) {
      const Case c = make_case(form + "gated_delta_rule", sizes(2, 70, 2, 20, 17), {.regime = r}).with("initial_state");
      const Buffer g = per_channel(c.input("g"), 20);
      Case k = make_case(form + "kda", sizes(2, 70, 2, 20, 17)).with("initial_state");
      for (const char* same : {"q", "k", "v", "beta", "initial_state"}) k = k.with(same, c.input(same));
      k = k.with("g", g.view());
      expect_equal_families(c, k, {{"grad.g", "the head's is the sum over channels"}, {"out.h", "only one has it"}});
      const Outcome dc = c.run_backward(context("cpu")), dk = k.run_backward(context("cpu"));
      if (!dc.ok() || !dk.ok()) return expect_ok(dc, c.text()), expect_ok(dk, k.text());
      const std::vector<double> channels = tools::values(dk["grad.g"]);
      std::vector<double> sums(channels.size() / 20, 0.0);
      for (std::size_t i = 0; i < channels.size(); ++i) sums[i / 20] += channels[i];
      Buffer summed(DType::F32, dc.tensors.at("grad.g").shape());
      tools::assign(summed.view(), sums);
      const auto d = tools::compare(dc["grad.g"], summed.view(), {.R = 1e-4});
      EXPECT_TRUE(d.ok) << k.text() << ": sum of dg: " << d.reason;
    }
}

TEST(GatedDeltaRule, GateZeroIsTheDeltaRule) {
  for (const std::string& form : kForms) {
    const Case c = make_case(form + "gated_delta_rule", sizes(2, 70, 2, 20, 17)).with("initial_state");
    const Case d = c.without("g").as(form + "delta_rule");
    expect_equal_families(c.fill("g", 0.0), d, {{"grad.g", "the delta rule has no gate"}});
  }
}

TEST(GeneralizedDeltaRule, IsTheDeltaRule) {  // a = k, b = -beta k, and v times beta
  for (const std::string& form : kForms) {
    const Case c = make_case(form + "delta_rule", sizes(2, 70, 2, 20, 17)).with("initial_state");
    const Buffer b = times(c.input("k"), c.input("beta"), -1.0), v = times(c.input("v"), c.input("beta"));
    Case i = make_case(form + "iplr_delta_rule", sizes(2, 70, 2, 20, 17)).with("initial_state");
    for (const char* same : {"q", "k", "initial_state"}) i = i.with(same, c.input(same));
    i = i.with("a", c.input("k")).with("b", b.view()).with("v", v.view());
    expect_equal_outputs(c, i);
    Case d = make_case(form + "dplr_delta_rule", sizes(2, 70, 2, 20, 17)).with("initial_state");
    for (const char* same : {"q", "k", "initial_state"}) d = d.with(same, c.input(same));
    d = d.with("a", c.input("k")).with("b", b.view()).with("v", v.view()).fill("gk", 0.0);
    expect_equal_outputs(c, d);
  }
}

TEST(GeneralizedDeltaRule, IsKda) {  // a reads the undecayed state, so it carries the decay
  for (const std::string& form : kForms)
    for (const GateRegime r : {GateRegime::Plain, GateRegime::Strong, GateRegime::Extreme}) {
      const Case c = make_case(form + "kda", sizes(1, 70, 2, 20, 17), {.regime = r}).with("initial_state");
      const Buffer decay = map(c.input("g"), [](double g) { return std::exp(g); });
      const Buffer a = times(c.input("k"), decay.view()), b = times(c.input("k"), c.input("beta"), -1.0),
                   v = times(c.input("v"), c.input("beta"));
      Case d = make_case(form + "dplr_delta_rule", sizes(1, 70, 2, 20, 17)).with("initial_state");
      for (const char* same : {"q", "k", "initial_state"}) d = d.with(same, c.input(same));
      d = d.with("a", a.view()).with("b", b.view()).with("v", v.view()).with("gk", c.input("g"));
      expect_equal_outputs(c, d);
    }
}

TEST(Rwkv7, IsTheGeneralizedDeltaRule) {
  for (const std::string& form : kForms) {
    const Case c = make_case(form + "rwkv7", sizes(2, 70, 2, 20, 17)).with("initial_state").flag("scale", 0.3);
    Case d = make_case(form + "dplr_delta_rule", sizes(2, 70, 2, 20, 17)).with("initial_state");
    for (const char* same : {"k", "v", "a", "b", "initial_state"}) d = d.with(same, c.input(same));
    d = d.with("q", c.input("r")).with("gk", c.input("w")).flag("scale", 0.3);
    expect_equal_families(c, d, {});
    Outcome x = c.run_backward(context("cpu")), y = d.run_backward(context("cpu"));
    if (!x.ok() || !y.ok()) return expect_ok(x, c.text()), expect_ok(y, d.text());
    for (const auto& [ours, theirs] : {std::pair{"grad.r", "grad.q"}, std::pair{"grad.w", "grad.gk"}})
      EXPECT_TRUE(tools::compare(y[theirs], x[ours], {.R = kClose}).ok) << c.text() << ": " << ours;
  }
}

// x = 1 makes every multiplier 1, whatever the statistics are.
TEST(Precond, WithoutSquashingIsThePlainRule) {
  for (const std::string& form : kForms)
    for (const auto& [precond, plain] :
         {std::pair<std::string, std::string>{"precond_gated_delta_rule", "gated_delta_rule"},
          std::pair<std::string, std::string>{"precond_kda", "kda"}}) {
      const Case p = make_case(form + precond, sizes(2, 70, 2, 20, 17)).with("initial_state").flag("x", 1.0);
      Case c = make_case(form + plain, sizes(2, 70, 2, 20, 17)).with("initial_state");
      for (const char* same : {"q", "k", "v", "g", "beta", "initial_state"}) c = c.with(same, p.input(same));
      // The preconditioned forms bring q and k to unit length unless told otherwise; the chunk form of kda always.
      expect_equal_outputs(p, c.flag("use_qk_l2norm_in_kernel", true));
    }
}

// A value head j reads key head j / (HV / H): the same as repeating the key heads.
void GroupedHeads(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const std::int64_t group : {2, 3, 4, 8}) {
      Sizes s = sizes(2, 37, 2, 20, 12);
      s.HV = 2 * group;
      const bool has_gradients = !e.spec.backward.empty();
      Case c = with_states(make_case(e.spec.name, s));
      if (has_gradients) c = c.prepared();
      Sizes all = s;
      all.H = s.HV;
      Case r = with_states(make_case(e.spec.name, all));
      for (const auto& name : c.input_names()) {
        const ArgSpec& a = *e.spec.find_arg(name);
        const auto axis = std::ranges::find(a.dims, "H");
        if (axis == a.dims.end()) {
          r = r.with(name, c.input(name));
          continue;
        }
        const int at = static_cast<int>(axis - a.dims.begin());
        const Buffer b(c.input(name).dtype, {r.input(name).dims().begin(), r.input(name).dims().end()});
        for (std::int64_t h = 0; h < s.HV; ++h)
          tools::assign(tools::slice(b.view(), at, h, 1), tools::values(tools::slice(c.input(name), at, h / group, 1)));
        r = r.with(name, b.view());
      }
      for (const char* output : {"o", "final_state"})
        if (has_gradients && e.spec.find_arg(output) != nullptr) r = r.with_upstream(output, c.upstream(output));
      const Context& ctx = context(backend);
      Outcome x = c.run(ctx), y = r.run(ctx);
      for (const char* per_key_head : {"out.final_A_state"}) {
        x.tensors.erase(per_key_head);
        y.tensors.erase(per_key_head);
      }
      expect_close(y, x, kClose, c.text() + " = repeated heads");
      if (!has_gradients) continue;
      Outcome dx = c.run_backward(ctx), dy = r.run_backward(ctx);
      std::erase_if(dx.tensors, [&](const auto& t) { return dy.tensors.at(t.first).shape() != t.second.shape(); });
      std::erase_if(dy.tensors, [&](const auto& t) { return !dx.has(t.first); });
      expect_close(dy, dx, 1e-4, c.text() + " = repeated heads, gradients");
    }
}

bool erases(const Case& c) { return c.has("k") && c.has("beta") && c.input("beta").ndim == 3; }

// The first key at every token.
Buffer parallel(const TensorView& k) {
  Buffer b = tools::clone(k);
  const auto first = tools::values(tools::slice(k, 1, 0, 1));
  for (std::int64_t t = 1; t < k.shape[1]; ++t) tools::assign(tools::slice(b.view(), 1, t, 1), first);
  return b;
}

Buffer of_norm(const TensorView& k, double norm) {
  std::vector<double> x = tools::values(k);
  const std::size_t K = static_cast<std::size_t>(k.shape[3]);
  for (std::size_t row = 0; row < x.size(); row += K) {
    double squares = 0;
    for (std::size_t i = row; i < row + K; ++i) squares += x[i] * x[i];
    for (std::size_t i = row; i < row + K; ++i) x[i] *= norm / std::sqrt(squares);
  }
  Buffer b = tools::clone(k);
  tools::assign(b.view(), x);
  return b;
}

// Parallel and repeated keys, zero rows, beta |k|^2 up to 2: the triangular system is as far from the identity as it
// gets while the recurrence stays bounded.
void NearSingular(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Case c = with_states(make_case(e.spec.name, sizes(1, 100, 2, 20, 17)));
    if (!erases(c)) continue;
    const Buffer repeated = parallel(c.input("k")), half = tools::clone(c.input("k")),
                 zero = tools::clone(c.input("k"));
    for (std::int64_t t = 1; t < c.input("k").shape[1]; ++t) {
      if (t % 2 == 1)
        tools::assign(tools::slice(half.view(), 1, t, 1), tools::values(tools::slice(half.view(), 1, t - 1, 1)));
      if (t % 3 == 1) tools::fill(tools::slice(zero.view(), 1, t, 1), 0.0);
    }
    for (const Buffer* k : {&repeated, &half, &zero})
      for (const double beta : {1.0, 1.999}) expect_finite(c.with("k", k->view()).fill("beta", beta), backend);
  }
}

// Keys of norm 20, not brought to unit length: a token multiplies the state along its key by 1 - 400 beta. A small beta
// or a strong gate holds that.
void LongKeys(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Case c = with_states(make_case(e.spec.name, sizes(1, 100, 2, 20, 17)));
    if (!erases(c)) continue;
    const Buffer random = of_norm(c.input("k"), 20), same = parallel(random.view());
    for (const Buffer* keys : {&random, &same}) {
      const Case x = c.with("k", keys->view());
      for (const double turn : {1.0, 1.999}) expect_finite(x.fill("beta", turn / 400), backend);
      for (const std::string& g : gates(x)) expect_finite(x.fill("beta", 1.0).fill(g, -13), backend);
    }
  }
}

// Without either the state grows by 399 a token and leaves fp32 after 14. What comes before that is right, whatever
// comes after it in the same chunk.
void Growing(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    Case c = with_states(make_case(e.spec.name, sizes(1, 100, 2, 20, 17)));
    if (!erases(c)) continue;
    const Buffer k = parallel(of_norm(c.input("k"), 20).view());
    c = c.with("k", k.view()).fill("beta", 1.0);
    for (const std::string& g : gates(c)) c = c.fill(g, 0.0);
    for (const std::int64_t T : {1, 2, 5}) expect_finite(c.tokens(0, T), backend);
    const Outcome want = c.run(reference()), got = c.run(context(backend));
    const std::vector<double> a = tools::values(want["out.o"]), b = tools::values(got["out.o"]);
    for (std::size_t i = 0; i < a.size(); ++i)
      ASSERT_TRUE(!(std::abs(a[i]) <= 1e30) || std::isfinite(b[i]))
          << c.text() << ": o[" << i << "], expected " << a[i];
  }
}

// A raw gate at an end of its range has a log gate and finite gradients.
void EndsOfRawGates(const Registry::Entry& e) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const auto& backend : backends(e)) {
    const Case plain = with_states(make_case(e.spec.name, sizes(1, 70, 2, 20, 17)));
    std::vector<Case> cases = {completed(plain.flag("use_gate_in_kernel", true), "use_gate_in_kernel")};
    if (plain.has_flag("lower_bound")) cases.push_back(cases[0].flag("lower_bound", -5.0));
    for (const Case& c : cases)
      for (const double end : {-kInfinity, 1e30, kInfinity}) {
        std::vector<double> x = tools::values(c.input("g"));
        for (std::size_t i = 3; i < x.size(); i += 5) x[i] = end;
        const Buffer g = tools::clone(c.input("g"));
        tools::assign(g.view(), x);
        expect_finite(c.with("g", g.view()), backend);
      }
  }
}

bool grouped(const FunctionSpec& s) { return takes_dim(s, "HV"); }
bool one_key(const FunctionSpec& s) {
  static const std::set<std::string> families = {
      "delta_rule",  "gated_delta_rule",   "kda", "comba", "precond_gated_delta_rule",
      "precond_kda", "gated_delta_product"};
  return families.contains(s.operation);
}
bool raw_gate(const FunctionSpec& s) { return s.find_flag("use_gate_in_kernel") != nullptr; }
// Comba erases from the undecayed state, exp(g) - 400 beta along its key, which no gate holds.
bool held_by_gates(const FunctionSpec& s) { return one_key(s) && s.operation != "comba"; }

const bool registered = for_every_function("GroupedHeads", GroupedHeads, grouped) &&
                        for_every_function("NearSingular", NearSingular, one_key) &&
                        for_every_function("LongKeys", LongKeys, held_by_gates) &&
                        for_every_function("Growing", Growing, one_key) &&
                        for_every_function("EndsOfRawGates", EndsOfRawGates, raw_gate);

}  // namespace
}  // namespace fla::gate
