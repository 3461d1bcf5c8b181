// One command on one effort: the lock, the repository, the records, and how a refusal is told.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/loop/effort.h"

namespace fla::tools {

struct Pending {  // a step between its commit and its row
  int iteration = 0;
  std::string direction, commit, base, note, bucket, floor;
  std::vector<std::string> files;
};

class Session {
 public:
  enum class Access : std::uint8_t { Write, Read };
  // `on_branch`: the effort's branch must be checked out. Writing is refused while another command works on the same
  // operator; reading is not.
  Session(const std::string& command, const std::string& op, bool on_branch, Access access = Access::Write);

  Repo repo;
  BuildTree tree;
  std::string op;
  std::filesystem::path records, relative;  // the records, absolute and from the root
  Effort effort;

  Facts facts() const;
  State state() const { return state_of(effort, facts()); }
  std::optional<Pending> pending() const;
  void set_pending(const Pending& p) const;
  void clear_pending() const;

  void save() const { save_effort(records, effort); }
  // Of the records alone.
  void commit_records(const std::string& message) const;
  std::string head() const { return repo.head(); }
  bool another_works() const { return !lock_->held(); }

 private:
  std::filesystem::path pending_file() const;
  std::unique_ptr<FileLock> lock_;
};

// The answer to every loop command, as JSON or as lines.
struct Answer {
  State state;
  const LogRow* row = nullptr;  // that it is about
  std::string text;             // for people
  Json more = Json::object();   // further keys
};
int answer(const Session& s, const Answer& a, bool json);
// Prints the answer and gives 1.
int refuse_step(const Session& s, const State& why, bool json, const std::string& text);

// Builds this program, the gate and the library; false: `log` has why not.
bool build_all(const BuildTree& tree, const std::filesystem::path& log);
struct Verified {
  int code = -1;
  Json json;
  std::string command;
};
// Runs `fla verify ARGS --json` with the program just built.
Verified run_verify(const Session& s, const std::vector<std::string>& args);
// The times alone, of the build that a run of run_verify has just proven: `proof` names that run's record. `fla verify`
// without a gate gives no verdict; here it is formed from the rows, and the JSON says where the proof is.
Verified run_timing(const Session& s, std::vector<std::string> args, const std::string& proof);
std::string environment_line(const Json& machine);

}  // namespace fla::tools
