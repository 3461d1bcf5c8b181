#include <algorithm>

#include "tools/loop/commands.h"
#include "tools/loop/session.h"

namespace fla::tools {

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

}  // namespace fla::tools
