#include "tools/common/machine.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>

#include "fla/engine/diag/cpu/entry.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/common/machine.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::tools::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Twelve independent chains cover the latency of two multiply-add units on every target and fit sixteen registers.
constexpr int kChains = 12;

// Runs `rounds` rounds of kChains multiply-adds; the number of operations comes back, a value of them in *sink.
double multiply_add(std::int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, 0.999F), b = hn::Set(d, 0.001F);
  auto c0 = hn::Iota(d, 0.0F), c1 = hn::Iota(d, 0.1F), c2 = hn::Iota(d, 0.2F), c3 = hn::Iota(d, 0.3F);
  auto c4 = hn::Iota(d, 0.4F), c5 = hn::Iota(d, 0.5F), c6 = hn::Iota(d, 0.6F), c7 = hn::Iota(d, 0.7F);
  auto c8 = hn::Iota(d, 0.8F), c9 = hn::Iota(d, 0.9F), c10 = hn::Iota(d, 1.0F), c11 = hn::Iota(d, 1.1F);
  for (std::int64_t i = 0; i < rounds; ++i) {
    c0 = hn::MulAdd(c0, a, b), c1 = hn::MulAdd(c1, a, b), c2 = hn::MulAdd(c2, a, b), c3 = hn::MulAdd(c3, a, b);
    c4 = hn::MulAdd(c4, a, b), c5 = hn::MulAdd(c5, a, b), c6 = hn::MulAdd(c6, a, b), c7 = hn::MulAdd(c7, a, b);
    c8 = hn::MulAdd(c8, a, b), c9 = hn::MulAdd(c9, a, b), c10 = hn::MulAdd(c10, a, b), c11 = hn::MulAdd(c11, a, b);
  }
  const auto s0 = hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)), s1 = hn::Add(hn::Add(c4, c5), hn::Add(c6, c7)),
             s2 = hn::Add(hn::Add(c8, c9), hn::Add(c10, c11));
  *sink = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), s2)));
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

float read_all(const float* x, std::size_t n) {  // n is a multiple of 256
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (std::size_t i = 0; i < n; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::LoadU(d, x + i));
    s1 = hn::Add(s1, hn::LoadU(d, x + i + lanes));
    s2 = hn::Add(s2, hn::LoadU(d, x + i + 2 * lanes));
    s3 = hn::Add(s3, hn::LoadU(d, x + i + 3 * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

}  // namespace fla::tools::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::tools {
HWY_EXPORT(multiply_add);
HWY_EXPORT(read_all);

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t0) { return std::chrono::duration<double>(Clock::now() - t0).count(); }

// The value after "key" and ':' in a file of such lines.
std::string field(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(key, 0) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::uint64_t kibibytes(const std::string& text) { return std::strtoull(text.c_str(), nullptr, 10) * 1024; }

constexpr int kShortPasses = 40;

}  // namespace

Machine machine() {
  Machine m;
  m.cpu = field("/proc/cpuinfo", "model name");
  if (m.cpu.empty()) m.cpu = "unknown";
  m.isa = cpu::isa_name();
  utsname u{};
  if (uname(&u) == 0) m.system = std::string(u.sysname) + " " + u.release + " " + u.machine;
  cpu_set_t set;
  CPU_ZERO(&set);
  m.processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                             : static_cast<int>(std::thread::hardware_concurrency());
  m.memory_bytes = kibibytes(field("/proc/meminfo", "MemTotal"));
  m.available_bytes = kibibytes(field("/proc/meminfo", "MemAvailable"));
  m.mhz = std::strtod(field("/proc/cpuinfo", "cpu MHz").c_str(), nullptr);
  return m;
}

Roof measure_roof(ThreadPool& pool) {
  Roof roof;
  const int threads = std::max(pool.size(), 1);
  struct alignas(64) Slot {
    float sink = 0.0F;
    double operations = 0.0;
  };
  std::unique_ptr<Slot[]> slots(new Slot[static_cast<std::size_t>(threads)]);
  constexpr std::int64_t kRounds = 1 << 18;  // about a millisecond: short enough to run undisturbed now and then
  for (int pass = 0; pass < kShortPasses; ++pass) {
    const auto t0 = Clock::now();
    const double operations = HWY_DYNAMIC_DISPATCH(multiply_add)(kRounds, &slots[0].sink);
    roof.gflops_thread = std::max(roof.gflops_thread, operations / seconds_since(t0) * 1e-9);
  }
  roof.gflops = roof.gflops_thread;
  for (int pass = 0; pass < kShortPasses; ++pass) {
    const auto t0 = Clock::now();
    for (int i = 0; i < threads; ++i) slots[static_cast<std::size_t>(i)].operations = 0.0;
    // Several tasks a thread: one that wakes late costs a share of a task, not half the figure.
    pool.run(std::int64_t{4} * threads, [&](std::int64_t, int worker) {
      auto& slot = slots[static_cast<std::size_t>(worker)];
      slot.operations += HWY_DYNAMIC_DISPATCH(multiply_add)(kRounds, &slot.sink);
    });
    const double seconds = seconds_since(t0);
    double operations = 0.0;
    for (int i = 0; i < threads; ++i) operations += slots[static_cast<std::size_t>(i)].operations;
    roof.gflops = std::max(roof.gflops, operations / seconds * 1e-9);
  }

  constexpr std::size_t kGrain = 256;  // floats; what read_all takes in one turn, on every target
  // A thread's part of one timing: a fraction of a millisecond, so that some run undisturbed also on a busy machine.
  constexpr std::size_t kPiece = std::size_t{1} << 18;
  constexpr std::size_t kLeastPieces = 24;
  const std::size_t most = std::clamp<std::size_t>(static_cast<std::size_t>(machine().available_bytes) / 8,
                                                   std::size_t{1} << 20, std::size_t{256} << 20);
  const auto share_of = [&](std::size_t bytes) {
    return std::max(bytes / sizeof(float) / static_cast<std::size_t>(threads) / kGrain, std::size_t{1}) * kGrain;
  };
  const std::size_t whole = share_of(most);
  std::unique_ptr<float[]> data(new float[whole * static_cast<std::size_t>(threads)]);
  const auto part = [&](std::int64_t i) { return data.get() + whole * static_cast<std::size_t>(i); };
  pool.run(threads, [&](std::int64_t i, int) { std::fill(part(i), part(i) + whole, 1.0F); });
  for (std::size_t size = std::size_t{64} << 10; size <= most; size *= 4) {
    const std::size_t share = share_of(size), piece = std::min(share, kPiece), repeats = kPiece / piece;
    const double bytes = static_cast<double>(share * sizeof(float)) * threads;
    const double piece_bytes = static_cast<double>(piece * repeats * sizeof(float)) * threads;
    double best = 0.0;
    for (std::size_t n = 0, at = 0; n < std::max(kLeastPieces, 2 * share / piece); ++n) {
      const auto t0 = Clock::now();
      pool.run(threads, [&](std::int64_t i, int) {
        float sum = 0.0F;
        for (std::size_t r = 0; r < repeats; ++r) sum += HWY_DYNAMIC_DISPATCH(read_all)(part(i) + at, piece);
        slots[static_cast<std::size_t>(i)].sink = sum;
      });
      best = std::max(best, piece_bytes / seconds_since(t0) * 1e-9);
      at += piece;
      if (at + piece > share) at = 0;
    }
    roof.levels.push_back({bytes, best});
  }
  // A larger set is never faster to read; where it seemed so, the smaller one was disturbed.
  for (std::size_t i = roof.levels.size(); i-- > 1;)
    roof.levels[i - 1].gbytes = std::max(roof.levels[i - 1].gbytes, roof.levels[i].gbytes);
  // Keeps the compiler from dropping the work.
  volatile float keep = 0.0F;
  for (int i = 0; i < threads; ++i) keep = keep + slots[static_cast<std::size_t>(i)].sink;
  return roof;
}

std::string threads_text(int threads) { return std::to_string(threads) + (threads == 1 ? " thread" : " threads"); }

double floor_ms(const Roof& roof, double flops, double bytes) {
  double gbytes = roof.levels.empty() ? 0.0 : roof.levels.front().gbytes;
  for (const Roof::Level& l : roof.levels)
    if (l.bytes <= bytes) gbytes = l.gbytes;
  return 1e3 * std::max(flops / (roof.gflops * 1e9), gbytes > 0 ? bytes / (gbytes * 1e9) : 0.0);
}

}  // namespace fla::tools
#endif
