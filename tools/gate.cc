// fla gate: the frozen correctness tests of operators.
#include <algorithm>
#include <memory>

#include "CLI/CLI.hpp"
#include "tools/command.h"
#include "tools/compare/build_graph.h"
#include "tools/gate_runner.h"
#include "tools/plugin/child.h"

namespace fla::tools {
namespace {

std::vector<std::string> changed_families(const std::string& base) {
  const BuildTree tree = this_build_tree("gate --changed");
  const Repo repo(tree.source);
  const auto files = repo.changed(repo.resolve(base.empty() ? "HEAD" : base));
  const auto operations = Registry::global().operations();
  const Reach reach = reach_of(files, tree, {operations.begin(), operations.end()});
  for (const auto& f : reach.unaffected) print(stderr, "gate: {} reaches no operator\n", f);
  if (reach.everything) {
    print(stderr, "gate: the changes reach every family\n");
    return {"all"};
  }
  if (reach.families.empty())
    throw Stop(kNothing, fmt::format("gate: {} changed files reach no operator", files.size()));
  std::vector<std::string> families(reach.families.begin(), reach.families.end());
  print(stderr, "gate: the changes reach {}\n", join(families));
  return families;
}

}  // namespace

Command add_gate(CLI::App& root) {
  struct Options {
    std::vector<std::string> ops;
    std::string subset, base;
    PluginOptions plugin;
    CallOptions call;
    bool changed = false, record = false, coverage = false, json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(
      root, "gate", "Run the frozen correctness tests of operators",
      "  fla gate chunk_gla\n  fla gate gla hgrn -k backward\n  fla gate all --json\n"
      "  fla gate --changed --base main\n  fla gate gla --device cuda\n  fla gate chunk_gla --plugin ./mine.so\n"
      "  fla gate gla --coverage");
  app->add_option("OP", o->ops, "operators, families or 'all'");
  app->add_flag("--changed", o->changed, "every family that files changed since HEAD (or --base) reach");
  app->add_option("--base", o->base, "with --changed: files that differ from this commit");
  app->add_option("-k", o->subset, "only tests whose full name contains SUBSET, or matches it when it has * or ?")
      ->check(not_empty("part of a test's name"));
  app->add_flag(
      "--record", o->record,
      "write what the tests exercise, and on a GPU what its backends refuse, into tests/gate/records; build again "
      "afterwards");
  app->add_flag("--coverage", o->coverage,
                "run the tests of kernels alone (of all operators where none is given) and print how many cases each "
                "kernel has, by topic");
  add_device(app, o->call);
  add_plugin(app, o->plugin);
  add_json(app, o->json);
  const auto run = [o](const std::string& plugin) {
    if (o->coverage && (!o->subset.empty() || o->record || !o->plugin.path.empty()))
      refuse("--coverage: expected without -k, --record and --plugin");
    if (o->coverage && o->ops.empty() && !o->changed) o->ops = {"all"};
    if (o->changed == !o->ops.empty())
      refuse("gate: expected operators or --changed, got {}", o->changed ? "both" : "neither");
    if (!o->base.empty() && !o->changed) refuse("--base: of use with --changed alone");
    device_of(o->call);
    if (o->call.device != "cpu" && !o->plugin.path.empty())
      refuse("--device: expected cpu with --plugin, which judges a plug-in of the CPU, got '{}'", o->call.device);
    const std::vector<std::string> names = o->changed ? changed_families(o->base) : o->ops;
    const auto ops = keep_served(select_operators(Registry::global(), names), o->plugin, plugin);
    const bool everything = std::find(names.begin(), names.end(), "all") != names.end();
    if (o->record && !o->plugin.path.empty()) refuse("--record: what a plug-in refuses is not recorded here");
    // The cases of kernels, and whether the lists that say who has them are whole.
    const std::string subset = o->coverage ? "*/*Kernel*" : o->subset;
    const GateResult g = run_gate(ops, everything, subset, o->plugin, o->call.device, o->record);
    if (o->record) write_records(g, this_build_tree("gate --record").source / "tests" / "gate" / "records");
    print_gate(g, o->json ? stderr : stdout);
    Json json = to_json(g);
    int code = g.exit_code();
    if (o->coverage) {
      const KernelCoverage c = coverage_of(g, ops);
      json["coverage"] = to_json(c);
      if (!o->json) print_coverage(c, stdout);
      if (code == kGood && !c.complete()) code = kFailed;
    }
    if (o->json) print_json(json);
    return code;
  };
  return {app, [o, run] {
            return with_plugin(o->plugin, o->json, {{"passed", 0}, {"failed", 1}, {"skipped", 0}}, run);
          }};
}

}  // namespace fla::tools
