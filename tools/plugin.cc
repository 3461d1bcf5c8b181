#include "tools/plugin.h"

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
#include "tools/common/plugin_guard.h"

namespace fla::tools {
namespace {

[[noreturn]] void run_child(PluginTrace* trace, const std::string& path, bool json,
                            const std::function<int(const std::string&)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a parent that is killed takes its child along
  use_trace(trace);
  const int code = report_errors(json, [&] {
    const Plugin plugin = check(load_guarded_plugin(path));
    return body(plugin.name);
  });
  std::fflush(nullptr);
  trace->exit_code = code;
  trace->finished = 1;
  _exit(code);  // the plug-in's own destructors have no say in the result
}

}  // namespace

void add_plugin(CLI::App* app, PluginOptions& o) {
  app->add_option("--plugin", o.path, "kernels of your own: a shared library with fla/plugin.h's entry point");
  app->add_option("--plugin-timeout", o.timeout_s, "seconds that one call of the plug-in may take (default 60)")
      ->check(integer(1, 1000000));
}

int with_plugin(const PluginOptions& o, bool json, Json failed, const std::function<int(const std::string&)>& body) {
  if (o.path.empty()) return body("");
  PluginTrace* trace = map_trace();
  int alive[2];
  if (trace == nullptr || pipe2(alive, O_CLOEXEC) != 0)
    throw Stop(kFailed, std::string("--plugin: ") + std::strerror(errno));
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw Stop(kFailed, std::string("--plugin: fork: ") + std::strerror(errno));
  if (child == 0) {
    close(alive[0]);
    run_child(trace, o.path, json, body);
  }
  close(alive[1]);
  int status = 0;
  bool hung = false;
  for (;;) {
    // The pipe closes when the child ends; a process that it has left behind may hold it open.
    pollfd end{alive[0], POLLIN, 0};
    const int ready = poll(&end, 1, 100);
    const pid_t ended = waitpid(child, &status, ready > 0 ? 0 : WNOHANG);
    if (ended == child || (ended < 0 && errno != EINTR)) break;
    if (!hung && seconds_inside(*trace) > static_cast<double>(o.timeout_s)) {
      hung = true;
      kill(child, SIGKILL);
    }
  }
  close(alive[0]);
  if (trace->finished.load() != 0) return trace->exit_code.load();
  const std::string text = death_text(*trace, status, hung, static_cast<double>(o.timeout_s));
  print(stderr, "fla: plug-in {}: {}\n", o.path, text);
  if (json) {
    failed["plugin"] = o.path;
    failed["error"] = error_json(kFailed, text);
    print_json(failed);
  }
  return kFailed;
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
