#include "tools/loop/session.h"

#include <algorithm>

#include "fla/core/version.h"
#include "tools/common/machine.h"
#include "tools/compare/paired_bench.h"
#include "tools/loop/frozen_scope.h"

namespace fla::tools {

namespace fs = std::filesystem;

Session::Session(const std::string& command, const std::string& op_, bool on_branch, Access access)
    : repo(this_build_tree("loop").source), tree(this_build_tree("loop")), op(op_), relative(records_of(op_)) {
  catch_signals();
  const Registry::Entry& entry = find_operator(Registry::global(), op);
  if (entry.spec.name != op) refuse("loop: expected the operator's name '{}', got '{}'", entry.spec.name, op);
  records = repo.root() / relative;
  lock_ = std::make_unique<FileLock>(repo.common_dir() / "fla-loop" / (op + ".lock"), FileLock::When::TryOnce);
  if (!lock_->held() && access == Access::Write)
    throw Stop(kFailed, fmt::format("loop {}: another command works on {} in this repository; two loops on one "
                                    "operator at once would overwrite each other's records",
                                    command, op));
  if (on_branch) {
    if (!repo.has_branch(branch_of(op)))
      refuse("loop {}: {} has no effort; begin with: fla loop init {}", command, op, op);
    if (repo.branch() != branch_of(op))
      refuse("loop {}: expected the branch {} checked out, got {}", command, branch_of(op),
             repo.branch().empty() ? "no branch" : repo.branch());
  }
  effort = load_effort(records, op);
}

Facts Session::facts() const {
  Facts f;
  f.records_dirty = !repo.git({"status", "--porcelain", "--", relative.string()}).empty();
  f.pending = pending().has_value();
  if (!effort.baseline.commit.empty())
    for (const auto& d : frozen_differences(repo, effort.baseline.commit)) f.frozen.push_back(d.what + " " + d.path);
  return f;
}

fs::path Session::pending_file() const { return repo.common_dir() / "fla-loop" / (op + ".pending.json"); }

std::optional<Pending> Session::pending() const {
  const Json j = Json::parse(read_text(pending_file()), nullptr, false);
  if (!j.is_object()) return std::nullopt;
  Pending p;
  p.iteration = j.value("iteration", 0);
  p.direction = j.value("direction", "");
  p.commit = j.value("commit", "");
  p.base = j.value("base", "");
  p.note = j.value("note", "");
  p.bucket = j.value("bucket", "");
  p.floor = j.value("floor", "");
  for (const auto& f : j.value("files", Json::array())) p.files.push_back(f.get<std::string>());
  // Left over from a branch that was rewound: its row can never come.
  if (!repo.try_git({"merge-base", "--is-ancestor", p.commit, "HEAD"}).ok()) return std::nullopt;
  return p;
}

void Session::set_pending(const Pending& p) const {
  write_text(pending_file(), Json{{"iteration", p.iteration},
                                  {"direction", p.direction},
                                  {"commit", p.commit},
                                  {"base", p.base},
                                  {"note", p.note},
                                  {"bucket", p.bucket},
                                  {"floor", p.floor},
                                  {"files", p.files}}
                                     .dump(1) +
                                 "\n");
}

void Session::clear_pending() const {
  std::error_code ignored;
  fs::remove(pending_file(), ignored);
}

void Session::commit_records(const std::string& message) const {
  repo.git({"add", "--all", "--", relative.string()});
  repo.git({"commit", "--quiet", "--no-verify", "-m", message, "--", relative.string()});
}

int answer(const Session& s, const Answer& a, bool json) {
  const Effort& e = s.effort;
  const LogRow* row = a.row != nullptr ? a.row : e.rows.empty() ? nullptr : &e.rows.back();
  if (!json) {
    if (!a.text.empty()) print("{}\n", a.text);
    print("{}: {}, phase {}\n", s.op, a.state.name, phase_of(e));
    for (const auto& m : a.state.missing) print("  missing: {}\n", m);
    return kGood;
  }
  Json gate = nullptr;
  if (row != nullptr)
    gate = {{"green", row->gate_green},
            {"passed", row->passed},
            {"failed", row->failed},
            {"skipped", row->skipped},
            {"hash", row->gate_hash}};
  Json j = {{"op", s.op},
            {"phase", phase_of(e)},
            {"state", a.state.name},
            {"missing", a.state.missing},
            {"iteration", row != nullptr ? Json(row->iteration) : Json(nullptr)},
            {"direction", row != nullptr ? Json(row->direction) : Json(nullptr)},
            {"scope", e.contract.scope()},
            {"gate", std::move(gate)},
            {"bench_ms", row != nullptr && row->bench_ms > 0 ? Json(row->bench_ms) : Json(nullptr)},
            {"change", row != nullptr && row->change > 0 ? Json(row->change) : Json(nullptr)},
            {"status", row != nullptr ? Json(row->status) : Json(nullptr)},
            {"commit", row != nullptr ? Json(row->commit) : Json(nullptr)}};
  for (const auto& [key, value] : a.more.items()) j[key] = value;
  if (!a.text.empty()) j["text"] = a.text;
  print_json(j);
  return kGood;
}

int refuse_step(const Session& s, const State& why, bool json, const std::string& text) {
  print(stderr, "fla: {}\n", text);
  answer(s, {.state = why}, json);
  return why.name == "frozen-scope-violated" ? kFrozen : kFailed;
}

bool build_all(const BuildTree& tree, const fs::path& log) {
  std::error_code ignored;
  fs::create_directories(log.parent_path(), ignored);
  fs::remove(log, ignored);
  return run_child({"cmake", "--build", tree.directory.string(), "--target", "fla_program", "fla_gate", "fla_shared",
                    "-j", std::to_string(machine().processors)},
                   {.log = log})
      .ok();
}

Verified run_verify(const Session& s, const std::vector<std::string>& args) {
  Verified v;
  std::vector<std::string> argv = {(s.tree.directory / "bin" / "fla").string(), "verify", "--op", s.op};
  argv.insert(argv.end(), args.begin(), args.end());
  if (const int threads = s.effort.contract.threads(); threads > 0) {
    argv.emplace_back("--threads");
    argv.push_back(std::to_string(threads));
  }
  const Contract& c = s.effort.contract;
  if (c.on_gpu()) argv.insert(argv.end(), {"--device", c["device"]});
  if (!c["dtype"].empty() && c["dtype"] != "f32") argv.insert(argv.end(), {"--dtype", c["dtype"]});
  v.command = "fla " + join({argv.begin() + 1, argv.end()}, " ");
  argv.emplace_back("--json");
  const ChildResult r = run_child(argv, {.directory = s.repo.root(), .show_errors = true});
  v.code = r.code;
  v.json = Json::parse(r.out, nullptr, false);
  if (v.code == kFrozen) throw Stop(kFrozen, "loop: " + v.command + " refused: the frozen scope is violated");
  if (!v.json.is_object() || v.json.contains("error"))
    throw Stop(v.code == kUsage ? kUsage : kFailed, fmt::format("loop: {}: exit status {}", v.command, v.code));
  return v;
}

Verified run_timing(const Session& s, std::vector<std::string> args, const std::string& proof) {
  args.insert(args.begin(), "--no-gate");
  Verified v = run_verify(s, args);
  v.json["verdict"] = name_of(verdict_of_rows(v.json.value("rows", Json::array())));
  v.json["unproven"] = nullptr;
  v.json["proof"] = proof;
  return v;
}

std::string environment_line(const Json& machine) {
  if (!machine.is_object()) return "";
  const Json gpu = machine.value("gpu", Json());
  const std::string device = !gpu.is_object() ? ""
                                              : fmt::format("{}, driver {}, runtime {}; ", gpu.value("name", "?"),
                                                            gpu.value("driver", "?"), gpu.value("runtime", "?"));
  return device + fmt::format("{}, {}, {}; {}; {}; {}; commit {}", machine.value("cpu", "?"), machine.value("isa", "?"),
                              threads_text(machine.value("threads", 0)), machine.value("system", "?"),
                              machine.value("compiler", "?"), machine.value("flags", "?"),
                              machine.value("commit", "?"));
}

}  // namespace fla::tools
