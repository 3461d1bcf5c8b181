// A plug-in's code is somebody else's: it may crash, hang, end the process, write where it may not. Tools run it in a
// child process, on memory of its own between pages that nobody may touch, and keep a trace that outlives the child.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "fla/core/status.h"
#include "fla/registry/plugin.h"

namespace fla::tools {

// What a parent knows about its child: memory that both share.
struct PluginTrace {
  std::atomic<std::int32_t> inside;    // threads that are in the plug-in's code
  std::atomic<std::int64_t> since;     // when the last one entered, ns of the steady clock
  std::atomic<std::int32_t> finished;  // the child has done its work and is about to end with `exit_code`
  std::atomic<std::int32_t> exit_code;
  char where[512];  // "forward of chunk_gla, q F32 [1,64,2,32] ..."
  char fault[256];  // what the signal handler saw: "wrote 0 bytes past the end of out.o"
};

// A trace in memory that is shared with children forked later; with a path, in that file, which a program started later
// maps by the same call. Null when the system refuses.
PluginTrace* map_trace(const std::string& path = "");
// Where this process leaves its trace from now on.
void use_trace(PluginTrace* trace);

// Seconds that the child's plug-in has been at one call; 0 when it is not in a call.
double seconds_inside(const PluginTrace& trace);
// Why a child that did not finish has ended. `status` is waitpid's; hung: the parent killed it after `limit` seconds.
std::string death_text(const PluginTrace& trace, int status, bool hung, double limit);

// load_plugin into the library's own registry, every kernel watched: the trace says where the process is, and each
// launch runs on copies of its tensors between guard pages. Inputs are read-only pages, outputs and workspace are full
// of NaN; what was not written, or written beside, makes the call fail with a text that says so.
Result<Plugin> load_guarded_plugin(const std::string& path);

// While one lives, launches go straight to the caller's memory: for timing. The trace is kept all the same.
class PluginAtSpeed {
 public:
  PluginAtSpeed();
  ~PluginAtSpeed();
  PluginAtSpeed(const PluginAtSpeed&) = delete;
  PluginAtSpeed& operator=(const PluginAtSpeed&) = delete;
};

}  // namespace fla::tools
