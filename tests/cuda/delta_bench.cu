// fla_cuda_delta_bench [SHAPE-TEXT [OPERATOR [unchecked|profile|cuts]]]: checks the delta rule's engine against the
// reference at small shapes on this GPU, then times it: one line per operator, shape and mode. With unchecked and
// profile nothing is checked, and with profile each call runs once, for a profiler; with cuts forwards are timed with
// time cut elsewhere, too. Needs no library beside libc and the driver.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "fla/engine/delta/cuda/entry.h"
#include "fla/engine/delta/cuda/launches.h"
#include "fla/kernels/cuda/launch.h"
#include "tests/cuda/delta_case.h"

namespace fla::cuda {
namespace {

using Gate = DeltaCase::Gate;

// One forward against the reference; `run` gets the workspace.
template <typename Run>
bool check_forward(const char* name, const char* how, DeltaData& d, std::size_t bytes, double limit, Run&& run) {
  const DeviceMemory ws(bytes);
  const Status expected = run_delta_reference(d.host);
  const Status called = expected ? run(std::span<std::byte>(static_cast<std::byte*>(ws.data()), bytes)) : expected;
  const Status s = called ? wait_for_device() : called;
  if (!s) {
    std::printf("check %-24s %s\n", name, s.message().c_str());
    return false;
  }
  const double o = relative_rms(d.o.device_values(), d.o_ref.host_values());
  const double ht = relative_rms(d.ht.device_values(), d.ht_ref.host_values());
  const bool good = o <= limit && ht <= limit;
  std::printf("check %-24s %-20s R(o) %.2e R(ht) %.2e %s\n", name, how, o, ht, good ? "ok" : "WRONG");
  return good;
}

bool check(const char* name, const DeltaCase& c, const DeviceInfo& device, double limit) {
  DeltaData d(c);
  return check_forward(name, delta_forward_kernel(d.device, delta_forward_plan(d.device, device)).c_str(), d,
                       delta_forward_workspace(d.device, device), limit,
                       [&](std::span<std::byte> ws) { return delta_forward(d.device, device, {}, ws); });
}

// The forward with blocks of `columns` value channels and time cut every `chunks` chunks.
bool check_cut(const char* name, const DeltaCase& c, const DeviceInfo& device, std::int64_t columns,
               std::int64_t chunks, double limit) {
  DeltaData d(c);
  const DeltaPlan plan = delta_chunk_plan(d.device, device, columns, chunks);
  std::string how = std::to_string(columns);
  how += " cut every ";
  how += std::to_string(32 * chunks);
  return check_forward(name, how.c_str(), d, delta_chunk_forward_workspace<bf16>(d.device, plan), limit,
                       [&](std::span<std::byte> ws) { return delta_chunk_forward<bf16>(d.device, plan, {}, ws); });
}

bool check_backward(const char* name, const DeltaCase& c, const DeviceInfo& device, double limit) {
  DeltaData d(c);
  const std::size_t bytes = delta_backward_workspace(d.device, device);
  const DeviceMemory ws(bytes);
  const Status expected = run_delta_backward_reference(d.host);
  const Status called =
      expected ? delta_backward(d.device, device, {}, {static_cast<std::byte*>(ws.data()), bytes}) : expected;
  const Status s = called ? wait_for_device() : called;
  if (!s) {
    std::printf("check %-24s backward %s\n", name, s.message().c_str());
    return false;
  }
  bool good = true;
  std::printf("check %-24s backward", name);
  for (const DeltaData::Gradient& x : d.gradients) {
    if (!x.got.view) continue;
    const double r = relative_rms(x.got.device_values(), x.want.host_values());
    good = good && r <= limit;
    std::printf(" R(%s) %.2e", x.name, r);
  }
  std::printf(" %s\n", good ? "ok" : "WRONG");
  return good;
}

struct Shape {
  const char* name;
  std::int64_t B, T, H, HV, D;
};
constexpr Shape kShapes[] = {
    {"B1_T8192_H96_D128", 1, 8192, 96, 96, 128},    {"B2_T16384_H16_D128", 2, 16384, 16, 16, 128},
    {"B4_T4096_H64_D128", 4, 4096, 64, 64, 128},    {"B4_T2048_H16_D128", 4, 2048, 16, 16, 128},
    {"B8_T2048_H32_D256", 8, 2048, 32, 32, 256},    {"B8_T1024_H8_D64", 8, 1024, 8, 8, 64},
    {"B1_T32768_H2_HV8_D128", 1, 32768, 2, 8, 128}, {"B1_T8192_H2_HV8_D128", 1, 8192, 2, 8, 128},
    {"B1_T2048_H2_HV8_D128", 1, 2048, 2, 8, 128},   {"B1_T32768_H4_HV16_D128", 1, 32768, 4, 16, 128},
    {"B1_T2048_H4_HV16_D128", 1, 2048, 4, 16, 128}, {"B1_T16384_H8_HV32_D128", 1, 16384, 8, 32, 128}};

// n numbers f(normal) as T, from a block of random ones repeated.
template <typename T, typename F>
std::unique_ptr<DeviceMemory> random_memory(std::int64_t n, F&& f) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  constexpr std::size_t kBlock = 1U << 20U;
  std::vector<T> block(kBlock);
  for (T& x : block) {
    const float y = f(normal(rng));
    if constexpr (std::is_same_v<T, float>) {
      x = y;
    } else {
      x = to_bf16(y);
    }
  }
  auto m = std::make_unique<DeviceMemory>(static_cast<std::size_t>(n) * sizeof(T));
  for (std::size_t at = 0; at < static_cast<std::size_t>(n); at += kBlock) {
    const std::size_t count = std::min(kBlock, static_cast<std::size_t>(n) - at);
    cudaMemcpy(static_cast<T*>(m->data()) + at, block.data(), count * sizeof(T), cudaMemcpyHostToDevice);
  }
  return m;
}

// Median, 10th and 90th percentile of a call of `run`, in ms.
template <typename F>
void time_call(const char* op, const char* mode, const Shape& x, const DeltaPlan& plan, const DeltaProblem& p,
               std::size_t bytes, int calls, F&& run) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> ms;
  for (int i = 0; i < calls; ++i) {
    cudaEventRecord(begin);
    const Status s = run();
    cudaEventRecord(end);
    if (!s || cudaEventSynchronize(end) != cudaSuccess) {
      std::printf("%-10s %-21s %s failed: %s %s\n", op, x.name, mode, s.message().c_str(),
                  cudaGetErrorString(cudaGetLastError()));
      return;
    }
    float t = 0.0F;
    cudaEventElapsedTime(&t, begin, end);
    if (i >= calls / 3) ms.push_back(t);
  }
  std::sort(ms.begin(), ms.end());
  std::printf(
      "%-10s %-21s %-3s %8.4f ms  p10 %8.4f p90 %8.4f  %s columns %d stages %d blocks %lld segment %d "
      "workspace %.1f MiB\n",
      op, x.name, mode, static_cast<double>(ms[ms.size() / 2]), static_cast<double>(ms[ms.size() / 10]),
      static_cast<double>(ms[ms.size() * 9 / 10]), plan.text().c_str(), static_cast<int>(plan.columns), plan.stages,
      static_cast<long long>(p.N * p.HV * plan.parts), static_cast<int>(plan.segment),
      static_cast<double>(bytes) / 1048576.0);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

// The forward with time cut in other places.
void bench_cuts(const char* op, const Shape& x, const DeltaProblem& p, const DeviceInfo& device, int calls) {
  const DeltaPlan own = delta_forward_plan(p, device);
  if (own.kernel != DeltaKernel::Chunk || own.width > 128) return;
  const std::int64_t all = (x.T + kDeltaBT - 1) / kDeltaBT;
  for (const std::int64_t columns : {kDeltaColumns, kDeltaWide}) {
    for (const std::int64_t segments : {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32}) {
      if (columns == kDeltaWide && own.width != kDeltaWideKeys) continue;
      const DeltaPlan plan = delta_chunk_plan(p, device, columns, segments == 1 ? 0 : (all + segments - 1) / segments);
      const std::size_t bytes = delta_chunk_forward_workspace<bf16>(p, plan);
      const DeviceMemory ws(bytes);
      time_call(op, "cut", x, plan, p, bytes, calls, [&] {
        return delta_chunk_forward<bf16>(p, plan, {}, {static_cast<std::byte*>(ws.data()), bytes});
      });
    }
  }
}

void bench(const char* op, Gate gate, const Shape& x, const DeviceInfo& device, int calls, bool cuts) {
  const std::int64_t rows = x.B * x.T * x.HV, n = rows * x.D, nk = x.B * x.T * x.H * x.D;
  const auto same = [](float y) { return y; };
  const auto decay = [](float y) { return -std::log1p(std::exp(-y)); };
  const auto q = random_memory<bf16>(nk, same), k = random_memory<bf16>(nk, same), v = random_memory<bf16>(n, same),
             o = random_memory<bf16>(n, same);
  const auto beta = random_memory<float>(rows, [](float y) { return 1.0F / (1.0F + std::exp(-y)); });
  const auto g = random_memory<float>(rows, decay);
  const auto gk = random_memory<bf16>(gate == Gate::Channel ? n : 1, decay);
  const DeviceMemory ht(static_cast<std::size_t>(x.B * x.HV * x.D * x.D * 4));
  DeltaBackwardProblem p;
  p.B = p.N = x.B;
  p.T = x.T;
  p.H = x.H;
  p.HV = x.HV;
  p.K = p.V = x.D;
  p.scale = 1.0 / std::sqrt(static_cast<double>(x.D));
  p.erase = gate == Gate::None ? Erase::Plain : Erase::Decayed;
  p.q = TensorView(static_cast<bf16*>(q->data()), {x.B, x.T, x.H, x.D});
  p.k = TensorView(static_cast<bf16*>(k->data()), {x.B, x.T, x.H, x.D});
  p.v = TensorView(static_cast<bf16*>(v->data()), {x.B, x.T, x.HV, x.D});
  p.o = TensorView(static_cast<bf16*>(o->data()), {x.B, x.T, x.HV, x.D});
  p.beta = TensorView(static_cast<float*>(beta->data()), {x.B, x.T, x.HV});
  if (gate == Gate::Head) p.g = TensorView(static_cast<float*>(g->data()), {x.B, x.T, x.HV});
  if (gate == Gate::Channel) p.gk = TensorView(static_cast<bf16*>(gk->data()), {x.B, x.T, x.HV, x.D});
  p.normalize_q = p.normalize_k = true;
  p.ht = TensorView(static_cast<float*>(ht.data()), {x.B, x.HV, x.D, x.D});
  {
    const std::size_t bytes = delta_forward_workspace(p, device);
    const DeviceMemory ws(bytes);
    const std::span<std::byte> space{static_cast<std::byte*>(ws.data()), bytes};
    time_call(op, "fwd", x, delta_forward_plan(p, device), p, bytes, calls,
              [&] { return delta_forward(p, device, {}, space); });
  }
  if (cuts) return bench_cuts(op, x, p, device, calls);
  const auto do_ = random_memory<bf16>(n, same);
  const DeviceMemory dq(static_cast<std::size_t>(2 * nk)), dk(static_cast<std::size_t>(2 * nk)),
      dv(static_cast<std::size_t>(2 * n)), dbeta(static_cast<std::size_t>(4 * rows)),
      dg(static_cast<std::size_t>(gate == Gate::Channel ? 2 * n : 4 * rows));
  const auto like = [](const TensorView& t, const DeviceMemory& m) {
    TensorView y = t;
    if (y) y.data = m.data();
    return y;
  };
  p.do_ = like(p.o, *do_);
  p.dq = like(p.q, dq);
  p.dk = like(p.k, dk);
  p.dv = like(p.v, dv);
  p.dbeta = like(p.beta, dbeta);
  p.dg = like(p.g, dg);
  p.dgk = like(p.gk, dg);
  const std::size_t bytes = delta_backward_workspace(p, device);
  const DeviceMemory ws(bytes);
  const std::span<std::byte> space{static_cast<std::byte*>(ws.data()), bytes};
  time_call(op, "bwd", x, delta_backward_plan(p, device), p, bytes, calls,
            [&] { return delta_backward(p, device, {}, space); });
}

// One token for each of B sequences on a pool of their states.
void bench_decode(const char* op, Gate gate, DType type, bool v_first, const DeviceInfo& device, int calls) {
  const Shape x{type == DType::F32 ? (v_first ? "decode_B256_H64 F32 v" : "decode_B256_H64 F32")
                                   : (v_first ? "decode_B256_H64 BF16 v" : "decode_B256_H64 BF16"),
                256,
                1,
                64,
                64,
                128};
  const std::int64_t rows = x.B * x.HV, n = rows * x.D, states = n * x.D;
  const auto same = [](float y) { return y; };
  const auto decay = [](float y) { return -std::log1p(std::exp(-y)); };
  const auto q = random_memory<bf16>(n, same), k = random_memory<bf16>(n, same), v = random_memory<bf16>(n, same),
             o = random_memory<bf16>(n, same), gk = random_memory<bf16>(n, decay);
  const auto beta = random_memory<float>(rows, [](float y) { return 1.0F / (1.0F + std::exp(-y)); });
  const auto g = random_memory<float>(rows, decay);
  const auto state = type == DType::F32 ? random_memory<float>(states, same) : random_memory<bf16>(states, same);
  std::vector<std::int64_t> order(static_cast<std::size_t>(x.B));
  for (std::int64_t i = 0; i < x.B; ++i) order[static_cast<std::size_t>(i)] = (i * 37 + 5) % x.B;
  const DeviceArray<std::int64_t> indices(order);
  DeltaProblem p;
  p.B = p.N = x.B;
  p.T = 1;
  p.H = x.H;
  p.HV = x.HV;
  p.K = p.V = x.D;
  p.scale = 1.0 / std::sqrt(static_cast<double>(x.D));
  p.erase = Erase::Decayed;
  p.q = TensorView(static_cast<bf16*>(q->data()), {x.B, 1, x.H, x.D});
  p.k = TensorView(static_cast<bf16*>(k->data()), {x.B, 1, x.H, x.D});
  p.v = TensorView(static_cast<bf16*>(v->data()), {x.B, 1, x.HV, x.D});
  p.o = TensorView(static_cast<bf16*>(o->data()), {x.B, 1, x.HV, x.D});
  p.beta = TensorView(static_cast<float*>(beta->data()), {x.B, 1, x.HV});
  if (gate == Gate::Head) p.g = TensorView(static_cast<float*>(g->data()), {x.B, 1, x.HV});
  if (gate == Gate::Channel) p.gk = TensorView(static_cast<bf16*>(gk->data()), {x.B, 1, x.HV, x.D});
  p.normalize_q = p.normalize_k = true;
  p.h0 = TensorView(state->data(), type, std::vector<std::int64_t>{x.B, x.HV, x.D, x.D});
  p.h0 = DeltaData::swapped(p.h0, v_first);
  p.ht = p.h0;
  SlotTable slots;
  slots.indices = TensorView(indices.data(), {x.B});
  p.pool = &slots;
  time_call(op, "dec", x, delta_forward_plan(p, device), p, 0, calls, [&] { return delta_forward(p, device, {}, {}); });
}

bool check_decode(const char* name, const DeltaCase& c, const DeviceInfo& device, double limit) {
  const DeltaData want(c), d(c);
  const Status expected = run_delta_reference(want.host);
  const Status called = expected ? delta_forward(d.device, device, {}, {}) : expected;
  const Status s = called ? wait_for_device() : called;
  if (!s) {
    std::printf("check %-24s %s\n", name, s.message().c_str());
    return false;
  }
  const double o = relative_rms(d.o.device_values(), want.o_ref.host_values());
  const double pool = relative_rms(d.h0.device_values(), want.ht_ref.host_values());
  const bool good = o <= 4e-3 && pool <= limit;
  std::printf("check %-24s decode R(o) %.2e R(pool) %.2e %s\n", name, o, pool, good ? "ok" : "WRONG");
  return good;
}

bool check_cuts(const DeviceInfo& device) {
  bool good = true;
  for (const Gate gate : {Gate::None, Gate::Head, Gate::Channel}) {
    for (const std::int64_t D : {64, 128}) {
      for (const auto& [columns, chunks] :
           {std::pair<std::int64_t, std::int64_t>{32, 4}, {32, 100}, {64, 0}, {64, 4}}) {
        if (columns == kDeltaWide && D != kDeltaWideKeys) continue;
        const std::string name = "BF16 D" + std::to_string(D) +
                                 (gate == Gate::None   ? " plain"
                                  : gate == Gate::Head ? " head"
                                                       : " channel");
        good &= check_cut(name.c_str(),
                          {.T = 2000,
                           .H = 1,
                           .HV = 2,
                           .K = D,
                           .V = D,
                           .cu = {0, 0, 1, 129, 700, 700, 2000},
                           .gate = gate,
                           .gate_divisor = 32.0F,
                           .erase = gate == Gate::None ? Erase::Plain : Erase::Decayed},
                          device, columns, chunks, 4e-3);
      }
    }
  }
  std::fflush(stdout);
  return good;
}

bool check_all(const DeviceInfo& device) {
  bool good = check_cuts(device);
  good &= check("F32 head", {.T = 100, .HV = 2, .K = 128, .V = 100, .type = DType::F32}, device, 2e-6);
  good &= check("F32 channel", {.T = 100, .HV = 2, .K = 60, .V = 60, .type = DType::F32, .gate = Gate::Channel}, device,
                2e-6);
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    good &= check(gate == Gate::Head ? "long head" : "long channel",
                  {.T = 6000, .H = 1, .HV = 1, .K = 128, .V = 128, .gate = gate, .gate_divisor = 32.0F}, device, 4e-3);
  }
  for (const DType t : {DType::BF16, DType::F16}) {
    for (const Gate gate : {Gate::None, Gate::Head, Gate::Channel}) {
      for (const std::int64_t D : {64, 128, 256}) {
        const std::string name = std::string(name_of(t)) + " D" + std::to_string(D) +
                                 (gate == Gate::None   ? " plain"
                                  : gate == Gate::Head ? " head"
                                                       : " channel");
        const Erase erase = gate == Gate::None ? Erase::Plain : Erase::Decayed;
        good &= check(name.c_str(),
                      {.B = 2, .T = 333, .H = 2, .HV = 4, .K = D, .V = D, .type = t, .gate = gate, .erase = erase},
                      device, 4e-3);
      }
    }
  }
  good &=
      check("strong head", {.T = 500, .H = 2, .HV = 2, .K = 128, .V = 128, .strong_share = 0.3F, .zero_share = 0.3F},
            device, 4e-3);
  good &= check(
      "strong channel",
      {.T = 500, .H = 2, .HV = 2, .K = 128, .V = 128, .gate = Gate::Channel, .strong_share = 0.3F, .zero_share = 0.3F},
      device, 4e-3);
  good &= check("packed head", {.T = 700, .H = 2, .HV = 2, .K = 128, .V = 128, .cu = {0, 0, 1, 33, 290, 290, 700}},
                device, 4e-3);
  for (const Gate gate : {Gate::None, Gate::Head, Gate::Channel}) {
    for (const std::int64_t D : {64, 128, 256}) {
      const std::string name = "BF16 D" + std::to_string(D) +
                               (gate == Gate::None   ? " plain"
                                : gate == Gate::Head ? " head"
                                                     : " channel");
      const Erase erase = gate == Gate::None ? Erase::Plain : Erase::Decayed;
      good &= check_backward(name.c_str(),
                             {.B = 2, .T = 333, .H = 2, .HV = 4, .K = D, .V = D, .gate = gate, .erase = erase}, device,
                             1e-2);
    }
  }
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    for (const std::int64_t D : {64, 128, 256}) {
      for (const bool v_first : {false, true}) {
        DeltaCase c{.B = 5, .T = 3, .H = 2, .HV = 4, .K = D, .V = D, .gate = gate, .state_v_first = v_first};
        c.pool = 7;
        c.indices = {6, -1, 2, 0, 1};
        std::string name = "D";
        name += std::to_string(D);
        name += gate == Gate::Head ? " head" : " channel";
        good &= check_decode((name + " F32").c_str(), c, device, 1e-5);
        c.state_type = DType::BF16;
        good &= check_decode((name + " BF16").c_str(), c, device, 4e-3);
      }
    }
  }
  std::fflush(stdout);
  return good;
}

int run(const std::string& only, const std::string& op, const std::string& mode) {
  const bool profile = mode == "profile", cuts = mode == "cuts";
  const auto info = device_info(0);
  if (!info) {
    std::printf("%s\n", info.status().message().c_str());
    return 77;
  }
  const bool good = profile || mode == "unchecked" || (cuts ? check_cuts(*info) : check_all(*info));
  constexpr std::pair<const char*, Gate> kOperators[] = {
      {"delta_rule", Gate::None}, {"gdn", Gate::Head}, {"kda", Gate::Channel}};
  for (const Shape& x : kShapes) {
    if (std::string(x.name).find(only) == std::string::npos) continue;
    for (const auto& [name, gate] : kOperators) {
      if (op.empty() || op == name) bench(name, gate, x, *info, profile ? 1 : 21, cuts);
    }
    std::fflush(stdout);
  }
  for (const DType type : {DType::F32, DType::BF16}) {
    for (const bool v_first : {false, true}) {
      if (std::string("decode").find(only) == std::string::npos) continue;
      bench_decode("gdn", Gate::Head, type, v_first, *info, profile ? 1 : 21);
      bench_decode("kda", Gate::Channel, type, v_first, *info, profile ? 1 : 21);
    }
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace fla::cuda

int main(int argc, char** argv) {
  return fla::cuda::run(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "", argc > 3 ? argv[3] : "");
}
