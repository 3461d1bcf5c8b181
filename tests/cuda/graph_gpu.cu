// What only a GPU can show: calls inside a captured graph, and on two streams at once.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fla/fla.hpp"
#include "tests/cuda/device_array.h"

namespace fla::cuda {
namespace {

constexpr Device kGpu{DeviceType::Cuda, 0};

class CudaStream {
 public:
  CudaStream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

std::vector<bf16> normals(std::int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<bf16> x(static_cast<std::size_t>(n));
  for (bf16& e : x) e = to_bf16(normal(random));
  return x;
}

// Calls that start their kernels in different ways, as their plan says.
template <const auto& FORWARD, const auto& BACKWARD, typename ARGS>
struct Family {
  using Args = ARGS;
  static constexpr auto& kForward = FORWARD;
  static constexpr auto& kBackward = BACKWARD;
};
struct Gla : Family<chunk_gla, chunk_gla_backward, GlaBackwardArgs> {
  static constexpr std::int64_t kT = 300, kH = 2;
  static constexpr bool kGatePerChannel = true;
  static constexpr const char* kPlan = "diag";
};
struct KdaInRounds : Family<chunk_kda, chunk_kda_backward, KdaBackwardArgs> {
  static constexpr std::int64_t kT = 1500, kH = 64;
  static constexpr bool kGatePerChannel = true;
  static constexpr const char* kPlan = "in rounds of";
};
struct GdnWithTimeCut : Family<chunk_gdn, chunk_gdn_backward, GatedDeltaRuleBackwardArgs> {
  static constexpr std::int64_t kT = 4100, kH = 2;
  static constexpr bool kGatePerChannel = false;
  static constexpr const char* kPlan = "time cut every";
};

// A forward and a backward with memory of their own.
template <typename F>
struct Call {
  static constexpr std::int64_t kT = F::kT, kH = F::kH, kD = 64, kAll = kT * kH * kD;
  static constexpr std::int64_t kGates = F::kGatePerChannel ? kAll : kT * kH;

  explicit Call(const CudaStream& s)
      : context({.threads = 1, .stream = {s.get(), 0}}),
        q(normals(kAll, 1)),
        k(normals(kAll, 2)),
        v(normals(kAll, 3)),
        up(normals(kAll, 4)),
        g(std::vector<float>(static_cast<std::size_t>(kGates), -0.05F)),
        beta(std::vector<float>(static_cast<std::size_t>(kT * kH), 0.5F)),
        o(static_cast<std::size_t>(kAll)),
        dq(static_cast<std::size_t>(kAll)),
        dk(static_cast<std::size_t>(kAll)),
        dv(static_cast<std::size_t>(kAll)),
        dg(static_cast<std::size_t>(kGates)),
        dbeta(static_cast<std::size_t>(kT * kH)) {
    const auto view = [](auto& a) { return TensorView(a.data(), {1, kT, kH, kD}, kGpu); };
    const auto by_head = [](auto& a) { return TensorView(a.data(), {1, kT, kH}, kGpu); };
    const auto gates = [&](auto& a) { return F::kGatePerChannel ? view(a) : by_head(a); };
    args.q = view(q), args.k = view(k), args.v = view(v), args.g = gates(g);
    if constexpr (requires { args.beta; }) {
      args.beta = by_head(beta);
      args.use_qk_l2norm_in_kernel = true;
    }
    backward = args;
    args.o = view(o);
    backward.do_ = view(up);
    backward.dq = view(dq), backward.dk = view(dk), backward.dv = view(dv), backward.dg = gates(dg);
    if constexpr (requires { args.beta; }) backward.dbeta = by_head(dbeta);
    const auto route = F::kForward.explain(context, args);
    EXPECT_TRUE(route.ok() && route->plan.find(F::kPlan) != std::string::npos) << (route.ok() ? route->plan : "");
    const auto forward_bytes = F::kForward.workspace_bytes(context, args);
    const auto backward_bytes = F::kBackward.workspace_bytes(context, backward);
    EXPECT_TRUE(forward_bytes.ok() && backward_bytes.ok());
    bytes = std::max(*forward_bytes, *backward_bytes);
    workspace = std::make_unique<DeviceMemory>(bytes);
  }
  Status run() {
    const std::span<std::byte> memory(static_cast<std::byte*>(workspace->data()), bytes);
    const Status s = F::kForward(context, args, memory);
    return s ? F::kBackward(context, backward, memory) : s;
  }
  std::vector<std::vector<float>> results() const {
    std::vector<std::vector<float>> all = {dg.get()};
    if constexpr (requires { args.beta; }) all.push_back(dbeta.get());
    for (const auto* x : {&o, &dq, &dk, &dv}) {
      all.emplace_back();
      for (const bf16 e : x->get()) all.back().push_back(to_float(e));
    }
    return all;
  }

  Context context;
  DeviceArray<bf16> q, k, v, up;
  DeviceArray<float> g, beta;
  DeviceArray<bf16> o, dq, dk, dv;
  DeviceArray<float> dg, dbeta;
  std::size_t bytes = 0;
  std::unique_ptr<DeviceMemory> workspace;
  typename F::Args args, backward;
};

template <typename F>
class CudaCalls : public ::testing::Test {};
using Families = ::testing::Types<Gla, KdaInRounds, GdnWithTimeCut>;
TYPED_TEST_SUITE(CudaCalls, Families);

TYPED_TEST(CudaCalls, InACapturedGraph) {
  const CudaStream stream;
  Call<TypeParam> direct(stream), captured(stream);
  ASSERT_TRUE(direct.run().ok());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), cudaSuccess);
  const Status s = captured.run();
  ASSERT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
  ASSERT_TRUE(s.ok()) << s.message();
  ASSERT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(cudaGraphLaunch(ready, stream.get()), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
  EXPECT_EQ(direct.results(), captured.results());
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
}

TYPED_TEST(CudaCalls, OnTwoStreamsAtOnce) {
  const CudaStream first, second;
  Call<TypeParam> a(first), b(second), alone(first);
  ASSERT_TRUE(alone.run().ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(a.run().ok());
    ASSERT_TRUE(b.run().ok());
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(a.results(), alone.results());
  EXPECT_EQ(b.results(), alone.results());
}

}  // namespace
}  // namespace fla::cuda
