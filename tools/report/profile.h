// Readings that explain a time: hardware counters where the machine gives them, a sample of where the program is, and
// the position under the roofline; on a GPU what Nsight Compute reads of each kernel, and the clocks. What is not
// available is said, never left out.
#pragma once

#include <string>
#include <vector>

#include "tools/bench_runner.h"
#include "tools/report/ncu.h"

namespace fla::tools {

struct Counter {
  std::string name;
  double per_call = 0;
};
struct HotFunction {
  std::string name;
  double share = 0;  // of the samples
};
struct Profile {
  std::string op, shape, mode, backend, device = "cpu";
  std::string error;             // why there is no time
  std::string counters_missing;  // why there are none; empty: there are
  std::vector<Counter> counters;
  std::string sampler_missing;
  std::size_t samples = 0;
  std::vector<HotFunction> hot;  // the hottest first
  std::string kernels_missing;
  std::vector<KernelReading> kernels;  // of one call on a GPU, in the order of the launches
  GpuClocks clocks;
  std::string gpu;
  double median_ms = 0, gflops = 0, gbytes = 0;           // achieved
  double floor_ms = 0, peak_gflops = 0, peak_gbytes = 0;  // 0: not known
  std::string limit;                                      // "compute", "memory" or "neither": what the roofline says
  std::string reading() const;                            // one line with the numbers
};

// Of the first shape chosen, in each mode chosen: about a second each.
std::vector<Profile> take_profiles(const std::vector<const Registry::Entry*>& ops, const BenchOptions& o);
Json to_json(const Profile& p);
void print_profile(const Profile& p);

}  // namespace fla::tools
