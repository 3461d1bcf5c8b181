// The program `fla`: finds the subcommand, runs it, turns every error into one line and an exit code.
#include <algorithm>
#include <sstream>
#include <string_view>

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
      "Exit codes: 0 good; 1 checked and failed; 2 usage, bad input, or a call that nothing here "
      "serves;\n            3 frozen scope violated; 4 nothing selected.");
  app.require_subcommand(1);
  const Command commands[] = {add_ops(app),    add_run(app),     add_check(app), add_gate(app),   add_bench(app),
                              add_verify(app), add_explain(app), add_loop(app),  add_report(app), add_doctor(app)};

  std::vector<std::string> names;
  for (const Command& c : commands) names.push_back(c.app->get_name());
  if (argc < 2) refuse("expected a command, got none: {}; see fla --help", join(names));
  if (argv[1][0] != '-' && std::find(names.begin(), names.end(), argv[1]) == names.end())
    refuse("unknown command '{}'; expected {}", argv[1], join(names));
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    std::ostringstream out;
    const int code = app.exit(e, out, out);
    write_text(stdout, out.str());
    return code;
  } catch (const CLI::ParseError& e) {
    std::string where = "fla";
    for (const CLI::App* sub : app.get_subcommands()) where += " " + sub->get_name();
    throw Stop(kUsage, fmt::format("{}; see {} --help", e.what(), where));
  }
  for (const Command& c : commands)
    if (c.app->parsed()) return c.run();
  return kUsage;
}

// Before the arguments are parsed, as parsing is what may fail.
bool wants_json(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](const char* a) { return std::string_view(a) == "--json"; });
}

}  // namespace
}  // namespace fla::tools

int main(int argc, char** argv) {
  using namespace fla::tools;
  const bool json = argc > 1 && wants_json(argc, argv);
  return report_errors(json, [&] { return run_program(argc, argv); });
}
