// fla_cuda_host_bench: how long a call keeps the CPU, beyond what the driver takes to launch its kernels. One line a
// call: its kernels, microseconds prepared, prepared and run on other memory, not prepared, and those of the bare
// launches. The bare launches are the same kernels with the same arguments, read back from a captured graph.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "fla/fla.hpp"
#include "tests/cuda/device_array.h"

namespace fla::cuda {
namespace {

constexpr int kQueued = 64, kRounds = 200;  // calls queued before the device is waited for, and how often

void must(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "fla_cuda_host_bench: %s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}
void must(const Status& s, const char* what) {
  if (s) return;
  std::fprintf(stderr, "fla_cuda_host_bench: %s: %s\n", what, s.message().c_str());
  std::exit(1);
}

// Median microseconds of one call while the device is kept from falling behind.
double host_time(const std::function<void(int)>& call) {
  std::vector<double> times;
  for (int r = 0; r < kRounds; ++r) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kQueued; ++i) call(i);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    must(cudaDeviceSynchronize(), "a call");
    times.push_back(took.count() / kQueued);
  }
  std::ranges::nth_element(times, times.begin() + kRounds / 2);
  return times[kRounds / 2];
}

class Inputs {
 public:
  TensorView make(DType t, std::initializer_list<std::int64_t> dims) {
    std::int64_t n = 1;
    for (const std::int64_t d : dims) n *= d;
    const std::size_t bytes = static_cast<std::size_t>(n) * size_of(t);
    memory_.push_back(std::make_unique<DeviceMemory>(bytes));
    must(cudaMemset(memory_.back()->data(), 0, bytes), "clearing an input");
    return {memory_.back()->data(), t, std::span<const std::int64_t>(dims.begin(), dims.size()),
            Device{DeviceType::Cuda, 0}};
  }

 private:
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

template <typename A>
void time_call(const Context& ctx, cudaStream_t stream, const Function<A>& fn, const char* text,
               const std::array<A, 2>& args) {
  const Result<Prepared<A>> made = fn.prepare(ctx, args[0]);
  must(made.status(), fn.name());
  const Prepared<A>& call = *made;
  const DeviceMemory memory(call.workspace_bytes());
  const std::span<std::byte> workspace(static_cast<std::byte*>(memory.data()), call.workspace_bytes());

  cudaGraph_t graph = nullptr;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  must(call.run(workspace), fn.name());
  must(cudaStreamEndCapture(stream, &graph), "capture");
  std::size_t count = 0;
  must(cudaGraphGetNodes(graph, nullptr, &count), "nodes");
  std::vector<cudaGraphNode_t> nodes(count);
  must(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes");
  std::vector<cudaKernelNodeParams> kernels;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    must(cudaGraphNodeGetType(node, &type), "node");
    if (type != cudaGraphNodeTypeKernel) continue;
    must(cudaGraphKernelNodeGetParams(node, &kernels.emplace_back()), "kernel");
  }

  const double same = host_time([&](int) { must(call.run(workspace), fn.name()); });
  const double other = host_time([&](int i) { must(call.run(args[i & 1], workspace), fn.name()); });
  const double whole = host_time([&](int i) { must(fn(ctx, args[i & 1], workspace), fn.name()); });
  const double bare = host_time([&](int) {
    for (const cudaKernelNodeParams& k : kernels)
      must(cudaLaunchKernel(k.func, k.gridDim, k.blockDim, k.kernelParams, k.sharedMemBytes, stream), "launch");
  });
  std::printf(
      "%-28s %-24s %-44s kernels %zu  prepared %6.2f  other memory %6.2f  not prepared %6.2f  launches %6.2f us\n",
      fn.name(), text, call.kernel(), kernels.size(), same, other, whole, bare);
  must(cudaGraphDestroy(graph), "graph");
}

void run() {
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const Context ctx(ContextOptions{.stream = {.handle = stream, .device = 0}});
  must(ctx.status(), "context");
  Inputs in;
  constexpr std::int64_t B = 8, H = 16, D = 128;
  std::array<GdnStepArgs, 2> step;
  for (GdnStepArgs& a : step) {
    a.state = in.make(DType::F32, {B, H, D, D});
    for (TensorView* x : {&a.q, &a.k, &a.v, &a.o}) *x = in.make(DType::BF16, {B, 1, H, D});
    a.g = in.make(DType::F32, {B, 1, H});
    a.beta = in.make(DType::BF16, {B, 1, H});
  }
  time_call(ctx, stream, gdn_step, "B8_T1_H16_D128", step);

  for (const std::int64_t T : {std::int64_t{64}, std::int64_t{1024}}) {
    const char* text = T == 64 ? "B1_T64_H16_D128" : "B1_T1024_H16_D128";
    std::array<GatedDeltaRuleBackwardArgs, 2> gdn;
    std::array<GatedDeltaRuleArgs, 2> forward;
    std::array<GlaArgs, 2> gla;
    for (int i = 0; i < 2; ++i) {
      GatedDeltaRuleBackwardArgs& a = gdn[i];
      for (TensorView* x : {&a.q, &a.k, &a.v, &a.o, &a.do_, &a.dq, &a.dk, &a.dv})
        *x = in.make(DType::BF16, {1, T, H, D});
      for (TensorView* x : {&a.g, &a.dg}) *x = in.make(DType::F32, {1, T, H});
      for (TensorView* x : {&a.beta, &a.dbeta}) *x = in.make(DType::BF16, {1, T, H});
      forward[i] = a;
      GlaArgs& l = gla[i];
      l.q = a.q, l.k = a.k, l.v = a.v, l.o = a.o;
      l.g = in.make(DType::BF16, {1, T, H, D});
    }
    time_call(ctx, stream, chunk_gla, text, gla);
    time_call(ctx, stream, chunk_gdn, text, forward);
    time_call(ctx, stream, chunk_gdn_backward, text, gdn);
  }
  must(cudaStreamDestroy(stream), "stream");
}

}  // namespace
}  // namespace fla::cuda

int main() {
  fla::cuda::run();
  return 0;
}
