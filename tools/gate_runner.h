// Runs the frozen tests: the program fla_gate beside this one, in as many processes as there are processors.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tools/command.h"

namespace fla::tools {

// What a test's process says of it, for records.
struct TestRecord {
  std::string exercises;  // functions beside the one that it is named after
  std::string backend;    // that it judged alone; empty: those of the CPU
  std::string kernels;    // that it has cases for
  std::string coverage;   // "KERNEL TOPIC COUNT" lines of what ran
  int taken = 0, refused = 0;
  bool failed = false;
};

struct GateResult {
  struct Failure {
    std::string test, text;
  };
  std::vector<std::string> ops;
  std::string subset;
  int selected = 0, passed = 0, failed = 0, skipped = 0;
  int not_run = 0;  // selected, but their process died before
  double seconds = 0.0;
  std::string hash;  // of the frozen files
  std::vector<Failure> failures;
  std::string plugin;  // its path; empty: none
  std::string device = "cpu";
  int accepted = 0, refused = 0;  // calls that backends judged alone took, and did not take, in tests that have ended
  std::vector<std::string> all_tests;  // that the gate has, in its order
  std::map<std::string, TestRecord> records;
  std::set<std::string> notes;  // what the gate's processes said beside their tests

  int exit_code() const { return failed > 0 || not_run > 0 ? kFailed : passed > 0 ? kGood : kNothing; }
};

// Path of the gate's program; empty when there is none.
std::string find_gate();
// Runs every test that exercises one of `ops`, as the gate's program says of itself (tests/gate/records); with
// `everything` those too that exercise none. `subset`: of these the tests whose full name contains it (or, with '*' or
// '?', matches it).
// With a plug-in, or on another device than the CPU: only the tests that judge a backend, and that one is judged, or all
// of the device. `record`: no test fails for what is recorded of it.
GateResult run_gate(const std::vector<const Registry::Entry*>& ops, bool everything, const std::string& subset,
                    const PluginOptions& plugin = {}, const std::string& device = "cpu", bool record = false);
// Puts what the tests said of themselves into the files of `folder` (tests/gate/records).
void write_records(const GateResult& g, const std::filesystem::path& folder);

Json to_json(const GateResult& g);  // "passed", "failed", "skipped", "hash" and more
// The cases that ran for each kernel which the selected functions' backends list for a device, by topic.
struct KernelCoverage {
  std::map<std::string, std::map<std::string, int>> kernels;
  std::set<std::string> unjudged;  // reached by a test's calls, and none of its cases was judged

  bool complete() const { return !kernels.empty() && unjudged.empty(); }
};
KernelCoverage coverage_of(const GateResult& g, const std::vector<const Registry::Entry*>& ops);
Json to_json(const KernelCoverage& c);
void print_coverage(const KernelCoverage& c, std::FILE* to);

// Failures and the summary line.
void print_gate(const GateResult& g, std::FILE* to);

}  // namespace fla::tools
