#include "tools/plugin/child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "CLI/CLI.hpp"
#include "tools/plugin/guard.h"

namespace fla::tools {
namespace {

// A process with the plug-in in it, and what it says on a pipe.
struct Child {
  PluginTrace* trace = nullptr;
  pid_t pid = -1;
  int pipe = -1;
};

Child start(const PluginOptions& o, bool json, const std::function<int(const std::string& backend, int pipe)>& body) {
  Child c;
  c.trace = map_trace();
  int ends[2];
  if (c.trace == nullptr || pipe2(ends, O_CLOEXEC) != 0)
    throw Stop(kFailed, std::string("--plugin: ") + std::strerror(errno));
  std::fflush(nullptr);
  c.pid = fork();
  if (c.pid < 0) throw Stop(kFailed, std::string("--plugin: fork: ") + std::strerror(errno));
  if (c.pid > 0) {
    close(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    c.pipe = ends[0];
    return c;
  }
  close(ends[0]);
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a parent that is killed takes its child along
  use_trace(c.trace);
  const int code = report_errors(json, [&] {
    const Plugin plugin = check(load_guarded_plugin(o.path));
    return body(plugin.name, ends[1]);
  });
  std::fflush(nullptr);
  c.trace->exit_code = code;
  c.trace->finished = 1;
  _exit(code);  // the plug-in's own destructors have no say in the result
}

// Takes what is in the pipe; false at its end.
bool drain(int pipe, std::string& said) {
  char text[4096];
  ssize_t n = 0;
  while ((n = read(pipe, text, sizeof text)) > 0) said.append(text, static_cast<std::size_t>(n));
  return n != 0;
}

// Reads what the child says until it ends. Empty: it has finished its work; else why it has not.
std::string watch(const Child& c, const PluginOptions& o, std::string& said) {
  int status = 0;
  bool hung = false;
  for (bool open = true;;) {
    // The pipe closes when the child ends; a process that it has left behind may hold it open.
    pollfd event{c.pipe, POLLIN, 0};
    if (open && poll(&event, 1, 100) > 0) open = drain(c.pipe, said);
    const pid_t ended = waitpid(c.pid, &status, open ? WNOHANG : 0);
    if (ended == c.pid || (ended < 0 && errno != EINTR)) break;
    if (!hung && seconds_inside(*c.trace) > static_cast<double>(o.timeout_s)) {
      hung = true;
      kill(c.pid, SIGKILL);
    }
  }
  drain(c.pipe, said);  // its last words
  close(c.pipe);
  if (c.trace->finished.load() != 0) return "";
  return death_text(*c.trace, status, hung, static_cast<double>(o.timeout_s));
}

int report_death(const PluginOptions& o, bool json, Json failed, const std::string& text) {
  print(stderr, "fla: plug-in {}: {}\n", o.path, text);
  if (json) {
    failed["plugin"] = o.path;
    failed["error"] = error_json(kFailed, text);
    print_json(failed);
  }
  return kFailed;
}

// All of it, or the child counts as dead.
void say(int pipe, const std::string& line) {
  for (std::size_t at = 0; at < line.size();) {
    const ssize_t n = write(pipe, line.data() + at, line.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) _exit(kFailed);
    at += static_cast<std::size_t>(n);
  }
}

}  // namespace

void add_plugin(CLI::App* app, PluginOptions& o) {
  app->add_option("--plugin", o.path, "kernels of your own: a shared library with fla/plugin.h's entry point");
  app->add_option("--plugin-timeout", o.timeout_s, "seconds that one call of the plug-in may take (default 60)")
      ->check(integer(1, 1000000));
}

int with_plugin(const PluginOptions& o, bool json, Json failed, const std::function<int(const std::string&)>& body) {
  if (o.path.empty()) return body("");
  const Child c = start(o, json, [&](const std::string& backend, int) { return body(backend); });
  std::string nothing;
  const std::string death = watch(c, o, nothing);
  return death.empty() ? c.trace->exit_code.load() : report_death(o, json, std::move(failed), death);
}

int in_parts(const PluginOptions& o, bool json, Json failed, const PluginParts& work) {
  std::size_t next = 0;
  do {
    const Child c = start(o, json, [&](const std::string& backend, int pipe) {
      say(pipe, "loaded\n");
      for (std::size_t i = next; i < work.count; ++i) say(pipe, work.part(i, backend).dump() + "\n");
      return static_cast<int>(kGood);
    });
    std::string said;
    const std::string death = watch(c, o, said);
    std::vector<std::string> lines = split(said, '\n');
    if (!said.ends_with('\n') && !lines.empty()) lines.pop_back();  // cut off by its end
    if (lines.empty() || lines.front() != "loaded")
      return death.empty() ? c.trace->exit_code.load() : report_death(o, json, std::move(failed), death);
    for (std::size_t i = 1; i < lines.size() && next < work.count; ++i)
      if (!lines[i].empty()) work.done(next++, Json::parse(lines[i]));
    if (death.empty() && c.trace->exit_code.load() != kGood) return c.trace->exit_code.load();
    if (death.empty()) break;
    if (next < work.count) work.died(next++, death);
  } while (next < work.count);
  return kGood;
}

std::vector<const Registry::Entry*> keep_served(std::vector<const Registry::Entry*> ops, const PluginOptions& o,
                                                const std::string& backend) {
  if (o.path.empty()) return ops;
  const Registry& r = Registry::global();
  const auto serves = [&](const Registry::Entry* e) {
    if (e == nullptr) return false;
    const std::vector<std::string> who = backends_of(e);
    return std::find(who.begin(), who.end(), backend) != who.end();
  };
  std::vector<std::string> served;
  for (const Registry::Entry* e : r.entries())
    if (serves(e)) served.push_back(e->spec.name);
  std::vector<const Registry::Entry*> kept;
  for (const Registry::Entry* e : ops) {
    if (serves(e) || serves(r.find(e->spec.backward)))
      kept.push_back(e);
    else
      print(stderr, "fla: plug-in {} does not serve {}; it serves {}\n", o.path, e->spec.name, join(served));
  }
  if (kept.empty()) throw Stop(kUsage, fmt::format("--plugin: nothing of what was asked for is served by {}", o.path));
  return kept;
}

}  // namespace fla::tools
