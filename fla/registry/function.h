// Function<A>: a public operator as a typed, callable constant, e.g. fla::chunk_gla(ctx, args).
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "fla/core/context.h"
#include "fla/core/status.h"
#include "fla/registry/call.h"

namespace fla {

// A prepared call of a function that takes A; see PreparedCall.
template <typename A>
class Prepared : public PreparedCall {
 public:
  Prepared() = default;
  explicit Prepared(PreparedCall call) : PreparedCall(std::move(call)) {}
  using PreparedCall::run;
  Status run(std::span<std::byte> workspace = {}) const {
    return PreparedCall::run(RunOptions{.workspace = workspace});
  }
  Status run(const A& args, std::span<std::byte> workspace = {}) const {
    return PreparedCall::run(static_cast<const void*>(&args), RunOptions{.workspace = workspace});
  }
  Status run(const A& args, const RunOptions& options) const {
    return PreparedCall::run(static_cast<const void*>(&args), options);
  }
};

namespace detail {
// The function of that name in the context's registry, nullptr without one. `known` remembers that of the library's own.
FLA_API const FunctionEntry* find_function(const Context& ctx, const char* name, const FunctionEntry** known);
FLA_API Status unknown_function(const char* name);
}  // namespace detail

template <typename A>
class Function {
 public:
  using Args = A;
  constexpr explicit Function(FunctionId<A> id) : name_(id.name) {}

  // Checks, dispatches and runs; allocates the workspace the chosen kernel asks for.
  Status operator()(const Context& ctx, const A& args) const {
    const FunctionEntry* e = entry(ctx);
    return e != nullptr ? run_call(ctx, *e, &args) : detail::unknown_function(name_);
  }
  // The same in the caller's memory: at least workspace_bytes(ctx, args); any alignment, any content. Allocates
  // nothing.
  Status operator()(const Context& ctx, const A& args, std::span<std::byte> workspace) const {
    return (*this)(ctx, args, RunOptions{.workspace = workspace});
  }
  Status operator()(const Context& ctx, const A& args, const RunOptions& options) const {
    const FunctionEntry* e = entry(ctx);
    return e != nullptr ? run_call(ctx, *e, &args, options) : detail::unknown_function(name_);
  }
  // Depends on shapes, dtypes, flags, the environment and the context's thread count, not on tensor contents.
  Result<std::size_t> workspace_bytes(const Context& ctx, const A& args) const {
    const FunctionEntry* e = entry(ctx);
    return e != nullptr ? workspace_call(ctx, *e, &args) : detail::unknown_function(name_);
  }
  // Which backend and kernel would serve the call and why each other one would not; runs nothing.
  Result<Route> explain(const Context& ctx, const A& args) const {
    const FunctionEntry* e = entry(ctx);
    if (e == nullptr) return detail::unknown_function(name_);
    return explain_call(ctx, *e, &args);
  }
  // Checks, dispatches, plans and sizes the call once, to be run often. The context need not outlive it.
  Result<Prepared<A>> prepare(const Context& ctx, const A& args) const {
    const FunctionEntry* e = entry(ctx);
    if (e == nullptr) return detail::unknown_function(name_);
    Result<PreparedCall> made = PreparedCall::make(ctx, *e, &args);
    if (!made) return made.status();
    return Prepared<A>(std::move(*made));
  }
  constexpr const char* name() const { return name_; }

 private:
  const FunctionEntry* entry(const Context& ctx) const { return detail::find_function(ctx, name_, &entry_); }

  const char* name_;
  mutable const FunctionEntry* entry_ = nullptr;  // read and written as an atomic
};

}  // namespace fla
