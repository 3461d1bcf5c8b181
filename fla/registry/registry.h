// The registry: which functions exist, which backends an operation has, which kernels serve which function. Dispatch
// walks it; docs/architecture.md tells the rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "fla/core/context.h"
#include "fla/core/status.h"
#include "fla/core/tensor.h"
#include "fla/registry/call.h"
#include "fla/registry/kernel.h"
#include "fla/registry/spec.h"

namespace fla {

inline constexpr const char* kReference = "reference";

// A kernel of a backend that might serve a function.
struct Candidate {
  const Backend* backend = nullptr;
  const ErasedKernel* kernel = nullptr;  // nullptr: this backend does not serve the function
};

struct FunctionEntry {
  FunctionSpec spec;
  std::vector<Candidate> candidates;        // in the order of trial, without the default
  const ErasedKernel* reference = nullptr;  // the default implementation on a CPU
};

class FLA_API Registry {
 public:
  using Candidate = fla::Candidate;
  using Entry = FunctionEntry;

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
    add(erase(std::move(k)));
  }
  void add(ErasedKernel k) { static_cast<void>(add_kernel(std::move(k))); }
  // A second kernel of one name for a function and backend is not taken: the answer says so, and so does defects().
  Status add_kernel(ErasedKernel kernel);

  const Entry* find(std::string_view function) const;
  // Functions in name order; backwards included.
  std::vector<const Entry*> entries() const;
  std::vector<std::string> operations() const;
  // Names that a context may force, the reference among them, in name order.
  std::vector<std::string> backends() const;
  // The known names nearest to a misspelt one, best first.
  std::vector<std::string> nearest(std::string_view name, std::size_t most = 3) const;

  // Defects of the registrations themselves: kernels of unknown functions or backends, kernels without a launcher or of
  // a name that is taken, functions without a reference. Empty in a sound build; a test asserts it.
  std::vector<std::string> defects() const;

 private:
  friend class PluginAccess;  // load_plugin adds to the library's own
  static Registry& instance();
  void rebuild(const std::string& operation);

  std::map<std::string, Entry, std::less<>> functions_;
  std::map<std::string, std::deque<Backend>, std::less<>> backends_;                 // by operation
  std::map<std::pair<std::string, std::string>, std::deque<ErasedKernel>> kernels_;  // by (function, backend)
  std::vector<std::string> refused_;                                                 // registrations
  std::uint64_t next_order_ = 0;
};

// Environment variables the library reads, for `fla ops --env`.
struct EnvVariable {
  std::string name, def, effect;
};
FLA_API std::vector<EnvVariable> environment_variables(const Registry& r);

}  // namespace fla
