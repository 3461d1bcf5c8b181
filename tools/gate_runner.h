// Runs the frozen tests: the program fla_gate beside this one, in as many processes as there are processors.
#pragma once

#include <string>
#include <vector>

#include "tools/command.h"

namespace fla::tools {

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
  int accepted = 0, refused = 0;  // calls that the one backend judged took, and did not take, in tests that have ended

  int exit_code() const { return failed > 0 || not_run > 0 ? kFailed : passed > 0 ? kGood : kNothing; }
};

// Path of the gate's program; empty when there is none.
std::string find_gate();
// `everything`: tests that name no operator too. `subset`: only tests whose full name contains it (or, with '*' or '?',
// matches it).
// With a plug-in, or on another device than the CPU: only the tests that judge a backend, and that one is judged.
GateResult run_gate(const std::vector<const Registry::Entry*>& ops, bool everything, const std::string& subset,
                    const PluginOptions& plugin = {}, const std::string& device = "cpu");

Json to_json(const GateResult& g);  // "passed", "failed", "skipped", "hash" and more
// Failures and the summary line.
void print_gate(const GateResult& g, std::FILE* to);

// Which of a test's names count, for run_gate and its test: the functions and families that `test` is about.
std::vector<std::string> subjects_of(const Registry& r, const std::string& test);

}  // namespace fla::tools
