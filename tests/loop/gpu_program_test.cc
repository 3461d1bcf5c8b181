// Timings and profiles on a GPU, by the program: on the emulated one of the preset `emulated`, with a script that plays
// Nsight Compute. Where there is no GPU the same commands are refused.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/loop/fake_ncu.h"
#include "tools/compare/process.h"
#include "tools/gpu/watch.h"

namespace fla::tools {
namespace {

using Json = nlohmann::ordered_json;

class GpuProgram : public FakeNcu {
 protected:
  void SetUp() override {
    FakeNcu::SetUp();
    setenv(kNvmlVariable, "/nonexistent/libnvidia-ml.so.1", 1);
  }
  void TearDown() override {
    unsetenv(kNvmlVariable);
    FakeNcu::TearDown();
  }
  static ChildResult fla(std::vector<std::string> args) {
    args.insert(args.begin(), FLA_PROGRAM);
    return run_child(args);
  }
  static bool has_gpu() { return !Json::parse(fla({"doctor", "--json"}).out)["gpu"].is_null(); }
  static std::vector<std::string> small(std::vector<std::string> args) {
    args.insert(args.end(), {"--device", "cuda", "--modes", "fwd", "--custom-shapes",
                             R"({"odd, /@[name]": {"B": 1, "T": 16, "H": 1, "D": 16}})"});
    return args;
  }
};

TEST_F(GpuProgram, ACallIsReadByNcuAndTheClocksAreInTheRecord) {
  const std::vector<std::string> verify = small({"verify", "--op", "chunk_gla", "--no-gate", "--profile", "--json"});
  if (!has_gpu()) {
    for (const auto& args : {verify, small({"bench", "chunk_gla", "--once"})}) {
      const ChildResult r = fla(args);
      EXPECT_EQ(r.code, 2);
      EXPECT_NE(r.err.find("--device: expected cpu, got 'cuda': "), std::string::npos) << r.err;
    }
    return;
  }
  // The command line that it gets is run: it must be one.
  ncu("while [ \"$1\" != --nvtx-include ]; do shift; done; echo \"$2\" >" + (dir_ / "range").string() +
      "\nwhile [ \"$1\" != base ]; do shift; done; shift\n\"$@\" >" + (dir_ / "child").string() +
      " 2>&1 || exit 1\ncat " + FLA_SOURCE_DIR + "/tests/loop/data/ncu_gla_fwdbwd.csv");
  ChildResult r = fla(verify);
  ASSERT_EQ(r.code, 0) << r.err << r.out;
  Json j = Json::parse(r.out);
  const Json& gpu = j["machine"]["gpu"];
  EXPECT_NE(gpu["clocks"]["missing"].get<std::string>().find("/nonexistent"), std::string::npos);
  ASSERT_EQ(j["profile"].size(), 1U);
  const Json& p = j["profile"][0];
  EXPECT_EQ(p["device"], "cuda");
  EXPECT_GT(p["median_ms"].get<double>(), 0);
  EXPECT_TRUE(p["kernels_missing"].is_null()) << p["kernels_missing"];
  EXPECT_EQ(p["kernels"].size(), 5U);
  EXPECT_EQ(p["limit"], "neither");
  EXPECT_NE(p["reading"].get<std::string>().find("5 kernels, 25 % of the time in diag_value_kernel"), std::string::npos)
      << p["reading"];
  EXPECT_EQ(read_text(dir_ / "range"), "fla@chunk_gla fwd odd_ ___name_/\n");
  EXPECT_NE(read_text(dir_ / "child").find("nothing is timed"), std::string::npos) << read_text(dir_ / "child");

  // A profiler that may not read ends nothing, and the rest of the record is there.
  ncu("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1");
  auto text = verify;
  text.erase(std::find(text.begin(), text.end(), "--json"));
  r = fla(text);
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("no readings of kernels (the driver lets this user read no counters"), std::string::npos)
      << r.out;
  EXPECT_NE(r.out.find("clocks: not sampled (NVML cannot be loaded"), std::string::npos) << r.out;
}

TEST_F(GpuProgram, RefusesWhatIsForOneKindOfDevice) {
  const ChildResult r = fla({"bench", "chunk_gla", "--once"});
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.err.find("--once: expected with --device cuda, got cpu"), std::string::npos) << r.err;
}

}  // namespace
}  // namespace fla::tools
