#include "fla/registry/registry.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>
#include <set>

#include "fla/core/version.h"

namespace fla {

void register_all(Registry& r);  // generated: every family, in name order

Registry& Registry::instance() {
  static Registry* const made = [] {
    auto* r = new Registry;  // never destroyed: calls may come from static destructors
    register_all(*r);
    return r;
  }();
  return *made;
}

const Registry& Registry::global() { return instance(); }

void Registry::add_function(FunctionSpec spec) {
  const std::string name = spec.name, operation = spec.operation;
  functions_[name].spec = std::move(spec);
  rebuild(operation);
}

void Registry::add_backend(const std::string& operation, Backend backend) {
  backend.order = next_order_++;
  auto& list = backends_[operation];
  const auto old = std::find_if(list.begin(), list.end(), [&](const Backend& b) { return b.name == backend.name; });
  if (old != list.end())
    *old = std::move(backend);
  else
    list.push_back(std::move(backend));
  rebuild(operation);
}

void Registry::add_kernel(ErasedKernel kernel) {
  const std::string function = kernel.function;
  kernels_[{function, kernel.backend}] = std::move(kernel);
  const auto f = functions_.find(function);
  if (f != functions_.end()) rebuild(f->second.spec.operation);
}

void Registry::rebuild(const std::string& operation) {
  std::vector<const Backend*> order;
  for (const Backend& b : backends_[operation]) order.push_back(&b);
  std::sort(order.begin(), order.end(), [](const Backend* a, const Backend* b) {
    return a->priority != b->priority ? a->priority < b->priority : a->order < b->order;
  });
  for (auto& [name, entry] : functions_) {
    if (entry.spec.operation != operation) continue;
    entry.candidates.clear();
    for (const Backend* b : order) {
      const auto k = kernels_.find({name, b->name});
      entry.candidates.push_back({b, k == kernels_.end() ? nullptr : &k->second});
    }
    const auto ref = kernels_.find({name, kReference});
    entry.reference = ref == kernels_.end() ? nullptr : &ref->second;
  }
}

const Registry::Entry* Registry::find(std::string_view function) const {
  const auto it = functions_.find(function);
  return it == functions_.end() ? nullptr : &it->second;
}

std::vector<const Registry::Entry*> Registry::entries() const {
  std::vector<const Entry*> all;
  for (const auto& [name, e] : functions_) all.push_back(&e);
  return all;
}

std::vector<std::string> Registry::operations() const {
  std::vector<std::string> names;
  for (const auto& [name, e] : functions_)
    if (std::find(names.begin(), names.end(), e.spec.operation) == names.end()) names.push_back(e.spec.operation);
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> Registry::backends() const {
  std::set<std::string> names{kReference};
  for (const auto& [operation, list] : backends_)
    for (const Backend& b : list) names.insert(b.name);
  return {names.begin(), names.end()};
}

namespace {

// Two neighbours in the wrong order count as one edit: the commonest slip of all.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, last, row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = std::move(last);
    last = row;
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1] ? 1U : 0U)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace

std::vector<std::string> Registry::nearest(std::string_view name, std::size_t most) const {
  std::vector<std::pair<std::size_t, std::string>> scored;
  for (const auto& [known, e] : functions_)
    if (!e.spec.is_backward()) scored.emplace_back(edit_distance(name, known), known);
  std::sort(scored.begin(), scored.end());
  std::vector<std::string> best;
  for (std::size_t i = 0; i < std::min(most, scored.size()); ++i) best.push_back(scored[i].second);
  return best;
}

std::vector<std::string> Registry::defects() const {
  std::vector<std::string> list;
  for (const auto& [key, k] : kernels_) {
    const auto f = functions_.find(key.first);
    if (f == functions_.end()) {
      list.push_back("kernel of backend " + key.second + " for unknown function " + key.first);
      continue;
    }
    if (!k.launch) list.push_back("kernel of backend " + key.second + " for " + key.first + " has no launcher");
    if (key.second == kReference) continue;
    const auto b = backends_.find(f->second.spec.operation);
    const std::string& backend = key.second;
    if (b == backends_.end() ||
        std::none_of(b->second.begin(), b->second.end(), [&backend](const Backend& x) { return x.name == backend; }))
      list.push_back("kernel for " + key.first + " names backend " + key.second + ", which operation " +
                     f->second.spec.operation + " does not have");
  }
  for (const auto& [name, e] : functions_)
    if (e.reference == nullptr) list.push_back(name + " has no reference");
  return list;
}

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

// Read once, when the library is loaded: every later call of the process is dispatched the same way.
const bool kDispatchDisabled = [] {
  const char* v = std::getenv("FLA_DISABLE_BACKEND_DISPATCH");
  return v != nullptr && std::strcmp(v, "1") == 0;
}();

thread_local LastRoute t_last_route;

// Only the exact text "0" disables. Read at every call: a test or a caller may change it while running.
bool enabled(const Backend& b) {
  if (b.env.empty()) return true;
  const char* v = std::getenv(b.env.c_str());
  return v == nullptr ? b.default_enable : std::strcmp(v, "0") != 0;
}

struct Tried {
  RouteStep::Outcome outcome;
  std::string reason;
};

const char* device_name(DeviceType d) { return d == DeviceType::Cpu ? "cpu" : "cuda"; }

Tried try_candidate(const Context& ctx, const Registry::Candidate& c, const void* args, const CallInfo& info) {
  using O = RouteStep::Outcome;
  const Backend& b = *c.backend;
  if (!ctx.options().backend.empty() && ctx.options().backend != b.name)
    return {O::Disabled, "the context asks for backend " + ctx.options().backend};
  if (b.device != info.device.type)
    return {O::Unavailable,
            std::string("serves ") + device_name(b.device) + " tensors, these are on " + device_name(info.device.type)};
  if (b.available && !b.available())
    return {O::Unavailable, b.why_not           ? b.why_not()
                            : b.package.empty() ? "not available on this machine"
                                                : "needs " + b.package};
  if (!enabled(b))
    return {O::Disabled, b.env + (std::getenv(b.env.c_str()) != nullptr ? " is 0" : " is not set (opt-in)")};
  if (c.kernel == nullptr) return {O::NotImplemented, "does not serve this function"};
  if (c.kernel->verify) {
    try {
      Verdict v = c.kernel->verify(args, info);
      if (!v.accepted) return {O::Refused, std::move(v.reason)};
    } catch (const std::exception& e) {  // only verifiers are protected; a kernel that throws is the caller's to see
      return {O::Refused, std::string("verifier threw: ") + e.what()};
    } catch (...) {
      return {O::Refused, "verifier threw"};
    }
  }
  if (!c.kernel->launch) return {O::Missing, "accepted the call but has no implementation of it"};
  return {O::Accepted, {}};
}

struct Checked {
  Dims dims;
  Device device;
};

CallInfo call_info(const Context& ctx, const Registry::Entry& e, const Checked& c) {
  return {.spec = e.spec,
          .dims = c.dims,
          .device = c.device,
          .threads = ctx.threads(),
          .pool = &ctx.pool(),
          .stream = {ctx.options().stream.handle, c.device.index}};
}

// A default stream exists on every device, any other belongs to one.
Status check_stream(const Context& ctx, const Registry::Entry& e, const Checked& c) {
  const Stream& s = ctx.options().stream;
  if (c.device.type == DeviceType::Cpu || s.handle == nullptr || s.device == c.device.index) return {};
  return {Code::InvalidArgument, e.spec.name + ": stream: expected one of device " + std::to_string(c.device.index) +
                                     ", where the tensors are, got one of device " + std::to_string(s.device)};
}

// What a call on an accelerator meets when the operation has no backend for it.
std::optional<RouteStep> no_backend_for(DeviceType device, const Registry::Entry& e) {
  if (device == DeviceType::Cpu || std::any_of(e.candidates.begin(), e.candidates.end(),
                                               [device](const auto& c) { return c.backend->device == device; }))
    return {};
  if (std::string(build_info().cuda).empty())
    return RouteStep{"cuda", "", RouteStep::Outcome::Unavailable, "this build has no CUDA code (FLA_CUDA=OFF)"};
  return RouteStep{"cuda", "", RouteStep::Outcome::NotImplemented, e.spec.operation + " has no CUDA kernels"};
}

Status check_backend_name(const Context& ctx, const Registry::Entry& e) {
  const std::string& want = ctx.options().backend;
  if (want.empty() || want == kReference) return {};
  std::string known;
  for (const auto& c : e.candidates) {
    if (c.backend->name == want) return {};
    known += c.backend->name + ", ";
  }
  return {Code::InvalidArgument, e.spec.name + ": backend: expected one of " + e.spec.operation + ": " + known +
                                     kReference + ", got '" + want + "'"};
}

enum class LogKind : int { Hit, Refusal, Fallback };

void log_once(const Context& ctx, const Registry::Entry& e, LogLevel level, const ErasedKernel& k, LogKind kind,
              std::string_view text) {
  ctx.log_once(&k, static_cast<int>(kind), {level, e.spec.operation, e.spec.name, k.backend, text});
}

struct Choice {
  const ErasedKernel* kernel = nullptr;
  bool by_default = false;
};

enum class Purpose { Run, Ask };  // only a call that runs is logged

// steps may be null (a real call wants only the choice).
Status choose(const Context& ctx, const Registry::Entry& e, const void* args, const CallInfo& info, Purpose purpose,
              Choice& choice, std::vector<RouteStep>* steps) {
  using O = RouteStep::Outcome;
  const auto refusal = [](const std::string& backend, O outcome, const std::string& reason) {
    return "\n  " + backend + ": " + name_of(outcome) + ": " + reason;
  };
  std::string refusals = kDispatchDisabled ? "\n  FLA_DISABLE_BACKEND_DISPATCH was 1 when the library was loaded" : "";
  if (!kDispatchDisabled) {
    for (const auto& c : e.candidates) {
      if (steps == nullptr && ctx.options().backend == kReference) break;
      Tried t = try_candidate(ctx, c, args, info);
      if (steps != nullptr) {
        steps->push_back({c.backend->name, c.kernel != nullptr ? c.kernel->name : "", t.outcome, t.reason});
      } else if (t.outcome == O::Refused) {
        if (purpose == Purpose::Run)
          log_once(ctx, e, LogLevel::Info, *c.kernel, LogKind::Refusal, "refused: " + t.reason);
      } else if (t.outcome == O::Missing && ctx.options().strict) {
        return {Code::Internal, e.spec.name + ": backend " + c.backend->name + " " + t.reason};
      } else if (t.outcome == O::Accepted) {
        choice.kernel = c.kernel;
        return {};
      }
      if (t.outcome == O::Accepted && choice.kernel == nullptr) choice.kernel = c.kernel;
      if (t.outcome != O::Accepted) refusals += refusal(c.backend->name, t.outcome, t.reason);
    }
  }
  if (auto none = no_backend_for(info.device.type, e)) {
    refusals += refusal(none->backend, none->outcome, none->reason);
    if (steps != nullptr) steps->push_back(std::move(*none));
  }
  const bool reference_allowed = ctx.options().backend.empty() || ctx.options().backend == kReference;
  const bool reference_serves = e.reference != nullptr && e.reference->launch && info.device.type == DeviceType::Cpu;
  if (steps != nullptr)
    steps->push_back({kReference, e.reference != nullptr ? e.reference->name : "",
                      !reference_allowed ? O::Disabled
                      : reference_serves ? O::Accepted
                                         : O::Unavailable,
                      !reference_allowed ? "the context asks for backend " + ctx.options().backend
                      : reference_serves ? "the default implementation, double precision, slow"
                                         : "serves cpu tensors only"});
  if (choice.kernel != nullptr) return {};
  if (reference_allowed && reference_serves) {
    choice = {e.reference, true};
    if (purpose == Purpose::Run && ctx.options().backend.empty())
      log_once(ctx, e, LogLevel::Warning, *e.reference, LogKind::Fallback,
               "no backend took the call; the double-precision reference is slow");
    return {};
  }
  return {Code::Unsupported, e.spec.name + ": no backend takes this call" + refusals};
}

// How to read the memory of the call's tensors; empty: it is the host's.
ReadMemory reader(const Registry::Entry& e, const CallInfo& info) {
  for (const auto& c : e.candidates)
    if (c.backend->device == info.device.type && c.backend->read)
      return [&read = c.backend->read, stream = info.stream](void* to, const void* from, std::size_t bytes) {
        return read(to, from, bytes, stream);
      };
  return {};
}

Status run_checked(const Context& ctx, const Registry::Entry& e, const void* args, std::span<std::byte> given,
                   bool allocate) {
  if (!ctx.status()) return ctx.status();
  Checked c;
  if (Status s = check_call(e.spec, args, c.dims, c.device); !s) return s;
  if (Status s = check_backend_name(ctx, e); !s) return s;
  bool any_output = false;
  for (const auto& a : e.spec.args)
    any_output |= (a.role == Role::Output || a.role == Role::Gradient) && a.get(const_cast<void*>(args)).present();
  if (!any_output) return {Code::InvalidArgument, e.spec.name + ": nothing to compute: no output was given"};

  if (Status s = check_overlaps(e.spec, args); !s) return s;
  if (Status s = check_stream(ctx, e, c); !s) return s;

  const CallInfo info = call_info(ctx, e, c);
  Choice choice;
  if (Status s = choose(ctx, e, args, info, Purpose::Run, choice, nullptr); !s) return s;
  const bool look = ctx.options().check_values;
  const ReadMemory read = look ? reader(e, info) : ReadMemory();
  if (look)
    if (Status s = check_values(e.spec, args, read); !s) return s;
  const std::size_t need = choice.kernel->workspace ? choice.kernel->workspace(args, info) : 0;
  std::unique_ptr<std::byte[]> own;
  if (allocate && need > 0 && info.device.type != DeviceType::Cpu)
    return {Code::OutOfMemory, e.spec.name + ": workspace: needs " + std::to_string(need) +
                                   " bytes in the device's memory, which the caller passes; none is allocated there"};
  if (allocate && need > 0) {
    own.reset(new (std::nothrow) std::byte[need]);
    if (!own)
      return {Code::OutOfMemory,
              e.spec.name + ": workspace of " + std::to_string(need) + " bytes could not be allocated"};
    given = {own.get(), need};
  }
  if (given.size() < need)
    return {Code::OutOfMemory,
            e.spec.name + ": workspace: needs " + std::to_string(need) + " bytes, got " + std::to_string(given.size())};
  // All ones is a NaN in every float type and -1 in every integer type.
  if (ctx.options().poison && info.device.type == DeviceType::Cpu && !given.empty())
    std::memset(given.data(), 0xff, given.size());
  Status s = choice.kernel->launch(args, info, given.first(need));
  if (s && read) s = read(nullptr, nullptr, 0);
  if (s) {
    t_last_route = {choice.kernel->backend.c_str(), choice.kernel->name.c_str()};
    if (!choice.by_default) log_once(ctx, e, LogLevel::Info, *choice.kernel, LogKind::Hit, "hit");
  }
  return s;
}

}  // namespace

Result<Route> explain_call(const Context& ctx, const Registry::Entry& e, const void* args) {
  if (!ctx.status()) return ctx.status();
  Checked c;
  if (Status s = check_call(e.spec, args, c.dims, c.device); !s) return s;
  if (Status s = check_backend_name(ctx, e); !s) return s;
  const CallInfo info = call_info(ctx, e, c);
  Route r;
  r.operation = e.spec.operation;
  r.function = e.spec.name;
  r.dispatch_disabled = kDispatchDisabled;
  Choice choice;
  const Status s = choose(ctx, e, args, info, Purpose::Ask, choice, &r.steps);
  if (!s && s.code() != Code::Unsupported) return s;
  if (choice.kernel != nullptr) {
    r.chosen = choice.kernel->backend;
    r.kernel = choice.kernel->name;
    r.by_default = choice.by_default;
    r.workspace_bytes = choice.kernel->workspace ? choice.kernel->workspace(args, info) : 0;
    if (choice.kernel->plan) r.plan = choice.kernel->plan(args, info);
  }
  return r;
}

Result<std::size_t> workspace_call(const Context& ctx, const Registry::Entry& e, const void* args) {
  if (!ctx.status()) return ctx.status();
  Checked c;
  if (Status s = check_call(e.spec, args, c.dims, c.device); !s) return s;
  if (Status s = check_backend_name(ctx, e); !s) return s;
  const CallInfo info = call_info(ctx, e, c);
  Choice choice;
  if (Status s = choose(ctx, e, args, info, Purpose::Ask, choice, nullptr); !s) return s;
  return choice.kernel->workspace ? choice.kernel->workspace(args, info) : std::size_t{0};
}

Status run_call(const Context& ctx, const Registry::Entry& e, const void* args) {
  return run_checked(ctx, e, args, {}, true);
}

Status run_call(const Context& ctx, const Registry::Entry& e, const void* args, std::span<std::byte> workspace) {
  return run_checked(ctx, e, args, workspace, false);
}

LastRoute last_route() { return t_last_route; }

std::vector<EnvVariable> environment_variables(const Registry& r) {
  std::vector<EnvVariable> list = {
      {"FLA_DISABLE_BACKEND_DISPATCH", "unset", "\"1\" when the library is loaded: every call goes to the reference"}};
  for (const Registry::Entry* e : r.entries())
    for (const auto& c : e->candidates) {
      if (c.backend->env.empty()) continue;
      if (std::none_of(list.begin(), list.end(), [&](const EnvVariable& v) { return v.name == c.backend->env; }))
        list.push_back({c.backend->env, c.backend->default_enable ? "enabled" : "disabled",
                        "\"0\" disables backend " + c.backend->name + ", anything else enables it"});
    }
  return list;
}

}  // namespace fla
