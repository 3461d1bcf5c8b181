// fla verify: the gate, and then the benchmark; nothing is timed behind a red gate.
#include <memory>
#include <optional>
#include <string_view>

#include "CLI/CLI.hpp"
#include "fla/core/version.h"
#include "tools/bench_runner.h"
#include "tools/command.h"
#include "tools/gate_runner.h"
#include "tools/plugin.h"

namespace fla::tools {
namespace {

struct Options {
  std::string op, subset;
  BenchOptions bench;
  PluginOptions plugin;
  bool no_gate = false, json = false;
};

Json rows_json(const BenchRun& b) {
  Json rows = Json::array();
  for (const BenchRow& r : b.rows) {
    const bool measured = r.n > 0;
    Json flags = Json::array();
    // Readings this far apart say little about a small change.
    if (measured && r.p90 - r.p10 > 0.2 * r.median) flags.push_back("noisy");
    if (!r.checked) flags.push_back("unchecked");
    rows.push_back({{"op", r.op},
                    {"mode", r.mode},
                    {"shape", r.shape},
                    {"dtype", b.dtype},
                    {"backend", r.backend.empty() ? Json(nullptr) : Json(r.backend)},
                    {"base_ms", nullptr},
                    {"new_ms", measured ? Json(r.median) : Json(nullptr)},
                    {"speedup", nullptr},
                    {"p10", measured ? Json(r.p10) : Json(nullptr)},
                    {"p90", measured ? Json(r.p90) : Json(nullptr)},
                    {"n", r.n},
                    {"peak_base", nullptr},
                    {"peak_new", r.peak_bytes},
                    {"err_base", nullptr},
                    {"err_new", number(r.err)},
                    {"share", r.floor > 0 && measured ? Json(r.floor / r.median) : Json(nullptr)},
                    {"error", r.error.empty() ? Json(nullptr) : Json(r.error)},
                    {"flags", std::move(flags)}});
  }
  return rows;
}

Json candidate_json() {
  constexpr std::string_view kDirty = "-dirty";
  std::string commit = build_info().commit;
  const bool dirty = commit.ends_with(kDirty);
  if (dirty) commit.resize(commit.size() - kDirty.size());
  return {{"commit", commit}, {"dirty", dirty}};
}

int run(const Options& o) {
  const auto ops = keep_served(select_operators(Registry::global(), {o.op}), o.plugin, o.bench.call.backend);
  validate(ops, o.bench);
  std::optional<GateResult> gate;
  if (o.no_gate) {
    print(stderr, "WARNING: --no-gate: NOTHING HAS PROVEN THAT {} IS RIGHT. The figures below are not a verdict.\n",
          o.op);
  } else {
    gate = run_gate(ops, o.op == "all", o.subset, o.plugin);
    print_gate(*gate, o.json ? stderr : stdout);
  }
  const int gate_code = gate ? gate->exit_code() : static_cast<int>(kGood);
  BenchRun bench;
  if (gate_code == kGood)
    bench = run_bench(ops, o.bench);
  else
    print(stderr, "verify: the gate is not green: nothing was timed\n");

  if (o.json) {
    Json g = nullptr;
    if (gate) g = to_json(*gate);
    print_json({{"machine", gate_code == kGood ? machine_json(bench) : Json(nullptr)},
                {"op", o.op},
                {"gate", std::move(g)},
                {"base", nullptr},
                {"candidate", candidate_json()},
                {"rows", rows_json(bench)},
                {"geomean", nullptr},
                {"verdict", gate_code == kGood ? Json(nullptr) : Json("blocked")}});
  } else if (gate_code == kGood) {
    print_bench(bench);
  }
  if (gate_code != kGood) return gate_code;
  if (bench.rows.empty()) throw Stop(kNothing, "verify: nothing was selected to time");
  return bench.exit_code();
}

}  // namespace

Command add_verify(CLI::App& root) {
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(
      root, "verify", "Prove an operator right (gate), then time it",
      "  fla verify --op chunk_gla\n  fla verify --op gla --shapes B1_T512_H16_D64 --modes fwd --threads 1 --json\n"
      "  fla verify --op chunk_gla --plugin ./mine.so");
  app->add_option("--op", o->op, "operator, family or 'all'")->required();
  app->add_option("--gate-k", o->subset, "only tests whose full name contains SUBSET: a signal, not a verdict")
      ->check(not_empty("part of a test's name"));
  app->add_flag("--no-gate", o->no_gate, "time without proof");
  add_bench_options(app, o->bench);
  add_plugin(app, o->plugin);
  add_json(app, o->json);
  return {app, [o] {
            const Json failed = {{"machine", nullptr},
                                 {"op", o->op},
                                 {"gate", nullptr},
                                 {"base", nullptr},
                                 {"candidate", candidate_json()},
                                 {"rows", Json::array()},
                                 {"geomean", nullptr},
                                 {"verdict", "blocked"}};
            return with_plugin(o->plugin, o->json, failed, [&](const std::string& backend) {
              if (o->bench.call.backend.empty()) o->bench.call.backend = backend;
              return run(*o);
            });
          }};
}

}  // namespace fla::tools
