// What only a GPU can show: calls inside a captured graph, and on two streams at once.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "fla/fla.hpp"
#include "tests/cuda/device_array.h"

namespace fla::cuda {
namespace {

constexpr std::int64_t kT = 300, kH = 2, kD = 64, kAll = kT * kH * kD;
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

std::vector<bf16> normals(unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<bf16> x(static_cast<std::size_t>(kAll));
  for (bf16& e : x) e = to_bf16(normal(random));
  return x;
}

// A forward and a backward of chunk_gla with memory of their own.
struct Call {
  explicit Call(const CudaStream& s)
      : context({.threads = 1, .stream = {s.get(), 0}}),
        q(normals(1)),
        k(normals(2)),
        v(normals(3)),
        up(normals(4)),
        g(std::vector<float>(static_cast<std::size_t>(kAll), -0.05F)),
        o(static_cast<std::size_t>(kAll)),
        dq(static_cast<std::size_t>(kAll)),
        dk(static_cast<std::size_t>(kAll)),
        dv(static_cast<std::size_t>(kAll)),
        dg(static_cast<std::size_t>(kAll)),
        workspace(std::size_t{64} << 20) {
    const auto view = [](auto& a) { return TensorView(a.data(), {1, kT, kH, kD}, kGpu); };
    args.q = view(q), args.k = view(k), args.v = view(v), args.g = view(g), args.do_ = view(up);
    args.o = view(o), args.dq = view(dq), args.dk = view(dk), args.dv = view(dv), args.dg = view(dg);
  }
  Status run() {
    const std::span<std::byte> memory(workspace.data(), workspace.size());
    if (Status s = chunk_gla(context, args, memory); !s) return s;
    GlaBackwardArgs backward = args;
    backward.o = {};
    return chunk_gla_backward(context, backward, memory);
  }
  std::vector<std::vector<float>> results() const {
    std::vector<std::vector<float>> all = {dg.get()};
    for (const auto* x : {&o, &dq, &dk, &dv}) {
      all.emplace_back();
      for (const bf16 e : x->get()) all.back().push_back(to_float(e));
    }
    return all;
  }

  Context context;
  DeviceArray<bf16> q, k, v, up;
  DeviceArray<float> g;
  DeviceArray<bf16> o, dq, dk, dv;
  DeviceArray<float> dg;
  DeviceArray<std::byte> workspace;
  GlaBackwardArgs args;
};

TEST(CudaCalls, InACapturedGraph) {
  const CudaStream stream;
  Call direct(stream), captured(stream);
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

TEST(CudaCalls, OnTwoStreamsAtOnce) {
  const CudaStream first, second;
  Call a(first), b(second), alone(first);
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
