#include "tools/gate_runner.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

#include "tools/common/frozen.h"
#include "tools/common/machine.h"
#include "tools/compare/process.h"
#include "tools/compare/repo.h"
#include "tools/plugin/guard.h"

extern char** environ;

namespace fla::tools {
namespace {

namespace fs = std::filesystem;

bool glob(const char* pattern, const char* text) {
  for (; *pattern != '\0'; ++pattern, ++text) {
    if (*pattern == '*') {
      for (const char* t = text;; ++t) {
        if (glob(pattern + 1, t)) return true;
        if (*t == '\0') return false;
      }
    }
    if (*text == '\0' || (*pattern != '?' && *pattern != *text)) return false;
  }
  return *text == '\0';
}

bool in_subset(const std::string& test, const std::string& subset) {
  if (subset.find_first_of("*?") != std::string::npos) return glob(subset.c_str(), test.c_str());
  return test.find(subset) != std::string::npos;
}

struct ListedTest {
  std::string name;
  std::set<std::string> exercises;
};

struct TempDir {
  fs::path path;
  TempDir() {
    std::string name = (fs::temp_directory_path() / "fla_gate.XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr)
      throw Stop(kFailed, "gate: cannot make a folder: " + name + ": " + std::strerror(errno));
    path = name;
  }
  ~TempDir() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
};

struct Child {
  pid_t pid = -1;
  int fd = -1;  // its stdout and stderr
  std::vector<std::string> tests;
  fs::path report;
  std::string pending;  // a line not yet complete
  std::string running;  // the test that has begun and not ended
  std::string tail;     // the running test's last output
  int passed = 0, failed = 0, skipped = 0;
  std::vector<GateResult::Failure> failures;
  std::map<std::string, TestRecord> records;
  std::set<std::string> notes;
  int accepted = 0, refused = 0;
  int status = 0;
  PluginTrace* trace = nullptr;  // of a run with a plug-in
  bool hung = false;
};

Child start(const std::string& program, const std::vector<std::string>& arguments) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw Stop(kFailed, std::string("gate: pipe: ") + std::strerror(errno));
  // Nothing in the environment may narrow or repeat the selection.
  std::vector<char*> env;
  for (char** e = environ; *e != nullptr; ++e)
    if (std::strncmp(*e, "GTEST_", 6) != 0) env.push_back(*e);
  env.push_back(nullptr);
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const auto& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  Child c;
  const int error = posix_spawn(&c.pid, program.c_str(), &actions, nullptr, argv.data(), env.data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (error != 0) {
    close(ends[0]);
    throw Stop(kFailed, "gate: cannot start " + program + ": " + std::strerror(error));
  }
  c.fd = ends[0];
  return c;
}

void kill_if_hung(Child& c, double limit) {
  if (c.trace == nullptr || c.hung || seconds_inside(*c.trace) <= limit) return;
  c.hung = true;
  kill(c.pid, SIGKILL);
}

// Calls line(child, text) for every line of every child until all have ended. A child whose plug-in is at one call for
// longer than `limit` seconds is killed.
template <typename Fn>
void follow(std::vector<Child>& children, double limit, Fn&& line) {
  char buffer[65536];
  for (;;) {
    std::vector<pollfd> fds;
    std::vector<Child*> open;
    for (Child& c : children) {
      if (c.fd < 0) continue;
      fds.push_back({c.fd, POLLIN, 0});
      open.push_back(&c);
    }
    if (fds.empty()) return;
    if (poll(fds.data(), fds.size(), limit > 0 ? 200 : -1) < 0 && errno != EINTR)
      throw Stop(kFailed, std::string("gate: poll: ") + std::strerror(errno));
    for (Child* c : open) kill_if_hung(*c, limit);
    for (std::size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents == 0) continue;
      Child& c = *open[i];
      const ssize_t n = read(c.fd, buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      if (n > 0) c.pending.append(buffer, static_cast<std::size_t>(n));
      std::size_t begin = 0;
      for (std::size_t end; (end = c.pending.find('\n', begin)) != std::string::npos; begin = end + 1)
        line(c, c.pending.substr(begin, end - begin));
      c.pending.erase(0, begin);
      if (n > 0) continue;
      if (!c.pending.empty()) line(c, c.pending);
      close(c.fd);
      c.fd = -1;
      while (waitpid(c.pid, &c.status, 0) < 0 && errno == EINTR) {
      }
    }
  }
}

std::string exit_text(int status) {
  if (WIFSIGNALED(status)) {
    const int n = WTERMSIG(status);
    const char* name = sigabbrev_np(n);
    return fmt::format("killed by signal {} (SIG{}: {})", n, name != nullptr ? name : "?", strsignal(n));
  }
  return fmt::format("exit status {}", WEXITSTATUS(status));
}

// What the gate's program says of its tests, "exercises TEST: FUNCTION FUNCTION", in its order.
std::vector<ListedTest> list_tests(const std::string& program, std::vector<std::string> arguments) {
  std::vector<Child> child;
  arguments.insert(arguments.begin(), "--list-exercises");
  child.push_back(start(program, arguments));
  std::vector<ListedTest> tests;
  std::string output;
  follow(child, 0, [&](Child&, const std::string& line) {
    constexpr std::string_view kBegin = "exercises ";
    output += line + "\n";
    const std::size_t colon = line.find(": ");
    if (!line.starts_with(kBegin) || colon == std::string::npos) return;
    ListedTest t{line.substr(kBegin.size(), colon - kBegin.size()), {}};
    for (auto& name : split(std::string_view(line).substr(colon + 2), ' '))
      if (!name.empty()) t.exercises.insert(std::move(name));
    tests.push_back(std::move(t));
  });
  if (child[0].status != 0)
    throw Stop(kFailed, fmt::format("gate: {} --list-exercises: {}\n{}", program, exit_text(child[0].status), output));
  return tests;
}

// "[       OK ] Suite.Test (3 ms)" -> the test's name when `tag` is there.
bool tagged(const std::string& line, std::string_view tag, std::string& test) {
  const std::size_t at = line.find(tag);
  if (at == std::string::npos) return false;
  const std::size_t begin = at + tag.size();
  const std::size_t end = std::min(line.find(" (", begin), line.find(',', begin));
  test = line.substr(begin, end == std::string::npos ? end : end - begin);
  return true;
}

void take_line(Child& c, const std::string& line) {
  std::string test;
  if (tagged(line, "[ RUN      ] ", test)) {
    c.running = test;
    c.tail.clear();
    return;
  }
  if (c.running.empty()) {
    if (line.starts_with("note: ")) c.notes.insert(line);
    return;
  }
  if (tagged(line, "[       OK ] ", test) && test == c.running) {
    ++c.passed;
    c.running.clear();
  } else if (tagged(line, "[  SKIPPED ] ", test) && test == c.running) {
    ++c.skipped;
    c.running.clear();
  } else if (tagged(line, "[  FAILED  ] ", test) && test == c.running) {
    ++c.failed;
    c.failures.push_back({test, c.tail});
    c.running.clear();
  } else if (c.tail.size() < 8192) {
    c.tail += line + "\n";
  }
}

// The report replaces what the stream said: tests may write anything between its lines.
void take_report(Child& c) {
  std::ifstream in(c.report);
  const Json j = Json::parse(in, nullptr, false);
  if (!j.is_object() || !j.contains("testsuites")) return;
  c.passed = c.failed = c.skipped = 0;
  c.failures.clear();
  for (const auto& suite : j["testsuites"])
    for (const auto& t : suite.value("testsuite", Json::array())) {
      const std::string name = suite.value("name", "") + "." + t.value("name", "");
      if (t.value("status", "") != "RUN") continue;
      c.accepted += std::atoi(t.value("calls_taken", "0").c_str());
      c.refused += std::atoi(t.value("calls_refused", "0").c_str());
      TestRecord& record = c.records[name];
      record.exercises = t.value("exercises", "");
      record.backend = t.value("backend", "");
      record.kernels = t.value("kernels", "");
      record.coverage = t.value("coverage", "");
      record.taken = std::atoi(t.value("calls_taken", "0").c_str());
      record.refused = std::atoi(t.value("calls_refused", "0").c_str());
      record.failed = t.contains("failures");
      if (t.contains("failures")) {
        std::string text;
        for (const auto& f : t["failures"]) text += f.value("failure", "") + "\n";
        c.failures.push_back({name, text});
        ++c.failed;
      } else if (t.value("result", "") == "SKIPPED") {
        ++c.skipped;
      } else {
        ++c.passed;
      }
    }
}

}  // namespace

std::string find_gate() {
  std::error_code error;
  const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
  if (error) return "";
  for (const fs::path& p : {here / "fla_gate", here / ".." / "libexec" / "fla" / "fla_gate"})
    if (access(p.c_str(), X_OK) == 0) return p.lexically_normal().string();
  return "";
}

GateResult run_gate(const std::vector<const Registry::Entry*>& ops, bool everything, const std::string& subset,
                    const PluginOptions& plugin, const std::string& device, bool record) {
  const auto t0 = std::chrono::steady_clock::now();
  GateResult g;
  g.subset = subset;
  g.hash = frozen_hash();
  g.plugin = plugin.path;
  g.device = device;
  std::vector<std::string> judged;  // what narrows the gate to one backend
  if (!plugin.path.empty()) judged.push_back("--plugin=" + fs::absolute(plugin.path).string());
  if (device != "cpu") judged.push_back("--device=" + device);
  const std::string program = find_gate();
  if (program.empty())
    refuse("gate: fla_gate was not found beside the program nor in ../libexec/fla; build it with `make build`");

  const Registry& r = Registry::global();
  for (const auto& v : environment_variables(r))
    if (const char* value = std::getenv(v.name.c_str()))
      print(stderr, "warning: {}={} is set: the gate proves the routes it leaves\n", v.name, value);

  std::set<std::string> wanted;
  for (const Registry::Entry* e : ops) {
    g.ops.push_back(e->spec.name);
    wanted.insert(e->spec.name);
  }
  std::vector<std::string> tests;
  for (const ListedTest& t : list_tests(program, judged)) {
    g.all_tests.push_back(t.name);
    if (t.name.find("DISABLED_") != std::string::npos || !in_subset(t.name, subset)) continue;
    if (everything || std::ranges::any_of(t.exercises, [&](const auto& f) { return wanted.contains(f); }))
      tests.push_back(t.name);
  }
  g.selected = static_cast<int>(tests.size());
  if (tests.empty()) return g;

  const TempDir temp;
  const std::size_t shards =
      std::clamp<std::size_t>(tests.size() / 4, 1, static_cast<std::size_t>(std::clamp(machine().processors, 1, 16)));
  std::vector<Child> children;
  for (std::size_t i = 0; i < shards; ++i) {
    std::vector<std::string> mine;
    for (std::size_t t = i; t < tests.size(); t += shards) mine.push_back(tests[t]);
    const fs::path report = temp.path / fmt::format("{}.json", i), flags = temp.path / fmt::format("{}.flags", i);
    std::ofstream(flags) << "--gtest_filter=" << join(mine, ":") << "\n";
    std::vector<std::string> arguments = {"--gtest_flagfile=" + flags.string(),
                                          "--gtest_output=json:" + report.string(), "--gtest_color=no"};
    arguments.insert(arguments.end(), judged.begin(), judged.end());
    if (record) arguments.emplace_back("--record");
    PluginTrace* trace = nullptr;
    if (!plugin.path.empty()) {
      const std::string file = (temp.path / fmt::format("{}.trace", i)).string();
      trace = map_trace(file);
      if (trace == nullptr) throw Stop(kFailed, "gate: cannot map " + file + ": " + std::strerror(errno));
      arguments.push_back("--plugin-trace=" + file);
    }
    children.push_back(start(program, arguments));
    children.back().trace = trace;
    children.back().tests = std::move(mine);
    children.back().report = report;
  }
  {
    Progress progress;
    follow(children, plugin.path.empty() ? 0.0 : static_cast<double>(plugin.timeout_s),
           [&](Child& c, const std::string& line) {
             take_line(c, line);
             int done = 0, failed = 0;
             for (const Child& x : children) done += x.passed + x.failed + x.skipped, failed += x.failed;
             progress.show(
                 fmt::format("gate: {} of {}, {} failed  {}", done, tests.size(), failed, c.running.substr(0, 60)));
           });
  }
  for (Child& c : children) {
    const bool died = WIFSIGNALED(c.status);
    if (!died) take_report(c);
    int done = c.passed + c.failed + c.skipped;
    // A process whose tests were all skipped says so by its status; others may have passed.
    const bool all_skipped =
        !died && WEXITSTATUS(c.status) == kNothing && c.skipped > 0 && done == static_cast<int>(c.tests.size());
    const bool cut_short = c.trace != nullptr && c.trace->finished.load() == 0;  // perhaps with status 0
    if (died || cut_short || (c.status != 0 && c.failed == 0 && !all_skipped)) {
      // The process fell, and its test with it.
      const std::string what = cut_short ? death_text(*c.trace, c.status, c.hung, static_cast<double>(plugin.timeout_s))
                                         : exit_text(c.status);
      c.failures.push_back({c.running.empty() ? "fla_gate" : c.running, what + "\n" + c.tail});
      ++c.failed;
      if (!c.running.empty()) ++done;
    }
    g.passed += c.passed;
    g.failed += c.failed;
    g.skipped += c.skipped;
    g.accepted += c.accepted;
    g.refused += c.refused;
    g.not_run += std::max(0, static_cast<int>(c.tests.size()) - done);
    std::move(c.failures.begin(), c.failures.end(), std::back_inserter(g.failures));
    g.records.merge(c.records);
    g.notes.merge(c.notes);
  }
  g.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
  return g;
}

namespace {

// A file of records: comments, and "TEST: VALUE" lines in byte order. Lines of tests that are gone are left out.
void update_records(const fs::path& file, const std::map<std::string, std::string>& values, const GateResult& g) {
  std::string head;
  std::map<std::string, std::string> lines;
  for (const std::string& line : lines_of(read_text(file))) {
    if (line.starts_with("#"))
      head += line + "\n";
    else if (const std::size_t colon = line.find(": "); colon != std::string::npos)
      lines[line.substr(0, colon)] = line.substr(colon + 2);
  }
  std::erase_if(lines, [&](const auto& l) {
    return std::find(g.all_tests.begin(), g.all_tests.end(), l.first) == g.all_tests.end();
  });
  for (const auto& [test, value] : values) {
    if (value.empty())
      lines.erase(test);
    else
      lines[test] = value;
  }
  std::string text = head;
  for (const auto& [test, value] : lines) text += test + ": " + value + "\n";
  write_text(file, text);
  print(stderr, "gate: wrote {}: {} lines\n", file.string(), lines.size());
}

}  // namespace

void write_records(const GateResult& g, const fs::path& folder) {
  std::map<std::string, std::string> exercises;
  std::map<std::string, std::map<std::string, std::string>> refusals, kernels;  // by backend
  for (const auto& [test, r] : g.records) {
    if (r.failed) {
      print(stderr, "gate: {} failed: what is recorded of it stays\n", test);
      continue;
    }
    if (test.find("/Kernels") != std::string::npos) kernels[r.backend.empty() ? "cpu" : r.backend][test] = r.kernels;
    if (r.backend.empty())
      exercises[test] = r.exercises;
    else
      refusals[r.backend][test] =
          r.refused == 0 && r.taken > 0 ? "" : fmt::format("{}{}", r.refused, r.taken == 0 ? " none-taken" : "");
  }
  // A device's tests are a part of all, and other calls of theirs are recorded where all are run.
  if (g.device == "cpu") update_records(folder / "exercises.txt", exercises, g);
  for (const auto& [backend, values] : kernels) update_records(folder / ("kernels_" + backend + ".txt"), values, g);
  for (const auto& [backend, values] : refusals) update_records(folder / ("refusals_" + backend + ".txt"), values, g);
}

Json to_json(const GateResult& g) {
  Json failures = Json::array();
  for (const auto& f : g.failures) failures.push_back({{"test", f.test}, {"text", f.text}});
  return {{"ops", g.ops},
          {"subset", g.subset.empty() ? Json(nullptr) : Json(g.subset)},
          {"selected", g.selected},
          {"passed", g.passed},
          {"failed", g.failed},
          {"skipped", g.skipped},
          {"not_run", g.not_run},
          {"seconds", g.seconds},
          {"hash", g.hash},
          {"failures", std::move(failures)},
          {"notes", g.notes},
          {"device", g.device},
          {"calls",
           g.plugin.empty() && g.device == "cpu" ? Json(nullptr) : Json{{"taken", g.accepted}, {"refused", g.refused}}},
          {"plugin", g.plugin.empty() ? Json(nullptr)
                                      : Json{{"path", g.plugin}, {"accepted", g.accepted}, {"refused", g.refused}}}};
}

namespace {

void list_kernels(const Registry::Entry* e, DeviceType device, KernelCoverage& c) {
  if (e == nullptr) return;
  for (const auto& candidate : e->candidates) {
    const Backend& b = *candidate.backend;
    if (candidate.kernel == nullptr || b.device != device) continue;
    for (const std::string& name : candidate.kernel->kernel_names(b.limits != nullptr ? b.limits(0) : nullptr))
      c.kernels[name];
  }
}

}  // namespace

KernelCoverage coverage_of(const GateResult& g, const std::vector<const Registry::Entry*>& ops) {
  KernelCoverage c;
  const DeviceType device = g.device == "cpu" ? DeviceType::Cpu : DeviceType::Cuda;
  for (const Registry::Entry* e : ops) {
    list_kernels(e, device, c);
    list_kernels(Registry::global().find(e->spec.backward), device, c);
  }
  std::set<std::string> reached;
  for (const auto& [test, r] : g.records) {
    for (const std::string& kernel : split(r.kernels, ' '))
      if (!kernel.empty()) reached.insert(kernel);
    std::istringstream lines(r.coverage);
    std::string kernel, topic;
    for (int count = 0; lines >> kernel >> topic >> count;) c.kernels[kernel][topic] += count;
  }
  for (const std::string& kernel : reached)
    if (c.kernels[kernel].empty()) c.unjudged.insert(kernel);
  return c;
}

Json to_json(const KernelCoverage& c) {
  Json kernels = Json::object();
  for (const auto& [kernel, topics] : c.kernels) kernels[kernel] = topics;
  return {{"kernels", std::move(kernels)}, {"unjudged", c.unjudged}};
}

void print_coverage(const KernelCoverage& c, std::FILE* to) {
  std::size_t width = 6, without = 0;
  std::set<std::string> topics;
  for (const auto& [kernel, counts] : c.kernels) {
    width = std::max(width, kernel.size());
    for (const auto& [topic, n] : counts) topics.insert(topic);
  }
  print(to, "{:<{}}", "kernel", width);
  for (const auto& topic : topics) print(to, "  {:>5}", topic);
  print(to, "\n");
  for (const auto& [kernel, counts] : c.kernels) {
    print(to, "{:<{}}", kernel, width);
    for (const auto& topic : topics) {
      const auto at = counts.find(topic);
      print(to, "  {:>{}}", at == counts.end() ? 0 : at->second, std::max<std::size_t>(topic.size(), 5));
    }
    without += counts.empty() ? 1U : 0U;
    print(to, "{}\n", c.unjudged.contains(kernel) ? "  REACHED, NOT JUDGED" : counts.empty() ? "  no case here" : "");
  }
  print(to, "coverage: {} kernels, {} without a case of these operators, {} reached and not judged\n", c.kernels.size(),
        without, c.unjudged.size());
}

void print_gate(const GateResult& g, std::FILE* to) {
  constexpr std::size_t kTests = 20, kText = 1200;
  for (std::size_t i = 0; i < std::min(kTests, g.failures.size()); ++i) {
    const auto& f = g.failures[i];
    print(to, "FAILED {}\n{}{}\n", f.test, f.text.substr(0, kText), f.text.size() > kText ? "..." : "");
  }
  if (g.failures.size() > kTests) print(to, "... and {} more\n", g.failures.size() - kTests);
  if (g.selected == 0) {
    print(to, "gate: no test was selected{}\n", g.subset.empty() ? "" : " by -k '" + g.subset + "'");
    return;
  }
  std::string rest;
  if (g.not_run > 0) rest += fmt::format(", {} not run", g.not_run);
  if (g.exit_code() == kNothing)
    rest += "; all were skipped: not green";
  else if (!g.subset.empty())
    rest += fmt::format("; only tests with '{}': a signal, not a verdict", g.subset);
  for (const auto& note : g.notes) print(to, "{}\n", note);
  if (g.device != "cpu") print(to, "{}: {} calls taken, {} refused\n", g.device, g.accepted, g.refused);
  if (!g.plugin.empty()) print(to, "plug-in {}: {} calls taken, {} refused\n", g.plugin, g.accepted, g.refused);
  print(to, "gate: {} passed, {} failed, {} skipped{} ({:.1f} s)  frozen {}\n", g.passed, g.failed, g.skipped, rest,
        g.seconds, g.hash);
}

}  // namespace fla::tools
