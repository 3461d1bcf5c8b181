// Registers a CUDA engine's kernels for a function and its backward, as engine_kernels.h does for the CPU's: a family
// supplies `P to_problem(const Args&)` for both args structs. Nothing here reads a tensor's memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>

#include "fla/core/device.h"
#include "fla/kernels/cuda/launch.h"
#include "fla/registry/registry.h"

namespace fla {

inline constexpr const char* kCuda = "cuda";

inline Backend cuda_backend() {
  Backend b;
  b.name = kCuda;
  b.env = "FLA_BACKEND_CUDA";
  b.priority = 4;
  b.device = DeviceType::Cuda;
  b.available = [] { return cuda::device_info(0).ok(); };
  b.read = cuda::read_memory;
  b.why_not = [] { return cuda::device_info(0).status().message(); };
  return b;
}

// One direction of an engine, on its problem or on a function's own args. All are pure functions of shapes, types,
// strides and flags but launch, which queues its kernels on the stream and returns.
template <typename P>
struct CudaPass {
  std::string (*refusal)(const P&, const DeviceInfo&) = nullptr;  // why it cannot serve the problem; empty: it can
  std::string (*plan)(const P&, const DeviceInfo&) = nullptr;     // which kernels, cut how, for `fla explain`
  std::size_t (*workspace)(const P&, const DeviceInfo&) = nullptr;
  Status (*launch)(const P&, const DeviceInfo&, Stream, std::span<std::byte>) = nullptr;
};
// P: what a forward computes from, B: what a backward does.
template <typename P, typename B = P>
struct CudaEngine {
  const char* name;
  CudaPass<P> forward;
  CudaPass<B> backward;
};

namespace detail {

template <typename P, typename A>
decltype(auto) cuda_problem(const A& a) {
  if constexpr (std::is_same_v<P, A>) {
    return (a);
  } else {
    return to_problem(a);
  }
}

template <typename P, typename A>
Kernel<A> cuda_kernel(FunctionId<A> function, const char* name, const CudaPass<P>& pass) {
  return {.function = function,
          .backend = kCuda,
          .name = name,
          .verify =
              [pass](const A& a, const CallInfo& c) {
                const Result<DeviceInfo> d = cuda::device_info(c.device.index);
                if (!d) return reject(d.status().message());
                std::string reason = pass.refusal(cuda_problem<P>(a), *d);
                return reason.empty() ? accept() : reject(std::move(reason));
              },
          .workspace =
              [pass](const A& a, const CallInfo& c) {
                const Result<DeviceInfo> d = cuda::device_info(c.device.index);
                return d ? pass.workspace(cuda_problem<P>(a), *d) : std::size_t{0};
              },
          .launch =
              [pass](const A& a, const CallInfo& c, std::span<std::byte> ws) {
                const Result<DeviceInfo> d = cuda::device_info(c.device.index);
                if (!d) return d.status();
                const cuda::OnDevice here(c.device.index);
                return here.status() ? pass.launch(cuda_problem<P>(a), *d, c.stream, ws) : here.status();
              },
          .plan =
              [pass](const A& a, const CallInfo& c) {
                const Result<DeviceInfo> d = cuda::device_info(c.device.index);
                return d ? pass.plan(cuda_problem<P>(a), *d) : std::string();
              }};
}

}  // namespace detail

template <typename P, typename B, typename F, typename G>
void register_cuda_engine(Registry& r, FunctionId<F> forward, FunctionId<G> backward, const CudaEngine<P, B>& e) {
  r.add(detail::cuda_kernel(forward, e.name, e.forward));
  r.add(detail::cuda_kernel(backward, e.name, e.backward));
}
// A function without a backward.
template <typename P, typename B, typename F>
void register_cuda_engine(Registry& r, FunctionId<F> forward, const CudaEngine<P, B>& e) {
  r.add(detail::cuda_kernel(forward, e.name, e.forward));
}

}  // namespace fla
