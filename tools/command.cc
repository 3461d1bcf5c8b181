#include "tools/command.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "CLI/CLI.hpp"
#include "fla/core/text.h"
#include "fla/core/threads.h"
#include "tools/common/no_memory.h"
#include "tools/common/placement.h"
#include "tools/compare/process.h"

namespace fla::tools {

void refuse(const Status& s) { throw Stop(s.code() == Code::DeviceError ? kFailed : kUsage, s.message()); }

namespace {

int report(bool json, int code, const std::string& message) {
  print(stderr, "fla: {}\n", message);
  if (json && !json_printed()) print_json({{"error", error_json(code, message)}});
  return code;
}

}  // namespace

int report_errors(bool json, const std::function<int()>& body) {
  int code = kFailed;
  try {
    code = body();
  } catch (const Stop& e) {
    code = report(json, e.code, e.what());
  } catch (const Interrupted& e) {  // everything has been put back
    print(stderr, "fla: interrupted\n");
    die_of(e.signal);
  } catch (const std::bad_alloc& e) {
    code = report(json, kUsage, memory_text(e));
  } catch (const std::exception& e) {
    code = report(json, kFailed, e.what());
  }
  const std::string error = finish_output();
  if (error.empty()) return code;
  print(stderr, "fla: stdout: cannot write the result: {}\n", error);
  return kUsage;
}

CLI::App* add_command(CLI::App& root, const std::string& name, const std::string& doc, const std::string& examples) {
  CLI::App* app = root.add_subcommand(name, doc);
  app->footer("Examples:\n" + examples);
  return app;
}

std::string either(const std::vector<std::string>& words) {
  std::string s;
  for (std::size_t i = 0; i < words.size(); ++i) s += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  return s;
}

CLI::Validator one_of(std::vector<std::string> names) {
  const std::string expected = either(names), kind = join(names, "|");
  return CLI::Validator(
      [names = std::move(names), expected](std::string& s) {
        return std::find(names.begin(), names.end(), s) != names.end() ? std::string()
                                                                       : "expected " + expected + ", got '" + s + "'";
      },
      kind);
}

CLI::Validator integer(std::int64_t least, std::int64_t most) {
  return CLI::Validator(
      [least, most](std::string& s) {
        std::int64_t i = 0;
        const auto [end, err] = std::from_chars(s.data(), s.data() + s.size(), i);
        if (err == std::errc() && end == s.data() + s.size() && i >= least && i <= most) return std::string();
        return fmt::format("expected an integer from {} to {}, got '{}'", least, most, s);
      },
      "N");
}

CLI::Validator not_empty(const std::string& expected) {
  return CLI::Validator([expected](std::string& s) { return s.empty() ? "expected " + expected + ", got ''" : ""; },
                        "");
}

void add_json(CLI::App* app, bool& json) {
  app->add_flag("--json", json, "one JSON document on stdout instead of text");
}
void add_dtype(CLI::App* app, CallOptions& o) {
  app->add_option("--dtype", o.dtype, "type of the wide tensors (default f32)")->check(one_of({"f32", "bf16", "f16"}));
}
void add_device(CLI::App* app, CallOptions& o) {
  app->add_option("--device", o.device, "where to compute (default cpu)")->check(one_of({"cpu", "cuda"}));
}
void add_backend(CLI::App* app, CallOptions& o) {
  app->add_option("--backend", o.backend, "only this backend may serve (default: dispatch decides)")
      ->check(not_empty("a backend"));
}
void add_threads(CLI::App* app, CallOptions& o) {
  app->add_option("--threads", o.threads, "threads of the pool (default 0: one per processor)")
      ->check(integer(0, ThreadPool::kMaxThreads));
}

DType parse_dtype(std::string_view name) {
  return name == "bf16" ? DType::BF16 : name == "f16" ? DType::F16 : DType::F32;
}
const char* option_name(DType t) {
  switch (t) {
    case DType::F32: return "f32";
    case DType::BF16: return "bf16";
    case DType::F16: return "f16";
    case DType::F64: return "f64";
    case DType::I32: return "i32";
    case DType::I64: return "i64";
  }
  return "?";
}

Device device_of(const CallOptions& o) {
  const Device device = o.device == "cuda" ? kGpu : Device{};
  if (const std::string problem = device_problem(device); !problem.empty())
    refuse("--device: expected cpu, got '{}': {}", o.device, problem);
  return device;
}

void require_backend(const Registry& r, const std::string& backend) {
  if (backend.empty()) return;
  const std::vector<std::string> known = r.backends();
  if (std::find(known.begin(), known.end(), backend) == known.end())
    refuse("--backend: expected {}, got '{}'", join(known, " or "), backend);
}

ContextOptions context_options(const CallOptions& o) {
  ContextOptions c;
  c.threads = o.threads;
  c.backend = o.backend;
  c.log = [](const LogRecord& r) {
    const char* level = r.level == LogLevel::Warning ? "warning: " : "";
    if (r.backend.empty())
      print(stderr, "{}{}\n", level, r.message);
    else
      print(stderr, "{}{}: {}: {}: {}\n", level, r.operation, r.function, r.backend, r.message);
  };
  return c;
}

std::vector<std::string> split(std::string_view text, char by) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i <= text.size();) {
    const std::size_t end = std::min(text.find(by, i), text.size());
    parts.emplace_back(text.substr(i, end - i));
    i = end + 1;
  }
  return parts;
}

std::string join(const std::vector<std::string>& words, std::string_view by) {
  std::string s;
  for (const auto& w : words) {
    if (!s.empty()) s += by;
    s += w;
  }
  return s;
}

const Registry::Entry& find_operator(const Registry& r, std::string_view name) {
  const Registry::Entry* e = r.find(name);
  if (e == nullptr) throw Stop(kUsage, fmt::format("unknown operator '{}'; nearest: {}", name, join(r.nearest(name))));
  if (e->spec.is_backward())
    refuse("operator: expected a forward function, got '{}'; its forward is {}", name, e->spec.forward);
  return *e;
}

std::vector<const Registry::Entry*> select_operators(const Registry& r, const std::vector<std::string>& names) {
  std::vector<const Registry::Entry*> chosen;
  const auto add = [&](const Registry::Entry* e) {
    if (std::find(chosen.begin(), chosen.end(), e) == chosen.end()) chosen.push_back(e);
  };
  const std::vector<std::string> families = r.operations();
  for (const auto& name : names) {
    const bool family = std::find(families.begin(), families.end(), name) != families.end();
    if (name != "all" && !family) {
      add(&find_operator(r, name));
      continue;
    }
    for (const Registry::Entry* e : r.entries())
      if (!e->spec.is_backward() && (name == "all" || e->spec.operation == name)) add(e);
  }
  return chosen;
}

std::vector<std::string> backends_of(const Registry::Entry* e) {
  std::vector<std::string> names;
  if (e == nullptr) return names;
  for (const auto& c : e->candidates)
    if (c.kernel != nullptr && c.kernel->complete && (names.empty() || names.back() != c.backend->name))
      names.push_back(c.backend->name);
  if (e->reference != nullptr && e->reference->complete) names.push_back(kReference);
  return names;
}

namespace {
int output_error = 0;  // errno of the first write to stdout that failed
bool json_out = false;

void write_bytes(std::FILE* to, std::string_view bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), to) < bytes.size() && to == stdout && output_error == 0)
    output_error = errno;
}
}  // namespace

void write_text(std::FILE* to, std::string_view text) {
  std::string s;
  while (!text.empty()) {
    const std::size_t end = text.find_first_of("\n\t");
    s += printable(text.substr(0, end));
    if (end == std::string_view::npos) break;
    s += text[end];
    text.remove_prefix(end + 1);
  }
  write_bytes(to, s);
}

std::string finish_output() {
  if (std::fflush(stdout) != 0 && output_error == 0) output_error = errno;
  if (output_error == 0 && std::ferror(stdout) != 0) output_error = EIO;
  return output_error == 0 ? "" : std::strerror(output_error);
}

void print_json(const Json& document) {
  json_out = true;
  write_bytes(stdout, document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

bool json_printed() { return json_out; }

Json error_json(int exit_code, const std::string& message) { return {{"exit", exit_code}, {"message", message}}; }

void print_table(const std::vector<std::vector<std::string>>& rows, std::vector<std::size_t> right) {
  std::vector<std::size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const bool to_right = std::find(right.begin(), right.end(), i) != right.end();
      line += to_right ? fmt::format("{:>{}}", row[i], width[i]) : fmt::format("{:<{}}", row[i], width[i]);
      if (i + 1 < row.size()) line += "  ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    print("{}\n", line);
  }
}

std::string bytes_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t u = 0;
  while (bytes >= 1024.0 && u + 1 < std::size(kUnits)) bytes /= 1024.0, ++u;
  return u == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[u]);
}

Json number(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

Progress::Progress() : terminal_(isatty(STDERR_FILENO) != 0) {}

void Progress::show(const std::string& text) {
  if (!terminal_) return;
  fmt::print(stderr, "\r\033[K{}", printable(text));
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (!shown_) return;
  fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

}  // namespace fla::tools
