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
#include <vector>

#include "fla/engine/diag/cpu/entry.h"
#include "fla/kernels/cpu/roof.h"
#include "fmt/format.h"

namespace fla::tools {
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
    double done = 0.0;  // operations or bytes
    std::size_t at = 0;
  };
  std::unique_ptr<Slot[]> slots(new Slot[static_cast<std::size_t>(threads)]);
  const auto slot = [&](int worker) -> Slot& { return slots[static_cast<std::size_t>(worker)]; };
  // How much is done in a second by all threads together. Several tasks a thread: one that wakes late, as all but one do
  // on a busy machine, costs a share of a task and not most of the figure. task(worker): operations or bytes.
  const auto rate = [&](const auto& task) {
    for (int i = 0; i < threads; ++i) slot(i).done = 0.0;
    const auto t0 = Clock::now();
    pool.run(std::int64_t{4} * threads, [&](std::int64_t, int worker) { slot(worker).done += task(worker); });
    const double seconds = seconds_since(t0);
    double done = 0.0;
    for (int i = 0; i < threads; ++i) done += slot(i).done;
    return done / seconds * 1e-9;
  };

  // About half a millisecond each: short enough to run undisturbed now and then.
  constexpr std::int64_t kRounds = 1 << 18, kProducts = 1 << 9;
  std::vector<float> tiles(static_cast<std::size_t>(cpu::kTileFloats) * static_cast<std::size_t>(threads), 0.5F);
  const auto in_registers = [&](int worker) { return cpu::register_products(kRounds, &slot(worker).sink); };
  const auto in_tiles = [&](int worker) {
    return cpu::tile_products(kProducts, tiles.data() + cpu::kTileFloats * worker);
  };
  for (int pass = 0; pass < kShortPasses; ++pass) {
    auto t0 = Clock::now();
    const double registers = in_registers(0) / seconds_since(t0);
    t0 = Clock::now();
    roof.gflops_thread = std::max(roof.gflops_thread, std::max(registers, in_tiles(0) / seconds_since(t0)) * 1e-9);
  }
  roof.gflops = roof.gflops_thread;
  for (int pass = 0; pass < kShortPasses; ++pass)
    roof.gflops = std::max({roof.gflops, rate(in_registers), rate(in_tiles)});

  constexpr std::size_t kGrain = 256;  // floats; what read_all takes in one turn, on every target
  // What a task reads: a fraction of a millisecond.
  constexpr std::size_t kPiece = std::size_t{1} << 17;
  constexpr std::size_t kLeastPasses = 12;
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
    // Each thread goes round its own share.
    const std::size_t share = share_of(size), piece = std::min(share, kPiece), repeats = kPiece / piece;
    for (int i = 0; i < threads; ++i) slot(i).at = 0;
    const auto read = [&](int worker) {
      Slot& s = slot(worker);
      for (std::size_t r = 0; r < repeats; ++r) s.sink += cpu::read_all(part(worker) + s.at, piece);
      s.at = s.at + 2 * piece > share ? 0 : s.at + piece;
      return static_cast<double>(piece * repeats * sizeof(float));
    };
    double best = 0.0;
    for (std::size_t n = 0; n < std::max(kLeastPasses, share / piece / 2); ++n) best = std::max(best, rate(read));
    roof.levels.push_back({static_cast<double>(share * sizeof(float)) * threads, best});
  }
  roof.level();
  // Keeps the compiler from dropping the work.
  volatile float keep = 0.0F;
  for (int i = 0; i < threads; ++i) keep = keep + slot(i).sink;
  return roof;
}

void Roof::level() {
  // A larger set is never faster to read; where it seemed so, the smaller one was disturbed.
  for (std::size_t i = levels.size(); i-- > 1;) levels[i - 1].gbytes = std::max(levels[i - 1].gbytes, levels[i].gbytes);
}

void Roof::include(const Roof& other) {
  gflops_thread = std::max(gflops_thread, other.gflops_thread);
  gflops = std::max(gflops, other.gflops);
  if (levels.empty()) levels = other.levels;
  // Sizes go by what memory was free, which may have changed.
  for (Level& l : levels)
    for (const Level& o : other.levels)
      if (o.bytes == l.bytes) l.gbytes = std::max(l.gbytes, o.gbytes);
  level();
}

std::string threads_text(int threads) { return std::to_string(threads) + (threads == 1 ? " thread" : " threads"); }

double floor_ms(const Roof& roof, double flops, double bytes) {
  double gbytes = roof.levels.empty() ? 0.0 : roof.levels.front().gbytes;
  for (const Roof::Level& l : roof.levels)
    if (l.bytes <= bytes) gbytes = l.gbytes;
  const double compute = roof.gflops > 0 ? flops / (roof.gflops * 1e9) : 0.0;
  return 1e3 * std::max(compute, gbytes > 0 ? bytes / (gbytes * 1e9) : 0.0);
}

std::string beyond_roof(const Roof& roof, double ms, double flops, double bytes) {
  const double floor = floor_ms(roof, flops, bytes);
  if (!(ms > 0) || ms >= floor) return "";
  return fmt::format(
      "broken measurement: {:.3g} ms is less than {:.3g}, what {:.4g} GFLOP/s and {:.4g} GB/s allow; "
      "the roof was measured while the machine was busy, or work is left out",
      ms, floor, roof.gflops, bytes / floor_ms(roof, 0.0, bytes) * 1e-6);
}

}  // namespace fla::tools
