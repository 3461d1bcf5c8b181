// The frozen scope's patterns, and what the build's own files say a change reaches.
#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "tools/compare/base_build.h"
#include "tools/compare/build_graph.h"
#include "tools/loop/frozen_scope.h"

namespace fla::tools {
namespace {

namespace fs = std::filesystem;

TEST(FrozenScope, Patterns) {
  EXPECT_TRUE(matches("tests/gate/**", "tests/gate/main.cc"));
  EXPECT_TRUE(matches("tests/gate/**", "tests/gate/deep/x.cc"));
  EXPECT_FALSE(matches("tests/gate/**", "tests/gates/x.cc"));
  EXPECT_TRUE(matches("fla/ops/*/*_spec.cc", "fla/ops/gla/gla_spec.cc"));
  EXPECT_FALSE(matches("fla/ops/*/*_spec.cc", "fla/ops/gla/deep/gla_spec.cc"));
  EXPECT_FALSE(matches("fla/ops/*/*_spec.cc", "fla/ops/gla/gla_specs.cc"));
  EXPECT_TRUE(matches("fla/ops/*/=.h", "fla/ops/gla/gla.h"));
  EXPECT_FALSE(matches("fla/ops/*/=.h", "fla/ops/gla/gla_cpu.h"));
  EXPECT_FALSE(matches("fla/ops/*/=.h", "fla/ops/gla/hgrn.h"));
  EXPECT_TRUE(matches("tools/verify.cc", "tools/verify.cc"));
  EXPECT_FALSE(matches("tools/verify.cc", "tools/verify.cc2"));
  EXPECT_TRUE(matches("tools/call_sizes.*", "tools/call_sizes.cc"));
}

std::vector<std::string> frozen_patterns() {
  return parse_frozen_scope(read_text(FLA_SOURCE_DIR "/tools/frozen_scope.txt"));
}

TEST(FrozenScope, NamesWhatTheContractFreezes) {
  const auto patterns = frozen_patterns();
  for (const char* path : {"tests/gate/gradient_test.cc",
                           "tests/golden/gla/decode.safetensors",
                           "tests/cuda/delta_test.cu",
                           "fla/ops/gla/gla_spec.cc",
                           "fla/ops/gla/gla_problem.h",
                           "fla/ops/spec/state_pool.h",
                           "fla/engine/diag/ref.cc",
                           "fla/engine/diag/problem.h",
                           "fla/engine/delta/translate.h",
                           "fla/engine/common/ref_access.h",
                           "fla/engine/common/slots.h",
                           "fla/registry/registry.cc",
                           "fla/ops/gla/gla.h",
                           "fla/fla.h",
                           "tools/common/cases.cc",
                           "tools/common/placement.cc",
                           "tools/common/device_image.cc",
                           "tools/shape_groups.cc",
                           "tools/gpu/device_cuda.cc",
                           "tools/bench_runner.cc",
                           "tools/gate_runner.cc",
                           "tools/verify.cc",
                           "tools/compare/paired_bench.cc",
                           "tools/compare/base_build.cc",
                           "tools/loop/step.cc",
                           "tools/loop/effort.cc",
                           "tools/loop/promote.cc",
                           "tools/frozen_scope.txt"})
    EXPECT_TRUE(matches_any(patterns, path)) << path;
  for (const char* path :
       {"fla/ops/gla/gla_cpu.cc", "fla/engine/diag/cpu/chunk.cc", "fla/engine/diag/cuda/plan.cu",
        "fla/kernels/cpu/gemm-inl.h", "fla/kernels/cuda/mma.cuh", "README.md", "tools/report/report.cc"})
    EXPECT_FALSE(matches_any(patterns, path)) << path;
}

// A file that is moved would fall out of the list without a word.
TEST(FrozenScope, PatternsWithoutAStarNameWhatIsThere) {
  for (std::string path : frozen_patterns()) {
    if (path.ends_with("/**")) path.resize(path.size() - 3);
    if (path.find('*') != std::string::npos) continue;
    EXPECT_TRUE(fs::exists(fs::path(FLA_SOURCE_DIR) / path)) << path;
  }
}

// A reference that reads a file which kernels may change is no judge of them.
TEST(FrozenScope, HoldsWhateverReferencesAndSpecsInclude) {
  const fs::path root = FLA_SOURCE_DIR;
  const auto patterns = frozen_patterns();
  // The core knows no operator; the others declare functions of kernels, and how they are registered.
  const std::vector<std::string> free = {"fla/core/**", "fla/engine/*/engine.h", "fla/engine/*/cpu/entry.h"};
  std::vector<std::string> open;
  for (const auto& entry : fs::recursive_directory_iterator(root / "fla")) {
    const std::string path = entry.path().lexically_relative(root).generic_string();
    const std::string name = entry.path().filename().string();
    if (name == "ref.cc" || name.ends_with("_ref.cc") || name.ends_with("_spec.cc")) open.push_back(path);
  }
  ASSERT_GT(open.size(), 30U);
  std::set<std::string> seen(open.begin(), open.end());
  while (!open.empty()) {
    const std::string path = open.back();
    open.pop_back();
    EXPECT_TRUE(matches_any(patterns, path)) << path << " is included by a reference or a spec and is not frozen";
    constexpr std::string_view kInclude = "#include \"";
    for (const std::string& line : lines_of(read_text(root / path))) {
      if (!line.starts_with(kInclude)) continue;
      const std::string name = line.substr(kInclude.size(), line.find('"', kInclude.size()) - kInclude.size());
      if (fs::exists(root / name) && !matches_any(free, name) && seen.insert(name).second) open.push_back(name);
    }
  }
}

const std::set<std::string> kFamilies = {"gla", "retention", "simple_gla", "hgrn"};

std::vector<ObjectDeps> deps() {
  return parse_ninja_deps(
      "CMakeFiles/fla_objects.dir/fla/ops/gla/gla_cpu.cc.o: #deps 3, deps mtime 1 (VALID)\n"
      "    /src/fla/ops/gla/gla_cpu.cc\n    /src/fla/engine/diag/problem.h\n    /src/fla/ops/gla/gla.h\n\n"
      "CMakeFiles/fla_objects.dir/fla/engine/diag/cpu/chunk.cc.o: #deps 2, deps mtime 1 (VALID)\n"
      "    /src/fla/engine/diag/cpu/chunk.cc\n    /src/fla/engine/diag/cpu/state.h\n\n"
      "CMakeFiles/fla_objects.dir/fla/ops/hgrn/hgrn_cpu.cc.o: #deps 1, deps mtime 1 (VALID)\n"
      "    /src/fla/ops/hgrn/hgrn_cpu.cc\n\n"
      "CMakeFiles/fla_objects.dir/fla/ops/retention/retention.cc.o: #deps 1, deps mtime 1 (VALID)\n"
      "    ../../src/fla/ops/retention/retention.cc\n\n"
      "tests/CMakeFiles/fla_gate.dir/gate/bits_test.cc.o: #deps 2, deps mtime 1 (VALID)\n"
      "    /src/tests/gate/bits_test.cc\n    /src/tools/common/cases.h\n",
      "/src/build");
}

std::map<std::string, ObjectSymbols> symbols() {
  return parse_symbols(
      "CMakeFiles/fla_objects.dir/fla/engine/diag/cpu/chunk.cc.o: diag_forward T 0 10\n"
      "CMakeFiles/fla_objects.dir/fla/ops/gla/gla_cpu.cc.o: diag_forward U\n"
      "CMakeFiles/fla_objects.dir/fla/ops/gla/gla_cpu.cc.o: register_gla_cpu T 0 10\n"
      "CMakeFiles/fla_objects.dir/fla/ops/gla/gla_cpu.cc.o: run_gla T 0 10\n"
      "CMakeFiles/fla_objects.dir/fla/ops/retention/retention.cc.o: run_gla U\n"
      "CMakeFiles/fla_objects.dir/fla/ops/hgrn/hgrn_cpu.cc.o: register_hgrn_cpu T 0 10\n"
      "CMakeFiles/fla_objects.dir/generated/register_all.cc.o: register_gla_cpu U\n"
      "CMakeFiles/fla_objects.dir/generated/register_all.cc.o: register_hgrn_cpu U\n"
      "CMakeFiles/fla_objects.dir/generated/register_all.cc.o: register_all T 0 10\n"
      "CMakeFiles/fla_objects.dir/fla/registry/registry.cc.o: register_all U\n");
}

Reach reach(const std::vector<std::string>& changed) { return reach_of(changed, deps(), symbols(), "/src", kFamilies); }

TEST(ChangedGate, AKernelReachesItsFamilyAndThoseThatCallIt) {
  EXPECT_EQ(reach({"fla/ops/gla/gla_cpu.cc"}).families, (std::set<std::string>{"gla", "retention"}));
  EXPECT_EQ(reach({"fla/ops/hgrn/hgrn_cpu.cc"}).families, std::set<std::string>{"hgrn"});
}

TEST(ChangedGate, ASharedStageReachesItsUsersThroughHeadersAndSymbols) {
  EXPECT_EQ(reach({"fla/engine/diag/cpu/state.h"}).families, (std::set<std::string>{"gla", "retention"}));
  EXPECT_EQ(reach({"fla/engine/diag/cpu/chunk.cc"}).families, (std::set<std::string>{"gla", "retention"}));
  EXPECT_EQ(reach({"fla/engine/diag/problem.h"}).families, (std::set<std::string>{"gla", "retention"}));
}

TEST(ChangedGate, WhatAllTestsShareReachesEverything) {
  EXPECT_TRUE(reach({"tools/common/cases.h"}).everything);
  EXPECT_TRUE(reach({"tests/gate/bits_test.cc"}).everything);
  EXPECT_TRUE(reach({"cmake/fla_family.cmake"}).everything);
}

TEST(ChangedGate, DocumentsReachNothingAndRecordedCasesTheirFamily) {
  const Reach r = reach({"README.md", "tests/golden/hgrn/decode.safetensors"});
  EXPECT_EQ(r.families, std::set<std::string>{"hgrn"});
  EXPECT_EQ(r.unaffected, std::vector<std::string>{"README.md"});
  EXPECT_FALSE(r.everything);
}

TEST(BuildFlags, OnlyFlagsThatChangeCodeAreCompared) {
  const std::string path = ::testing::TempDir() + "/commands.json";
  write_text(path, R"([{"file": "/src/fla/a.cc", "command":
    "/usr/bin/ccache /usr/bin/c++ -I/src -Iinclude -O2 -Wall -Werror -std=c++20 -MD -MT x.o -MF x.d -o x.o -c /src/fla/a.cc"},
    {"file": "/src/tools/b.cc", "command": "c++ -O0 -c /src/tools/b.cc"}])");
  const auto flags = compile_flags(path, "/src");
  ASSERT_EQ(flags.size(), 1U);
  EXPECT_EQ(flags.at("fla/a.cc"), "-O2 -std=c++20");
  EXPECT_TRUE(flag_differences(flags, flags).empty());
  auto other = flags;
  other["fla/a.cc"] = "-O3 -std=c++20";
  EXPECT_EQ(flag_differences(flags, other).size(), 1U);
  EXPECT_TRUE(flag_differences(flags, {{"fla/new.cc", "-O1"}}).empty());
}

}  // namespace
}  // namespace fla::tools
