// Values at the ends of what a call may hold: gates so strong that their gradients are tiny, gate parameters and rows
// beyond what an exponential or a square can hold. Wherever the right answer is a number, it is expected.
#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

bool is_gate(const ArgSpec& a) {
  return a.role == Role::Input && a.grad &&
         (a.gen.log_gate() || (a.gen.kind == Gen::Kind::None && a.name.starts_with('g')));
}

// The tensor over the reference's rms, so that neither the floor nor the epsilon of R excuses a small one.
Buffer relative_to(double rms, const TensorView& t) {
  Buffer b(DType::F64, {t.dims().begin(), t.dims().end()});
  std::vector<double> x = tools::values(t);
  for (double& v : x) v /= rms;
  tools::assign(b.view(), x);
  return b;
}

void expect_relative(const Case& c, const std::string& backend, const std::set<std::string>& inputs) {
  const Outcome want = (c.options().dtype == DType::F32 ? c : c.widen(DType::F32)).run_backward(reference());
  const Outcome got = c.run_backward(context(backend));
  if (!want.ok()) return expect_ok(want, c.text());
  if (!got.ok()) return expect_ok(got, backend + ": " + c.text());
  count_call(true);
  for (const auto& input : inputs) {
    const std::string name = "grad." + input;
    const double rms = tools::rms(want[name]);
    ASSERT_GT(rms, 0.0) << c.text() << ": " << name;
    const Buffer x = relative_to(rms, want[name]), y = relative_to(rms, got[name]);
    tools::Limits limit = limits(c, name);
    limit.floor = limit.zero = 0.0;
    const tools::Difference d = tools::compare(x.view(), y.view(), limit);
    EXPECT_TRUE(d.ok) << backend << ": " << c.text() << "\n  " << name << " of rms " << rms << ": " << d.reason;
  }
}

// The gradient of a gate is as small as the decay: it is no difference of what is not.
void GateGradients(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const DType t : {DType::F32, DType::BF16}) {
      const Case plain = with_states(make_case(e.spec.name, sizes(1, 70, 2, 20, 17), {.dtype = t}));
      std::vector<Case> cases = {plain};
      for (const auto& a : e.spec.args)
        if (is_gate(a) && !plain.has(a.name)) cases.push_back(with_input(plain, a.name));
      for (const auto& f : e.spec.flags)
        if (f.name == "reverse") cases.push_back(plain.flag("reverse", true));
      for (const Case& of : cases)
        for (const double gate : {-5.0, -12.0, -20.0, -40.0}) {
          Case c = of;
          std::set<std::string> names;
          for (const auto& a : e.spec.args)
            if (is_gate(a) && c.has(a.name)) {
              c = c.fill(a.name, gate);
              names.insert(a.name);
            }
          expect_relative(c, backend, names);
        }
    }
}

// The same of a raw gate, and of its parameters.
void RawGateGradients(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Case plain = with_states(make_case(e.spec.name, sizes(1, 70, 2, 20, 17)));
    const Case raw = completed(plain.flag("use_gate_in_kernel", true), "use_gate_in_kernel").with("dt_bias");
    for (const double gate : {-5.0, -12.0, -20.0, -40.0}) {
      const std::set<std::string> names = {"g", "A_log", "dt_bias"};
      expect_relative(raw.fill("A_log", std::log(-gate)).fill("g", 1.0).fill("dt_bias", 0.0), backend, names);
      if (!raw.has_flag("lower_bound")) continue;
      for (const double y : {-2.0, 2.0, 12.0})
        expect_relative(raw.flag("lower_bound", gate).fill("A_log", 0.0).fill("g", y).fill("dt_bias", 0.0), backend,
                        names);
    }
  }
}

// e^{A_log} and what it multiplies leave fp32, their product need not.
void GateParameters(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Case plain = with_states(make_case(e.spec.name, sizes(1, 40, 2, 20, 17)));
    const Case raw = completed(plain.flag("use_gate_in_kernel", true), "use_gate_in_kernel").with("dt_bias");
    std::vector<Case> cases = {raw};
    if (raw.has_flag("lower_bound"))
      for (const double bound : {-5.0, -100.0}) cases.push_back(raw.flag("lower_bound", bound));
    for (const Case& c : cases) {
      for (const double A : {-1e30, -1000.0, -200.0, 80.0, 87.5, 88.0, 95.0, 700.0, 1e4, 1e30})
        for (const double bias : {0.0, 1e4, -1e4, 1e30, -1e30}) {
          if (A == -bias) continue;  // what is left of their sum in fp32 is no gate
          SCOPED_TRACE("A_log " + std::to_string(A) + ", dt_bias " + std::to_string(bias));
          expect_finite(c.fill("A_log", A).fill("dt_bias", bias), backend);
        }
      for (const double bias : {100.0, -100.0, 1e30, -1e30}) {
        SCOPED_TRACE("dt_bias " + std::to_string(bias));
        expect_finite(c.fill("dt_bias", bias), backend);
      }
      // Ordinary gates from factors that are none; of numbers whose sums are exact in fp32, as there is no gate otherwise.
      std::vector<double> coarse = tools::values(c.input("g"));
      for (double& x : coarse) x = std::round(x * 64.0) / 64.0;
      const Buffer g = tools::clone(c.input("g"));
      tools::assign(g.view(), coarse);
      for (const double A : {60.0, 88.5, 100.0}) {
        SCOPED_TRACE("A_log and -dt_bias " + std::to_string(A));
        expect_finite(c.with("g", g.view()).fill("A_log", A).fill("dt_bias", -A), backend);
      }
    }
  }
}

std::vector<std::string> norm_flags(const FunctionSpec& s) {
  std::vector<std::string> names;
  for (const auto& f : s.flags)
    if (f.set && f.retired_for.empty() && f.name.find("l2norm") != std::string::npos) names.push_back(f.name);
  return names;
}

// Rows that are brought to unit length, of any length: also where their squares leave fp32, above or below.
void RowsOfAnyLength(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const DType t : {DType::F32, DType::BF16})
      for (const Sizes& s : {sizes(1, 40, 2, 20, 17), sizes(1, 1, 2, 64, 64)}) {
        Case c = with_states(make_case(e.spec.name, s, {.dtype = t}));
        for (const auto& flag : norm_flags(e.spec)) c = completed(c.flag(flag, true), flag);
        for (const char* name : {"q", "k", "p"}) {
          if (!c.has(name)) continue;
          const TensorView x = c.input(name);
          Buffer b = tools::clone(x);
          // A solve by conjugate gradients takes a query whose square underflows for none.
          const int least = std::string(name) == "q" && c.has_flag("max_CG_iteration") ? -20 : -100;
          int power = 125;
          for (std::int64_t i = 0; i < x.shape[1]; ++i, power = power < least ? 125 : power - 19) {
            std::vector<double> row = tools::values(tools::slice(x, 1, i, 1));
            for (double& v : row) v = std::ldexp(std::clamp(v, -4.0, 4.0), power);
            tools::assign(tools::slice(b.view(), 1, i, 1), row);
          }
          c = c.with(name, b.view());
        }
        expect_finite(c, backend);
      }
}

bool has_gate_gradient(const FunctionSpec& s) {
  return !s.backward.empty() && std::ranges::any_of(s.args, [](const ArgSpec& a) { return is_gate(a); });
}
bool raw_gate(const FunctionSpec& s) { return s.find_flag("use_gate_in_kernel") != nullptr; }
bool raw_gate_gradient(const FunctionSpec& s) { return raw_gate(s) && !s.backward.empty(); }
bool has_norm(const FunctionSpec& s) { return !norm_flags(s).empty(); }

const bool registered = for_every_function("GateGradients", GateGradients, has_gate_gradient) &&
                        for_every_function("RawGateGradients", RawGateGradients, raw_gate_gradient) &&
                        for_every_backend("GateParameters", GateParameters, raw_gate) &&
                        for_every_function("RowsOfAnyLength", RowsOfAnyLength, has_norm);

}  // namespace
}  // namespace fla::gate
