// Registers an engine's kernels for a function and its backward. A family supplies `P to_problem(const Args&)` for both
// args structs, P being what the engine computes from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/core/threads.h"
#include "fla/registry/registry.h"

namespace fla {

inline Backend cpu_backend() {
  Backend b;
  b.name = "cpu";
  b.env = "FLA_BACKEND_CPU";
  return b;
}

// The cpu kernels carry fp32; only the reference computes in double.
inline Verdict verify_cpu(const CallInfo& c, DType wide) {
  if (wide == DType::F64) return reject(c.spec.name + ": needs F32, F16 or BF16, got F64 (the reference serves F64)");
  return accept();
}

// Chunkwise, for training and prefill; token by token, for decoding and short sequences.
enum class Form : std::uint8_t { Chunk, Step };

// P: what a forward computes from, B: what a backward does.
template <typename P, typename B = P>
struct Engine {
  const char* backend;
  const char* name;
  std::size_t (*forward_workspace)(const P&, int threads);
  Status (*forward)(const P&, ThreadPool&, std::span<std::byte>);
  std::size_t (*backward_workspace)(const B&, int threads);
  Status (*backward)(const B&, ThreadPool&, std::span<std::byte>);
};

namespace detail {

template <typename E, typename P, typename A>
Kernel<A> engine_kernel(FunctionId<A> function, const E& e, std::size_t (*workspace)(const P&, int),
                        Status (*run)(const P&, ThreadPool&, std::span<std::byte>)) {
  Kernel<A> k{.function = function,
              .backend = e.backend,
              .name = e.name,
              .verify = {},
              .workspace = [workspace](const A& a, const CallInfo& c) { return workspace(to_problem(a), c.threads); },
              .launch = [run](const A& a, const CallInfo& c,
                              std::span<std::byte> ws) { return run(to_problem(a), *c.pool, ws); }};
  if (k.backend != kReference)
    k.verify = [](const A& a, const CallInfo& c) { return verify_cpu(c, to_problem(a).q.dtype); };
  return k;
}

}  // namespace detail

template <typename P, typename B, typename F, typename G>
void register_engine(Registry& r, FunctionId<F> forward, FunctionId<G> backward, const Engine<P, B>& e) {
  r.add(detail::engine_kernel(forward, e, e.forward_workspace, e.forward));
  r.add(detail::engine_kernel(backward, e, e.backward_workspace, e.backward));
}
// A function without a backward.
template <typename P, typename B, typename F>
void register_engine(Registry& r, FunctionId<F> forward, const Engine<P, B>& e) {
  r.add(detail::engine_kernel(forward, e, e.forward_workspace, e.forward));
}

}  // namespace fla
