// fla gate: the frozen correctness tests of operators.
#include <algorithm>
#include <memory>

#include "CLI/CLI.hpp"
#include "tools/command.h"
#include "tools/gate_runner.h"

namespace fla::tools {

Command add_gate(CLI::App& root) {
  struct Options {
    std::vector<std::string> ops;
    std::string subset;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(root, "gate", "Run the frozen correctness tests of operators",
                              "  fla gate chunk_gla\n  fla gate gla hgrn -k backward\n  fla gate all --json");
  app->add_option("OP", o->ops, "operators, families or 'all'")->required();
  app->add_option("-k", o->subset, "only tests whose full name contains SUBSET, or matches it when it has * or ?")
      ->check(not_empty("part of a test's name"));
  add_json(app, o->json);
  return {app, [o] {
            const auto ops = select_operators(Registry::global(), o->ops);
            const bool everything = std::find(o->ops.begin(), o->ops.end(), "all") != o->ops.end();
            const GateResult g = run_gate(ops, everything, o->subset);
            print_gate(g, o->json ? stderr : stdout);
            if (o->json) print_json(to_json(g));
            return g.exit_code();
          }};
}

}  // namespace fla::tools
