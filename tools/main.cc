// The program `fla`: finds the subcommand, runs it, turns every error into one line and an exit code.
#include <algorithm>
#include <exception>
#include <new>

#include "CLI/CLI.hpp"
#include "fla/core/version.h"
#include "tools/command.h"

namespace fla::tools {
namespace {

int run_program(int argc, char** argv) {
  CLI::App app("Linear-attention operators: list, run, check, prove and time them.", "fla");
  app.set_version_flag("--version", fmt::format("fla {} ({})", build_info().version, build_info().commit));
  app.footer(
      "Each command has --help with examples and --json.\n"
      "Exit codes: 0 good; 1 checked and failed; 2 usage or bad input; 3 frozen scope violated; 4 nothing selected.");
  app.require_subcommand(1);
  const Command commands[] = {add_ops(app),   add_run(app),    add_check(app),   add_gate(app),
                              add_bench(app), add_verify(app), add_explain(app), add_doctor(app)};

  if (argc > 1 && argv[1][0] != '-' && std::none_of(std::begin(commands), std::end(commands), [&](const Command& c) {
        return c.app->get_name() == argv[1];
      })) {
    std::vector<std::string> names;
    for (const Command& c : commands) names.push_back(c.app->get_name());
    refuse("unknown command '{}'; expected {}", argv[1], join(names));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    std::string where = "fla";
    for (const CLI::App* sub : app.get_subcommands()) where += " " + sub->get_name();
    throw Stop(kUsage, fmt::format("{}; see {} --help", e.what(), where));
  }
  for (const Command& c : commands)
    if (c.app->parsed()) return c.run();
  return kUsage;
}

}  // namespace
}  // namespace fla::tools

int main(int argc, char** argv) {
  using namespace fla::tools;
  try {
    return run_program(argc, argv);
  } catch (const Stop& e) {
    fmt::print(stderr, "fla: {}\n", e.what());
    return e.code;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "fla: out of memory\n");
    return kFailed;
  } catch (const std::exception& e) {
    fmt::print(stderr, "fla: {}\n", e.what());
    return kFailed;
  }
}
