// The registry: which functions exist, which backends an operation has, which kernel serves which function. Dispatch
// walks it; docs/architecture.md tells the rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fla/core/context.h"
#include "fla/core/status.h"
#include "fla/core/tensor.h"
#include "fla/registry/spec.h"

namespace fla {

// A verifier's answer. A refusal says what was needed and what came.
struct Verdict {
  bool accepted = true;
  std::string reason;
};
inline Verdict accept() { return {}; }
inline Verdict reject(std::string reason) { return {false, std::move(reason)}; }

// What a verifier, a workspace query and a launcher know beside the arguments.
struct CallInfo {
  const FunctionSpec& spec;
  const Dims& dims;
  Device device;
  int threads;       // of the context's pool
  ThreadPool* pool;  // launchers only
  Stream stream;     // of the tensors' device, where that is an accelerator
};

// An alternative implementation of some of an operation's functions.
struct Backend {
  std::string name;            // identity: adding the same name again replaces the earlier object
  std::string package;         // external package it stands for; informative
  std::string env;             // environment variable whose value "0" disables it; empty: always enabled
  bool default_enable = true;  // when the variable is unset
  int priority = 5;            // lower is tried first; equal ones in order of registration
  DeviceType device = DeviceType::Cpu;
  std::function<bool()> available;       // empty: always
  std::function<std::string()> why_not;  // what is missing where it is not available; empty: its package
  // Copies from its device's memory and waits for all that was queued on the stream; empty: the host can read it.
  std::function<Status(void* to, const void* from, std::size_t bytes, Stream stream)> read;
  std::uint64_t order = 0;  // set by the registry
};

// One backend's implementation of one function, types erased.
struct ErasedKernel {
  std::string function;
  std::string backend;
  std::string name;                                                    // what explain prints: "chunk", "step", ...
  std::function<Verdict(const void*, const CallInfo&)> verify;         // empty: accepts
  std::function<std::size_t(const void*, const CallInfo&)> workspace;  // empty: none
  std::function<std::string(const void*, const CallInfo&)> plan;       // how it would run this call, for explain
  std::function<Status(const void*, const CallInfo&, std::span<std::byte>)> launch;  // empty: a defect, see Route
};

// What a family's file registers. The function's id fixes the args type.
template <typename A>
struct Kernel {
  FunctionId<A> function;
  const char* backend;
  const char* name;
  std::function<Verdict(const A&, const CallInfo&)> verify;
  std::function<std::size_t(const A&, const CallInfo&)> workspace;
  std::function<Status(const A&, const CallInfo&, std::span<std::byte>)> launch;
  std::function<std::string(const A&, const CallInfo&)> plan{};
};

inline constexpr const char* kReference = "reference";

class FLA_API Registry {
 public:
  Registry() = default;
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // Every family of this build; made on first use.
  static const Registry& global();

  template <typename F, typename G>
  void add(OpSpec<F, G>& spec) {
    const bool both = spec.has_backward();
    add_function(spec.take_forward());
    if (both) add_function(spec.take_backward());
  }
  void add_function(FunctionSpec spec);
  void add_backend(const std::string& operation, Backend backend);
  template <typename A>
  void add(Kernel<A> k) {
    ErasedKernel e{.function = k.function.name,
                   .backend = k.backend,
                   .name = k.name,
                   .verify = {},
                   .workspace = {},
                   .plan = {},
                   .launch = {}};
    if (k.verify)
      e.verify = [f = std::move(k.verify)](const void* a, const CallInfo& c) {
        return f(*static_cast<const A*>(a), c);
      };
    if (k.workspace)
      e.workspace = [f = std::move(k.workspace)](const void* a, const CallInfo& c) {
        return f(*static_cast<const A*>(a), c);
      };
    if (k.plan)
      e.plan = [f = std::move(k.plan)](const void* a, const CallInfo& c) { return f(*static_cast<const A*>(a), c); };
    if (k.launch)
      e.launch = [f = std::move(k.launch)](const void* a, const CallInfo& c, std::span<std::byte> w) {
        return f(*static_cast<const A*>(a), c, w);
      };
    add_kernel(std::move(e));
  }
  void add_kernel(ErasedKernel kernel);

  struct Candidate {
    const Backend* backend = nullptr;
    const ErasedKernel* kernel = nullptr;  // nullptr: this backend does not serve the function
  };
  struct Entry {
    FunctionSpec spec;
    std::vector<Candidate> candidates;        // in the order of trial, without the default
    const ErasedKernel* reference = nullptr;  // the default implementation on a CPU
  };

  const Entry* find(std::string_view function) const;
  // Functions in name order; backwards included.
  std::vector<const Entry*> entries() const;
  std::vector<std::string> operations() const;
  // Names that a context may force, the reference among them, in name order.
  std::vector<std::string> backends() const;
  // The known names nearest to a misspelt one, best first.
  std::vector<std::string> nearest(std::string_view name, std::size_t most = 3) const;

  // Defects of the registrations themselves: kernels of unknown functions or backends, kernels without a launcher,
  // functions without a reference. Empty in a sound build; a test asserts it.
  std::vector<std::string> defects() const;

 private:
  friend class PluginAccess;  // load_plugin adds to the library's own
  static Registry& instance();
  void rebuild(const std::string& operation);

  std::map<std::string, Entry, std::less<>> functions_;
  std::map<std::string, std::deque<Backend>, std::less<>> backends_;     // by operation
  std::map<std::pair<std::string, std::string>, ErasedKernel> kernels_;  // by (function, backend)
  std::uint64_t next_order_ = 0;
};

// ---- dispatch ----------------------------------------------------------------------------------------------------

struct RouteStep {
  enum class Outcome : std::uint8_t {
    Unavailable,     // its package or hardware is missing
    Disabled,        // its environment variable, or the context's forced backend, rules it out
    Refused,         // its verifier said no: see reason
    NotImplemented,  // it does not serve this function
    Missing,         // it accepted but has no implementation: a defect, an error in strict contexts
    Accepted,        // it could serve the call
  };
  std::string backend;
  std::string kernel;
  Outcome outcome = Outcome::Accepted;
  std::string reason;
};
FLA_API const char* name_of(RouteStep::Outcome o);

// How a call is, or would be, served. `chosen` is the first accepted step, the reference last; empty: none took it.
struct FLA_API Route {
  std::string operation, function, chosen, kernel;
  bool by_default = false;         // no backend took it and the default implementation serves it
  bool dispatch_disabled = false;  // the master switch was set when the library was loaded
  std::size_t workspace_bytes = 0;
  std::string plan;  // how the chosen kernel cuts the call; empty: it does not tell
  std::vector<RouteStep> steps;
  const std::string* reason(std::string_view backend) const;
};

// Checks the call and says how it would be served; runs nothing.
FLA_API Result<Route> explain_call(const Context& ctx, const Registry::Entry& entry, const void* args);
// Bytes of workspace the call needs.
FLA_API Result<std::size_t> workspace_call(const Context& ctx, const Registry::Entry& entry, const void* args);
// Checks, dispatches and runs. Without `workspace` the library allocates what the kernel asks for, on the host: a call
// on another device that needs some is refused.
FLA_API Status run_call(const Context& ctx, const Registry::Entry& entry, const void* args);
FLA_API Status run_call(const Context& ctx, const Registry::Entry& entry, const void* args,
                        std::span<std::byte> workspace);
// The backend that served this thread's last successful call ("cpu"), and its kernel. For tests and tools.
struct LastRoute {
  const char* backend = "";
  const char* kernel = "";
};
FLA_API LastRoute last_route();

// Environment variables the library reads, for `fla ops --env`.
struct EnvVariable {
  std::string name, def, effect;
};
FLA_API std::vector<EnvVariable> environment_variables(const Registry& r);

}  // namespace fla
