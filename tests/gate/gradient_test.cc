// The references' own gradients against central differences, in double: what everything else is compared with must be
// right by itself.
#include <algorithm>
#include <cmath>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

// Other outputs (scores, states of every chunk) are constants of the backward.
bool differentiable(const FunctionSpec& spec, const std::string& output) {
  const FunctionSpec& backward = Registry::global().find(spec.backward)->spec;
  return std::ranges::any_of(backward.args,
                             [&](const ArgSpec& a) { return a.role == Role::Upstream && a.of == output; });
}

double loss(const Case& c) {
  const Outcome o = c.run(reference());
  if (!o.ok()) throw std::runtime_error(c.text() + ": " + o.problem());
  double sum = 0.0;
  for (const auto& [name, b] : o.tensors) {
    std::string of = name.substr(4);
    if (of.ends_with(".0")) of.resize(of.size() - 2);
    if (!differentiable(c.spec(), of)) continue;
    const std::vector<double> x = tools::values(b.view()), up = tools::values(c.upstream(of));
    for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * up[i];
  }
  return sum;
}

void expect_gradients(const Case& plain) {
  Case c = plain.prepared();
  double R = 1e-7;
  // The backward gives the gradient of the exact solve, of which conjugate gradients leave a residual of some 1e-3,
  // however long the query is: long ones make the gap small, those brought to unit length keep the page's limit.
  if (c.has_flag("max_CG_iteration")) {
    const bool unit = c.call()->flag_on("use_qk_l2norm_in_kernel");
    R = unit ? 5e-3 : 1e-5;
    std::vector<double> q = tools::values(c.input("q"));
    for (double& x : q) x *= unit ? 1.0 : 1e4;
    const Buffer b = tools::clone(c.input("q"));
    tools::assign(b.view(), q);
    c = c.with("q", b.view());
  }
  const Outcome analytic = c.run_backward(reference());
  if (!analytic.ok()) return expect_ok(analytic, c.text());
  int checked = 0;
  for (const auto& input : c.input_names()) {
    if (!c.spec().find_arg(input)->grad) continue;
    const std::string name = analytic.has("grad." + input) ? "grad." + input : "grad." + input + ".0";
    ASSERT_TRUE(analytic.has(name)) << c.text() << ": no gradient of " << input;
    const std::vector<double> x = tools::values(c.input(input));
    Buffer numeric(DType::F64, {c.input(input).dims().begin(), c.input(input).dims().end()});
    std::vector<double> slope(x.size()), expected = tools::values(analytic[name]);
    const std::vector<double> each = expected;
    // A symmetric matrix moves in both its places.
    const bool symmetric = c.spec().find_arg(input)->gen.kind == Gen::Kind::Moment;
    const auto width = static_cast<std::size_t>(c.input(input).dim(c.input(input).ndim - 1));
    constexpr double kStep = 1e-5;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t row = i / width, mirror = symmetric ? (row - row % width + i % width) * width + row % width : i;
      if (mirror != i) expected[i] += each[mirror];
      std::vector<double> moved = x;
      const Buffer b = tools::clone(c.input(input));
      moved[i] = x[i] + kStep;
      moved[mirror] = x[mirror] + kStep;
      tools::assign(b.view(), moved);
      const double up = loss(c.with(input, b.view()));
      moved[i] = x[i] - kStep;
      moved[mirror] = x[mirror] - kStep;
      tools::assign(b.view(), moved);
      slope[i] = (up - loss(c.with(input, b.view()))) / (2.0 * kStep);
      ++checked;
    }
    tools::assign(numeric.view(), slope);
    const Buffer exact = tools::clone(numeric.view());
    tools::assign(exact.view(), expected);
    const auto d = tools::compare(numeric.view(), exact.view(), {.R = R, .floor = 1e-8});
    EXPECT_TRUE(d.ok) << c.text() << "\n  " << name << " against central differences: " << d.reason;
  }
  EXPECT_GT(checked, 0) << c.text();
}

void NumericalGradient(const Registry::Entry& e) {
  const CaseOptions f64 = {.dtype = DType::F64, .seed = 5};
  const Case c = with_states(make_case(e.spec.name, sizes(2, 4, 2, 3, 2), f64));
  expect_gradients(c);
  if (takes(e.spec, "cu_seqlens"))
    expect_gradients(with_states(make_case(e.spec.name, packed({0, 3, 3, 4}, 2, 2, 3), f64)));
  for (const auto& f : e.spec.flags) {
    if (!f.set || !f.retired_for.empty()) continue;
    if (f.type == FlagSpec::Type::Bool)
      for (const bool v : {false, true}) expect_gradients(v ? completed(c.flag(f.name, v), f.name) : c.flag(f.name, v));
    if (f.type == FlagSpec::Type::Float)
      expect_gradients(
          completed(c.flag(f.name, f.sign == FlagSpec::Sign::Positive || f.min >= 0.0 ? 0.7 : -0.7), f.name));
  }
  for (const auto& a : e.spec.args) {  // optional differentiable inputs that the plain case leaves out
    if (a.role != Role::Input || !a.grad || a.required) continue;
    if (c.has(a.name))
      expect_gradients(c.without(a.name));
    else if (a.name.ends_with(".1"))
      expect_gradients((c.has_flag("normalize") ? c.flag("normalize", true) : c).with(a.name));
    else
      expect_gradients(with_input(c, a.name));
  }
  if (c.has_flag("reverse") && c.has_flag("normalize"))
    expect_gradients(c.flag("normalize", true).flag("reverse", true));
  if (c.takes("g_gamma")) expect_gradients(c.without("g").with("g_gamma"));
}

const bool registered = for_every_function("NumericalGradient", NumericalGradient,
                                           [](const FunctionSpec& s) { return !s.backward.empty(); });

}  // namespace
}  // namespace fla::gate
