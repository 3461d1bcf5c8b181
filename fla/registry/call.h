// A call: how it is described to a user (its route), run, and prepared once to be run often. Everything here works on a
// function's args struct behind a void*; fla/registry/function.h puts the types on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fla/core/context.h"
#include "fla/core/device.h"
#include "fla/core/export.h"
#include "fla/core/status.h"

namespace fla {

// A typed name: a kernel registered for it must take the same args struct, so a misspelt or mistyped registration does
// not compile.
template <typename A>
struct FunctionId {
  const char* name;
};

struct FunctionEntry;  // a function of a registry (fla/registry/registry.h)

struct RouteStep {
  enum class Outcome : std::uint8_t {
    Unavailable,     // its package or hardware is missing
    Disabled,        // its environment variable, or what the context forces, rules it out
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
  std::string operation, function, chosen;
  std::string kernel;              // the name of the kernel itself: "diag.chunk.channel"
  bool by_default = false;         // no backend took it and the default implementation serves it
  bool dispatch_disabled = false;  // the master switch was set when the library was loaded
  std::size_t workspace_bytes = 0;
  std::size_t keeps_bytes = 0;  // what a forward can leave for its backward, or a backward can use of it
  std::string plan;             // how the chosen kernel cuts the call; empty: it does not tell
  std::vector<RouteStep> steps;
  const std::string* reason(std::string_view backend) const;
};

// Memory in which a forward leaves for its backward what it has anyway (states, solutions), so that the backward need
// not compute it again: speed for memory, where the caller wants that. `layout` comes from the forward's call and tells
// the backward what lies there.
struct Kept {
  std::span<std::byte> memory{};
  std::uint64_t layout = 0;
};

// What may be said of a run beside its arguments.
struct RunOptions {
  // At least as many bytes as the call asks for, of any alignment and content.
  std::span<std::byte> workspace{};
  Kept kept{};
  const Stream* stream = nullptr;  // instead of the context's
};

// Checks the call and says how it would be served; runs nothing.
FLA_API Result<Route> explain_call(const Context& ctx, const FunctionEntry& entry, const void* args);
// Bytes of workspace the call needs.
FLA_API Result<std::size_t> workspace_call(const Context& ctx, const FunctionEntry& entry, const void* args);
// Checks, dispatches and runs. Without RunOptions the library allocates what the kernel asks for, on the host: a call
// on another device that needs some is refused.
FLA_API Status run_call(const Context& ctx, const FunctionEntry& entry, const void* args);
FLA_API Status run_call(const Context& ctx, const FunctionEntry& entry, const void* args, const RunOptions& options);

// The backend that served this thread's last successful call ("cpu"), and its kernel. For tests and tools.
struct LastRoute {
  const char* backend = "";
  const char* kernel = "";  // lives until the thread's next call
};
FLA_API LastRoute last_route();

// A call that was checked, dispatched, planned and sized once. It may be run from any thread, by one at a time, and
// inside a captured graph; a run allocates nothing. Everything that decides the route is as it was when the call was
// made: shapes, types, strides, flags, boundaries on the host, the environment.
class FLA_API PreparedCall {
 public:
  PreparedCall() = default;  // empty: runs are refused
  ~PreparedCall();
  PreparedCall(PreparedCall&& o) noexcept : state_(std::exchange(o.state_, nullptr)) {}
  PreparedCall& operator=(PreparedCall&& o) noexcept {
    std::swap(state_, o.state_);
    return *this;
  }
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;

  static Result<PreparedCall> make(const Context& ctx, const FunctionEntry& entry, const void* args);
  explicit operator bool() const { return state_ != nullptr; }

  std::size_t workspace_bytes() const;
  // What a forward can leave for its backward (0: nothing), or what a backward takes; equal layouts fit together.
  std::size_t keeps_bytes() const;
  std::uint64_t keeps_layout() const;
  const char* backend() const;
  const char* kernel() const;
  std::string plan() const;

  // The memory that the call was made for, or that it last ran on.
  Status run(const RunOptions& options) const;
  // Other memory: `args` is the same call, its tensors lie elsewhere. The memory has to be aligned as the first one was
  // where the kernel makes use of that.
  Status run(const void* args, const RunOptions& options) const;

 private:
  struct State;
  State* state_ = nullptr;
};

}  // namespace fla
