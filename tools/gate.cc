// fla gate: the frozen correctness tests of operators.
#include <algorithm>
#include <memory>

#include "CLI/CLI.hpp"
#include "tools/command.h"
#include "tools/gate_runner.h"
#include "tools/plugin.h"

namespace fla::tools {

Command add_gate(CLI::App& root) {
  struct Options {
    std::vector<std::string> ops;
    std::string subset;
    PluginOptions plugin;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(root, "gate", "Run the frozen correctness tests of operators",
                              "  fla gate chunk_gla\n  fla gate gla hgrn -k backward\n  fla gate all --json\n"
                              "  fla gate chunk_gla --plugin ./mine.so");
  app->add_option("OP", o->ops, "operators, families or 'all'")->required();
  app->add_option("-k", o->subset, "only tests whose full name contains SUBSET, or matches it when it has * or ?")
      ->check(not_empty("part of a test's name"));
  add_plugin(app, o->plugin);
  add_json(app, o->json);
  const auto run = [o](const std::string& plugin) {
    const auto ops = keep_served(select_operators(Registry::global(), o->ops), o->plugin, plugin);
    const bool everything = std::find(o->ops.begin(), o->ops.end(), "all") != o->ops.end();
    const GateResult g = run_gate(ops, everything, o->subset, o->plugin);
    print_gate(g, o->json ? stderr : stdout);
    if (o->json) print_json(to_json(g));
    return g.exit_code();
  };
  return {app, [o, run] {
            return with_plugin(o->plugin, o->json, {{"passed", 0}, {"failed", 1}, {"skipped", 0}}, run);
          }};
}

}  // namespace fla::tools
