// Child processes for commands that must clean up after themselves: a signal that asks this program to end reaches the
// child, is turned into an exception here, and ends the program when everything has been put back.
#pragma once

#include <exception>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace fla::tools {

// SIGINT, SIGTERM or SIGHUP arrived. Not a std::runtime_error, so that no handler of failures swallows it.
struct Interrupted : std::exception {
  explicit Interrupted(int number) : signal(number) {}
  const char* what() const noexcept override { return "interrupted"; }
  int signal;
};
// From here on the three signals are remembered instead of ending the program at once.
void catch_signals();
void throw_if_interrupted();
// While one lives, children run although a signal has arrived: for putting things back.
class PauseSignals {
 public:
  PauseSignals();
  ~PauseSignals();
  PauseSignals(const PauseSignals&) = delete;
  PauseSignals& operator=(const PauseSignals&) = delete;

 private:
  int pending_;
};
// Ends this process the way the signal would have.
[[noreturn]] void die_of(int signal);

struct ChildOptions {
  std::filesystem::path directory;  // empty: this process's
  std::filesystem::path log;        // stdout and stderr are appended to it instead of captured
  std::vector<std::pair<std::string, std::string>> environment;  // set beside the inherited ones
  std::vector<std::string> unset;
  std::string input;         // its stdin; empty: nothing
  bool show_errors = false;  // its stderr is this process's instead of captured
  int timeout_s = 0;         // then it and what it started are ended; 0: never. Not with `log`
};
struct ChildResult {
  int code = -1;  // exit status, or 128 + the signal that ended it
  bool timed_out = false;
  std::string out, err;
  bool ok() const { return code == 0; }
};
// argv[0] is looked for in PATH. Throws Stop when it cannot be started, Interrupted when this process was.
ChildResult run_child(const std::vector<std::string>& argv, const ChildOptions& options = {});

// Holds the advisory lock of a file while it lives; the system drops it with the process.
class FileLock {
 public:
  enum class When { TryOnce, Wait };
  // Without the lock after TryOnce, held() is false. A folder that cannot be written is refused.
  FileLock(const std::filesystem::path& path, When when);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  bool held() const { return held_; }

 private:
  int fd_ = -1;
  bool held_ = false;
};

std::string read_text(const std::filesystem::path& path);  // empty when it cannot be read
// Complete or not at all. Refuses a folder that cannot be written.
void write_text(const std::filesystem::path& path, const std::string& text);

}  // namespace fla::tools
