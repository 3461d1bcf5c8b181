// Function<A>: a public operator as a typed, callable constant, e.g. fla::chunk_gla(ctx, args).
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string>

#include "fla/core/context.h"
#include "fla/core/status.h"
#include "fla/registry/registry.h"

namespace fla {

template <typename A>
class Function {
 public:
  using Args = A;
  constexpr explicit Function(FunctionId<A> id) : name_(id.name) {}

  // Checks, dispatches and runs; allocates the workspace the chosen kernel asks for.
  Status operator()(const Context& ctx, const A& args) const {
    return with_entry(ctx, [&](const Registry::Entry& e) { return run_call(ctx, e, &args); });
  }
  // The same in the caller's memory: at least workspace_bytes(ctx, args); any alignment, any content. Allocates
  // nothing.
  Status operator()(const Context& ctx, const A& args, std::span<std::byte> workspace) const {
    return with_entry(ctx, [&](const Registry::Entry& e) { return run_call(ctx, e, &args, workspace); });
  }
  // Depends on shapes, dtypes, flags, the environment and the context's thread count, not on tensor contents.
  Result<std::size_t> workspace_bytes(const Context& ctx, const A& args) const {
    const Registry::Entry* e = entry(ctx);
    if (e == nullptr) return unknown();
    return workspace_call(ctx, *e, &args);
  }
  // Which backend and kernel would serve the call and why each other one would not; runs nothing.
  Result<Route> explain(const Context& ctx, const A& args) const {
    const Registry::Entry* e = entry(ctx);
    if (e == nullptr) return unknown();
    return explain_call(ctx, *e, &args);
  }
  constexpr const char* name() const { return name_; }

 private:
  // An entry of the library's own registry stays where it is, so it is looked up once.
  const Registry::Entry* entry(const Context& ctx) const {
    if (&ctx.registry() != &Registry::global()) return ctx.registry().find(name_);
    const Registry::Entry* e = entry_.load(std::memory_order_acquire);
    if (e == nullptr) {
      e = Registry::global().find(name_);
      entry_.store(e, std::memory_order_release);
    }
    return e;
  }
  template <typename Fn>
  Status with_entry(const Context& ctx, Fn&& fn) const {
    const Registry::Entry* e = entry(ctx);
    return e == nullptr ? unknown() : fn(*e);
  }
  Status unknown() const { return {Code::Unsupported, std::string(name_) + ": not in this registry"}; }

  const char* name_;
  mutable std::atomic<const Registry::Entry*> entry_{nullptr};
};

}  // namespace fla
