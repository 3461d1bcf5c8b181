// What only a GPU can show: calls inside a captured graph, and on two streams at once.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <random>
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

// Families whose calls start their kernels in different ways.
struct Gla {
  static constexpr std::int64_t kT = 300;
  static constexpr bool kGatePerChannel = true, kHasBeta = false;
  using Args = GlaBackwardArgs;
  static constexpr auto& kForward = chunk_gla;
  static constexpr auto& kBackward = chunk_gla_backward;
};
struct KdaInRounds {
  static constexpr std::int64_t kT = 1500;
  static constexpr bool kGatePerChannel = true, kHasBeta = true;
  using Args = KdaBackwardArgs;
  static constexpr auto& kForward = chunk_kda;
  static constexpr auto& kBackward = chunk_kda_backward;
};
struct GdnWithTimeCut {
  static constexpr std::int64_t kT = 4100;
  static constexpr bool kGatePerChannel = false, kHasBeta = true;
  using Args = GatedDeltaRuleBackwardArgs;
  static constexpr auto& kForward = chunk_gdn;
  static constexpr auto& kBackward = chunk_gdn_backward;
};

// A forward and a backward with memory of their own.
template <typename Family>
struct Call {
  static constexpr std::int64_t kT = Family::kT, kH = 2, kD = 64, kAll = kT * kH * kD;
  static constexpr std::int64_t kGates = Family::kGatePerChannel ? kAll : kT * kH;

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
        dbeta(static_cast<std::size_t>(Family::kHasBeta ? kT * kH : 0)),
        workspace(std::size_t{64} << 20) {
    const auto view = [](auto& a) { return TensorView(a.data(), {1, kT, kH, kD}, kGpu); };
    const auto gates = [&](auto& a) {
      return Family::kGatePerChannel ? view(a) : TensorView(a.data(), {1, kT, kH}, kGpu);
    };
    args.q = view(q), args.k = view(k), args.v = view(v), args.g = gates(g), args.do_ = view(up);
    args.o = view(o), args.dq = view(dq), args.dk = view(dk), args.dv = view(dv), args.dg = gates(dg);
    if constexpr (Family::kHasBeta) {
      args.beta = TensorView(beta.data(), {1, kT, kH}, kGpu);
      args.dbeta = TensorView(dbeta.data(), {1, kT, kH}, kGpu);
      args.use_qk_l2norm_in_kernel = true;
    }
  }
  Status run() {
    const std::span<std::byte> memory(workspace.data(), workspace.size());
    if (Status s = Family::kForward(context, args, memory); !s) return s;
    typename Family::Args backward = args;
    backward.o = {};
    return Family::kBackward(context, backward, memory);
  }
  std::vector<std::vector<float>> results() const {
    std::vector<std::vector<float>> all = {dg.get(), dbeta.get()};
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
  DeviceArray<std::byte> workspace;
  typename Family::Args args;
};

template <typename Family>
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
