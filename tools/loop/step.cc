#include <algorithm>

#include "tools/compare/base_build.h"
#include "tools/loop/commands.h"
#include "tools/loop/frozen_scope.h"
#include "tools/loop/session.h"

namespace fla::tools {

namespace fs = std::filesystem;

namespace {

std::string number_of(int iteration) { return fmt::format("{:03}", iteration); }

Json bucket_json(const StepOptions& o) {
  return {{"condition", o.bucket}, {"entry", o.bucket_entry}, {"shapes", o.bucket_shapes}, {"why", o.bucket_why}};
}

// Commits the change as it lies in the work tree: what is measured is a commit.
Pending commit_change(const Session& s, const StepOptions& o, std::vector<std::string> files) {
  Pending p;
  p.iteration = s.effort.next_iteration();
  p.direction = o.direction;
  p.base = s.effort.best()->commit;
  p.note = o.note;
  p.floor = o.floor;
  if (!o.bucket.empty()) p.bucket = bucket_json(o).dump();
  p.files = std::move(files);
  std::vector<std::string> add = {"add", "--all", "--"};
  add.insert(add.end(), p.files.begin(), p.files.end());
  s.repo.git(add);
  s.repo.git(
      {"commit", "--quiet", "--no-verify", "-m", fmt::format("{}: iteration {}: {}", s.op, p.iteration, o.direction)});
  p.commit = s.head();
  s.set_pending(p);
  return p;
}

std::vector<std::string> target_args(const Contract& c, const std::string& base) {
  return {"--base", base, "--shapes", c["target shapes"], "--modes", join(c.target_modes(), ",")};
}

// A step takes minutes, and a person may check something else out meanwhile, or edit: what was measured is then not the
// commit that the row names, and the records may be those of another tree.
void require_candidate(const Session& s, const Pending& p) {
  std::string got;
  if (const std::string branch = s.repo.branch(); branch != branch_of(s.op)) {
    got = branch.empty() ? "no branch" : branch;
  } else {
    auto files = s.repo.changed(p.commit);
    std::erase_if(files, [](const std::string& f) { return f.starts_with("profile/"); });
    if (files.empty()) return;
    got = "other contents of " + files.front();
  }
  refuse(
      "loop step: expected {} with the contents of {} until iteration {} has its row, got {}; put that back and run "
      "the step again: nothing was recorded",
      branch_of(s.op), short_commit(p.commit), p.iteration, got);
}

// The record of the run whose gate is that of a step's other runs too.
std::string proof_of(const Pending& p) { return "trace/" + number_of(p.iteration) + ".json"; }

// Evidence of a step into its records.
void keep_trace(const Session& s, const Pending& p, const std::string& name, const std::string& text) {
  require_candidate(s, p);
  write_text(s.records / "trace" / (number_of(p.iteration) + name), text);
}

// A bucket must win on its own shapes against the baseline, and cost nothing on the whole shape set.
void judge_bucket(const Session& s, const Pending& p, LogRow& row, std::vector<std::string>& why) {
  const Contract& c = s.effort.contract;
  const std::string own = Json::parse(p.bucket).value("shapes", "");
  const Verified on_own = run_timing(s, {"--base", s.effort.baseline.commit, "--shapes", own}, proof_of(p));
  keep_trace(s, p, "-bucket.json", on_own.json.dump(1) + "\n");
  if (on_own.json.value("verdict", "") != "win") {
    why.push_back("bucket: no win on its own shapes " + own);
    decide(on_own.json, why);
    row.status = "drop";
    return;
  }
  const Verified whole =
      run_timing(s, {"--base", s.effort.baseline.commit, "--shapes", c["target shapes"] + "," + c["coverage shapes"]},
                 proof_of(p));
  keep_trace(s, p, "-whole.json", whole.json.dump(1) + "\n");
  const std::string verdict = whole.json.value("verdict", "");
  if (verdict != "win" && verdict != "no_win") {
    why.push_back("bucket: the whole shape set says " + verdict);
    decide(whole.json, why);
    row.status = "revert";
    return;
  }
  row.status = "keep";
  row.total = on_own.json.value("geomean", 0.0);
}

Bucket bucket_of(const Json& bucket, const Json& evidence, int iteration) {
  Bucket b;
  b.condition = bucket.value("condition", "");
  b.entry = bucket.value("entry", "");
  b.why = bucket.value("why", "");
  b.shapes = split(bucket.value("shapes", ""), ',');
  b.iteration = iteration;
  b.speedup = evidence.value("geomean", 0.0);
  const Json rows = evidence.value("rows", Json::array());
  for (const auto& r : rows) {
    b.base_ms += r.value("base_ms", 0.0) / static_cast<double>(rows.size());
    b.new_ms += r.value("new_ms", 0.0) / static_cast<double>(rows.size());
  }
  return b;
}

LogRow evaluate(const Session& s, const Pending& p) {
  LogRow row;
  row.iteration = p.iteration;
  row.direction = p.direction;
  row.note = p.note;
  row.bucket = p.bucket;
  row.commit = p.commit;
  row.base = p.base;
  row.files = p.files;
  const fs::path log = s.repo.common_dir() / "fla-loop" / (s.op + ".build.log");
  if (!build_all(s.tree, log)) {
    row.built = false;
    row.status = "revert";
    row.blocked.push_back("does not build");
    keep_trace(s, p, "-build.log", read_text(log));
    return row;
  }
  const Verified v = run_verify(s, target_args(s.effort.contract, p.base));
  keep_trace(s, p, ".json", v.json.dump(1) + "\n");
  take_evidence(row, v.json);
  if (!row.gate_green) {
    if (row.passed + row.failed == 0)
      throw Stop(kNothing, "loop step: the gate ran no test: a row needs its evidence; the step stays open");
    row.status = "revert";
    row.blocked.push_back(fmt::format("gate: {} failed", row.failed));
    return row;
  }
  row.status = decide(v.json, row.blocked);
  if (!p.bucket.empty() && row.status != "revert") {
    judge_bucket(s, p, row, row.blocked);
  } else if (row.status == "keep") {
    row.total = row.change;
    if (p.base != s.effort.baseline.commit) {
      const Verified whole = run_timing(s, target_args(s.effort.contract, s.effort.baseline.commit), proof_of(p));
      keep_trace(s, p, "-total.json", whole.json.dump(1) + "\n");
      if (whole.json.value("verdict", "") == "win") row.total = whole.json.value("geomean", 0.0);
    }
  }
  if (row.status == "drop" && !p.floor.empty()) {
    row.status = "floor";
    row.note += (row.note.empty() ? "" : "; ") + ("floor: " + p.floor);
  }
  return row;
}

std::string candidate_header(const Session& s, const LogRow& row, const StepOptions& o) {
  std::string parent = "0";
  std::string dead;
  for (const auto& r : s.effort.rows) {
    if (r.iteration >= row.iteration) break;
    if (r.commit == row.base) parent = std::to_string(r.iteration);
    if (r.status != "keep" && r.status != "base")
      dead += fmt::format("- iteration {}: {}: {}{}\n", r.iteration, r.direction, r.status,
                          r.note.empty() ? "" : ": " + r.note);
  }
  return fmt::format(
      "# {} iteration {}\n\n- operator: {}\n- kernel: {}\n- iteration: {}, parent {}\n- commit: {}\n- delta: {}\n"
      "- lessons: {}\n- open levers: {}\n\n## Dead ends\n\n{}",
      s.op, row.iteration, s.op, s.effort.contract["entry point"], row.iteration, parent, row.commit, row.direction,
      o.lessons.empty() ? "not written" : o.lessons, o.levers.empty() ? "not written" : o.levers,
      dead.empty() ? "none so far\n" : dead);
}

// Puts the row into the records, takes a change that is not kept back, commits. May be run again after an interruption.
void conclude(Session& s, const Pending& p) {
  const LogRow& row = s.effort.rows.back();
  if (row.status != "keep" && s.head() == p.commit) {
    s.repo.git({"revert", "--no-commit", p.commit});
    s.repo.git({"commit", "--quiet", "--no-verify", "-m",
                fmt::format("{}: iteration {} taken back: {}", s.op, row.iteration, row.status)});
  }
  s.commit_records(fmt::format("{}: log of iteration {}: {}", s.op, row.iteration, row.status));
  s.clear_pending();
}

void record(Session& s, const LogRow& row, const StepOptions& o) {
  write_text(s.records / "OPT_LOG.md", append_row(read_text(s.records / "OPT_LOG.md"), row));
  s.effort.rows.push_back(row);
  if (row.status == "keep") {
    write_text(s.records / "candidates" / (number_of(row.iteration) + ".md"), candidate_header(s, row, o));
    if (!row.bucket.empty()) {
      const Json evidence =
          Json::parse(read_text(s.records / "trace" / (number_of(row.iteration) + "-bucket.json")), nullptr, false);
      s.effort.buckets.push_back(bucket_of(Json::parse(row.bucket), evidence, row.iteration));
      write_text(s.records / "dispatch.md", render_dispatch(s.effort.buckets));
    }
  }
  s.save();
}

std::string told(const LogRow& r) {
  std::string s = fmt::format("iteration {}: {}: {}", r.iteration, r.direction, r.status);
  if (r.change > 0) s += fmt::format(", {:.3f} [{:.3f}, {:.3f}] against the best so far", r.change, r.low, r.high);
  for (const auto& b : r.blocked) s += "\n  " + b;
  if (r.status != "keep") s += fmt::format("\n  taken back; the change is kept as commit {}", short_commit(r.commit));
  return s;
}

}  // namespace

int loop_step(const StepOptions& o) {
  Session s("step", o.op, true);
  std::optional<Pending> pending = s.pending();
  if (!pending) {
    const State now = s.state();
    if (now.name != "ready" && now.name != "promotable")
      return refuse_step(s, now, o.json, fmt::format("loop step: refused: {}", now.name));
    if (o.direction.empty())
      refuse("loop step: --direction: expected what was changed and why, in one line, got nothing");
    const bool any = !o.bucket.empty() || !o.bucket_entry.empty() || !o.bucket_shapes.empty() || !o.bucket_why.empty();
    const bool all = !o.bucket.empty() && !o.bucket_entry.empty() && !o.bucket_shapes.empty() && !o.bucket_why.empty();
    if (any && !all)
      refuse(
          "loop step: a bucket needs --bucket, --bucket-entry, --bucket-shapes and --bucket-why: it exists only with "
          "its own evidence");
    if (!o.floor.empty() && o.floor.find_first_of("0123456789") == std::string::npos)
      refuse("loop step: --floor: expected the limit with its number, got '{}'", o.floor);
    const auto files = s.repo.changed("HEAD");
    if (files.empty())
      return refuse_step(s, {"ready", {"a change in " + s.effort.contract["kernel scope"]}}, o.json,
                         "loop step: nothing was changed since the last row");
    const auto scope = s.effort.contract.scope();
    std::vector<std::string> outside;
    for (const auto& f : files)
      if (!matches_any(scope, f)) outside.push_back(f);
    if (!outside.empty())
      return refuse_step(s, {"scope-exceeded", outside}, o.json,
                         fmt::format("loop step: one iteration changes the declared scope ({}) and nothing else",
                                     s.effort.contract["kernel scope"]));
    pending = commit_change(s, o, files);
  }
  if (s.effort.rows.back().iteration != pending->iteration) {
    require_candidate(s, *pending);
    const LogRow row = evaluate(s, *pending);
    require_candidate(s, *pending);
    record(s, row, o);
  }
  // While the build is still the candidate's: the next step compares with it.
  if (s.effort.rows.back().status == "keep" && s.head() == pending->commit)
    build_base(s.repo, s.tree, pending->commit, cache_folder(""), s.effort.contract.on_gpu());
  conclude(s, *pending);
  return answer(s, {.state = s.state(), .text = told(s.effort.rows.back())}, o.json);
}

}  // namespace fla::tools
