// Registers an engine's CUDA kernels for a family's functions, as cpu_engine.h does for the CPU's. Nothing here reads a
// tensor's memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fla/core/device.h"
#include "fla/engine/common/functions.h"
#include "fla/kernels/cuda/launch.h"
#include "fla/registry/registry.h"

namespace fla {

inline constexpr const char* kCuda = "cuda";

inline Backend cuda_backend() {
  Backend b;
  b.name = kCuda;
  b.env = "FLA_CPP_BACKEND_CUDA";
  b.priority = 4;
  b.device = DeviceType::Cuda;
  b.limits = cuda::device_limits;
  b.read = cuda::read_memory;
  b.why_not = [] { return cuda::device_info(0).status().message(); };
  return b;
}

// One direction of an engine. L is what it decides once for a problem: which kernels, cut how. All are pure functions of
// shapes, types, strides and flags but launch, which queues the kernels on the stream and returns.
template <typename P, typename L>
struct CudaPass {
  // False: the engine cannot serve the problem, or not with the kernel that is `wanted` where that is not empty; the
  // reason goes to `why` where somebody asks.
  bool (*plan)(const P&, const DeviceInfo&, std::string_view wanted, L&, std::string* why);
  KernelName (*kernel)(const P&, const L&);
  std::string (*text)(const P&, const L&);
  std::size_t (*workspace)(const P&, const L&);
  Status (*launch)(const P&, const L&, Stream, std::span<std::byte>);
  std::vector<std::string> (*kernels)(const DeviceInfo&);  // all that a plan for such a device may name
};
template <typename P, typename L, typename G, typename M>
struct CudaEngine {
  const char* name;
  CudaPass<P, L> forward;
  CudaPass<G, M> backward;
};

namespace detail {

// What an engine computes from: a function's own args, or their translation.
template <typename P, typename A>
decltype(auto) cuda_problem(const A& a) {
  if constexpr (std::is_same_v<P, A>) {
    return (a);
  } else {
    return to_problem(a);
  }
}

template <typename P, typename L, typename A>
class CudaPlan final : public Plan {
 public:
  CudaPlan(const CudaPass<P, L>& pass, const A& args) : pass_(pass), args_(args), problem_(cuda_problem<P>(args)) {}
  // False: refused.
  bool decide(const CallInfo& c, std::string* why) {
    device_ = c.device.index;
    if (!pass_.plan(problem_, *c.gpu, c.kernel, plan_, why)) return false;
    workspace_ = pass_.workspace(problem_, plan_);
    return true;
  }
  KernelName kernel() const override { return pass_.kernel(problem_, plan_); }
  std::size_t workspace() const override { return workspace_; }
  std::string text() const override { return pass_.text(problem_, plan_); }
  bool wants_alignment() const override { return true; }
  void rebind() override { problem_ = cuda_problem<P>(args_); }
  Status launch(const LaunchInfo& l) const override {
    const cuda::OnDevice here(device_);
    return here.status() ? pass_.launch(problem_, plan_, l.stream, l.workspace) : here.status();
  }

 private:
  const CudaPass<P, L>& pass_;
  const A& args_;
  std::remove_cvref_t<decltype(cuda_problem<P>(std::declval<const A&>()))> problem_;
  L plan_{};
  std::size_t workspace_ = 0;
  int device_ = 0;
};

template <typename P, typename L, typename A>
ErasedKernel cuda_kernel(FunctionId<A> function, const char* name, const CudaPass<P, L>& pass) {
  return {
      .function = function.name,
      .backend = kCuda,
      .name = name,
      .make = [&pass](const void* a, const CallInfo& c, PlanMemory& memory, Verdict& v) -> Plan* {
        auto* plan = memory.make<CudaPlan<P, L, A>>(pass, *static_cast<const A*>(a));
        if (plan->decide(c, c.texts ? &v.reason : nullptr)) return plan;
        v.accepted = false;
        memory.clear();
        return nullptr;
      },
      .kernels = [&pass](const DeviceInfo* d) { return d != nullptr ? pass.kernels(*d) : std::vector<std::string>(); }};
}

}  // namespace detail

// Registers one direction for one function. The engine object has to stay.
template <typename E, typename A, bool BACKWARD>
void register_cuda_engine(Registry& r, FunctionId<A> function, std::bool_constant<BACKWARD>, const E& e) {
  if constexpr (BACKWARD)
    r.add(detail::cuda_kernel(function, e.name, e.backward));
  else
    r.add(detail::cuda_kernel(function, e.name, e.forward));
}

template <typename Functions, typename E>
void register_cuda(Registry& r, const char* operation, const Functions& functions, const E& e) {
  r.add_backend(operation, cuda_backend());
  for_each_function(functions, [&](Form, auto id, auto backward) { register_cuda_engine(r, id, backward, e); });
}

}  // namespace fla
