// fla bench: how fast operators are here.
#include <memory>

#include "CLI/CLI.hpp"
#include "tools/bench_runner.h"
#include "tools/command.h"

namespace fla::tools {

Command add_bench(CLI::App& root) {
  struct Options {
    std::vector<std::string> ops;
    BenchOptions bench;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(
      root, "bench", "Time operators: median, spread, memory, share of the roofline",
      "  fla bench chunk_gla --threads 1\n  fla bench gla --shapes decode --modes fwd --dtype bf16\n"
      "  fla bench chunk_gla --custom-shapes '{\"mine\": {\"T\": 300, \"H\": 4, \"K\": 96, \"V\": 128}}' --json");
  app->add_option("OP", o->ops, "operators, families or 'all'")->required();
  add_bench_options(app, o->bench);
  add_json(app, o->json);
  return {app, [o] {
            const BenchRun run = run_bench(select_operators(Registry::global(), o->ops), o->bench);
            if (o->json)
              print_json(to_json(run));
            else
              print_bench(run);
            if (run.rows.empty()) throw Stop(kNothing, "bench: nothing was selected");
            return run.exit_code();
          }};
}

}  // namespace fla::tools
