// The gate's main: registers the tests that the tables ask for, and is red when nothing ran.
#include <cstdio>
#include <string_view>

#include "tests/gate/gate.h"

int gate_child(std::string_view name);  // dispatch_test.cc: what a re-executed child does
extern const char* gate_program;

int main(int argc, char** argv) {
  gate_program = argv[0];
  for (int i = 1; i < argc; ++i)
    if (const std::string_view arg = argv[i]; arg.starts_with("--child=")) return gate_child(arg.substr(8));
  ::testing::InitGoogleTest(&argc, argv);
  fla::gate::register_function_tests();
  const int rc = RUN_ALL_TESTS();
  if (::testing::GTEST_FLAG(list_tests)) return rc;
  fla::gate::print_worst();
  const auto* unit = ::testing::UnitTest::GetInstance();
  if (unit->successful_test_count() + unit->failed_test_count() == 0) {
    std::puts("gate: no test ran: nothing was selected, or all were skipped");
    return 4;
  }
  return rc;
}
