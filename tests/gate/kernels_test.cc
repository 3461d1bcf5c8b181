// Every kernel by its name: calls that reach it, whatever dispatch would choose, in each way that a kernel can go wrong.
// Which function has the cases of which kernel is recorded (records/kernels_BACKEND.txt, written by --record), so a
// kernel that no longer has any is a failure, and so is a recorded one that its cases no longer reach.
#include <array>
#include <atomic>
#include <cctype>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <tuple>

#include "fla/registry/kernel_name.h"
#include "tests/gate/gate.h"
#include "tests/gate/records.h"
#include "tools/gpu/device.h"

namespace fla::gate {
namespace {

// A kernel as a function's forward or backward may run it.
struct Wanted {
  std::string kernel;
  bool backward;
};

std::vector<std::string> listed(const Registry::Entry& e, const std::string& backend) {
  std::vector<std::string> names;
  for (const auto& c : e.candidates) {
    if (c.kernel == nullptr || c.backend->name != backend) continue;
    const DeviceInfo* gpu = c.backend->limits != nullptr ? c.backend->limits(0) : nullptr;
    for (const auto& n : c.kernel->kernel_names(gpu)) names.push_back(n);
  }
  return names;
}

std::vector<Wanted> wanted(const Registry::Entry& e, const std::string& backend) {
  std::vector<Wanted> all;
  for (const auto& n : listed(e, backend)) all.push_back({n, false});
  if (const Registry::Entry* b = e.spec.backward.empty() ? nullptr : Registry::global().find(e.spec.backward))
    for (const auto& n : listed(*b, backend)) all.push_back({n, true});
  return all;
}

// The number behind a letter in a name, "k128" or "v64"; 0: there is none.
std::int64_t part(const std::string& kernel, char letter) {
  for (std::size_t at = kernel.find('.'); at != std::string::npos; at = kernel.find('.', at + 1))
    if (at + 2 < kernel.size() && kernel[at + 1] == letter && std::isdigit(kernel[at + 2]) != 0)
      return std::atoll(kernel.c_str() + at + 2);
  return 0;
}

// A call that reaches the kernel: sizes, and what is put into it beside what every call has.
struct Base {
  Sizes sizes;
  CaseOptions options;
  std::function<Case(const Case&)> with;
  bool all = true;  // else of a forward o alone, of a backward all but the gradients of gates

  RunOptions run(const Case& c, bool backward) const {
    if (all) return {};
    return {.only = backward ? without_gates(c) : std::vector<std::string>{"out.o"}};
  }
  static std::vector<std::string> without_gates(const Case& c) {
    std::vector<std::string> names;
    for (const auto& a : c.spec().args)
      if (a.role == Role::Input && c.has(a.name) && is_float(c.input(a.name).dtype) && !a.name.starts_with("g"))
        names.push_back("grad." + a.name);
    return names;
  }

  Case make(const std::string& function, const Sizes& s, GateRegime regime = GateRegime::Plain) const {
    CaseOptions o = options;
    o.regime = regime;
    return with(make_case(function, s, o));
  }
};

// What optional inputs and flags may choose another kernel.
std::vector<std::function<Case(const Case&)>> variants(const FunctionSpec& spec) {
  std::vector<std::function<Case(const Case&)>> list = {[](const Case& c) { return c; }, with_states};
  for (const auto& a : spec.args)
    if (a.role == Role::Input && !a.required && a.types != Types::Index)
      list.push_back([name = a.name](const Case& c) { return c.has(name) ? c : with_input(c, name); });
  const auto bare = [](const Case& c) {  // without what may be absent
    Case b = c;
    for (const auto& a : c.spec().args)
      if (a.role == Role::Input && !a.required && c.has(a.name)) b = b.without(a.name);
    return b;
  };
  list.emplace_back(bare);
  for (const auto& a : spec.args)
    if (a.role == Role::Input && !a.required && a.types != Types::Index && a.name.starts_with("g"))
      list.push_back([name = a.name, bare](const Case& c) { return with_input(bare(c), name); });
  // States of the wide type.
  for (const char* state : {"state", "initial_state"})
    if (takes(spec, state))
      list.push_back([state](const Case& c) {
        const Case s = c.has(state) ? c : with_input(c, state);
        return s.cast(state, c.options().dtype);
      });
  for (const auto& f : spec.flags)
    if (f.set && f.retired_for.empty() && f.type == FlagSpec::Type::Bool)
      list.push_back([name = f.name](const Case& c) { return completed(c.flag(name, true), name); });
  return list;
}

// Whether the kernel would serve the call's pass; computes nothing.
bool serves(const Wanted& w, const Case& c, const std::string& backend, const RunOptions& options) {
  const Context& ctx = context(backend);
  Result<DynamicCall> call = w.backward ? c.backward_call() : c.call();
  if (!call) return false;
  const auto outputs = call->outputs(ctx);
  if (!outputs) return false;
  const Device device{judges_device() ? DeviceType::Cuda : DeviceType::Cpu, 0};
  const auto there = [&](TensorView v) {
    v.device = device;
    return v;
  };
  for (const auto& name : c.input_names())
    if (!name.ends_with("_cpu") && !call->set(name, there(c.input(name)))) return false;
  if (w.backward)
    for (const auto& name : c.upstream_names())
      if (!call->set("grad_out." + name, there(c.upstream(name)))) return false;
  static std::array<std::max_align_t, 16> nowhere;
  for (const auto& o : *outputs)
    if ((options.only.empty() || std::ranges::find(options.only, o.name) != options.only.end()) &&
        !call->bind(o.name, TensorView(nowhere.data(), o.dtype, o.shape, device)))
      return false;
  const Result<Route> r = call->explain(ctx);
  return r && r->chosen == backend && KernelName(r->kernel).has(w.kernel);
}

// Calls of one function that are looked at for many kernels.
class Calls {
 public:
  explicit Calls(const Registry::Entry& e) : name_(e.spec.name), variants_(variants(e.spec)) {}
  std::size_t variants_count() const { return variants_.size(); }
  Base base(std::size_t variant, const Sizes& s, DType t) const { return {s, {.dtype = t}, variants_[variant]}; }
  // nullptr: there is no such call.
  const Case* at(std::size_t variant, const Sizes& s, DType t) {
    const auto [it, added] = made_.try_emplace({variant, s.T, s.H, s.K, s.V, t});
    if (added) try {
        it->second = base(variant, s, t).make(name_, s).prepared();
      } catch (const std::invalid_argument&) {
        it->second.reset();
      }
    return it->second ? &*it->second : nullptr;
  }

 private:
  std::string name_;
  std::vector<std::function<Case(const Case&)>> variants_;
  std::map<std::tuple<std::size_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, DType>, std::optional<Case>>
      made_;
};

std::optional<Base> reach(const Registry::Entry& e, const std::string& backend, const Wanted& w, Calls& calls) {
  const std::int64_t k = part(w.kernel, 'k'), v = part(w.kernel, 'v');
  std::vector<DType> types = {DType::F32, DType::BF16, DType::F16};
  for (const DType t : {DType::BF16, DType::F16})
    if (w.kernel.find(std::string(".") + short_name(t)) != std::string::npos) types = {t};
  const std::int64_t K = k > 0 ? k : 20;
  std::vector<std::int64_t> vs = {v > 0 ? v : k > 0 ? k : 17};
  for (const std::int64_t V : {64, 128, 256})
    if (k > 0 && V > vs[0]) vs.push_back(V);
  const OnlyKernel only(w.kernel);
  for (std::size_t variant = 0; variant < calls.variants_count(); ++variant)
    for (const std::int64_t T : {70, 200, 1})
      for (const DType t : types)
        for (const std::int64_t V : vs)
          for (const bool all : {true, false}) {
            Sizes s = sizes(1, T, 1, K, V);
            const Case* c = allows(e.spec, s) ? calls.at(variant, s, t) : nullptr;
            Base b = calls.base(variant, s, t);
            b.all = all;
            if (c == nullptr || !serves(w, *c, backend, b.run(*c, w.backward))) continue;
            if (s.K * s.V > 128 * 128) return b;  // the reference would take seconds
            s.H = 2;
            c = calls.at(variant, s, t);
            if (c != nullptr && serves(w, *c, backend, b.run(*c, w.backward))) b.sizes = s;
            return b;
          }
  return std::nullopt;
}

using Topics = std::vector<std::pair<const char*, std::vector<Case>>>;

// The cases of a kernel by topic. `few`: those of the emulated GPU, where a call takes a second.
Topics topics(const Registry::Entry& e, const Base& b, bool few) {
  const FunctionSpec& spec = e.spec;
  Topics all;
  const auto add = [&](const char* topic, const std::function<void(std::vector<Case>&)>& fill) {
    std::vector<Case> cases;
    try {
      fill(cases);
    } catch (const std::invalid_argument&) {
      // The function has no such input or flag.
    }
    if (!cases.empty()) all.emplace_back(topic, std::move(cases));
  };
  const auto sized = [&](const std::function<void(Sizes&)>& change, GateRegime regime = GateRegime::Plain) {
    Sizes s = b.sizes;
    change(s);
    return b.make(spec.name, s, regime);
  };
  const std::int64_t T = b.sizes.T;
  add("lengths", [&](std::vector<Case>& to) {
    const std::vector<std::int64_t> lengths =
        few               ? std::vector<std::int64_t>{33}
        : judges_device() ? std::vector<std::int64_t>{1, 16, 31, 33, 64, 65, 129}
                          : std::vector<std::int64_t>{1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, T};
    for (const std::int64_t n : lengths) to.push_back(sized([&](Sizes& s) { s.T = n; }));
    if (T > 129) to.push_back(sized([](Sizes&) {}));
  });
  if (takes(spec, "cu_seqlens"))
    add("packed", [&](std::vector<Case>& to) {
      to.push_back(sized([&](Sizes& s) { s.cu_seqlens = {0, 0, 1, 17, 17, 64, T + 61, T + 61}; }, GateRegime::Mild));
      if (!few) to.push_back(sized([&](Sizes& s) { s.cu_seqlens = {0, T, 2 * T + 1}, s.index = DType::I32; }));
    });
  add("heads", [&](std::vector<Case>& to) {
    for (const std::int64_t group : few ? std::vector<std::int64_t>{2} : std::vector<std::int64_t>{2, 3}) {
      if (takes_dim(spec, "HV")) to.push_back(sized([&](Sizes& s) { s.HV = group * s.H; }));
      if (takes_dim(spec, "HQ")) to.push_back(sized([&](Sizes& s) { s.HQ = group * s.H; }));
    }
  });
  if (!gates(b.make(spec.name, b.sizes)).empty())
    add("gates", [&](std::vector<Case>& to) {
      for (const GateRegime r : tools::kGateRegimes)
        if (r != GateRegime::Plain && (!few || r == GateRegime::Extreme)) to.push_back(sized([](Sizes&) {}, r));
    });
  if (few) return all;
  for (const auto& f : spec.flags) {
    if (!f.set || !f.retired_for.empty()) continue;
    add("flags", [&](std::vector<Case>& to) {
      const Case c = sized([](Sizes&) {});
      if (f.type == FlagSpec::Type::Bool) to.push_back(completed(c.flag(f.name, true), f.name));
    });
  }
  add("states", [&](std::vector<Case>& to) { to.push_back(with_states(sized([](Sizes&) {}))); });
  add("strides", [&](std::vector<Case>& to) {
    for (const Layout& l : {Layout{.row_pad = 8}, Layout{.row_pad = 3}, Layout{.last_stride = 2}}) {
      Case c = sized([](Sizes&) {});
      for (const auto& name : c.input_names())
        if (is_float(c.input(name).dtype) && c.input(name).ndim > 2) c = c.layout(name, l);
      to.push_back(c);
    }
  });
  return all;
}

bool legal(const Case& c, bool backward) {
  const Outcome o = run_pass(c, reference(), backward);
  return o.status.code() != Code::InvalidArgument;
}

// Rows of an output that a NaN in every input's later tokens has reached; -1: none before `from`.
std::int64_t reached_by_later(const Case& c, const std::string& backend, std::int64_t from) {
  Case late = c;
  for (const auto& name : c.input_names()) {
    const ArgSpec* a = c.spec().find_arg(name);
    if (!is_float(c.input(name).dtype) || a->dims.size() < 2 || a->dims[1] != "T") continue;
    const Buffer b = tools::clone(c.input(name));
    std::vector<double> x = tools::values(b.view());
    const std::size_t row = x.size() / static_cast<std::size_t>(c.sizes().T);
    for (std::size_t i = static_cast<std::size_t>(from) * row; i < x.size(); ++i)
      x[i] = std::numeric_limits<double>::quiet_NaN();
    tools::assign(b.view(), x);
    late = late.with(name, b.view());
  }
  const Outcome plain = c.run(context(backend)), with_nan = late.run(context(backend));
  if (!plain.ok() || !with_nan.ok() || !plain.has("out.o")) return -1;
  const std::vector<double> x = tools::values(plain["out.o"]), y = tools::values(with_nan["out.o"]);
  const std::size_t row = x.size() / static_cast<std::size_t>(c.sizes().T);
  for (std::size_t i = 0; i < static_cast<std::size_t>(from) * row; ++i)
    if (x[i] != y[i]) return static_cast<std::int64_t>(i / row);
  return -1;
}

class Counts {
 public:
  void add(const std::string& kernel, const char* topic, int n = 1) { counts_[kernel][topic] += n; }
  std::string text() const {
    std::string s;
    for (const auto& [kernel, topics] : counts_)
      for (const auto& [topic, n] : topics) s += kernel + " " + topic + " " + std::to_string(n) + "\n";
    return s;
  }

 private:
  std::map<std::string, std::map<std::string, int>> counts_;
};

void judge_kernel(const Registry::Entry& e, const std::string& backend, const Wanted& w, const Base& b, bool few,
                  Counts& counts) {
  const OnlyKernel only(w.kernel);
  for (const auto& [topic, cases] : topics(e, b, few))
    for (const Case& c : cases) {
      Outcome got;
      const auto problems = disagreements_of_pass(c, backend, w.backward, b.run(c, w.backward), got);
      if (got.status.code() == Code::Unsupported) continue;  // not a call of this kernel's
      if (got.status.code() == Code::InvalidArgument && !legal(c, w.backward)) continue;
      for (const auto& problem : problems) ADD_FAILURE() << w.kernel << ", " << topic << ": " << problem;
      EXPECT_TRUE(KernelName(got.kernel).has(w.kernel))
          << topic << ": a case made for " << w.kernel << " reached " << got.kernel << ": " << c.text();
      counts.add(w.kernel, topic);
    }
  if (few) return;
  const Case c = b.make(e.spec.name, b.sizes);
  const RunOptions options = b.run(c, w.backward);
  const Outcome once = run_pass(c, context(backend), w.backward, options);
  if (!once.ok()) return;
  expect_same_bits(once, run_pass(c, context(backend), w.backward, options), w.kernel + ", reruns");
  counts.add(w.kernel, "reruns");
  // Two threads at once, each on memory of its own.
  std::vector<Outcome> both(2);
  {
    std::vector<std::thread> threads;
    for (Outcome& o : both)
      threads.emplace_back([&] {
        const OnlyKernel mine(w.kernel);
        o = run_pass(c, context(backend), w.backward, options);
      });
    for (auto& t : threads) t.join();
  }
  for (const Outcome& o : both) expect_same_bits(once, o, w.kernel + ", two threads");
  counts.add(w.kernel, "threads");
  // One output alone has the same bits as among all.
  for (const auto& [name, tensor] : once.tensors) {
    const RunOptions one{.only = {name}};
    const Outcome o = run_pass(c, context(backend), w.backward, one);
    if (o.status.code() == Code::Unsupported || o.status.code() == Code::InvalidArgument) continue;
    EXPECT_TRUE(o.ok()) << w.kernel << ", " << name << " alone: " << o.problem();
    if (!o.ok() || o.kernel != once.kernel || !o.has(name)) continue;
    EXPECT_TRUE(tools::same_bits(tensor.view(), o[name])) << w.kernel << ": " << name << " alone has other bits";
    counts.add(w.kernel, "subsets");
  }
  const bool causal = !w.backward && takes_dim(e.spec, "T") && c.sizes().T > 41 && !c.has_flag("reverse") &&
                      !takes(e.spec, "block_indices");
  if (!causal) return;
  EXPECT_EQ(reached_by_later(c, backend, 41), -1) << w.kernel << ": a later NaN reaches an earlier row: " << c.text();
  counts.add(w.kernel, "causality");
}

std::string this_test() {
  const auto* t = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(t->test_suite_name()) + "." + t->name();
}

void Kernels(const Registry::Entry& e) {
  Counts counts;
  std::string reached;
  for (const auto& backend : backends(e)) {
    const bool emulated = backend == "cuda" && tools::gpu::make_timer({}) == nullptr;
    const std::vector<std::string> recorded = recorded_kernels(backend, this_test());
    Calls calls(e);
    for (const Wanted& w : wanted(e, backend)) {
      const bool known = std::ranges::find(recorded, w.kernel) != recorded.end();
      if (!known && !recording()) continue;
      // A GPU has hundreds of kernels, many of them for a dozen functions: the first one that reaches a kernel judges it.
      if (judges_device() && !recording() && first_test(backend, w.kernel) != this_test()) continue;
      const std::optional<Base> base = reach(e, backend, w, calls);
      if (!base) {
        EXPECT_TRUE(recording()) << backend << ": no call of " << e.spec.name << " reaches " << w.kernel
                                 << ", which is recorded as having one: write the records again";
        continue;
      }
      if (reached.find(w.kernel + " ") == std::string::npos) reached += w.kernel + " ";
      if (!recording()) judge_kernel(e, backend, w, *base, emulated, counts);
    }
  }
  if (!reached.empty()) reached.pop_back();
  ::testing::Test::RecordProperty("kernels", reached);
  ::testing::Test::RecordProperty("coverage", counts.text());
}

// Every kernel that this build lists has a case, or a reason why it has none.
void EveryKernel(const Registry::Entry& e) {
  if (recording()) return;
  for (const auto& backend : backends(e)) {
    if (backend != "cpu" && backend != "cuda") continue;  // a plug-in's kernels are in no record of this tree
    const Names recorded = recorded_kernels(backend), unreached = unreached_kernels(backend);
    std::vector<std::string> names;
    for (const Wanted& w : wanted(e, backend)) names.push_back(w.kernel);
    for (const auto& name : without_a_case(names, recorded, unreached))
      ADD_FAILURE() << backend << ": " << name << " has no case: fla gate " << e.spec.name
                    << " -k Kernels --record, or say in tests/gate/records/unreached_" << backend
                    << ".txt why none can be";
    for (const auto& name : unreached)
      EXPECT_FALSE(recorded.contains(name)) << backend << ": " << name << " is reached after all";
  }
}

TEST(Coverage, AKernelWhoseCaseIsTakenAwayIsFound) {
  Names recorded = recorded_kernels("cpu");
  const std::vector<std::string> all(recorded.begin(), recorded.end());
  ASSERT_FALSE(all.empty());
  EXPECT_TRUE(without_a_case(all, recorded, {}).empty());
  recorded.erase(all.front());
  EXPECT_EQ(without_a_case(all, recorded, {}), Names{all.front()});
}

const bool registered = for_every_backend("Kernels", Kernels) && for_every_backend("EveryKernel", EveryKernel);

}  // namespace
}  // namespace fla::gate
