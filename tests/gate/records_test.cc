// The gate holds its tests to what they say of themselves; this holds the gate to it.
#include <sys/wait.h>

#include <cstdio>
#include <string>

#include "tests/gate/gate.h"
#include "tests/gate/records.h"

extern const char* gate_program;

namespace fla::gate {
namespace {

// For the test below alone. No record names it, and disabled tests are not recorded.
TEST(Records, DISABLED_CallsChunkHgrnWithoutSayingSo) {
  EXPECT_TRUE(make_case("chunk_hgrn", sizes(1, 5, 1, 4, 3)).run(context("cpu")).ok());
}

TEST(Records, ATestThatCallsWhatItDoesNotSayFails) {
  std::FILE* child = popen(("env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX '" + std::string(gate_program) +
                            "' --gtest_also_run_disabled_tests --gtest_filter='Records.DISABLED_*' 2>&1")
                               .c_str(),
                           "r");
  ASSERT_NE(child, nullptr);
  std::string text;
  for (int c; (c = std::fgetc(child)) != EOF;) text += static_cast<char>(c);
  const int status = pclose(child);
  if (WIFEXITED(status) && (WEXITSTATUS(status) == 126 || WEXITSTATUS(status) == 127))
    GTEST_SKIP() << "this machine cannot run the test's own program: " << text;
  EXPECT_NE(status, 0) << text;
  EXPECT_NE(text.find("exercises chunk_hgrn and tests/gate/records/exercises.txt does not say so"), std::string::npos)
      << text;
}

// Tests that have no function's name are not left out where the function is asked for.
TEST(Records, TestsOfOtherSuitesBelongToWhatTheyCall) {
  EXPECT_TRUE(exercised_by("Overlap.SlicesOfOneFusedTensorAreLegal").contains("chunk_gla"));
  EXPECT_TRUE(exercised_by("Serving.ALoopOfPrefillDecodeAndDraftsEqualsOneLongCall").contains("gdn_step"));
  EXPECT_TRUE(exercised_by("Gla.chunk_gla/Shapes").contains("chunk_gla"));
  EXPECT_TRUE(exercised_by("Compare.FollowsTheContract").empty());
}

}  // namespace
}  // namespace fla::gate
