#include <algorithm>

#include "fla/registry/registry.h"
#include "tools/loop/commands.h"
#include "tools/loop/session.h"
#include "tools/shape_groups.h"

namespace fla::tools {

namespace fs = std::filesystem;

namespace {

// What the fields before it say is known.
std::string defaults_for(const Session& s, const std::string& field, const Contract& c, const std::string& commit) {
  const FunctionSpec& spec = find_operator(Registry::global(), s.op).spec;
  if (field == "operator") return s.op;
  if (field == "baseline") return commit;
  if (field == "target modes") return spec.backward.empty() ? "fwd" : "fwd, fwdbwd";
  if (field == "validation command") return "fla gate " + s.op + (c.on_gpu() ? " --device cuda" : "");
  if (field == "benchmark command")
    return fmt::format("fla verify --op {} --base BEST --shapes {} --modes {}{}{}{}", s.op, c["target shapes"],
                       join(c.target_modes(), ","), c.on_gpu() ? " --device cuda" : "",
                       c["dtype"] == "f32" ? "" : " --dtype " + c["dtype"],
                       c.threads() > 0 ? " --threads " + c["threads"] : "");
  if (field == "device") return "cpu";
  if (field == "dtype") return c.on_gpu() ? "bf16" : "f32";
  if (field == "coverage shapes" && c.on_gpu()) return spec.find_arg("cu_seqlens") != nullptr ? "gpu,varlen" : "gpu";
  if (field == "coverage shapes") return spec.find_arg("cu_seqlens") != nullptr ? "cpu,varlen" : "cpu";
  if (field == "iteration cap") return "20";
  if (field == "threads") return "all";
  if (field == "frozen scope") return "tools/frozen_scope.txt";
  return "";
}

// What is filled must be right, and possible here, before anything is made for it.
void require_sound(const Contract& c) {
  if (const auto wrong = c.wrong(); !wrong.empty()) refuse("loop init: {}", join(wrong, "; "));
  device_of(CallOptions{.device = c["device"]});
  for (const char* shapes : {"target shapes", "coverage shapes"})
    if (!c[shapes].empty()) bench_shapes(c[shapes], "", "");
}

// The effort's branch, made from a clean HEAD; or the one that is checked out, whose contract was not complete.
void enter_branch(const Session& s) {
  const std::string branch = branch_of(s.op), now = s.repo.branch();
  if (now == branch) return;
  if (s.repo.has_branch(branch))
    refuse("loop init: {} has an effort on the branch {}; check it out to go on, or delete it", s.op, branch);
  if (now.starts_with("fla-loop/"))
    refuse("loop init: on the branch {} of another effort; check out the branch to start from", now);
  if (!s.repo.clean()) refuse("loop init: the work tree has changes: a baseline is a commit; commit or stash them");
  s.repo.git({"switch", "--quiet", "--create", branch});
}

}  // namespace

int loop_init(const InitOptions& o) {
  Session s("init", o.op, false);
  if (s.repo.branch() == branch_of(s.op) && !s.effort.rows.empty())
    refuse("loop init: {} has a baseline already; fla loop status {}", s.op, s.op);
  Contract given;
  if (!o.file.empty()) {
    if (!fs::exists(o.file)) refuse("--file: cannot read '{}'", o.file);
    given = parse_contract(read_text(o.file), o.file);
  }
  Contract& c = s.effort.contract;
  const std::string commit = s.head();
  for (const auto& f : contract_fields()) {
    std::string& value = c.values[f.key];
    if (*f.option == '\0') value.clear();  // follows from the others
    if (const std::string v = given[f.key]; !v.empty()) value = v;
    if (const auto it = o.fields.find(f.key); it != o.fields.end() && !it->second.empty()) value = it->second;
    if (value.empty()) value = defaults_for(s, f.key, c, commit);
  }
  c.values["operator"] = s.op;
  c.values["baseline"] = commit;
  require_sound(c);
  enter_branch(s);
  if (!s.repo.clean()) refuse("loop init: the work tree has changes outside the records: a baseline is a commit");
  const auto write_draft = [&] { write_text(s.records / "docs" / "draft.md", render_contract(c)); };
  if (!c.missing().empty()) {
    write_draft();
    return refuse_step(s, {"contract-missing", c.missing()}, o.json,
                       fmt::format("loop init: on the branch {}, fill {} (or give the options) and run this again",
                                   branch_of(s.op), (s.records / "docs" / "draft.md").string()));
  }

  fs::remove(s.records / "docs" / "draft.md");
  const fs::path log = s.repo.common_dir() / "fla-loop" / (s.op + ".build.log");
  if (!build_all(s.tree, log)) {
    write_draft();
    refuse("loop init: the unmodified tree does not build; see {}", log.string());
  }
  // Against itself: the first figures, a copy of this build for later, and a proof that the machine can tell no
  // difference where there is none.
  Verified v;
  try {
    v = run_verify(s, {"--base", commit, "--shapes", c["target shapes"], "--modes", join(c.target_modes(), ",")});
  } catch (...) {
    write_draft();
    throw;
  }
  write_draft();
  LogRow row;
  row.direction = "baseline";
  row.status = "base";
  row.commit = row.base = commit;
  take_evidence(row, v.json);
  row.change = row.low = row.high = 0;
  row.total = 1.0;
  Baseline& b = s.effort.baseline;
  b.commit = commit;
  b.gate = v.json.value("gate", Json());
  b.green = row.gate_green;
  b.environment = environment_line(v.json.value("machine", Json()));
  b.rows = v.json.value("rows", Json::array());
  if (!b.green) {
    s.save();
    return refuse_step(s, s.state(), o.json, "loop init: the gate of the unmodified operator is not green");
  }
  if (const std::string verdict = v.json.value("verdict", ""); verdict != "no_win") {
    b = {};
    return refuse_step(s, {"baseline-missing", {"a measurement that tells no difference between equal builds"}}, o.json,
                       fmt::format("loop init: the unmodified operator against itself gave '{}': the machine is too "
                                   "noisy now, or a row failed",
                                   verdict));
  }
  s.effort.rows.push_back(row);
  write_text(s.records / "OPT_LOG.md", render_log(s.effort));
  write_text(s.records / "TRAPS.md", render_traps({}, "Traps met: " + s.op));
  write_text(s.records / "trace" / "000.json", v.json.dump(1) + "\n");
  s.save();
  s.commit_records(fmt::format("{}: task contract and baseline", s.op));
  return answer(s, {.state = s.state(), .text = fmt::format("baseline: {:.4g} ms on the target", row.bench_ms)},
                o.json);
}

}  // namespace fla::tools
