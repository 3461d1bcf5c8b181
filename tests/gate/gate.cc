#include "tests/gate/gate.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "tests/gate/records.h"

namespace fla::gate {

namespace {

struct Topic {
  const char* name;
  FunctionTest test;
  bool (*applies)(const FunctionSpec&);
  enum class Judges : std::uint8_t { Function, Backends, Plugin } judges;
};

// Backends that are judged one by one; none: those of the CPU are, all in each test.
struct Judged {
  std::vector<std::string> backends;
  bool plugin = false;
};
Judged& judged_ones() {
  static Judged j;
  return j;
}
// The one that the running test judges; empty: those of the CPU.
std::string& judged() {
  static std::string name;
  return name;
}
int accepted_calls = 0, refused_calls = 0;  // of the running test

bool has_kernel(const Registry::Entry* e, const std::string& backend) {
  return e != nullptr && std::ranges::any_of(e->candidates, [&](const auto& c) {
           return c.backend->name == backend && c.kernel != nullptr;
         });
}

std::vector<Topic>& topics() {
  static std::vector<Topic> list;
  return list;
}

class FunctionCase : public ::testing::Test {
 public:
  FunctionCase(FunctionTest test, const Registry::Entry& e, std::string name, std::string backend)
      : test_(test), entry_(e), name_(std::move(name)), backend_(std::move(backend)) {}
  void TestBody() override {
    judged() = backend_;
    accepted_calls = refused_calls = 0;
    test_(entry_);
    if (backend_.empty()) return;
    RecordProperty("backend", backend_);
    RecordProperty("calls_taken", accepted_calls);
    RecordProperty("calls_refused", refused_calls);
    const bool none = accepted_calls == 0 && !HasFailure();
    const std::optional<Refusals> expected = recorded_refusals(backend_, name_);
    if (expected && !judged_ones().plugin && !recording()) {
      const std::string file = "tests/gate/records/refusals_" + backend_ + ".txt";
      if (refused_calls > expected->calls)
        ADD_FAILURE() << backend_ << " refused " << refused_calls << " calls, expected at most " << expected->calls
                      << " (" << file << "); where that is meant: fla gate ... --record";
      else if (none && !expected->none_taken)
        ADD_FAILURE() << backend_ << " took none of this test's calls, and " << file << " does not say so";
    }
    if (none && !HasFailure()) GTEST_SKIP() << backend_ << " took none of this test's calls";
  }

 private:
  FunctionTest test_;
  const Registry::Entry& entry_;
  const std::string name_, backend_;
};

struct Worst {
  double R = 0.0, block_R = 0.0;
  std::string where;
};
std::map<std::string, Worst>& worst() {
  static std::map<std::string, Worst> w;
  return w;
}

}  // namespace

bool for_every_function(const char* topic, FunctionTest test, bool (*applies)(const FunctionSpec&)) {
  topics().push_back({topic, test, applies, Topic::Judges::Function});
  return true;
}

bool for_every_backend(const char* topic, FunctionTest test, bool (*applies)(const FunctionSpec&)) {
  topics().push_back({topic, test, applies, Topic::Judges::Backends});
  return true;
}

bool for_every_plugin(const char* topic, FunctionTest test) {
  topics().push_back({topic, test, nullptr, Topic::Judges::Plugin});
  return true;
}

void judge_plugin(const std::string& backend) { judged_ones() = {{backend}, true}; }

void judge_device(DeviceType device) {
  std::set<std::string> names;
  for (const Registry::Entry* e : Registry::global().entries())
    for (const auto& c : e->candidates)
      if (c.kernel != nullptr && c.backend->device == device) names.insert(c.backend->name);
  judged_ones() = {{names.begin(), names.end()}, false};
}

bool judges_one_by_one() { return !judged_ones().backends.empty(); }
bool judges_device() { return !judged_ones().backends.empty() && !judged_ones().plugin; }

namespace {

void register_test(const Topic& t, const Registry::Entry& e, const std::string& backend) {
  const std::string suite = camel(e.spec.operation);
  const std::string suffix = backend.empty() || judged_ones().plugin || backend == "cuda" ? "" : "/" + backend;
  const std::string name = e.spec.name + "/" + t.name + suffix, full = suite + "." + name;
  belongs_to(full, e.spec.name);
  ::testing::RegisterTest(
      suite.c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
      [t, &e, full, backend]() -> ::testing::Test* { return new FunctionCase(t.test, e, full, backend); });
}

}  // namespace

void register_function_tests() {
  std::vector<std::string> who = judged_ones().backends;
  const bool all_of_cpu = who.empty();
  if (all_of_cpu) who.emplace_back();
  for (const Registry::Entry* e : Registry::global().entries()) {
    if (e->spec.is_backward()) continue;
    for (const Topic& t : topics()) {
      if (t.judges == (all_of_cpu ? Topic::Judges::Plugin : Topic::Judges::Function)) continue;
      if (t.applies != nullptr && !t.applies(e->spec)) continue;
      for (const std::string& backend : who)
        if (all_of_cpu || has_kernel(e, backend) || has_kernel(Registry::global().find(e->spec.backward), backend))
          register_test(t, *e, backend);
    }
  }
}

std::string camel(const std::string& operation) {
  std::string s;
  bool up = true;
  for (const char c : operation) {
    if (c != '_') s += up ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    up = c == '_';
  }
  return s;
}

namespace {
std::string& only_kernel() {
  static thread_local std::string name;
  return name;
}
}  // namespace

OnlyKernel::OnlyKernel(std::string name) { only_kernel() = std::move(name); }
OnlyKernel::~OnlyKernel() { only_kernel().clear(); }

const Context& context(const std::string& backend, int threads) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, int, std::string>, std::unique_ptr<Context>> made;
  const std::string kernel = backend == kReference ? std::string() : only_kernel();
  const std::lock_guard lock(mutex);
  auto& c = made[{backend, threads, kernel}];
  if (!c)
    c = std::make_unique<Context>(
        ContextOptions{.threads = threads, .backend = backend, .poison = true, .strict = true, .kernel = kernel});
  return *c;
}

std::vector<std::string> backends(const Registry::Entry& e) {
  if (!judged().empty()) return {judged()};
  std::vector<std::string> names;
  for (const auto& c : e.candidates)
    if (c.kernel != nullptr && c.backend->device == DeviceType::Cpu) names.push_back(c.backend->name);
  if (names.empty()) ADD_FAILURE() << e.spec.name << " has no CPU backend but the reference";
  return names;
}

Sizes sizes(std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t K, std::int64_t V) {
  return {.B = B, .T = T, .H = H, .K = K, .V = V, .D = K, .cu_seqlens = {}};
}

Sizes packed(std::vector<std::int64_t> cu_seqlens, std::int64_t H, std::int64_t K, std::int64_t V, DType index) {
  Sizes s = sizes(1, cu_seqlens.back(), H, K, V);
  s.cu_seqlens = std::move(cu_seqlens);
  s.index = index;
  return s;
}

bool allows(const FunctionSpec& spec, const Sizes& s) {
  const auto fits = [&](const char* symbol, std::int64_t n) {
    const auto it = spec.max_dim.find(symbol);
    return it == spec.max_dim.end() || it->second == 0 || n <= it->second;
  };
  return fits("K", s.K) && fits("V", s.V) && fits("D", s.D);
}

std::int64_t at_most(const FunctionSpec& spec, const std::string& symbol, std::int64_t n) {
  const auto it = spec.max_dim.find(symbol);
  return it == spec.max_dim.end() || it->second == 0 ? n : std::min(n, it->second);
}

std::vector<bool> passes(const FunctionSpec& spec) {
  return spec.backward.empty() ? std::vector<bool>{false} : std::vector<bool>{false, true};
}
Outcome run_pass(const Case& c, const Context& ctx, bool backward, const RunOptions& o) {
  return backward ? c.run_backward(ctx, o) : c.run(ctx, o);
}

std::vector<std::string> gates(const Case& c) {
  std::vector<std::string> names;
  for (const auto& n : c.input_names())
    if (c.spec().find_arg(n)->gen.log_gate()) names.push_back(n);
  return names;
}

std::string first_wide(const FunctionSpec& spec) {
  for (const auto& a : spec.args)
    if (a.role == Role::Input && a.types == Types::Wide) return a.name_in_files(0);
  return "";
}

bool takes_dim(const FunctionSpec& spec, std::string_view symbol) {
  return std::ranges::any_of(spec.args, [&](const ArgSpec& a) { return std::ranges::count(a.dims, symbol) > 0; });
}

Case completed(const Case& c, std::string_view name) {
  const ArgSpec* a = c.spec().find_arg(name);
  const FlagSpec* f = c.spec().find_flag(name);
  const std::string& other = a != nullptr ? a->together : f != nullptr ? f->together : "";
  if (other.empty()) return c;
  if (takes(c.spec(), other)) return c.has(other) ? c : completed(c.with(other), other);
  if (c.call()->flag_on(other)) return c;
  return completed(c.flag(other, true), other);
}

Case with_input(const Case& c, const std::string& name) { return completed(c.with(name), name); }

Case with_states(const Case& c) {
  Case all = c;
  for (const auto& a : c.spec().args)
    if (a.role == Role::Input && a.name.starts_with("initial_") && !a.name.ends_with(".1") && !c.has(a.name) &&
        c.spec().find_arg("final_" + a.name.substr(8)) != nullptr)
      all = all.with(a.name);
  return all;
}

std::vector<double> legal_numbers(const FlagSpec& f) {
  std::vector<double> list;
  for (const double v : {0.0, -0.7, 1.0, 3.5})
    if ((f.sign != FlagSpec::Sign::Positive || v > 0.0) && (f.sign != FlagSpec::Sign::Negative || v < 0.0) &&
        v >= f.min && v <= f.max)
      list.push_back(v);
  return list;
}

Case chunked(const Case& c, std::int64_t n) {
  const FlagSpec* f = c.spec().find_flag("chunk_size");
  return c.flag("chunk_size", std::clamp(n, static_cast<std::int64_t>(std::max(f->min, 1.0)),
                                         static_cast<std::int64_t>(std::min(f->max, 4096.0))));
}

bool takes(const FunctionSpec& spec, std::string_view input) {
  const ArgSpec* a = spec.find_arg(input);
  return a != nullptr && a->role == Role::Input;
}

bool has_state(const FunctionSpec& spec) {
  if (spec.operation == "abc") return false;  // its running softmax starts afresh in every call
  const ArgSpec* out = spec.find_arg("final_state");
  return takes(spec, "initial_state") && out != nullptr && !out->only_when;
}

tools::Limits limits(const Case& c, const std::string& tensor) {
  const FunctionSpec& spec = c.spec();
  const DType dtype = c.options().dtype;
  tools::Limits l;
  const bool gradient = tensor.starts_with("grad.");
  // What is left where the query cancels: exact against the query, not against itself.
  if (tensor == "out.cg_residual") l.R = 1e-3;
  if (dtype != DType::F32) {
    const double page = spec.tolerance_of(gradient ? "d" + tensor.substr(5) : tensor.substr(4));
    l.R = dtype == DType::F16 ? page : std::max(page, gradient ? 0.01 : 0.005);
    l.zero = l.R;  // upstream gradients have an rms of 1
  }
  // A head's constants: one number sums over all tokens, and may be small by cancellation. Its error grows as the root
  // of their count, whatever the sum is.
  const ArgSpec* a = gradient ? spec.find_arg(tensor.substr(5)) : nullptr;
  if (a != nullptr && std::ranges::none_of(a->dims, [](const std::string& d) { return d == "B" || d == "N"; }))
    l.floor *= std::sqrt(static_cast<double>(std::max<std::int64_t>(c.sizes().B * c.sizes().T, 1)));
  l.block = 4.0 * l.R;
  return l;
}

bool refused(const Status& s) { return !judged().empty() && s.code() == Code::Unsupported; }

bool count_call(bool taken) {
  if (judged().empty()) return false;
  ++(taken ? accepted_calls : refused_calls);
  return !taken;
}

void expect_ok(const Outcome& o, const std::string& what) {
  if (refused(o)) {
    count_call(false);
    return;
  }
  if (o.backend == judged()) count_call(true);
  EXPECT_TRUE(o.ok()) << what << "\n  " << o.problem();
}

namespace {

using Rounding = std::function<double(const std::string&)>;  // R that rounding of the inputs may cause in a tensor

void compare_all(const Case& c, const std::string& backend, const Outcome& expected, const Outcome& got,
                 const Rounding& rounding, std::vector<std::string>& problems) {
  const auto say = [&](const std::string& text) { problems.push_back(text); };
  if (!expected.ok()) return say("reference: " + c.text() + "\n  " + expected.problem());
  if (!got.ok()) return say(backend + ": " + c.text() + "\n  " + got.problem());
  if (got.backend != backend) say(c.text() + ": expected " + backend + " to compute it, got " + got.backend);
  if (got.tensors.empty()) say(backend + ": " + c.text() + ": no output");
  Worst& w = worst()[backend + " " + name_of(c.options().dtype)];
  for (const auto& [name, b] : got.tensors) {
    const tools::Difference d = tools::compare(expected[name], b.view(), limits(c, name));
    const auto near = [&] { return rounding && d.R <= kNeighbours * rounding(name); };
    if (!d.ok && !near())
      say(backend + ": " + c.text() + "\n  " + name + ": " + d.reason + " (block R " + std::to_string(d.block_R) + ")");
    if (d.max_abs <= 1e-6 || d.zero_reference) continue;
    w.block_R = std::max(w.block_R, d.block_R);
    if (d.R > w.R) {
      w.R = d.R;
      w.where = name + " of " + c.text();
    }
  }
}

// The case in F64, each number of its inputs, as it is or half a unit in the last place of its type further or nearer.
Case neighbour(const Case& c) {
  const DType dtype = c.options().dtype;
  const double unit = dtype == DType::BF16 ? 0x1p-9 : dtype == DType::F16 ? 0x1p-12 : 0x1p-25;
  Case moved = c.widen(DType::F64);
  std::uint64_t place = 0;
  for (const std::string& name : c.input_names()) {
    if (!is_float(c.input(name).dtype)) continue;
    std::vector<double> x = tools::values(moved.input(name));
    for (double& v : x) v *= 1.0 + (tools::uniform(tools::stream_of(1, "neighbour"), place++) < 0.5 ? unit : -unit);
    const Buffer b = tools::clone(moved.input(name));
    tools::assign(b.view(), x);
    moved = moved.with(name, b.view());
  }
  return moved;
}

std::vector<std::string> judge(const Case& c, const std::string& backend, const RunOptions& o,
                               const std::vector<bool>& which, bool rounding, Outcome* last = nullptr) {
  std::vector<std::string> problems;
  const Case wide = c.options().dtype == DType::F32 ? c : c.widen(DType::F32);
  for (const bool pass : which) {
    Outcome got = run_pass(c, context(backend), pass, o);
    if (count_call(!refused(got))) {
      if (last != nullptr) *last = std::move(got);
      continue;
    }
    std::optional<std::pair<Outcome, Outcome>> exact;
    const auto moves = [&](const std::string& name) {
      if (!exact)
        exact.emplace(run_pass(c.widen(DType::F64), reference(), pass), run_pass(neighbour(c), reference(), pass));
      const auto& [at, beside] = *exact;
      if (!at.ok() || !beside.ok()) return 0.0;
      return tools::compare(at[name], beside[name], {}).R;
    };
    compare_all(c, backend, run_pass(wide, reference(), pass), got, rounding ? Rounding(moves) : Rounding(), problems);
    if (last != nullptr) *last = std::move(got);
  }
  return problems;
}

}  // namespace

std::vector<std::string> disagreements(const Case& c, const std::string& backend, const RunOptions& o, bool backward) {
  return judge(c, backend, o, backward ? passes(c.spec()) : std::vector<bool>{false}, false);
}
std::vector<std::string> disagreements_beyond_rounding(const Case& c, const std::string& backend, const RunOptions& o) {
  return judge(c, backend, o, passes(c.spec()), true);
}
std::vector<std::string> disagreements_of_pass(const Case& c, const std::string& backend, bool backward,
                                               const RunOptions& o, Outcome& got) {
  return judge(c, backend, o, {backward}, true, &got);
}

void expect_agrees(const Case& c, const std::string& backend, const RunOptions& o, bool backward) {
  for (const auto& problem : disagreements(c, backend, o, backward)) ADD_FAILURE() << problem;
}

void expect_finite(const Case& c, const std::string& backend) {
  expect_agrees(c, backend);
  for (const bool backward : passes(c.spec())) {
    const Outcome o = run_pass(c, context(backend), backward);
    if (!o.ok()) return expect_ok(o, c.text());
    for (const auto& [name, b] : o.tensors)
      for (const double v : tools::values(b.view())) ASSERT_TRUE(std::isfinite(v)) << c.text() << ": " << name;
  }
}

void expect_close(const Outcome& expected, const Outcome& got, double R, const std::string& what) {
  if (!expected.ok() || !got.ok()) {
    expect_ok(expected, what);
    return expect_ok(got, what);
  }
  EXPECT_EQ(got.tensors.empty(), got.no_such_pass) << what;
  for (const auto& [name, b] : got.tensors) {
    if (!expected.has(name)) {
      ADD_FAILURE() << what << ": " << name << " is in one run only";
      continue;
    }
    const tools::Difference d = tools::compare(expected[name], b.view(), {.R = R, .block = 4.0 * R});
    EXPECT_TRUE(d.ok) << what << "\n  " << name << ": " << d.reason;
  }
}

void expect_same_bits(const Outcome& expected, const Outcome& got, const std::string& what) {
  if (!expected.ok() || !got.ok()) {
    if (!expected.ok()) expect_ok(expected, what);
    if (!got.ok()) expect_ok(got, what);
    return;
  }
  expect_ok(got, what);
  EXPECT_EQ(got.tensors.empty(), got.no_such_pass) << what;
  EXPECT_EQ(expected.tensors.size(), got.tensors.size()) << what;
  for (const auto& [name, b] : got.tensors)
    EXPECT_TRUE(expected.has(name) && tools::same_bits(expected[name], b.view()))
        << what << "\n  " << name << " differs";
}

void common(Outcome& a, Outcome& b) {
  for (Outcome* o : {&a, &b})
    for (const auto& [from, to] :
         {std::pair{"grad.gk", "grad.g"}, {"out.state_out", "out.final_state"}, {"out.state_pool", "out.final_state"}})
      if (auto node = o->tensors.extract(from)) {
        node.key() = to;
        o->tensors.insert(std::move(node));
      }
  std::erase_if(a.tensors, [&](const auto& x) { return !b.has(x.first); });
  std::erase_if(b.tensors, [&](const auto& x) { return !a.has(x.first); });
}

void expect_equal_families(const Case& a, const Case& b, const std::map<std::string, std::string>& ignore) {
  const Context& ctx = context("cpu");
  for (const bool backward : {false, true}) {
    Outcome x = backward ? a.run_backward(ctx) : a.run(ctx), y = backward ? b.run_backward(ctx) : b.run(ctx);
    for (const auto& [name, why] : ignore) {
      x.tensors.erase(name);
      y.tensors.erase(name);
    }
    common(x, y);
    expect_close(x, y, kClose, a.text() + " = " + b.text());
  }
}

Buffer per_channel(const TensorView& g, std::int64_t K) {
  Buffer b(g.dtype, {g.dim(0), g.dim(1), g.dim(2), K});
  TensorView spread = g;
  spread.ndim = 4;
  spread.shape[3] = K;
  spread.stride[3] = 0;
  tools::assign(b.view(), tools::values(spread));
  return b;
}

void print_worst() {
  for (const auto& [key, w] : worst())
    std::printf("worst against the reference, %s: R %.2e, block %.2e, %s\n", key.c_str(), w.R, w.block_R,
                w.where.c_str());
}

void print_unrecorded() {
  if (!judges_device()) return;
  for (const auto& backend : judged_ones().backends)
    if (!recorded_refusals(backend, ""))
      std::printf(
          "note: what %s refuses is not recorded, so it may refuse anything: fla gate all --device cuda --record\n",
          backend.c_str());
}

}  // namespace fla::gate
