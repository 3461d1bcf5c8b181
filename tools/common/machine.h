// What this machine is, and what it can do at most: the roof that the benchmark measures against.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fla/core/threads.h"

namespace fla::tools {

struct Machine {
  std::string cpu;     // "AMD EPYC 9R14"
  std::string isa;     // that run-time dispatch selects: "AVX3"
  std::string system;  // "Linux 6.1.0 x86_64"
  int processors = 0;  // that this process may run on
  std::uint64_t memory_bytes = 0, available_bytes = 0;
  double mhz = 0.0;  // of the first processor now; 0 where the system does not tell
};
Machine machine();

std::string threads_text(int threads);  // "1 thread"

// Measured with every thread of the pool at work; each the best of a few passes, about 0.5 s together.
struct Roof {
  // F32 fused multiply-adds, two operations each, one thread alone: in registers or in a product of small matrices,
  // whichever is more.
  double gflops_thread = 0.0;
  double gflops = 0.0;  // all threads together
  // Reading so many bytes over and over, all threads together, from what fits in the first cache to what fits in none.
  struct Level {
    double bytes, gbytes;  // GB/s
  };
  std::vector<Level> levels;
  double memory_gbytes() const { return levels.empty() ? 0.0 : levels.back().gbytes; }
  // Takes what another measurement of the same machine found to be more.
  void include(const Roof& other);
  void level();
};
Roof measure_roof(ThreadPool& pool);

// The least time in ms: operations at the peak, or bytes at the bandwidth of a working set not larger than they are,
// whichever is longer.
double floor_ms(const Roof& roof, double flops, double bytes);
// What is wrong with a time below that; empty: nothing.
std::string beyond_roof(const Roof& roof, double ms, double flops, double bytes);

}  // namespace fla::tools
