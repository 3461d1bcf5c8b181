// The gate's main: registers the tests that the tables ask for, and is red when nothing ran. Beside GoogleTest's options:
// --list-exercises, --record (fails no test for what is recorded of it), --device=cuda, --plugin=SO, --plugin-trace=FILE.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "tests/gate/gate.h"
#include "tests/gate/records.h"
#include "tools/common/placement.h"
#include "tools/plugin/guard.h"

int gate_child(std::string_view name);  // dispatch_test.cc: what a re-executed child does
extern const char* gate_program;

int main(int argc, char** argv) {
  gate_program = argv[0];
  fla::tools::PluginTrace* trace = nullptr;
  std::string plugin;
  bool list = false, record = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg.starts_with("--child=")) return gate_child(arg.substr(8));
    list = list || arg == "--list-exercises";
    record = record || arg == "--record";
    if (arg.starts_with("--plugin=")) plugin = arg.substr(9);
    if (arg == "--device=cuda") {
      if (const std::string problem = fla::tools::device_problem(fla::tools::kGpu); !problem.empty()) {
        std::fprintf(stderr, "gate: --device=cuda: %s\n", problem.c_str());
        return 2;
      }
      fla::gate::judge_device(fla::DeviceType::Cuda);
    }
    if (arg.starts_with("--plugin-trace=")) trace = fla::tools::map_trace(std::string(arg.substr(15)));
  }
  if (!plugin.empty()) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fla::tools::use_trace(trace);
    const auto loaded = fla::tools::load_guarded_plugin(plugin);
    if (!loaded) {
      std::fprintf(stderr, "gate: %s\n", loaded.status().message().c_str());
      return 2;
    }
    fla::gate::judge_plugin(loaded->name);
  }
  ::testing::InitGoogleTest(&argc, argv);
  fla::gate::register_function_tests();
  if (list) {
    fla::gate::list_exercises(fla::gate::judges_one_by_one());
    std::fflush(nullptr);
    _exit(0);  // without a plug-in's own destructors, as below
  }
  fla::gate::watch_exercises(record);
  int rc = RUN_ALL_TESTS();
  if (!::testing::GTEST_FLAG(list_tests)) {
    fla::gate::print_worst();
    fla::gate::print_unrecorded();
    const auto* unit = ::testing::UnitTest::GetInstance();
    if (unit->successful_test_count() + unit->failed_test_count() == 0) {
      std::puts("gate: no test ran: nothing was selected, or all were skipped");
      rc = 4;
    }
  }
  if (plugin.empty()) return rc;
  std::fflush(nullptr);
  if (trace != nullptr) trace->finished = 1;
  _exit(rc);  // a plug-in's own destructors have no say in the result
}
