// fla verify --base: this build against another commit's, in one run.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/bench_runner.h"
#include "tools/compare/base_build.h"
#include "tools/compare/paired_bench.h"
#include "tools/gate_runner.h"

namespace fla::tools {

struct BaseComparison {
  BuiltLibrary base;
  std::string candidate_commit;  // as the library says it: "-dirty" at its end when the tree has changes
  std::vector<std::string> flag_differences;
  PairedRun run;
};
// Everything but the timing: the frozen scope holds, both libraries are there and are what they should be.
class BaseSetup {
 public:
  BaseSetup(const std::string& ref, const std::string& cache, const std::string& device);
  BaseComparison compare(const std::vector<const Registry::Entry*>& ops, const BenchOptions& o) const;
  void build();

 private:
  BuildTree tree_;
  Repo repo_;
  std::string ref_, cache_;
  bool on_gpu_;
  BuiltLibrary base_, candidate_;
};

}  // namespace fla::tools
