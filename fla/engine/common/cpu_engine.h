// Registers an engine's kernels on the CPU, and its reference, for a family's functions. A family supplies
// `to_problem(const Args&)` for each of its args structs: what the engine computes from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fla/core/threads.h"
#include "fla/engine/common/functions.h"
#include "fla/registry/registry.h"

namespace fla {

inline Backend cpu_backend() {
  Backend b;
  b.name = "cpu";
  b.env = "FLA_CPP_BACKEND_CPU";
  return b;
}

// The cpu kernels carry fp32; only the reference computes in double.
inline Verdict verify_cpu(const CallInfo& c, DType wide) {
  if (wide == DType::F64)
    return reject(c, [&] { return c.spec.name + ": needs F32, F16 or BF16, got F64 (the reference serves F64)"; });
  return accept();
}

// One direction of an engine in one form.
template <typename P>
struct CpuPass {
  // Its kernels by name, and which of them runs a problem: an index, by what the kernels themselves branch on.
  std::span<const char* const> kernels;
  std::size_t (*kernel)(const P&);
  std::size_t (*workspace)(const P&, int threads);
  Status (*run)(const P&, ThreadPool&, std::span<std::byte> workspace);
};

// Both directions of one form. P: the forward's problem, G: the backward's.
template <typename P, typename G>
struct CpuEngine {
  const char* backend;
  const char* name;  // of this form: "diag.chunk"
  CpuPass<P> forward;
  CpuPass<G> backward;
};

namespace detail {

// A call as a pass runs it: its problem, translated once.
template <typename P, typename A>
class CpuPlan final : public Plan {
 public:
  using Problem = decltype(to_problem(std::declval<const A&>()));

  CpuPlan(const CpuPass<P>& pass, const A& args, const CallInfo& info)
      : pass_(pass), args_(args), problem_(to_problem(args)), workspace_(pass.workspace(problem_, info.threads)) {}
  KernelName kernel() const override { return {pass_.kernels[pass_.kernel(problem_)]}; }
  std::size_t workspace() const override { return workspace_; }
  void rebind() override { problem_ = to_problem(args_); }
  Status launch(const LaunchInfo& l) const override { return pass_.run(problem_, *l.pool, l.workspace); }

 private:
  const CpuPass<P>& pass_;
  const A& args_;
  Problem problem_;
  std::size_t workspace_;
};

template <typename P, typename A>
ErasedKernel cpu_kernel(FunctionId<A> function, const char* backend, const char* name, const CpuPass<P>& pass) {
  const bool narrow = std::string_view(backend) != kReference;
  return {.function = function.name,
          .backend = backend,
          .name = name,
          .make = [&pass, narrow](const void* a, const CallInfo& c, PlanMemory& memory, Verdict& v) -> Plan* {
            const A& args = *static_cast<const A*>(a);
            if (narrow) {
              v = verify_cpu(c, first_wide(args));
              if (!v.accepted) return nullptr;
            }
            return memory.make<CpuPlan<P, A>>(pass, args, c);
          },
          .kernels =
              [&pass](const DeviceInfo*) {
                std::vector<std::string> names;
                for (const char* one : pass.kernels) KernelName(one).append_to(names);
                return names;
              }};
}

}  // namespace detail

template <typename A>
concept HasQueries = requires(const A& a) {
  a.q;
};
template <typename A>
concept HasReceptance = requires(const A& a) {
  a.r;
};

// The type of a call's wide arguments: that of q, or of what stands for it.
template <typename A>
DType first_wide(const A& a) {
  if constexpr (HasQueries<A>) {
    return a.q.dtype;
  } else if constexpr (HasReceptance<A>) {
    return a.r.dtype;
  } else {
    return a.x.dtype;
  }
}

// Registers the engine's form for one function and direction. The engine object has to stay.
template <typename P, typename G, typename A, bool BACKWARD>
void register_cpu_engine(Registry& r, FunctionId<A> function, std::bool_constant<BACKWARD>, const CpuEngine<P, G>& e) {
  if constexpr (BACKWARD)
    r.add(detail::cpu_kernel<G>(function, e.backend, e.name, e.backward));
  else
    r.add(detail::cpu_kernel<P>(function, e.backend, e.name, e.forward));
}

// All functions of the list, each in its form.
template <typename Functions, typename Engine>
void register_cpu(Registry& r, const char* operation, const Functions& functions, const Engine& chunk,
                  const Engine& step) {
  r.add_backend(operation, cpu_backend());
  for_each_function(functions, [&](Form form, auto id, auto backward) {
    register_cpu_engine(r, id, backward, form == Form::Chunk ? chunk : step);
  });
}
template <typename Functions, typename Engine>
void register_reference(Registry& r, const Functions& functions, const Engine& reference) {
  for_each_function(functions, [&](Form, auto id, auto backward) { register_cpu_engine(r, id, backward, reference); });
}

}  // namespace fla
