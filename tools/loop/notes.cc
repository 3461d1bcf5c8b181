// Commands that record what was thought rather than what was changed.
#include <algorithm>

#include "tools/loop/commands.h"
#include "tools/loop/session.h"

namespace fla::tools {

namespace {

// Every one has fooled somebody; the program's reaction stands in the last column.
const std::vector<Trap>& catalogue() {
  static const std::vector<Trap> traps = {
      {"an output that was written only in part passes now and then", "fresh memory is often zero",
       "the gate and every timed run fill outputs with NaN first, and compare all of them afterwards"},
      {"a reference product in TF32 fails a right candidate", "its mantissa has 10 bits",
       "references compute in double; a tolerance is never loosened for this"},
      {"one error ratio for a whole tensor hides a few bad elements", "a degraded kernel passes at a looser ratio",
       "tolerances are frozen; verify blocks an error above 1.5 times the base's"},
      {"a side with other flags or a narrower accumulator is faster", "both sides pass their tests",
       "both builds' flags are compared file by file; a difference blocks"},
      {"32-bit address arithmetic wraps at large lengths only", "small cases pass",
       "the gate's long case is mandatory"},
      {"a speedup beyond what the change can give", "a shape was skipped, or an early exit taken",
       "below the roofline's floor: skip suspect; outputs are compared with the base's at the timed shape"},
      {"a result kept from an earlier call", "the same inputs come again and again in a benchmark",
       "after timing, new contents in the same memory must give new results"},
      {"a tuning choice survives the edit it was made for", "the old kernel is timed",
       "a base is built from its commit alone, and both libraries say which commit they are"},
      {"the same program takes another time a minute later", "clocks and load drift",
       "both sides run in turns in one process, and only paired ratios decide"}};
  return traps;
}

std::string axes_from(const Effort& e) {
  std::string s;
  for (const auto& r : e.rows)
    if (r.iteration > 0) s += fmt::format("{}{} ({})", s.empty() ? "" : "; ", r.direction, r.status);
  return s;
}

}  // namespace

int loop_status(const std::string& op, bool json) {
  const Session s("status", op, true, Session::Access::Read);
  Json more;
  more["running"] = s.another_works();
  more["branch"] = branch_of(op);
  more["records"] = s.relative.generic_string();
  more["iterations_left"] = std::max(0, s.effort.contract.cap() + 1 - s.effort.next_iteration());
  if (const LogRow* best = s.effort.best()) more["best"] = {{"iteration", best->iteration}, {"total", best->total}};
  return answer(s, {.state = s.state(), .more = std::move(more)}, json);
}

int loop_assess(const AssessOptions& o) {
  Session s("assess", o.op, true);
  const State now = s.state();
  const std::vector<std::string> allowed = {"ready", "stalled", "floor-claimed", "promotable"};
  if (std::find(allowed.begin(), allowed.end(), now.name) == allowed.end())
    return refuse_step(s, now, o.json, fmt::format("loop assess: refused: {}", now.name));
  if (!s.repo.clean()) refuse("loop assess: the work tree has changes; the profile must be that of the best candidate");

  const auto log = s.repo.common_dir() / "fla-loop" / (s.op + ".build.log");
  if (!build_all(s.tree, log)) refuse("loop assess: the tree does not build; see {}", log.string());
  const std::string first = split(s.effort.contract["target shapes"], ',').front();
  const Verified v = run_verify(
      s, {"--no-gate", "--profile", "--shapes", first, "--modes", join(s.effort.contract.target_modes(), ",")});
  std::string reading;
  for (const auto& p : v.json.value("profile", Json::array()))
    reading += (reading.empty() ? "" : "; ") + p.value("reading", "");
  const std::string axes = axes_from(s.effort) + (o.axes.empty() ? "" : "; " + o.axes);

  std::vector<std::string> missing;
  if (reading.empty()) missing.emplace_back("a fresh profile");
  if (axes.empty()) missing.emplace_back("axes tried (--axes)");
  if (o.techniques.empty()) missing.emplace_back("techniques known for the family (--techniques)");
  if (o.next.empty()) missing.emplace_back("next direction (--next)");
  if (o.why.empty()) missing.emplace_back("why that direction (--why)");
  if (!missing.empty())
    return refuse_step(s, {now.name, missing}, o.json,
                       fmt::format("loop assess: not complete\nprofile: {}\naxes tried: {}", reading, axes));

  const int after = s.effort.rows.back().iteration;
  s.effort.assessments.push_back({after, axes, o.techniques, o.next, o.why, reading});
  std::string text = read_text(s.records / "OPT_LOG.md");
  text += fmt::format(
      "\n## Assessment after iteration {}\n\n- profile: {}\n- axes tried: {}\n- known techniques: {}\n- next: {}\n- "
      "why: {}\n",
      after, reading, axes, o.techniques, o.next, o.why);
  write_text(s.records / "OPT_LOG.md", text);
  write_text(s.records / "trace" / fmt::format("{:03}-profile.json", after), v.json.dump(1) + "\n");
  s.save();
  s.commit_records(fmt::format("{}: assessment after iteration {}", s.op, after));
  return answer(s, {.state = s.state(), .text = "profile: " + reading}, o.json);
}

int loop_no_go(const NoGoOptions& o) {
  Session s("no-go", o.op, true);
  const State now = s.state();
  const std::vector<std::string> refused = {"contract-missing", "frozen-scope-violated", "awaiting-log", "promoted",
                                            "no-go"};
  if (std::find(refused.begin(), refused.end(), now.name) != refused.end())
    return refuse_step(s, now, o.json, fmt::format("loop no-go: refused: {}", now.name));
  const auto missing = no_go_missing(s.effort, o.limit);
  if (!missing.empty())
    return refuse_step(s, {"no-go-incomplete", missing}, o.json, "loop no-go: the effort is unfinished");
  const LogRow& base = s.effort.rows.front();
  std::string tried;
  for (const auto& r : s.effort.rows) {
    if (r.iteration == 0) continue;
    tried += fmt::format("- iteration {}: {}: gate {}/{}/{}, {} ms, {}\n", r.iteration, r.direction, r.passed, r.failed,
                         r.skipped, r.bench_ms > 0 ? fmt::format("{:.4g}", r.bench_ms) : "-", r.status);
  }
  s.effort.no_go = {{"limit", o.limit}, {"summary", o.summary}, {"baseline_ms", base.bench_ms}};
  write_text(s.records / "NO_GO.md",
             fmt::format("# No win to ship: {}\n\n- baseline: {:.4g} ms on the target, commit {}\n- limit: {}\n{}\n"
                         "## Attempts (gate passed/failed/skipped, time, outcome)\n\n{}",
                         s.op, base.bench_ms, short_commit(base.commit), o.limit,
                         o.summary.empty() ? "" : "- summary: " + o.summary + "\n", tried));
  s.save();
  s.commit_records(fmt::format("{}: no win to ship: {}", s.op, o.limit));
  return answer(s, {.state = s.state()}, o.json);
}

int loop_trap_add(const std::string& op, const std::string& fact, const std::string& why, const std::string& apply,
                  bool json) {
  Session s("trap add", op, true);
  for (const auto& [name, text] : {std::pair{"--fact", &fact}, {"--why", &why}, {"--apply", &apply}})
    if (text->find_first_not_of(" \t\n") == std::string::npos)
      refuse("loop trap add: {}: expected words, got none", name);
  const State now = s.state();
  if (now.name == "awaiting-log" || now.name == "contract-missing")
    return refuse_step(s, now, json, fmt::format("loop trap add: refused: {}", now.name));
  s.effort.traps.push_back({fact, why, apply});
  write_text(s.records / "TRAPS.md", render_traps(s.effort.traps, "Traps met: " + s.op));
  s.save();
  s.commit_records(fmt::format("{}: trap: {}", s.op, fact));
  return answer(s, {.state = s.state()}, json);
}

int loop_trap_list(const std::string& op, bool json) {
  std::vector<Trap> own;
  if (!op.empty()) {
    // Reading takes no lock: a list may be looked at while a step runs.
    find_operator(Registry::global(), op);
    own = load_effort(this_build_tree("loop").source / records_of(op), op).traps;
  }
  if (json) {
    const auto list = [](const std::vector<Trap>& traps) {
      Json j = Json::array();
      for (const auto& t : traps) j.push_back({{"fact", t.fact}, {"why", t.why}, {"apply", t.apply}});
      return j;
    };
    print_json({{"op", op.empty() ? Json(nullptr) : Json(op)}, {"catalogue", list(catalogue())}, {"traps", list(own)}});
    return kGood;
  }
  const auto show = [](const std::vector<Trap>& traps) {
    for (const auto& t : traps) print("- {}\n    why it fools: {}\n    apply: {}\n", t.fact, t.why, t.apply);
  };
  show(catalogue());
  if (!own.empty()) print("\nmet while tuning {}:\n", op);
  show(own);
  return kGood;
}

}  // namespace fla::tools
