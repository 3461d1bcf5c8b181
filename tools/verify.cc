// fla verify: the gate, and then the benchmark; nothing is timed behind a red gate.
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "CLI/CLI.hpp"
#include "fla/core/version.h"
#include "tools/bench_runner.h"
#include "tools/command.h"
#include "tools/compare/process.h"
#include "tools/compare/verify_base.h"
#include "tools/gate_runner.h"
#include "tools/plugin/child.h"
#include "tools/report/profile.h"

namespace fla::tools {
namespace {

struct Options {
  std::string op, subset, base, cache;
  BenchOptions bench;
  PluginOptions plugin;
  bool no_gate = false, profile = false, json = false;
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

Json candidate_json(std::string commit) {
  constexpr std::string_view kDirty = "-dirty";
  const bool dirty = commit.ends_with(kDirty);
  if (dirty) commit.resize(commit.size() - kDirty.size());
  return {{"commit", commit}, {"dirty", dirty}};
}

// Why nothing that this run says is a verdict; empty: it may be one.
std::string unproven(const Options& o) {
  if (o.no_gate) return "--no-gate: nothing has proven the candidate right";
  if (!o.subset.empty()) return "--gate-k: a part of the gate proves nothing";
  return "";
}

void print_verdict(const BaseComparison& c, const std::string& unproven) {
  const PairedRun& run = c.run;
  const std::string where = run.device == "cpu"
                                ? fmt::format("{}, {}, {}", run.machine.cpu, run.machine.isa, threads_text(run.threads))
                                : fmt::format("{}, driver {}", run.gpu.name, run.gpu.driver);
  print("{}; base {} ({}{}), candidate {}; one process, in turns, equal bytes\n", where, c.base.ref,
        short_commit(c.base.commit), c.base.own ? ", a copy of this build" : "", c.candidate_commit);
  if (run.device != "cpu") print("clocks: {}\n", run.clocks.text());
  print_paired(run);
  for (const auto& d : c.flag_differences) print("different build flags: {}\n", d);
  for (const PairedRow& r : run.rows) {
    if (!r.error.empty()) print("blocked: {} {} {}: {}\n", r.op, r.mode, r.shape, r.error);
    for (const auto& f : r.flags) print("blocked: {} {} {}: {}\n", r.op, r.mode, r.shape, f);
    if (r.error.empty() && r.stats.slower())
      print("slower: {} {} {}: {:.3f} [{:.3f}, {:.3f}]\n", r.op, r.mode, r.shape, r.stats.speedup, r.stats.low,
            r.stats.high);
  }
  const Geomean g = geomean(run.paired_rows());
  const std::string verdict = unproven.empty() ? name_of(run.verdict()) : "none (" + unproven + ")";
  print("\nverdict: {}  geometric mean {:.3f} [{:.3f}, {:.3f}] of {} rows\n", verdict, g.value, g.low, g.high,
        run.paired_rows().size());
}

int run(const Options& o) {
  const auto ops = keep_served(select_operators(Registry::global(), {o.op}), o.plugin, o.bench.call.backend);
  validate(ops, o.bench);
  std::optional<BaseSetup> setup;
  if (o.bench.call.device != "cpu" && !o.plugin.path.empty())
    refuse("--plugin: expected with --device cpu, got '{}'", o.bench.call.device);
  if (!o.base.empty() && !o.plugin.path.empty())
    refuse("--base: a plug-in has no earlier build to compare with; give --plugin or --base");
  if (!o.base.empty()) {
    catch_signals();
    setup.emplace(o.base, o.cache, o.bench.call.device);
    setup->build();
  } else if (!o.cache.empty()) {
    refuse("--cache: without --base nothing is built");
  }
  const std::string doubt = unproven(o);
  std::optional<GateResult> gate;
  if (o.no_gate) {
    print(stderr, "WARNING: --no-gate: NOTHING HAS PROVEN THAT {} IS RIGHT. The figures below are not a verdict.\n",
          o.op);
  } else {
    gate = run_gate(ops, o.op == "all", o.subset, o.plugin, o.bench.call.device);
    print_gate(*gate, o.json ? stderr : stdout);
    if (setup) throw_if_interrupted();
  }
  const int gate_code = gate ? gate->exit_code() : static_cast<int>(kGood);
  const bool green = gate_code == kGood;
  if (!green) print(stderr, "verify: the gate is not green: nothing was timed\n");

  BenchRun bench;
  std::optional<BaseComparison> compared;
  std::vector<Profile> profiles;
  if (green && setup)
    compared = setup->compare(ops, o.bench);
  else if (green)
    bench = run_bench(ops, o.bench);
  if (green && o.profile) profiles = take_profiles(ops, o.bench);

  if (o.json) {
    Json out = {{"machine", nullptr},
                {"op", o.op},
                {"gate", gate ? to_json(*gate) : Json(nullptr)},
                {"base", nullptr},
                {"candidate", candidate_json(compared ? compared->candidate_commit : build_info().commit)},
                {"rows", compared ? rows_json(compared->run) : rows_json(bench)},
                {"geomean", nullptr},
                {"verdict", green ? Json(nullptr) : Json("blocked")}};
    if (compared) {
      const PairedRun& run = compared->run;
      out["machine"] = machine_json(run);
      out["base"] = {{"ref", o.base}, {"commit", short_commit(compared->base.commit)}};
      const Geomean g = geomean(run.paired_rows());
      out["geomean"] = run.paired_rows().empty() ? Json(nullptr) : number(g.value);
      out["interval"] = {number(g.low), number(g.high)};
      out["verdict"] = doubt.empty() ? Json(name_of(run.verdict())) : Json(nullptr);
      out["flag_differences"] = compared->flag_differences;
    } else if (green) {
      out["machine"] = machine_json(bench);
    }
    if (o.profile) {
      out["profile"] = Json::array();
      for (const Profile& p : profiles) out["profile"].push_back(to_json(p));
    }
    out["unproven"] = doubt.empty() ? Json(nullptr) : Json(doubt);
    print_json(out);
  } else if (green) {
    if (compared)
      print_verdict(*compared, doubt);
    else
      print_bench(bench);
    for (const Profile& p : profiles) print_profile(p);
  }
  if (!green) return gate_code;
  if (compared ? compared->run.rows.empty() : bench.rows.empty())
    throw Stop(kNothing, "verify: nothing was selected to time");
  if (!compared) return bench.exit_code();
  if (!doubt.empty()) {
    print(stderr, "verify: no verdict: {}\n", doubt);
    return kNothing;
  }
  const Verdict v = compared->run.verdict();
  return v == Verdict::Win || v == Verdict::NoWin ? kGood : kFailed;
}

}  // namespace

Command add_verify(CLI::App& root) {
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(
      root, "verify", "Prove an operator right (gate), then time it",
      "  fla verify --op chunk_gla\n  fla verify --op gla --shapes B1_T512_H16_D64 --modes fwd --threads 1 --json\n"
      "  fla verify --op chunk_gla --base main --profile\n  fla verify --op chunk_gla --plugin ./mine.so");
  app->add_option("--op", o->op, "operator, family or 'all'")->required();
  app->add_option("--gate-k", o->subset,
                  "only tests whose full name contains SUBSET: a signal, not a verdict; with --base exit code 4")
      ->check(not_empty("part of a test's name"));
  app->add_flag("--no-gate", o->no_gate, "time without proof: with --base there is no verdict, and exit code 4");
  app->add_option("--base", o->base,
                  "commit, branch or tag to compare with: built, then timed in turns with this build");
  app->add_option("--cache", o->cache,
                  "folder of built bases (default $FLA_CACHE_DIR, $XDG_CACHE_HOME/fla or ~/.cache/fla)");
  app->add_flag("--profile", o->profile,
                "afterwards, readings of the first shape: counters, hot functions, roofline; on a GPU its kernels'");
  add_bench_options(app, o->bench);
  add_plugin(app, o->plugin);
  add_json(app, o->json);
  return {app, [o] {
            const Json failed = {{"machine", nullptr},
                                 {"op", o->op},
                                 {"gate", nullptr},
                                 {"base", nullptr},
                                 {"candidate", candidate_json(build_info().commit)},
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
