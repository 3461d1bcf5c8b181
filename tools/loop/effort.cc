#include "tools/loop/effort.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "tools/common/json_strict.h"
#include "tools/compare/paired_bench.h"

namespace fla::tools {

namespace fs = std::filesystem;

const std::vector<ContractField>& contract_fields() {
  static const std::vector<ContractField> fields = {
      {"operator", "", "public function that is to become faster"},
      {"entry point", "--entry", "function in the source that does the work"},
      {"target shapes", "--shapes", "names of the benchmark's shapes, separated by commas"},
      {"target modes", "--modes", "fwd, fwdbwd or both"},
      {"target speedup", "--speedup", "against the baseline, for example 1.15"},
      {"baseline", "", "commit that the speedup is measured against"},
      {"languages", "--languages", "implementation languages that are allowed"},
      {"kernel scope", "--scope", "files that an iteration may change: patterns separated by commas"},
      {"device", "--device", "where calls are timed: cpu or cuda", {"cpu", "cuda"}},
      {"dtype", "--dtype", "of q, k and v: f32, bf16 or f16", {"f32", "bf16", "f16"}},
      {"threads", "--threads", "of a timed call: all, or a number; one thread can be timed on a busy machine"},
      {"validation command", "", "what proves a candidate right"},
      {"benchmark command", "", "what times it"},
      {"promotion criteria", "--criteria", "what must hold before the change is shipped"},
      {"coverage shapes", "--coverage", "shapes that promotion times beside the target's"},
      {"iteration cap", "--cap", "iterations after which the effort must conclude"},
      {"machine", "--machine", "machine whose figures decide"},
      {"frozen scope", "", "what may not change"}};
  return fields;
}

std::string cell(std::string text) {
  std::string s;
  for (const char c : text) {
    if (c == '|') s += '\\';
    s += c == '\n' || c == '\r' ? ' ' : c;
  }
  return s;
}

namespace {

std::string trim(const std::string& s) {
  const std::size_t begin = s.find_first_not_of(" \t\r"), end = s.find_last_not_of(" \t\r");
  return begin == std::string::npos ? "" : s.substr(begin, end - begin + 1);
}

bool is_row(const std::string& line) { return trim(line).starts_with("|"); }

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::string text;
  const std::string body = trim(line);
  for (std::size_t i = 1; i < body.size(); ++i) {
    if (body[i] == '\\' && i + 1 < body.size() && body[i + 1] == '|') {
      text += body[++i];
    } else if (body[i] == '|') {
      cells.push_back(trim(text));
      text.clear();
    } else {
      text += body[i];
    }
  }
  return cells;
}

bool is_rule(const std::string& line) {
  return is_row(line) && trim(line).find_first_not_of("|-: ") == std::string::npos;
}

std::string row_text(const std::vector<std::string>& cells) {
  std::string s = "|";
  for (const auto& c : cells) s += " " + cell(c) + " |";
  return s;
}

std::vector<std::string> list_of(const std::string& text) {
  std::vector<std::string> words;
  for (const auto& w : split(text, ','))
    if (const std::string t = trim(w); !t.empty()) words.push_back(t);
  return words;
}

std::vector<std::string> strings(const Json& j, const char* key) {
  std::vector<std::string> list;
  for (const auto& s : j.value(key, Json::array())) list.push_back(s.get<std::string>());
  return list;
}

double real(const Json& j, const char* key) {
  const auto it = j.find(key);
  return it != j.end() && it->is_number() ? it->get<double>() : 0.0;
}

Json or_null(double x) { return x > 0 ? Json(x) : Json(nullptr); }

const std::vector<std::string> kLogHeader = {"iteration", "direction", "gate", "bench", "change vs best", "status"};

}  // namespace

std::vector<std::vector<std::string>> table_rows(const std::string& markdown, const std::string& first) {
  std::vector<std::vector<std::string>> rows;
  bool inside = false;
  for (const std::string& line : lines_of(markdown)) {
    if (!is_row(line)) {
      if (inside) break;
      continue;
    }
    auto cells = cells_of(line);
    if (!inside) {
      inside = !cells.empty() && cells[0] == first;
      continue;
    }
    if (!is_rule(line)) rows.push_back(std::move(cells));
  }
  return rows;
}

// ---- contract

std::string Contract::operator[](const std::string& key) const {
  const auto it = values.find(key);
  return it == values.end() ? "" : it->second;
}

std::vector<std::string> Contract::scope() const { return list_of((*this)["kernel scope"]); }
std::vector<std::string> Contract::target_modes() const { return list_of((*this)["target modes"]); }

double Contract::target_speedup() const {
  const std::string text = (*this)["target speedup"];
  char* end = nullptr;
  const double x = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' && x > 1.0 && std::isfinite(x) ? x : 0.0;
}

int Contract::cap() const {
  const std::string text = (*this)["iteration cap"];
  char* end = nullptr;
  const long n = std::strtol(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0' && n > 0 && n < 10000 ? static_cast<int>(n) : 0;
}

int Contract::threads() const {
  const std::string text = (*this)["threads"];
  if (text == "all") return 0;
  char* end = nullptr;
  const long n = std::strtol(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0' && n > 0 && n < 10000 ? static_cast<int>(n) : -1;
}

std::vector<std::string> Contract::missing() const {
  std::vector<std::string> list;
  for (const auto& f : contract_fields())
    if ((*this)[f.key].empty())
      list.push_back(fmt::format("{}: {}{}", f.key, f.doc, *f.option != '\0' ? fmt::format(" ({})", f.option) : ""));
  for (auto& text : wrong()) list.push_back(std::move(text));
  return list;
}

std::vector<std::string> Contract::wrong() const {
  std::vector<std::string> list;
  const auto look = [&](const char* key, bool bad, const std::string& expected) {
    if (bad && !(*this)[key].empty())
      list.push_back(fmt::format("{}: expected {}, got '{}'", key, expected, (*this)[key]));
  };
  look("target speedup", target_speedup() == 0, "a number above 1");
  look("iteration cap", cap() == 0, "a number of iterations");
  look("threads", threads() < 0, "all or a number");
  for (const auto& f : contract_fields())
    look(f.key, !f.words.empty() && std::ranges::find(f.words, (*this)[f.key]) == f.words.end(), either(f.words));
  for (const auto& m : target_modes()) look("target modes", m != "fwd" && m != "fwdbwd", "fwd, fwdbwd or both");
  return list;
}

std::string render_contract(const Contract& c) {
  std::string s = fmt::format(
      "# Task contract: {}\n\nEvery field must be filled before the first edit; then run `fla loop init {}` again.\n\n"
      "| field | value | meaning |\n|---|---|---|\n",
      c["operator"], c["operator"]);
  for (const auto& f : contract_fields()) s += row_text({f.key, c[f.key], f.doc}) + "\n";
  return s;
}

Contract parse_contract(const std::string& markdown, const std::string& name) {
  Contract c;
  const auto rows = table_rows(markdown, "field");
  if (rows.empty()) refuse("{}: expected a table with the columns field and value, found none", name);
  for (const auto& r : rows) {
    const auto known = std::find_if(contract_fields().begin(), contract_fields().end(),
                                    [&](const ContractField& f) { return !r.empty() && r[0] == f.key; });
    if (known == contract_fields().end())
      refuse("{}: expected the contract's fields, got '{}'", name, r.empty() ? "" : printable(r[0]));
    if (r.size() > 1) c.values[r[0]] = r[1];
  }
  return c;
}

// ---- rows

Json to_json(const LogRow& r) {
  return {{"iteration", r.iteration},
          {"direction", r.direction},
          {"built", r.built},
          {"gate",
           {{"green", r.gate_green},
            {"passed", r.passed},
            {"failed", r.failed},
            {"skipped", r.skipped},
            {"hash", r.gate_hash}}},
          {"bench_ms", or_null(r.bench_ms)},
          {"change", or_null(r.change)},
          {"low", or_null(r.low)},
          {"high", or_null(r.high)},
          {"total", or_null(r.total)},
          {"status", r.status},
          {"commit", r.commit},
          {"base", r.base},
          {"files", r.files},
          {"blocked", r.blocked},
          {"note", r.note},
          {"bucket", r.bucket}};
}

LogRow log_row(const Json& j) {
  LogRow r;
  r.iteration = j.at("iteration").get<int>();
  r.direction = j.at("direction").get<std::string>();
  r.built = j.value("built", true);
  const Json& g = j.at("gate");
  r.gate_green = g.at("green").get<bool>();
  r.passed = g.value("passed", 0);
  r.failed = g.value("failed", 0);
  r.skipped = g.value("skipped", 0);
  r.gate_hash = g.value("hash", "");
  r.bench_ms = real(j, "bench_ms");
  r.change = real(j, "change");
  r.low = real(j, "low");
  r.high = real(j, "high");
  r.total = real(j, "total");
  r.status = j.at("status").get<std::string>();
  r.commit = j.value("commit", "");
  r.base = j.value("base", "");
  r.files = strings(j, "files");
  r.blocked = strings(j, "blocked");
  r.note = j.value("note", "");
  r.bucket = j.value("bucket", "");
  return r;
}

std::vector<std::string> log_cells(const LogRow& r) {
  const std::string gate =
      !r.built ? "fail (does not build)"
               : fmt::format("{} ({}/{}/{})", r.gate_green ? "pass" : "fail", r.passed, r.failed, r.skipped);
  return {std::to_string(r.iteration),
          r.direction,
          gate,
          r.bench_ms > 0 ? fmt::format("{:.4g}", r.bench_ms) : "-",
          r.change > 0 ? fmt::format("{:.3f} [{:.3f}, {:.3f}]", r.change, r.low, r.high) : "-",
          r.status};
}

std::string render_log(const Effort& e) {
  std::string s = fmt::format("# Optimisation log: {}\n\nenvironment: {}\nbaseline: {}", e.op, e.baseline.environment,
                              short_commit(e.baseline.commit));
  for (const auto& row : e.baseline.rows)
    s += fmt::format("; {} {} {:.4g} ms", row.value("shape", ""), row.value("mode", ""), real(row, "new_ms"));
  s += fmt::format(
      "\ntarget: {} x on {} ({})\n\ngate: passed/failed/skipped; bench: median ms on the target "
      "(geometric mean of its rows); change: speedup against the best so far, from pairs timed in turns, "
      "with its interval\n\n",
      e.contract["target speedup"], e.contract["target shapes"], e.contract["target modes"]);
  s += row_text(kLogHeader) + "\n|---|---|---|---|---|---|\n";
  for (const auto& r : e.rows) s += row_text(log_cells(r)) + "\n";
  return s;
}

std::string append_row(const std::string& log, const LogRow& r) {
  std::vector<std::string> lines = lines_of(log);
  std::size_t at = lines.size();
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (!is_row(lines[i])) continue;
    if (const auto cells = cells_of(lines[i]); !cells.empty() && cells[0] == kLogHeader[0]) at = i;
  }
  if (at == lines.size())
    refuse("OPT_LOG.md: expected a table that begins with '{}', got {}", kLogHeader[0],
           lines.empty() ? "an empty or missing file" : "none");
  while (at + 1 < lines.size() && is_row(lines[at + 1])) ++at;
  lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(at) + 1, row_text(log_cells(r)));
  return join(lines, "\n") + "\n";
}

Status reconcile(Effort& e, const std::string& log) {
  const auto bad = [](const std::string& what) { return Status(Code::InvalidArgument, "OPT_LOG.md: " + what); };
  const auto rows = table_rows(log, kLogHeader[0]);
  if (rows.size() != e.rows.size())
    return bad(fmt::format("expected {} rows, as state.json has evidence for, got {}", e.rows.size(), rows.size()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto expected = log_cells(e.rows[i]);
    if (rows[i].size() != expected.size())
      return bad(fmt::format("row {}: expected {} cells, got {}", i, expected.size(), rows[i].size()));
    for (std::size_t k = 0; k < expected.size(); ++k)
      if (k != 1 && rows[i][k] != trim(expected[k]))
        return bad(fmt::format("row {}: {}: evidence in state.json says '{}', got '{}'", i, kLogHeader[k], expected[k],
                               printable(rows[i][k])));
    e.rows[i].direction = rows[i][1];
  }
  return {};
}

// ---- the twin

const LogRow* Effort::best() const {
  const LogRow* b = nullptr;
  for (const auto& r : rows)
    if (r.status == "keep" || r.status == "base") b = &r;
  return b;
}

int Effort::since_keep() const {
  int n = 0;
  const int assessed = assessments.empty() ? -1 : assessments.back().after;
  for (auto it = rows.rbegin(); it != rows.rend(); ++it, ++n)
    if (it->status == "keep" || it->status == "base" || it->iteration <= assessed) break;
  return n;
}

Json to_json(const Effort& e) {
  Json j = {{"op", e.op}, {"contract", Json::object()}};
  for (const auto& f : contract_fields()) j["contract"][f.key] = e.contract[f.key];
  j["baseline"] = {{"commit", e.baseline.commit},
                   {"environment", e.baseline.environment},
                   {"green", e.baseline.green},
                   {"gate", e.baseline.gate},
                   {"rows", e.baseline.rows}};
  j["rows"] = Json::array();
  for (const auto& r : e.rows) j["rows"].push_back(to_json(r));
  j["assessments"] = Json::array();
  for (const auto& a : e.assessments)
    j["assessments"].push_back({{"after", a.after},
                                {"axes", a.axes},
                                {"techniques", a.techniques},
                                {"next", a.next},
                                {"why", a.why},
                                {"reading", a.reading}});
  j["buckets"] = Json::array();
  for (const auto& b : e.buckets)
    j["buckets"].push_back({{"condition", b.condition},
                            {"entry", b.entry},
                            {"shapes", b.shapes},
                            {"base_ms", b.base_ms},
                            {"new_ms", b.new_ms},
                            {"speedup", b.speedup},
                            {"why", b.why},
                            {"iteration", b.iteration}});
  j["traps"] = Json::array();
  for (const auto& t : e.traps) j["traps"].push_back({{"fact", t.fact}, {"why", t.why}, {"apply", t.apply}});
  j["no_go"] = e.no_go;
  j["promotion"] = e.promotion;
  return j;
}

Effort effort_from(const Json& j) {
  Effort e;
  e.op = j.at("op").get<std::string>();
  for (const auto& [key, value] : j.at("contract").items()) e.contract.values[key] = value.get<std::string>();
  const Json& b = j.at("baseline");
  e.baseline = {b.at("commit").get<std::string>(), b.at("environment").get<std::string>(), b.at("rows"), b.at("gate"),
                b.at("green").get<bool>()};
  for (const auto& r : j.at("rows")) e.rows.push_back(log_row(r));
  for (const auto& a : j.at("assessments"))
    e.assessments.push_back({a.at("after").get<int>(), a.value("axes", ""), a.value("techniques", ""),
                             a.value("next", ""), a.value("why", ""), a.value("reading", "")});
  for (const auto& k : j.at("buckets"))
    e.buckets.push_back({k.value("condition", ""), k.value("entry", ""), k.value("why", ""), strings(k, "shapes"),
                         real(k, "base_ms"), real(k, "new_ms"), real(k, "speedup"), k.value("iteration", 0)});
  for (const auto& t : j.at("traps"))
    e.traps.push_back({t.value("fact", ""), t.value("why", ""), t.value("apply", "")});
  e.no_go = j.value("no_go", Json());
  e.promotion = j.value("promotion", Json());
  return e;
}

Effort load_effort(const fs::path& records, const std::string& op) {
  const fs::path twin = records / "state.json", draft = records / "docs" / "draft.md", log = records / "OPT_LOG.md";
  Effort e;
  e.op = op;
  if (fs::exists(twin)) {
    const std::string text = read_text(twin);
    const auto parsed = parse_json_strict<Json>(text);
    if (!parsed) refuse("{}: {}", twin.string(), parsed.status().message());
    try {
      e = effort_from(*parsed);
    } catch (const Json::exception& error) {
      refuse("{}: not the record of an effort: {}", twin.string(), error.what());
    }
    if (e.op != op) refuse("{}: expected the effort of {}, got that of {}", twin.string(), op, printable(e.op));
  }
  if (fs::exists(draft)) {
    const Contract written = parse_contract(read_text(draft), draft.string());
    // What was agreed stands once the baseline is measured: another target or scope is another effort.
    if (!e.rows.empty())
      for (const auto& f : contract_fields())
        if (written[f.key] != e.contract[f.key])
          refuse("{}: {}: agreed as '{}', now '{}': a contract does not change under way", draft.string(), f.key,
                 e.contract[f.key], printable(written[f.key]));
    e.contract = written;
  }
  if (!e.rows.empty())
    if (const Status s = reconcile(e, read_text(log)); !s) refuse("{}: {}", records.string(), s.message());
  return e;
}

void save_effort(const fs::path& records, const Effort& e) {
  write_text(records / "state.json", to_json(e).dump(1) + "\n");
}

std::string render_dispatch(const std::vector<Bucket>& buckets) {
  std::string s =
      "# Shape buckets\n\nEach has its own evidence on its own shapes, and was validated on the whole shape set.\n\n"
      "| bucket condition | chosen entry point | baseline ms | candidate ms | speedup | why this path |\n"
      "|---|---|---|---|---|---|\n";
  for (const auto& b : buckets)
    s += row_text({b.condition, b.entry, fmt::format("{:.4g}", b.base_ms), fmt::format("{:.4g}", b.new_ms),
                   fmt::format("{:.3f}", b.speedup), b.why}) +
         "\n";
  return s;
}

std::string render_traps(const std::vector<Trap>& traps, const std::string& title) {
  std::string s = fmt::format("# {}\n\n| fact | why it fools | how to apply |\n|---|---|---|\n", title);
  for (const auto& t : traps) s += row_text({t.fact, t.why, t.apply}) + "\n";
  return s;
}

// ---- state

std::vector<std::string> no_go_missing(const Effort& e, const std::string& limit) {
  std::vector<std::string> list;
  const auto tried = [](const LogRow& r) { return r.iteration > 0; };
  if (e.rows.empty() || e.baseline.rows.empty()) list.emplace_back("a recorded baseline: fla loop init");
  if (std::none_of(e.rows.begin(), e.rows.end(), tried))
    list.emplace_back("at least one reasoned candidate: fla loop step");
  if (std::none_of(e.rows.begin(), e.rows.end(),
                   [&](const LogRow& r) { return tried(r) && r.built && r.passed + r.failed > 0; }))
    list.emplace_back("the gate's status of a candidate");
  if (std::none_of(e.rows.begin(), e.rows.end(), [&](const LogRow& r) { return tried(r) && r.bench_ms > 0; }))
    list.emplace_back("benchmark evidence of a candidate");
  if (limit.find_first_of("0123456789") == std::string::npos)
    list.emplace_back("the limit or blocker by name, with its number (--limit)");
  return list;
}

State state_of(const Effort& e, const Facts& f) {
  if (const auto missing = e.contract.missing(); !missing.empty()) return {"contract-missing", missing};
  if (!f.frozen.empty()) return {"frozen-scope-violated", f.frozen};
  if (e.rows.empty()) {
    if (!e.baseline.gate.is_null() && !e.baseline.green)
      return {"gate-red", {"a green gate of the unmodified operator: make it right first, then fast"}};
    return {"baseline-missing", {"a green gate and a measured baseline: fla loop init"}};
  }
  if (!e.promotion.is_null()) return {"promoted", {}};
  if (!e.no_go.is_null()) return {"no-go", {}};
  if (f.pending) return {"awaiting-log", {"the row of the step that was interrupted: fla loop step"}};
  if (f.records_dirty) return {"awaiting-log", {"a commit of the records"}};
  const LogRow* best = e.best();
  const bool reached = best->iteration > 0 && best->total >= e.contract.target_speedup();
  if (reached)
    return {"promotable", {"two separate wins, the reading that explains them and the impact: fla loop promote"}};
  if (e.rows.back().status == "floor" &&
      (e.assessments.empty() || e.assessments.back().after < e.rows.back().iteration))
    return {"floor-claimed", {"a conclusion (fla loop no-go or promote), or another direction (fla loop assess)"}};
  if (e.next_iteration() > e.contract.cap()) {
    auto missing = no_go_missing(e, "");
    missing.insert(missing.begin(), fmt::format("a conclusion: the cap of {} iterations is reached", e.contract.cap()));
    return {"no-go-incomplete", missing};
  }
  if (e.since_keep() >= 3)
    return {"stalled",
            {"a re-assessment: fresh profile, axes tried, known techniques, next direction (fla loop assess)"}};
  return {"ready", {}};
}

std::string phase_of(const Effort& e) {
  if (e.rows.empty()) return "baseline";
  return e.buckets.empty() ? "profile-guided" : "specialisation";
}

std::string decide(const Json& verify, std::vector<std::string>& why) {
  const std::string verdict = verify.value("verdict", "blocked");
  for (const auto& row : verify.value("rows", Json::array())) {
    const std::string name = row.value("shape", "") + " " + row.value("mode", "");
    if (row.contains("error") && row["error"].is_string()) why.push_back(name + ": " + row["error"].get<std::string>());
    for (const auto& flag : row.value("flags", Json::array()))
      if (const std::string text = flag.get<std::string>(); blocks(text)) why.push_back(name + ": " + text);
    if (row.value("verdict", "") == "slower") why.push_back(fmt::format("{}: {:.3f}", name, real(row, "speedup")));
  }
  if (verdict == "win") return "keep";
  return verdict == "no_win" ? "drop" : "revert";
}

void take_evidence(LogRow& row, const Json& verify) {
  const Json gate = verify.value("gate", Json());
  if (gate.is_object()) {
    row.passed = gate.value("passed", 0);
    row.failed = gate.value("failed", 0);
    row.skipped = gate.value("skipped", 0);
    row.gate_hash = gate.value("hash", "");
    const bool whole = !gate.contains("subset") || gate["subset"].is_null();
    row.gate_green = whole && row.passed > 0 && row.failed == 0 && gate.value("not_run", 0) == 0;
  }
  double sum = 0.0;
  int n = 0;
  for (const auto& r : verify.value("rows", Json::array()))
    if (const double ms = real(r, "new_ms"); ms > 0) sum += std::log(ms), ++n;
  if (!row.gate_green || n == 0) return;
  row.bench_ms = std::exp(sum / n);
  if (verify.value("base", Json()).is_null()) return;
  row.change = real(verify, "geomean");
  const Json interval = verify.value("interval", Json::array());
  if (interval.size() == 2 && interval[0].is_number() && interval[1].is_number()) {
    row.low = interval[0].get<double>();
    row.high = interval[1].get<double>();
  }
}

}  // namespace fla::tools
