// Readings that explain a time: hardware counters where the machine gives them, a sample of where the program is, and
// the position under the roofline. What is not available is said, never left out.
#pragma once

#include <string>
#include <vector>

#include "tools/bench_runner.h"

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
  std::string op, shape, mode, backend;
  std::string counters_missing;  // why there are none; empty: there are
  std::vector<Counter> counters;
  std::string sampler_missing;
  std::size_t samples = 0;
  std::vector<HotFunction> hot;                  // the hottest first
  double median_ms = 0, gflops = 0, gbytes = 0;  // achieved
  double floor_ms = 0, peak_gflops = 0, peak_gbytes = 0;
  std::string limit;            // "compute", "memory" or "neither": what the roofline says
  std::string reading() const;  // one line with the numbers
};

// Of the first shape chosen, in each mode chosen: about a second each.
std::vector<Profile> take_profiles(const std::vector<const Registry::Entry*>& ops, const BenchOptions& o);
Json to_json(const Profile& p);
void print_profile(const Profile& p);

}  // namespace fla::tools
