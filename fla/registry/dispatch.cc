// Dispatch: from checked arguments to a plan, and its run.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>

#include "fla/core/context_core.h"
#include "fla/core/index_table.h"
#include "fla/core/version.h"
#include "fla/registry/registry.h"

namespace fla {

const char* name_of(RouteStep::Outcome o) {
  switch (o) {
    case RouteStep::Outcome::Unavailable: return "unavailable";
    case RouteStep::Outcome::Disabled: return "disabled";
    case RouteStep::Outcome::Refused: return "refused";
    case RouteStep::Outcome::NotImplemented: return "not implemented";
    case RouteStep::Outcome::Missing: return "accepted, but missing";
    case RouteStep::Outcome::Accepted: return "accepted";
  }
  return "?";
}

const std::string* Route::reason(std::string_view backend) const {
  for (const auto& s : steps)
    if (s.backend == backend) return &s.reason;
  return nullptr;
}

namespace {

using detail::ContextCore;

// Read once, when the library is loaded: every later call of the process is dispatched the same way.
const bool kDispatchDisabled = [] {
  const char* v = std::getenv("FLA_CPP_DISABLE_DISPATCH");
  return v != nullptr && std::strcmp(v, "1") == 0;
}();

// FLA reads these itself, and who sets them means it.
const char* variable_of_fla() {
  static const char* const found = []() -> const char* {
    for (const char* name : {"FLA_DISABLE_BACKEND_DISPATCH", "FLA_BACKEND_CPU", "FLA_BACKEND_CUDA"})
      if (std::getenv(name) != nullptr) return name;
    return nullptr;
  }();
  return found;
}

struct LastNames {
  const char* backend = "";
  KernelName kernel;
};
thread_local LastNames t_last_route;

// Only the exact text "0" disables. Read at every call: a test or a caller may change it while running.
bool enabled(const Backend& b) {
  if (b.env.empty()) return true;
  const char* v = std::getenv(b.env.c_str());
  return v == nullptr ? b.default_enable : std::strcmp(v, "0") != 0;
}

const char* device_name(DeviceType d) { return d == DeviceType::Cpu ? "cpu" : "cuda"; }

// A call from the point where it is legal to that where it is planned.
struct Resolved {
  ContextCore& core;
  const FunctionEntry& entry;
  const void* args;
  Dims dims{};
  Device device{};
  const Backend* backend = nullptr;  // nullptr: the default implementation
  const ErasedKernel* kernel = nullptr;
  Plan* plan = nullptr;

  bool by_default() const { return backend == nullptr; }
  Status bad(const std::string& text) const { return {Code::InvalidArgument, entry.spec.name + ": " + text}; }
};

enum class Texts { Wanted, Unwanted };

// What one candidate says of the call. `texts`: whether the reason is formed. A plan is made in `memory`.
RouteStep::Outcome try_candidate(const Resolved& r, const Candidate& c, PlanMemory& memory, Texts texts, Plan*& plan,
                                 std::string* reason) {
  using O = RouteStep::Outcome;
  const Backend& b = *c.backend;
  const ContextOptions& o = r.core.options;
  const auto say = [&](auto&& text) {
    if (texts == Texts::Wanted) *reason = text();
  };
  if (!o.backend.empty() && o.backend != b.name) {
    say([&] { return "the context asks for backend " + o.backend; });
    return O::Disabled;
  }
  if (b.device != r.device.type) {
    say([&] {
      return std::string("serves ") + device_name(b.device) + " tensors, these are on " + device_name(r.device.type);
    });
    return O::Unavailable;
  }
  const auto why_not = [&] {
    return b.why_not ? b.why_not() : b.package.empty() ? "not available on this machine" : "needs " + b.package;
  };
  if (b.available && !b.available()) {
    say(why_not);
    return O::Unavailable;
  }
  if (!enabled(b)) {
    say([&] { return b.env + (std::getenv(b.env.c_str()) != nullptr ? " is 0" : " is not set (opt-in)"); });
    return O::Disabled;
  }
  if (c.kernel == nullptr) {
    say([] { return std::string("does not serve this function"); });
    return O::NotImplemented;
  }
  const DeviceInfo* limits = b.limits != nullptr ? b.limits(r.device.index) : nullptr;
  if (b.limits != nullptr && limits == nullptr) {
    say(why_not);
    return O::Unavailable;
  }
  Verdict v;
  Plan* made = nullptr;
  try {
    made = c.kernel->make(r.args,
                          {.spec = r.entry.spec,
                           .dims = r.dims,
                           .device = r.device,
                           .threads = r.core.pool.size(),
                           .gpu = limits,
                           .texts = texts == Texts::Wanted,
                           .kernel = o.kernel},
                          memory, v);
  } catch (const std::exception& e) {  // only verifiers are protected; a kernel that throws is the caller's to see
    v = reject(std::string("verifier threw: ") + e.what());
  } catch (...) {
    v = reject("verifier threw");
  }
  if (!v.accepted) {
    say([&] { return std::move(v.reason); });
    return O::Refused;
  }
  if (made == nullptr) {
    say([] { return std::string("accepted the call but has no implementation of it"); });
    return O::Missing;
  }
  if (!o.kernel.empty() && !made->kernel().has(o.kernel)) {
    say([&] { return "the context asks for kernel " + o.kernel + ", this call gets " + made->kernel().c_str(); });
    memory.clear();
    return O::Disabled;
  }
  plan = made;
  return O::Accepted;
}

// A default stream exists on every device, any other belongs to one.
Status check_stream(const Resolved& r, const Stream& s) {
  if (r.device.type == DeviceType::Cpu || s.handle == nullptr || s.device == r.device.index) return {};
  return r.bad("stream: expected one of device " + std::to_string(r.device.index) +
               ", where the tensors are, got one of device " + std::to_string(s.device));
}

// What a call on an accelerator meets when the operation has no backend for it.
std::optional<RouteStep> no_backend_for(DeviceType device, const FunctionEntry& e) {
  if (device == DeviceType::Cpu || std::any_of(e.candidates.begin(), e.candidates.end(),
                                               [device](const auto& c) { return c.backend->device == device; }))
    return {};
  if (std::string(build_info().cuda).empty())
    return RouteStep{"cuda", "", RouteStep::Outcome::Unavailable, "this build has no CUDA code (FLA_CUDA=OFF)"};
  return RouteStep{"cuda", "", RouteStep::Outcome::NotImplemented, e.spec.operation + " has no CUDA kernels"};
}

Status check_backend_name(const Resolved& r) {
  const std::string& want = r.core.options.backend;
  if (want.empty() || want == kReference) return {};
  std::string known;
  for (const auto& c : r.entry.candidates) {
    if (c.backend->name == want) return {};
    if (known.find(c.backend->name + ", ") == std::string::npos) known += c.backend->name + ", ";
  }
  return r.bad("backend: expected one of " + r.entry.spec.operation + ": " + known + kReference + ", got '" + want +
               "'");
}

enum class LogKind : int { Hit, Refusal, Fallback };

void log_once(const Resolved& r, LogLevel level, const ErasedKernel& k, LogKind kind, std::string_view text) {
  r.core.log_once(&k, static_cast<int>(kind), {level, r.entry.spec.operation, r.entry.spec.name, k.backend, text});
}

bool reference_allowed(const ContextOptions& o) { return o.backend.empty() || o.backend == kReference; }
bool reference_serves(const Resolved& r) {
  return r.entry.reference != nullptr && r.entry.reference->complete && r.device.type == DeviceType::Cpu;
}

// Every step of the way, with its reason. The plan of the step that was chosen is not touched.
void tell_steps(const Resolved& r, std::vector<RouteStep>& steps) {
  using O = RouteStep::Outcome;
  if (!kDispatchDisabled)
    for (const auto& c : r.entry.candidates) {
      const auto memory = std::make_unique<PlanMemory>();
      Plan* plan = nullptr;
      std::string reason;
      const O outcome = try_candidate(r, c, *memory, Texts::Wanted, plan, &reason);
      steps.push_back({c.backend->name,
                       plan != nullptr       ? plan->kernel().c_str()
                       : c.kernel != nullptr ? c.kernel->name
                                             : "",
                       outcome, std::move(reason)});
    }
  if (auto none = no_backend_for(r.device.type, r.entry)) steps.push_back(std::move(*none));
  const bool allowed = reference_allowed(r.core.options), serves = reference_serves(r);
  steps.push_back({kReference, r.entry.reference != nullptr ? r.entry.reference->name : "",
                   !allowed ? O::Disabled
                   : serves ? O::Accepted
                            : O::Unavailable,
                   !allowed ? "the context asks for backend " + r.core.options.backend
                   : serves ? "the default implementation, double precision, slow"
                            : "serves cpu tensors only"});
}

Status nobody_takes(const Resolved& r) {
  std::string text = r.entry.spec.name + ": no backend takes this call";
  if (kDispatchDisabled) text += "\n  FLA_CPP_DISABLE_DISPATCH was 1 when the library was loaded";
  std::vector<RouteStep> steps;
  tell_steps(r, steps);
  steps.pop_back();  // the reference's
  for (const RouteStep& s : steps) text += "\n  " + s.backend + ": " + name_of(s.outcome) + ": " + s.reason;
  return {Code::Unsupported, std::move(text)};
}

enum class Purpose { Run, Ask };  // only a call that runs is logged

// The kernel and its plan. Refusals' texts are formed where a log wants them.
Status choose(Resolved& r, PlanMemory& memory, Purpose purpose) {
  using O = RouteStep::Outcome;
  const ContextOptions& o = r.core.options;
  const bool tell = purpose == Purpose::Run && static_cast<bool>(o.log);
  if (tell && variable_of_fla() != nullptr)
    r.core.log_once(&kDispatchDisabled, 0,
                    {LogLevel::Info, r.entry.spec.operation, r.entry.spec.name, "",
                     std::string(variable_of_fla()) + " is a variable of FLA and does nothing here; see FLA_CPP_*"});
  if (!kDispatchDisabled && o.backend != kReference)
    for (const Candidate& c : r.entry.candidates) {
      if (c.backend->device != r.device.type || (!o.backend.empty() && o.backend != c.backend->name)) continue;
      std::string reason;
      const O outcome = try_candidate(r, c, memory, tell ? Texts::Wanted : Texts::Unwanted, r.plan, &reason);
      if (outcome == O::Accepted) {
        r.backend = c.backend;
        r.kernel = c.kernel;
        return {};
      }
      if (outcome == O::Refused && tell) log_once(r, LogLevel::Info, *c.kernel, LogKind::Refusal, "refused: " + reason);
      if (outcome == O::Missing && o.strict)
        return {Code::Internal, r.entry.spec.name + ": backend " + c.backend->name +
                                    " accepted the call but has no implementation of it"};
    }
  if (!reference_allowed(o) || !reference_serves(r)) return nobody_takes(r);
  Verdict v;
  const CallInfo info = {.spec = r.entry.spec,
                         .dims = r.dims,
                         .device = r.device,
                         .threads = r.core.pool.size(),
                         .gpu = nullptr,
                         .texts = false};
  r.kernel = r.entry.reference;
  r.plan = r.kernel->make(r.args, info, memory, v);
  if (r.plan == nullptr) return {Code::Internal, r.entry.spec.name + ": the reference made no plan"};
  if (purpose == Purpose::Run && o.backend.empty())
    log_once(r, LogLevel::Warning, *r.kernel, LogKind::Fallback,
             "no backend took the call; the double-precision reference is slow");
  return {};
}

bool is_output(const ArgSpec& a) { return a.role == Role::Output || a.role == Role::Gradient; }
bool any_present(const ArgSpec& a, const void* args) {
  const TensorList views = a.get.views(args);
  return std::any_of(views.begin(), views.end(), [](const TensorView& t) { return t.present(); });
}

// How to read the memory of the call's tensors; empty: it is the host's.
ReadMemory reader(const Resolved& r, Stream stream) {
  for (const auto& c : r.entry.candidates)
    if (c.backend->device == r.device.type && c.backend->read)
      return [&read = c.backend->read, stream](void* to, const void* from, std::size_t bytes) {
        return read(to, from, bytes, stream);
      };
  return {};
}

// All that is asked of a call before it is planned.
Status check(Resolved& r, Purpose purpose) {
  if (!r.core.status) return r.core.status;
  if (Status s = check_call(r.entry.spec, r.args, r.dims, r.device); !s) return s;
  if (Status s = check_backend_name(r); !s) return s;
  if (purpose == Purpose::Ask) return {};
  const bool any_output = std::any_of(r.entry.spec.args.begin(), r.entry.spec.args.end(),
                                      [&](const ArgSpec& a) { return is_output(a) && any_present(a, r.args); });
  if (!any_output) return r.bad("nothing to compute: no output was given");
  if (Status s = check_overlaps(r.entry.spec, r.args); !s) return s;
  return check_stream(r, r.core.options.stream);
}

// Launches what was planned.
Status launch(const Resolved& r, const RunOptions& o) {
  const Stream& stream = o.stream != nullptr ? *o.stream : r.core.options.stream;
  if (o.stream != nullptr)
    if (Status s = check_stream(r, stream); !s) return s;
  const std::size_t need = r.plan->workspace();
  if (o.workspace.size() < need)
    return {Code::OutOfMemory, r.entry.spec.name + ": workspace: needs " + std::to_string(need) + " bytes, got " +
                                   std::to_string(o.workspace.size())};
  std::span<std::byte> kept;
  if (!o.kept.memory.empty()) {
    const std::size_t keeps = r.plan->keeps();
    if (keeps == 0) return r.bad(std::string("kept: kernel ") + r.plan->kernel().c_str() + " has no use for it");
    if (o.kept.layout != r.plan->layout())
      return r.bad("kept: expected memory of layout " + std::to_string(r.plan->layout()) + ", got " +
                   std::to_string(o.kept.layout) + ": the two directions were planned in different ways");
    if (o.kept.memory.size() < keeps)
      return {Code::OutOfMemory, r.entry.spec.name + ": kept: needs " + std::to_string(keeps) + " bytes, got " +
                                     std::to_string(o.kept.memory.size())};
    kept = o.kept.memory.first(keeps);
  }
  const Stream here{stream.handle, r.device.index};
  ReadMemory read;
  if (r.core.options.check_values) {
    read = reader(r, here);
    if (Status s = check_values(r.entry.spec, r.args, read); !s) return s;
  }
  // All ones is a NaN in every float type and -1 in every integer type.
  if (r.core.options.poison && r.device.type == DeviceType::Cpu && !o.workspace.empty())
    std::memset(o.workspace.data(), 0xff, o.workspace.size());
  Status s = r.plan->launch({.pool = &r.core.pool, .stream = here, .workspace = o.workspace.first(need), .kept = kept});
  if (s && read) s = read(nullptr, nullptr, 0);
  if (s) {
    t_last_route.backend = r.kernel->backend.c_str();
    t_last_route.kernel = r.plan->kernel();
    if (!r.by_default()) log_once(r, LogLevel::Info, *r.kernel, LogKind::Hit, "hit");
  }
  return s;
}

// The workspace that a caller left to the library.
struct OwnWorkspace {
  std::unique_ptr<std::byte[]> memory;
  RunOptions options;

  Status allocate(const Resolved& r) {
    const std::size_t need = r.plan->workspace();
    if (need == 0) return {};
    if (r.device.type != DeviceType::Cpu)
      return {Code::OutOfMemory, r.entry.spec.name + ": workspace: needs " + std::to_string(need) +
                                     " bytes in the device's memory, which the caller passes; none is allocated there"};
    memory.reset(new (std::nothrow) std::byte[need]);
    if (!memory)
      return {Code::OutOfMemory,
              r.entry.spec.name + ": workspace of " + std::to_string(need) + " bytes could not be allocated"};
    options.workspace = {memory.get(), need};
    return {};
  }
};

}  // namespace

Result<Route> explain_call(const Context& ctx, const FunctionEntry& e, const void* args) {
  Resolved r{.core = *ctx.core(), .entry = e, .args = args};
  if (Status s = check(r, Purpose::Ask); !s) return s;
  Route route;
  route.operation = e.spec.operation;
  route.function = e.spec.name;
  route.dispatch_disabled = kDispatchDisabled;
  tell_steps(r, route.steps);
  PlanMemory memory;
  const Status s = choose(r, memory, Purpose::Ask);
  if (!s && s.code() != Code::Unsupported) return s;
  if (r.plan != nullptr) {
    route.chosen = r.kernel->backend;
    route.kernel = r.plan->kernel().c_str();
    route.by_default = r.by_default();
    route.workspace_bytes = r.plan->workspace();
    route.keeps_bytes = r.plan->keeps();
    route.plan = r.plan->text();
  }
  return route;
}

Result<std::size_t> workspace_call(const Context& ctx, const FunctionEntry& e, const void* args) {
  Resolved r{.core = *ctx.core(), .entry = e, .args = args};
  if (Status s = check(r, Purpose::Ask); !s) return s;
  PlanMemory memory;
  if (Status s = choose(r, memory, Purpose::Ask); !s) return s;
  return r.plan->workspace();
}

Status run_call(const Context& ctx, const FunctionEntry& e, const void* args) {
  Resolved r{.core = *ctx.core(), .entry = e, .args = args};
  if (Status s = check(r, Purpose::Run); !s) return s;
  PlanMemory memory;
  if (Status s = choose(r, memory, Purpose::Run); !s) return s;
  OwnWorkspace own;
  if (Status s = own.allocate(r); !s) return s;
  return launch(r, own.options);
}

Status run_call(const Context& ctx, const FunctionEntry& e, const void* args, const RunOptions& options) {
  Resolved r{.core = *ctx.core(), .entry = e, .args = args};
  if (Status s = check(r, Purpose::Run); !s) return s;
  PlanMemory memory;
  if (Status s = choose(r, memory, Purpose::Run); !s) return s;
  return launch(r, options);
}

LastRoute last_route() { return {t_last_route.backend, t_last_route.kernel.c_str()}; }

namespace detail {

const FunctionEntry* find_function(const Context& ctx, const char* name, const FunctionEntry** known) {
  if (&ctx.registry() != &Registry::global()) return ctx.registry().find(name);
  const std::atomic_ref<const FunctionEntry*> cached(*known);
  const FunctionEntry* e = cached.load(std::memory_order_acquire);
  if (e == nullptr) {
    e = Registry::global().find(name);
    cached.store(e, std::memory_order_release);
  }
  return e;
}

Status unknown_function(const char* name) { return {Code::Unsupported, std::string(name) + ": not in this registry"}; }

}  // namespace detail

// ---- prepared calls

struct PreparedCall::State {
  State(ContextCore& core, const FunctionEntry& e, std::shared_ptr<void> copy)
      : args(std::move(copy)), r{.core = core, .entry = e, .args = args.get()} {
    core.retain();
  }
  ~State() {
    memory.clear();
    r.core.release();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  std::shared_ptr<void> args;  // the call's own copy: views and flags
  Resolved r;
  PlanMemory memory;
  std::atomic<bool> running{false};

  // What the plan was made for and a run has to find again.
  struct Table {  // boundaries in the host's memory
    const ArgSpec* arg;
    std::vector<std::int64_t> entries;
  };
  std::vector<Table> tables;
  bool slots = false;  // tables on the host whose entries may differ from run to run

  void remember() {
    for (const ArgSpec& a : r.entry.spec.args) {
      if (a.types != Types::Index || a.role != Role::Input) continue;
      const TensorView& t = a.get(r.args);
      if (!t || t.device.type != DeviceType::Cpu) continue;
      if (!a.cuts.empty()) {
        Table& table = tables.emplace_back(Table{&a, {}});
        for (std::int64_t i = 0; i < t.dim(0); ++i) table.entries.push_back(read_index(t, i));
      } else {
        slots = true;
      }
    }
  }

  Status other_tables() const {
    for (const Table& table : tables) {
      const TensorView& t = table.arg->get(r.args);
      for (std::size_t i = 0; i < table.entries.size(); ++i)
        if (const std::int64_t now = read_index(t, static_cast<std::int64_t>(i)); now != table.entries[i])
          return r.bad(table.arg->name + ": the call was prepared for boundaries whose entry " + std::to_string(i) +
                       " is " + std::to_string(table.entries[i]) + ", got " + std::to_string(now) +
                       "; prepare another");
    }
    if (slots && r.entry.spec.check)
      if (const Status s = r.entry.spec.check(r.args, r.dims); !s)
        return {s.code(), r.entry.spec.name + ": " + s.message()};
    return {};
  }

  // How a view differs from the one that the call was prepared with; nullptr: in nothing but its memory.
  Status same_but_for_memory(const ArgSpec& a, std::size_t element, const TensorView& was, const TensorView& t) const {
    const auto bad = [&](const std::string& what) {
      return r.bad(a.name_of(element) + ": the call was prepared for " + what + "; prepare another");
    };
    if (t.present() != was.present()) return bad(was.present() ? "a tensor, got none" : "none, got a tensor");
    if (!t) return {};
    if (t.dtype != was.dtype) return bad(std::string("dtype ") + name_of(was.dtype) + ", got " + name_of(t.dtype));
    if (!(t.device == was.device))
      return bad(std::string("memory on ") + device_name(was.device.type) + ":" + std::to_string(was.device.index) +
                 ", got " + device_name(t.device.type) + ":" + std::to_string(t.device.index));
    if (t.ndim != was.ndim || !std::equal(t.dims().begin(), t.dims().end(), was.dims().begin()))
      return bad("shape " + shape_string(was.dims()) + ", got " + shape_string(t.dims()));
    const auto n = static_cast<std::size_t>(t.ndim);
    if (!std::equal(t.stride.begin(), t.stride.begin() + static_cast<std::ptrdiff_t>(n), was.stride.begin()))
      return bad("strides " + shape_string({was.stride.data(), n}) + ", got " + shape_string({t.stride.data(), n}));
    if (t.data == was.data) return {};
    if (t.data == nullptr && t.numel() > 0) return r.bad(a.name_of(element) + ": data pointer is null");
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(t.data);
    std::uintptr_t align = size_of(t.dtype);
    if (r.plan->wants_alignment()) {
      const std::uintptr_t old = reinterpret_cast<std::uintptr_t>(was.data);
      align = std::max(align, std::min<std::uintptr_t>(old == 0 ? 16 : old & (~old + 1), 16));
    }
    if (address % align != 0)
      return bad("memory at a multiple of " + std::to_string(align) + " bytes, got one " +
                 std::to_string(address % align) + " past");
    return {};
  }

  Status rebind(const void* given) {
    bool moved = false;
    for (const ArgSpec& a : r.entry.spec.args) {
      const TensorList was = a.get.views(r.args), now = a.get.views(given);
      if (was.size() != now.size())
        return r.bad(a.name + ": the call was prepared for " + std::to_string(was.size()) + " tensors, got " +
                     std::to_string(now.size()) + "; prepare another");
      for (std::size_t i = 0; i < was.size(); ++i) {
        if (Status s = same_but_for_memory(a, i, was[i], now[i]); !s) return s;
        moved |= now[i].data != was[i].data;
      }
    }
    for (const FlagSpec& f : r.entry.spec.flags)
      if (f.value && f.retired_for.empty() && f.value(given) != f.value(r.args))
        return r.bad(f.name + ": the call was prepared for " + to_string(f.value(r.args)) + ", got " +
                     to_string(f.value(given)) + "; prepare another");
    if (!moved) return {};
    if (Status s = check_overlaps(r.entry.spec, given); !s) return s;
    for (const ArgSpec& a : r.entry.spec.args) {
      const TensorList now = a.get.views(given);
      const std::span<TensorView> own = a.get.views(args.get());
      for (std::size_t i = 0; i < own.size(); ++i) own[i].data = now[i].data;
    }
    r.plan->rebind();
    return {};
  }

  // A run holds the call and the context; a kernel that throws lets go of both.
  struct Hold {
    State& s;
    bool alone, alive = false;
    explicit Hold(State& state) : s(state), alone(!state.running.exchange(true, std::memory_order_acquire)) {
      if (alone) alive = s.r.core.begin();
    }
    ~Hold() {
      if (alive) s.r.core.end();
      if (alone) s.running.store(false, std::memory_order_release);
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
  };

  Status run(const void* given, const RunOptions& o) {
    const Hold hold(*this);
    if (!hold.alone) return r.bad("the prepared call is running in another thread: one at a time, or prepare another");
    if (!hold.alive) return r.bad("the context that the call was prepared on is gone");
    if (given != nullptr)
      if (Status s = rebind(given); !s) return s;
    if (Status s = other_tables(); !s) return s;
    if (!o.workspace.empty() || r.plan->workspace() == 0) return launch(r, o);
    OwnWorkspace own;
    if (Status s = own.allocate(r); !s) return s;
    RunOptions with = o;
    with.workspace = own.options.workspace;
    return launch(r, with);
  }
};

PreparedCall::~PreparedCall() { delete state_; }

Result<PreparedCall> PreparedCall::make(const Context& ctx, const FunctionEntry& e, const void* args) {
  auto state = std::make_unique<State>(*ctx.core(), e, e.spec.copy_args(args));
  if (Status s = check(state->r, Purpose::Run); !s) return s;
  if (Status s = choose(state->r, state->memory, Purpose::Run); !s) return s;
  state->remember();
  PreparedCall call;
  call.state_ = state.release();
  return call;
}

std::size_t PreparedCall::workspace_bytes() const { return state_ != nullptr ? state_->r.plan->workspace() : 0; }
std::size_t PreparedCall::keeps_bytes() const { return state_ != nullptr ? state_->r.plan->keeps() : 0; }
std::uint64_t PreparedCall::keeps_layout() const { return state_ != nullptr ? state_->r.plan->layout() : 0; }
const char* PreparedCall::backend() const { return state_ != nullptr ? state_->r.kernel->backend.c_str() : ""; }
const char* PreparedCall::kernel() const {
  if (state_ == nullptr) return "";
  static thread_local KernelName name;
  name = state_->r.plan->kernel();
  return name.c_str();
}
std::string PreparedCall::plan() const { return state_ != nullptr ? state_->r.plan->text() : std::string(); }

namespace {
Status empty_call() { return {Code::InvalidArgument, "run: the prepared call is empty"}; }
}  // namespace

Status PreparedCall::run(const RunOptions& options) const {
  return state_ != nullptr ? state_->run(nullptr, options) : empty_call();
}
Status PreparedCall::run(const void* args, const RunOptions& options) const {
  return state_ != nullptr ? state_->run(args, options) : empty_call();
}

}  // namespace fla
