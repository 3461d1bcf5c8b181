// What the subcommands of the program share: exit codes, errors, common options, tables.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fla/core/context.h"
#include "fla/registry/registry.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace fla::tools {

using Json = nlohmann::ordered_json;

enum Exit : int {
  kGood = 0,
  kFailed = 1,   // checked and failed, or a missing row
  kUsage = 2,    // bad arguments, bad input, a malformed file, more than there is memory for
  kFrozen = 3,   // the frozen scope was violated
  kNothing = 4,  // nothing was selected, all was skipped, or nothing could be covered
};

// Ends the program with a message on stderr. For the program alone; the library has no exceptions.
struct Stop : std::runtime_error {
  Stop(int exit_code, const std::string& message) : std::runtime_error(message), code(exit_code) {}
  int code;
};
template <typename... T>
[[noreturn]] void refuse(fmt::format_string<T...> text, T&&... args) {
  throw Stop(kUsage, fmt::format(text, std::forward<T>(args)...));
}
// A bad call, or one that nothing here can serve or has the memory for, is usage (2), the rest is failure (1).
[[noreturn]] void refuse(const Status& s);
inline void check(const Status& s) {
  if (!s) refuse(s);
}
template <typename T>
T check(Result<T> r) {
  if (!r) refuse(r.status());
  return std::move(*r);
}

// Runs all that there is to run and returns the process's exit code. What `body` throws becomes one line on stderr and,
// with json, a document on stdout; a result that could not be written is bad usage.
int report_errors(bool json, const std::function<int()>& body);

struct Command {
  CLI::App* app;
  std::function<int()> run;  // the exit code
};
CLI::App* add_command(CLI::App& root, const std::string& name, const std::string& doc, const std::string& examples);

Command add_ops(CLI::App& root);
Command add_run(CLI::App& root);
Command add_check(CLI::App& root);
Command add_gate(CLI::App& root);
Command add_bench(CLI::App& root);
Command add_verify(CLI::App& root);
Command add_explain(CLI::App& root);
Command add_loop(CLI::App& root);
Command add_report(CLI::App& root);
Command add_doctor(CLI::App& root);

// ---- options

std::string either(const std::vector<std::string>& words);  // "a, b or c"
// "expected a, b or c, got 'd'"
CLI::Validator one_of(std::vector<std::string> names);
CLI::Validator integer(std::int64_t least, std::int64_t most);
// An empty value is a script's unset variable, not a wish for the default.
CLI::Validator not_empty(const std::string& expected);

struct PluginOptions {
  std::string path;  // empty: none
  int timeout_s = 60;
};
struct CallOptions {
  std::string device = "cpu";
  std::string backend;  // empty: dispatch decides
  int threads = 0;      // 0: one per processor
  std::string dtype = "f32";
};
void add_json(CLI::App* app, bool& json);
void add_dtype(CLI::App* app, CallOptions& o);
void add_device(CLI::App* app, CallOptions& o);
void add_backend(CLI::App* app, CallOptions& o);
void add_threads(CLI::App* app, CallOptions& o);

DType parse_dtype(std::string_view name);  // of one that one_of has accepted
const char* option_name(DType t);          // "f32"
Device device_of(const CallOptions& o);    // where to compute; refused where nothing can run there
void require_backend(const Registry& r, const std::string& backend);
// Library log records go to stderr.
ContextOptions context_options(const CallOptions& o);

std::vector<std::string> split(std::string_view text, char by);
std::string join(const std::vector<std::string>& words, std::string_view by = ", ");

// ---- operators

// The forward function of that name; a misspelt one is refused with the nearest names.
const Registry::Entry& find_operator(const Registry& r, std::string_view name);
// Of functions, families or "all", in the order given, each once.
std::vector<const Registry::Entry*> select_operators(const Registry& r, const std::vector<std::string>& names);
// Backends that implement a function: "cpu", "reference".
std::vector<std::string> backends_of(const Registry::Entry* e);

// ---- output

// The one way to stdout and stderr. Control characters but line breaks and tabs come out as escapes: names from files
// and the command line must not command a terminal.
void write_text(std::FILE* to, std::string_view text);
template <typename... T>
void print(std::FILE* to, fmt::format_string<T...> text, T&&... args) {
  write_text(to, fmt::format(text, std::forward<T>(args)...));
}
template <typename... T>
void print(fmt::format_string<T...> text, T&&... args) {
  write_text(stdout, fmt::format(text, std::forward<T>(args)...));
}
// Writes what stdout still holds back; the error's text when not all of it arrived, else "".
std::string finish_output();

void print_json(const Json& document);
bool json_printed();  // so far in this run
// What stands under "error" in a document when the exit code is that of an error.
Json error_json(int exit_code, const std::string& message);
// Columns as wide as their widest cell; those of `right` (by index) are aligned to the right.
void print_table(const std::vector<std::vector<std::string>>& rows, std::vector<std::size_t> right = {});
std::string bytes_text(double bytes);  // "1.5 MiB"
// A number for JSON: NaN and infinities become null.
Json number(double x);

// One line on a terminal, nothing in a pipe.
class Progress {
 public:
  Progress();
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(const std::string& text);
  void clear();

 private:
  bool terminal_;
  bool shown_ = false;
};

}  // namespace fla::tools
