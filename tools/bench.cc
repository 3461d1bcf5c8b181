// fla bench: how fast operators are here.
#include <memory>

#include "CLI/CLI.hpp"
#include "tools/bench_runner.h"
#include "tools/command.h"
#include "tools/plugin/child.h"

namespace fla::tools {

Command add_bench(CLI::App& root) {
  struct Options {
    std::vector<std::string> ops;
    BenchOptions bench;
    PluginOptions plugin;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(
      root, "bench", "Time operators: median, spread, memory, share of the roofline",
      "  fla bench chunk_gla --threads 1\n  fla bench gla --shapes decode --modes fwd --dtype bf16\n"
      "  fla bench chunk_gla --custom-shapes '{\"mine\": {\"T\": 300, \"H\": 4, \"K\": 96, \"V\": 128}}' --json");
  app->add_option("OP", o->ops, "operators, families or 'all'")->required();
  add_bench_options(app, o->bench);
  app->add_flag("--once", o->bench.once,
                "on a GPU: call each row once, in a range of its own (NVTX, domain fla), for a profiler; no times");
  add_plugin(app, o->plugin);
  add_json(app, o->json);
  const auto run = [o](const std::string& plugin) {
    if (o->bench.call.backend.empty()) o->bench.call.backend = plugin;
    const BenchRun b =
        run_bench(keep_served(select_operators(Registry::global(), o->ops), o->plugin, plugin), o->bench);
    if (o->json)
      print_json(to_json(b));
    else
      print_bench(b);
    if (b.rows.empty()) throw Stop(kNothing, "bench: nothing was selected");
    return b.exit_code();
  };
  return {app, [o, run] {
            return with_plugin(o->plugin, o->json, {{"machine", nullptr}, {"results", Json::array()}}, run);
          }};
}

}  // namespace fla::tools
