// fla_cuda_diag_bench [NAME]: checks the diagonal-decay engine against the double reference on this GPU, then times it.
// With NAME only times what begins with it, as "simple_gla B1". Exit status 1 if a check fails.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "fla/kernels/cuda/toolbox.cuh"
#include "fla/ops/linear_attn/linear_attn_cuda.h"
#include "tests/cuda/diag_case.h"

namespace fla::cuda {
namespace {

using Gate = DiagCase::Gate;

// The engine's choice, then every kernel that could run the problem with each of these numbers of segments.
std::vector<DiagPlan> plans(const DiagProblem& p, const DeviceInfo& d, std::vector<int> segments) {
  const DiagPlan own = diag_forward_plan(p, d);
  std::vector<DiagPlan> all{own};
  if (own.chunk == 1) return all;
  if (own.segments > 1) segments.push_back(own.segments);
  for (const DiagPlan& f : diag_alternatives(p, own)) {
    for (const int s : segments) {
      all.push_back(f);
      all.back().segments = s;
      if (all.back().text() == own.text()) all.pop_back();
    }
  }
  return all;
}

int check(const DeviceInfo& d) {
  int failed = 0;
  const auto report = [&](const DiagCase& c, const char* what, double r, double limit, const std::string& how) {
    const bool good = r >= 0 && r < limit;
    failed += good ? 0 : 1;
    std::printf("%s %-12s %s K %3d V %3d T %d R %.2e %s\n", good ? "ok  " : "FAIL", what, name_of(c.type),
                static_cast<int>(c.K), static_cast<int>(c.V), static_cast<int>(c.T), r, how.c_str());
    std::fflush(stdout);
  };
  const auto forward = [&](const DiagCase& c, const char* what) {
    DiagRun first(c);
    for (const DiagPlan& plan : plans(first.device, d, {1, 2})) {
      DiagRun run(c);
      std::string error;
      const double r = run.forward(plan, d, error);
      const bool exact = c.type == DType::F32 && c.state_type == DType::F32;
      report(c, what, r, exact ? 3e-6 : c.type == DType::F16 ? 1.5e-3 : 5e-3, plan.text() + " " + error);
    }
  };
  // Many multiprocessors: sequences in segments; few: the widest kernels.
  const auto backward = [&](DiagCase c, const char* what, int multiprocessors) {
    c.backward = true;
    DeviceInfo other = d;
    other.sm_count = multiprocessors;
    DiagRun run(c);
    std::string error;
    for (const DiagBackwardPlan& plan : diag_backward_alternatives(run.device, other)) {
      const auto all = run.backward(plan, other, error);
      if (!error.empty()) report(c, what, -1, 0, error);
      for (const auto& [name, r] : all) {
        report(c, what, r, c.type == DType::F32 ? 1e-5 : 1e-2, name + " by " + plan.text());
      }
    }
  };
  const struct {
    Gate gate;
    const char* op;
  } ops[] = {
      {Gate::None, "linear"}, {Gate::Retention, "retention"}, {Gate::Head, "simple_gla"}, {Gate::Channel, "gla"}};
  for (const auto& [gate, op] : ops) {
    for (const DType type : {DType::BF16, DType::F16, DType::F32}) {
      for (const int K : {64, 128, 256}) forward({.T = 150, .H = 1, .K = K, .V = K, .type = type, .gate = gate}, op);
      for (const int K : {64, 128, 256}) {
        forward({.B = 3, .T = K == 128 ? 1 : 7, .K = K, .V = K, .state_type = type, .gate = gate, .inplace = true}, op);
      }
      for (const int K : {64, 128, 256}) {
        backward({.T = 150, .H = 2, .K = K, .V = K, .type = type, .gate = gate}, op, 1);
      }
    }
    backward({.T = 700, .H = 1, .K = 128, .V = 128, .gate = gate}, op, d.sm_count);
    backward({.T = 300, .H = 1, .K = 128, .V = 128, .gate = gate, .lengths = {1, 0, 99, 200}}, op, d.sm_count);
  }
  forward({.T = 150, .K = 128, .V = 128, .gate = Gate::Value}, "value gate");
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    forward({.T = 150, .K = 128, .V = 128, .gate = gate, .extreme = true}, "extreme");
    backward({.T = 150, .K = 128, .V = 128, .gate = gate, .extreme = true}, "extreme", 1);
  }
  forward({.T = 300, .K = 128, .V = 128, .gate = Gate::Channel, .reverse = true, .lengths = {1, 0, 99, 200}}, "packed");
  forward({.T = 150, .K = 100, .V = 72, .gate = Gate::Channel, .odd_rows = true}, "strided");
  return failed;
}

// Normalised linear attention against plain loops.
int check_normalised(const DeviceInfo& d) {
  int failed = 0;
  for (const DType type : {DType::BF16, DType::F16, DType::F32}) {
    for (const std::int64_t D : {64, 100, 128, 256}) {
      constexpr std::int64_t kT = 150, kH = 2;
      const std::vector<std::int64_t> shape = {1, kT, kH, D};
      std::mt19937 random(1);
      std::uniform_real_distribution<double> uniform(0.0, 1.0);
      std::deque<DeviceMemory> memory;
      std::deque<std::vector<std::byte>> bytes;
      const auto make = [&](TensorView& device) {
        const std::size_t size = static_cast<std::size_t>(kT * kH * D) * size_of(type);
        TensorView host(bytes.emplace_back(size).data(), type, shape);
        for (std::int64_t t = 0; t < kT; ++t) {
          for (std::int64_t h = 0; h < kH; ++h) {
            for (std::int64_t c = 0; c < D; ++c) reference::store(host, uniform(random), 0, t, h, c);
          }
        }
        memory.emplace_back(size).upload(host.data);
        device = TensorView(memory.back().data(), type, shape);
        return host;
      };
      LinearAttnArgs a;
      const TensorView q = make(a.q), k = make(a.k), v = make(a.v), o = make(a.o);
      NormalisedPlan plan;
      if (!normalised_plan(a, d, {}, plan, nullptr)) ++failed;
      const std::size_t n = normalised_workspace(a, plan);
      const DeviceMemory workspace(n);
      const Status status = normalised(a, plan, {}, {static_cast<std::byte*>(workspace.data()), n});
      const Status end = wait_for_device();
      memory.back().download(o.data);
      double difference = 0, size = 0;
      for (std::int64_t h = 0; h < kH; ++h) {
        std::vector<double> state(static_cast<std::size_t>(D * D)), z(static_cast<std::size_t>(D));
        for (std::int64_t t = 0; t < kT; ++t) {
          std::vector<double> y(static_cast<std::size_t>(D));
          double sum = 0;
          for (std::int64_t i = 0; i < D; ++i) {
            const double key = reference::load(k, 0, t, h, i), query = reference::load(q, 0, t, h, i);
            sum += query * (z[static_cast<std::size_t>(i)] += key);
            for (std::int64_t j = 0; j < D; ++j) {
              double& s = state[static_cast<std::size_t>(i * D + j)];
              s += key * reference::load(v, 0, t, h, j);
              y[static_cast<std::size_t>(j)] += query * s;
            }
          }
          for (std::int64_t j = 0; j < D; ++j) {
            const double want = y[static_cast<std::size_t>(j)] / sum, got = reference::load(o, 0, t, h, j);
            difference += (got - want) * (got - want);
            size += want * want;
          }
        }
      }
      const double r = std::sqrt(difference / size);
      const bool good = status.ok() && end.ok() && r < (type == DType::F32 ? 3e-6 : 5e-3);
      failed += good ? 0 : 1;
      std::printf("%s normalised   %s K %3d V %3d R %.2e\n", good ? "ok  " : "FAIL", name_of(type), static_cast<int>(D),
                  static_cast<int>(D), r);
    }
  }
  return failed;
}

FLA_KERNEL(256, 1)
fill_kernel(void* p, DType type, std::int64_t n, float least, float most, unsigned seed) {
  for (std::int64_t i = block_x() * 256 + thread_id(); i < n; i += grid_x() * 256) {
    auto x = static_cast<std::uint32_t>(i) * 2654435761U + seed;
    x = (x ^ (x >> 16U)) * 2246822519U;
    x = (x ^ (x >> 13U)) * 3266489917U;
    x ^= x >> 16U;
    store_any(p, type, i, least + (most - least) * static_cast<float>(x >> 8U) * 0x1p-24F);
  }
}

class Buffers {
 public:
  ~Buffers() {
    for (void* p : all_) cudaFree(p);
  }
  TensorView make(DType type, std::vector<std::int64_t> shape, float least, float most) {
    std::int64_t n = 1;
    for (const auto s : shape) n *= s;
    void* p = bytes(static_cast<std::size_t>(n) * size_of(type));
    (void)launch<fill_kernel>({.name = "fill", .grid = {4096}, .threads = 256}, {}, p, type, n, least, most,
                              static_cast<unsigned>(all_.size()));
    return {p, type, shape};
  }
  void* bytes(std::size_t n) {
    void* p = nullptr;
    if (cudaMalloc(&p, n + 1) != cudaSuccess) {
      std::printf("out of device memory\n");
      std::exit(1);
    }
    all_.push_back(p);
    return p;
  }

 private:
  std::vector<void*> all_;
};

// The median over 20 runs after 3 unmeasured ones.
template <typename F>
float milliseconds(F&& run) {
  constexpr int kWarm = 3, kRuns = 20;
  cudaEvent_t event[kRuns + 1];
  for (auto& e : event) cudaEventCreate(&e);
  for (int i = 0; i < kWarm; ++i) {
    if (const Status s = run(); !s) {
      std::printf("%s\n", s.message().c_str());
      return -1;
    }
  }
  cudaEventRecord(event[0]);
  for (int i = 0; i < kRuns; ++i) {
    (void)run();
    cudaEventRecord(event[i + 1]);
  }
  if (const Status s = wait_for_device(); !s) {
    std::printf("%s\n", s.message().c_str());
    std::exit(1);
  }
  std::vector<float> ms(kRuns);
  for (int i = 0; i < kRuns; ++i) cudaEventElapsedTime(&ms[static_cast<std::size_t>(i)], event[i], event[i + 1]);
  for (auto& e : event) cudaEventDestroy(e);
  std::nth_element(ms.begin(), ms.begin() + kRuns / 2, ms.end());
  return ms[kRuns / 2];
}

void time_shape(const DeviceInfo& d, const std::string& only, Gate gate, const char* op, std::int64_t B, std::int64_t T,
                std::int64_t H, std::int64_t D) {
  const std::string shape = std::string(op) + " B" + std::to_string(B) + "_T" + std::to_string(T) + "_H" +
                            std::to_string(H) + "_D" + std::to_string(D);
  if (shape.rfind(only, 0) != 0) return;
  Buffers m;
  DiagProblem p;
  p.B = p.N = B;
  p.T = T;
  p.H = H;
  p.K = p.V = D;
  p.scale = 1.0 / std::sqrt(static_cast<double>(D));
  for (TensorView* x : {&p.q, &p.k, &p.v}) *x = m.make(DType::BF16, {B, T, H, D}, -1, 1);
  p.o = m.make(DType::BF16, {B, T, H, D}, 0, 0);
  double bytes = 8.0 * static_cast<double>(B * T * H * D);
  if (gate == Gate::Retention) p.head.kind = HeadDecay::Kind::Retention;
  if (gate == Gate::Head) p.g = m.make(DType::F32, {B, T, H}, -0.2F, 0);
  if (gate == Gate::Channel) {
    p.gk = m.make(DType::BF16, {B, T, H, D}, -0.2F, 0);
    bytes *= 1.25;
  }
  float forward = 0;
  bool own = true;
  for (const DiagPlan& plan : plans(p, d, {1})) {
    const std::size_t n = diag_forward_workspace(p, plan);
    const std::span<std::byte> ws(static_cast<std::byte*>(m.bytes(n)), n);
    const float ms = milliseconds([&] { return diag_forward(p, plan, {}, ws); });
    if (own) forward = ms;
    std::printf("%-28s %s %.3f ms %.0f GB/s, %s\n", shape.c_str(), own ? "fwd" : "alt", ms, bytes / ms * 1e-6,
                plan.text().c_str());
    std::fflush(stdout);
    own = false;
  }
  DiagBackwardProblem b(p);
  b.o = {};
  b.do_ = m.make(DType::BF16, {B, T, H, D}, -1, 1);
  for (TensorView* x : {&b.dq, &b.dk, &b.dv}) *x = m.make(DType::BF16, {B, T, H, D}, 0, 0);
  if (gate == Gate::Head) b.dg = m.make(DType::F32, {B, T, H}, 0, 0);
  if (gate == Gate::Channel) b.dgk = m.make(DType::BF16, {B, T, H, D}, 0, 0);
  const std::string chosen = diag_backward_plan(b, d).text();
  for (const DiagBackwardPlan& plan : diag_backward_alternatives(b, d)) {
    const std::size_t n = diag_backward_workspace(b, plan);
    const std::span<std::byte> ws(static_cast<std::byte*>(m.bytes(n)), n);
    const float backward = milliseconds([&] { return diag_backward(b, plan, {}, ws); });
    std::printf("%-28s %s %.3f ms, fwd+bwd %.3f ms, workspace %.0f MB, %s\n", shape.c_str(),
                plan.text() == chosen ? "bwd" : "alt", backward, forward + backward, static_cast<double>(n) * 1e-6,
                plan.text().c_str());
    std::fflush(stdout);
  }
}

void time_normalised(const DeviceInfo& d, const std::string& only, std::int64_t B, std::int64_t T, std::int64_t H,
                     std::int64_t D) {
  const std::string shape = "normalised B" + std::to_string(B) + "_T" + std::to_string(T) + "_H" + std::to_string(H) +
                            "_D" + std::to_string(D);
  if (shape.rfind(only, 0) != 0) return;
  Buffers m;
  LinearAttnArgs a;
  // Positive q and k, or the denominator has no reason to stay away from 0.
  for (TensorView* x : {&a.q, &a.k}) *x = m.make(DType::BF16, {B, T, H, D}, 0, 1);
  a.v = m.make(DType::BF16, {B, T, H, D}, -1, 1);
  a.o = m.make(DType::BF16, {B, T, H, D}, 0, 0);
  a.scale = 1.0 / std::sqrt(static_cast<double>(D));
  NormalisedPlan plan;
  if (!normalised_plan(a, d, {}, plan, nullptr)) return;
  const std::size_t n = normalised_workspace(a, plan);
  const std::span<std::byte> ws(static_cast<std::byte*>(m.bytes(n)), n);
  const float ms = milliseconds([&] { return normalised(a, plan, {}, ws); });
  std::printf("%-28s fwd %.3f ms\n", shape.c_str(), ms);
  std::fflush(stdout);
}

void time_decode(const DeviceInfo& d, Gate gate, const char* op, std::int64_t B, std::int64_t H, DType state) {
  Buffers m;
  constexpr std::int64_t kD = 128;
  DiagProblem p;
  p.B = p.N = B;
  p.T = 1;
  p.H = H;
  p.K = p.V = kD;
  p.q = m.make(DType::BF16, {B, 1, H, kD}, -1, 1);
  p.k = m.make(DType::BF16, {B, 1, H, kD}, -1, 1);
  p.v = m.make(DType::BF16, {B, 1, H, kD}, -1, 1);
  p.o = m.make(DType::BF16, {B, 1, H, kD}, 0, 0);
  if (gate == Gate::Head) p.g = m.make(DType::F32, {B, 1, H}, -0.2F, 0);
  if (gate == Gate::Channel) p.gk = m.make(DType::F32, {B, 1, H, kD}, -0.2F, 0);
  p.h0 = p.ht = m.make(state, {B, H, kD, kD}, -1, 1);
  const float ms = milliseconds([&] { return diag_forward(p, d, {}, {}); });
  std::printf("%-10s decode %dx%d %s %.1f us %.0f GB/s\n", op, static_cast<int>(B), static_cast<int>(H), name_of(state),
              ms * 1e3, 2.0 * static_cast<double>(B * H * kD * kD) * static_cast<double>(size_of(state)) / ms * 1e-6);
}

}  // namespace
}  // namespace fla::cuda

int main(int argc, char** argv) {
  using namespace fla;
  using namespace fla::cuda;
  const auto d = device_info(0);
  if (!d) {
    std::printf("%s\n", d.status().message().c_str());
    return 77;
  }
  std::printf("sm_%d, %d multiprocessors\n", d->sm, d->sm_count);
  const std::string only = argc > 1 ? argv[1] : "";
  const int failed = only.empty() ? check(*d) + check_normalised(*d) : 0;
  const struct {
    Gate gate;
    const char* op;
  } ops[] = {
      {Gate::None, "linear"}, {Gate::Retention, "retention"}, {Gate::Head, "simple_gla"}, {Gate::Channel, "gla"}};
  for (const auto& [gate, op] : ops) {
    time_shape(*d, only, gate, op, 1, 8192, 96, 128);
    time_shape(*d, only, gate, op, 2, 16384, 16, 128);
    time_shape(*d, only, gate, op, 4, 4096, 64, 128);
    time_shape(*d, only, gate, op, 4, 2048, 16, 128);
    time_shape(*d, only, gate, op, 8, 1024, 8, 64);
  }
  time_normalised(*d, only, 1, 8192, 96, 128);
  time_normalised(*d, only, 2, 16384, 16, 128);
  time_normalised(*d, only, 4, 4096, 64, 128);
  time_normalised(*d, only, 4, 2048, 16, 128);
  time_normalised(*d, only, 8, 1024, 8, 64);
  if (!only.empty()) return 0;
  for (const DType state : {DType::F32, DType::BF16}) {
    for (const auto& [gate, op] : {ops[1], ops[2]}) {
      time_decode(*d, gate, op, 16, 32, state);
      time_decode(*d, gate, op, 64, 64, state);
      time_decode(*d, gate, op, 256, 64, state);
    }
  }
  std::printf("%d checks failed\n", failed);
  return failed > 0 ? 1 : 0;
}
