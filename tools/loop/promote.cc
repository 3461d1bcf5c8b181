#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "tools/compare/build_graph.h"
#include "tools/compare/paired_bench.h"
#include "tools/loop/commands.h"
#include "tools/loop/session.h"

namespace fla::tools {

namespace fs = std::filesystem;

namespace {

constexpr double kLeastCapability = 9.0;  // of a GPU whose figures decide

std::string key_of(const Json& row) { return row.value("shape", "") + " " + row.value("mode", ""); }

std::map<std::string, std::string> accepted(const std::vector<std::string>& list) {
  std::map<std::string, std::string> map;
  for (const auto& text : list) {
    const std::size_t at = text.find('=');
    if (at == std::string::npos || at == 0 || at + 1 == text.size())
      refuse("--accept: expected SHAPE=REASON, got '{}'", text);
    map[text.substr(0, at)] = text.substr(at + 1);
  }
  return map;
}

// A time says little when the clock fell or somebody else was computing, and small cards are no measure for large ones.
std::vector<std::string> lacking_of_gpu(const Json& machine, const std::string& who) {
  const Json gpu = machine.value("gpu", Json());
  if (!gpu.is_object()) return {fmt::format("{}: figures of a GPU", who)};
  std::vector<std::string> list;
  if (const std::string capability = gpu.value("compute_capability", "0");
      std::strtod(capability.c_str(), nullptr) < kLeastCapability)
    list.push_back(fmt::format("{}: a GPU of compute capability {:.1f} or newer, got {} ({})", who, kLeastCapability,
                               capability, gpu.value("name", "?")));
  const Json clocks = gpu.value("clocks", Json::object());
  if (clocks.contains("missing") && clocks["missing"].is_string()) {
    list.push_back(fmt::format("{}: samples of the clocks: {}", who, clocks["missing"].get<std::string>()));
    return list;
  }
  const Json during = clocks.value("during", Json::object());
  const Json throttle = during.value("throttle", Json::array());
  for (const auto& reason : throttle)  // a limit on power or clocks that somebody set meets both sides of a pair alike
    if (const auto text = reason.get<std::string>(); text != "power cap" && text != "application clocks")
      list.push_back(fmt::format("{}: a steady clock: throttled by {}", who, text));
  if (const Json others = clocks.value("other_processes", Json()); others.is_number() && others.get<int>() > 0)
    list.push_back(fmt::format("{}: a GPU that nobody else uses, got {} processes", who, others.get<int>()));
  return list;
}

// What one run of the whole shape set lacks for promotion.
std::vector<std::string> lacking(const Session& s, const Json& v, const std::map<std::string, std::string>& accept,
                                 const std::string& who) {
  std::vector<std::string> list;
  LogRow gate;
  take_evidence(gate, v);
  if (!gate.gate_green) list.push_back(fmt::format("{}: a full green gate", who));
  const Contract& c = s.effort.contract;
  const auto targets = split(c["target shapes"], ',');
  const auto modes = c.target_modes();
  double product = 1.0, low = 0.0;
  int n = 0;
  bool sure = true;
  for (const auto& r : v.value("rows", Json::array())) {
    const std::string name = key_of(r);
    if (r.contains("error") && r["error"].is_string())
      list.push_back(fmt::format("{}: {}: {}", who, name, r["error"].get<std::string>()));
    for (const auto& f : r.value("flags", Json::array()))
      if (const auto text = f.get<std::string>(); blocks(text))
        list.push_back(fmt::format("{}: {}: {}", who, name, text));
    const std::string shape = r.value("shape", "");
    if (r.value("verdict", "") == "slower" && !accept.contains(shape))
      list.push_back(fmt::format("{}: {} is slower ({:.3f}): name it with its reason (--accept {}=REASON)", who, name,
                                 r.value("speedup", 0.0), shape));
    const bool target = std::find(targets.begin(), targets.end(), shape) != targets.end() &&
                        std::find(modes.begin(), modes.end(), r.value("mode", "")) != modes.end();
    if (!target || !r["speedup"].is_number()) continue;
    product *= r["speedup"].get<double>();
    low = r.value("low", 0.0);
    sure = sure && low > 1.0;
    ++n;
  }
  const double gain = n > 0 ? std::pow(product, 1.0 / n) : 0.0;
  if (n == 0 || !sure || gain < c.target_speedup())
    list.push_back(
        fmt::format("{}: {} x on the target, beyond noise in every row; got {:.3f}", who, c["target speedup"], gain));
  if (c.on_gpu())
    for (auto& text : lacking_of_gpu(v.value("machine", Json()), who)) list.push_back(std::move(text));
  return list;
}

// Everything that the change reaches must be right, not only the operator that it was made for.
struct ReachedGate {
  std::vector<std::string> ops;    // what was gated
  std::vector<std::string> lines;  // commands and counts, for the page
  std::vector<std::string> lacking;
};
ReachedGate gate_reached(const Session& s) {
  auto files = s.repo.changed(s.effort.baseline.commit);
  std::erase_if(files, [](const std::string& f) { return f.starts_with("profile/"); });
  const auto operations = Registry::global().operations();
  const Reach reach = reach_of(files, s.tree, {operations.begin(), operations.end()});
  ReachedGate g;
  g.ops.assign(reach.families.begin(), reach.families.end());
  const std::string own = find_operator(Registry::global(), s.op).spec.operation;
  if (!reach.families.contains(own)) g.ops.push_back(own);
  if (reach.everything) g.ops = {"all"};
  std::vector<std::string> devices = {"cpu"};
  if (s.effort.contract.on_gpu()) devices.push_back(s.effort.contract["device"]);
  for (const std::string& device : devices) {
    std::vector<std::string> argv = {(s.tree.directory / "bin" / "fla").string(), "gate"};
    argv.insert(argv.end(), g.ops.begin(), g.ops.end());
    if (device != "cpu") argv.insert(argv.end(), {"--device", device});
    const std::string command = "fla " + join({argv.begin() + 1, argv.end()}, " ");
    argv.emplace_back("--json");
    const ChildResult r = run_child(argv, {.directory = s.repo.root(), .show_errors = true});
    const Json j = Json::parse(r.out, nullptr, false);
    if (!j.is_object() || j.contains("error"))
      throw Stop(kFailed, fmt::format("loop promote: {}: exit status {}", command, r.code));
    write_text(s.records / "trace" / fmt::format("promote-gate-{}.json", device), j.dump(1) + "\n");
    g.lines.push_back(fmt::format("`{}`: {} passed, {} failed, {} skipped, frozen {}", command, j.value("passed", 0),
                                  j.value("failed", 0), j.value("skipped", 0), j.value("hash", "")));
    if (r.ok()) continue;
    std::string text =
        fmt::format("a green gate of all that the change reaches ({}): {} failed", command, j.value("failed", 0));
    const Json failures = j.value("failures", Json::array());
    for (std::size_t i = 0; i < std::min<std::size_t>(failures.size(), 3); ++i)
      text += (i == 0 ? ": " : ", ") + failures[i].value("test", "");
    g.lacking.push_back(std::move(text));
  }
  return g;
}

std::string stats_table(const Json& v) {
  std::string s =
      "| shape | mode | side | median | mean | sd | min | p10 | p90 | n | speedup | interval | R |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const auto& r : v.value("rows", Json::array())) {
    if (!r["stats_base"].is_object()) {
      s += fmt::format("| {} | {} | - | not measured: {} |\n", r.value("shape", ""), r.value("mode", ""),
                       cell(r["error"].is_string() ? r["error"].get<std::string>() : "?"));
      continue;
    }
    for (const bool base : {true, false}) {
      const Json& x = r[base ? "stats_base" : "stats_new"];
      const auto ms = [&](const char* key) { return fmt::format("{:.4g}", x.value(key, 0.0)); };
      const Json& err = r[base ? "err_base" : "err_new"];
      s +=
          fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n", r.value("shape", ""),
                      r.value("mode", ""), base ? "base" : "candidate", ms("median"), ms("mean"), ms("sd"), ms("min"),
                      ms("p10"), ms("p90"), x.value("n", 0), base ? "" : fmt::format("{:.3f}", r.value("speedup", 0.0)),
                      base ? "" : fmt::format("[{:.3f}, {:.3f}]", r.value("low", 0.0), r.value("high", 0.0)),
                      err.is_number() ? fmt::format("{:.2g}", err.get<double>()) : "-");
    }
  }
  return s;
}

std::string gpu_line(const Json& machine) {
  const Json gpu = machine.value("gpu", Json());
  if (!gpu.is_object()) return "GPU: none";
  const Json during = gpu.value("clocks", Json::object()).value("during", Json::object());
  std::string s = fmt::format("GPU: index 0, {}, driver {}, runtime {}", gpu.value("name", "?"),
                              gpu.value("driver", "?"), gpu.value("runtime", "?"));
  for (const auto& [key, range] : during.items())
    if (range.is_object() && range.contains("median") && range["median"].is_number())
      s += fmt::format("; {} {:.0f} ({:.0f} to {:.0f})", key, range["median"].get<double>(), range["min"].get<double>(),
                       range["max"].get<double>());
  return s;
}

std::string clocks(const Json& machine) {
  std::vector<double> mhz;
  for (const auto& x : machine.value("mhz_during", Json::array())) mhz.push_back(x.get<double>());
  std::string s = fmt::format("load (one-minute mean) {:.2f} before, {:.2f} after", machine.value("load_before", 0.0),
                              machine.value("load_after", 0.0));
  if (mhz.empty()) return s + "; the system tells no clock";
  const auto [least, most] = std::minmax_element(mhz.begin(), mhz.end());
  return s + fmt::format("; clock {:.0f} to {:.0f} MHz in {} samples", *least, *most, mhz.size());
}

// One commit on the baseline with the code alone: the records stay behind.
std::string shipped_branch(const Session& s, const std::string& summary) {
  std::string branch = "fla-promoted/" + s.op;
  const std::string base = s.effort.baseline.commit, best = s.effort.best()->commit;
  std::string index = (s.repo.common_dir() / "fla-loop" / (s.op + ".index")).string();
  const auto plumbing = [&](const std::vector<std::string>& args) {
    std::vector<std::string> argv = {"git"};
    argv.insert(argv.end(), args.begin(), args.end());
    const ChildResult r = run_child(argv, {.directory = s.repo.root(), .environment = {{"GIT_INDEX_FILE", index}}});
    if (!r.ok()) throw Stop(kFailed, fmt::format("git {}: {}", join(args, " "), r.err));
    return r.out.substr(0, r.out.find('\n'));
  };
  plumbing({"read-tree", best});
  plumbing({"rm", "-r", "--quiet", "--cached", "--force", "--ignore-unmatch", "--", "profile"});
  if (s.repo.try_git({"cat-file", "-e", base + ":profile"}).ok())
    plumbing({"read-tree", "--prefix=profile/", base + ":profile"});
  const std::string tree = plumbing({"write-tree"});
  std::error_code ignored;
  fs::remove(index, ignored);
  const std::string commit = s.repo.git({"commit-tree", tree, "-p", base, "-m", summary});
  s.repo.git({"branch", "--force", branch, commit});
  return branch;
}

}  // namespace

int loop_promote(const PromoteOptions& o) {
  Session s("promote", o.op, true);
  const State now = s.state();
  const LogRow* best = s.effort.best();
  const std::vector<std::string> allowed = {"promotable", "ready", "stalled", "floor-claimed", "no-go-incomplete"};
  if (std::find(allowed.begin(), allowed.end(), now.name) == allowed.end())
    return refuse_step(s, now, o.json, fmt::format("loop promote: refused: {}", now.name));
  const auto accept = accepted(o.accept);
  std::vector<std::string> missing;
  if (best == nullptr || best->iteration == 0) missing.emplace_back("a kept candidate");
  if (o.reading.find_first_of("0123456789") == std::string::npos)
    missing.emplace_back("the profiler or roofline reading that explains the win, with its number (--reading)");
  if (o.impact.empty()) missing.emplace_back("which shapes, types, backends and users see a change (--impact)");
  if (o.summary.empty()) missing.emplace_back("what was changed (--summary)");
  if (!s.repo.clean()) missing.emplace_back("a clean work tree");
  if (!missing.empty())
    return refuse_step(s, {now.name, missing}, o.json, "loop promote: evidence is missing, so nothing was timed");

  const auto log = s.repo.common_dir() / "fla-loop" / (s.op + ".build.log");
  if (!build_all(s.tree, log)) refuse("loop promote: the tree does not build; see {}", log.string());
  const ReachedGate reached = gate_reached(s);
  if (!reached.lacking.empty()) {
    s.commit_records(fmt::format("{}: promotion refused", s.op));
    return refuse_step(s, {now.name, reached.lacking}, o.json,
                       "loop promote: the change breaks something that it reaches, so nothing was timed");
  }
  const Contract& c = s.effort.contract;
  const std::string base = s.effort.baseline.commit;
  const std::vector<std::string> args = {"--base", base, "--shapes", c["target shapes"] + "," + c["coverage shapes"]};
  std::vector<Verified> runs;
  for (const char* who : {"first run", "second run"}) {
    auto with = args;
    if (runs.empty()) with.emplace_back("--profile");
    runs.push_back(run_verify(s, with));
    write_text(s.records / "trace" / fmt::format("promote-{}.json", runs.size()), runs.back().json.dump(1) + "\n");
    missing = lacking(s, runs.back().json, accept, who);
    if (!missing.empty()) {
      s.commit_records(fmt::format("{}: promotion refused", s.op));
      return refuse_step(s, {now.name, missing}, o.json, "loop promote: the evidence does not carry it");
    }
  }

  const Json& v = runs.front().json;
  const std::string branch = shipped_branch(s, o.summary);
  const std::string files = s.repo.git({"diff", "--stat", base, branch});
  LogRow gate;
  take_evidence(gate, v);
  std::string page = fmt::format("# {}: promoted\n\n{}\n\n", s.op, o.summary);
  page += fmt::format(
      "- conclusion: gain: geometric mean {:.3f} and {:.3f} over all rows of two runs\n- impact: {}\n"
      "- breaking changes: {}\n- reading: {}\n- branch: {} (the code alone, on the baseline)\n\n```\n{}\n```\n\n",
      v.value("geomean", 0.0), runs[1].json.value("geomean", 0.0), o.impact, o.breaking, o.reading, branch, files);
  page += fmt::format("## Test plan\n\n- the change reaches: {}\n", join(reached.ops));
  for (const auto& line : reached.lines) page += "- " + line + "\n";
  page += fmt::format("- `{}`: {} passed, {} failed, {} skipped, frozen {}\n", runs[0].command, gate.passed,
                      gate.failed, gate.skipped, gate.gate_hash);
  page += "- the same command once more, in a process of its own\n\n";
  page += fmt::format(
      "## Environment\n\n- {}\n- baseline {}, candidate {}\n- {}\n- {} (second run)\n- {}\n- {} (second run)\n\n",
      environment_line(v.value("machine", Json())), base, best->commit, clocks(v.value("machine", Json())),
      clocks(runs[1].json.value("machine", Json())), gpu_line(v.value("machine", Json())),
      gpu_line(runs[1].json.value("machine", Json())));
  for (const auto& p : v.value("profile", Json::array())) page += "- profile: " + p.value("reading", "") + "\n";
  for (std::size_t i = 0; i < runs.size(); ++i)
    page += fmt::format("\n## Run {} (ms)\n\n{}", i + 1, stats_table(runs[i].json));
  page += "\n## Coverage\n\n";
  page +=
      fmt::format("- target: {} ({}); beside it: {}\n", c["target shapes"], c["target modes"], c["coverage shapes"]);
  for (const auto& [shape, reason] : accept) page += fmt::format("- {} may be slower: {}\n", shape, reason);
  write_text(s.records / "PROMOTION.md", page);
  s.effort.promotion = {
      {"branch", branch},       {"reading", o.reading},
      {"impact", o.impact},     {"summary", o.summary},
      {"breaking", o.breaking}, {"geomeans", {v.value("geomean", 0.0), runs[1].json.value("geomean", 0.0)}},
      {"base", base},           {"candidate", best->commit}};
  s.save();
  s.commit_records(fmt::format("{}: promoted", s.op));
  return answer(
      s,
      {.state = s.state(),
       .text = fmt::format("evidence: {}; code alone: branch {}", (s.relative / "PROMOTION.md").string(), branch)},
      o.json);
}

}  // namespace fla::tools
