// The records of one effort to make an operator faster, profile/<op>-opt/: plain Markdown that a person may correct,
// and state.json, its twin for machines. Words are the Markdown's; figures are the twin's evidence, and a figure that
// was edited in the Markdown alone is refused.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tools/command.h"
#include "tools/compare/repo.h"

namespace fla::tools {

// ---- the task contract, docs/draft.md

struct ContractField {
  const char* key;     // in the file and the twin
  const char* option;  // of `loop init`
  const char* doc;
  std::vector<std::string> words = {};  // its value is one of these; empty: any text
};
const std::vector<ContractField>& contract_fields();

struct Contract {
  std::map<std::string, std::string> values;
  std::string operator[](const std::string& key) const;
  std::vector<std::string> missing() const;  // names of fields that nobody has filled, or not as they must be
  std::vector<std::string> wrong() const;    // of these the latter: "device: expected cpu or cuda, got 'tpu'"
  std::vector<std::string> scope() const;    // patterns of the kernel's files
  std::vector<std::string> target_modes() const;
  double target_speedup() const;  // 0: not a number
  int cap() const;                // of iterations
  int threads() const;            // of a timed call; 0: all, -1: neither that nor a number
  bool on_gpu() const { return (*this)["device"] == "cuda"; }
};
std::string render_contract(const Contract& c);
// Refuses a file that has no table, or a field that no contract has.
Contract parse_contract(const std::string& markdown, const std::string& name);

// ---- the log, OPT_LOG.md

struct LogRow {
  int iteration = 0;
  std::string direction;
  bool built = true, gate_green = false;
  int passed = 0, failed = 0, skipped = 0;
  std::string gate_hash;
  double bench_ms = 0;                   // geometric mean of the target's medians; 0: not timed
  double change = 0, low = 0, high = 0;  // speedup against the best so far; 0: none
  double total = 0;                      // speedup against the baseline, timed in one run; 0: not timed
  std::string status;                    // base, keep, revert, drop, floor
  std::string commit, base;              // candidate and what it was compared with
  std::vector<std::string> files;
  std::vector<std::string> blocked;  // why a row was not believed
  std::string note, bucket;
};
Json to_json(const LogRow& r);
LogRow log_row(const Json& j);
std::vector<std::string> log_cells(const LogRow& r);  // of the Markdown table

struct Assessment {
  int after = 0;  // iteration
  std::string axes, techniques, next, why, reading;
};
struct Trap {
  std::string fact, why, apply;
};
// A shape regime with code of its own.
struct Bucket {
  std::string condition, entry, why;
  std::vector<std::string> shapes;
  double base_ms = 0, new_ms = 0, speedup = 0;
  int iteration = 0;
};

struct Baseline {
  std::string commit, environment;
  Json rows = Json::array();  // of the verify run
  Json gate;
  bool green = false;
};

struct Effort {
  std::string op;
  Contract contract;
  Baseline baseline;
  std::vector<LogRow> rows;
  std::vector<Assessment> assessments;
  std::vector<Bucket> buckets;
  std::vector<Trap> traps;
  Json no_go, promotion;  // null until they are concluded

  const LogRow* best() const;  // the last kept row, or the baseline's
  int next_iteration() const { return rows.empty() ? 0 : rows.back().iteration + 1; }
  int since_keep() const;  // rows since the last keep or assessment
};
Json to_json(const Effort& e);
Effort effort_from(const Json& j);

// ---- what state it is in

struct Facts {  // what the repository says
  bool records_dirty = false;
  bool pending = false;             // a step was interrupted between its commit and its row
  std::vector<std::string> frozen;  // files of the frozen scope that differ from the baseline
};
struct State {
  std::string name;
  std::vector<std::string> missing;  // evidence
};
State state_of(const Effort& e, const Facts& f);
std::string phase_of(const Effort& e);
// What "no win to ship" still lacks; `limit` is the named limit with its number.
std::vector<std::string> no_go_missing(const Effort& e, const std::string& limit);

// keep, revert or drop, from a verify run's JSON (product.md); `why` gets what spoke against it.
std::string decide(const Json& verify, std::vector<std::string>& why);
// Gate and figures of a verify run into a row.
void take_evidence(LogRow& row, const Json& verify);

// ---- files

inline std::filesystem::path records_of(const std::string& op) {
  return std::filesystem::path("profile") / (op + "-opt");
}
inline std::string branch_of(const std::string& op) { return "fla-loop/" + op; }

// Reads and reconciles; refuses figures that differ between the Markdown and the twin, naming both.
Effort load_effort(const std::filesystem::path& records, const std::string& op);
// Takes corrected words out of the log into the rows; the error tells which figure was edited.
Status reconcile(Effort& e, const std::string& log);
std::string render_log(const Effort& e);                          // from nothing
std::string append_row(const std::string& log, const LogRow& r);  // behind the table's last row, the rest as it is
void save_effort(const std::filesystem::path& records, const Effort& e);  // the twin alone
std::string render_dispatch(const std::vector<Bucket>& buckets);
std::string render_traps(const std::vector<Trap>& traps, const std::string& title);

// Of text for a cell of a Markdown table.
std::string cell(std::string text);
// Rows of the first table whose header starts with `first`; cells trimmed, "\|" undone.
std::vector<std::vector<std::string>> table_rows(const std::string& markdown, const std::string& first);

}  // namespace fla::tools
