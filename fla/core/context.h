// Context: what a caller decides once and every call uses: threads, logging, a forced backend, test modes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fla/core/device.h"
#include "fla/core/export.h"
#include "fla/core/status.h"
#include "fla/core/threads.h"

namespace fla {

class Registry;

enum class LogLevel : std::uint8_t { Info, Warning };

// One dispatch event. The library prints nothing; a caller who wants to see these sets ContextOptions::log.
struct LogRecord {
  LogLevel level = LogLevel::Info;
  std::string_view operation;  // "gla"
  std::string_view function;   // "chunk_gla"
  std::string_view backend;    // "cpu"
  std::string_view message;    // "hit", "refused: K: needs ...", ...
};
using LogFn = std::function<void(const LogRecord&)>;

struct ContextOptions {
  int threads = 0;            // pool size, at most 4096; 0 = one per processor this process may run on
  std::vector<int> affinity;  // processors to pin workers to; empty = the system decides
  LogFn log;                  // called at most once per (operation, function, backend) hit and refusal of this context
  std::string backend;        // only this backend may serve calls ("reference", "cpu"); empty = dispatch decides
  Stream stream;              // calls on tensors of an accelerator start here and do not wait
  // Refuse inputs that hold a NaN; on an accelerator also look into tables of boundaries and slots, and wait for the
  // call so that its errors are its own. Copies every input to the host: for finding a fault.
  bool check_values = false;
  bool poison = false;                 // fill every workspace with NaN before a kernel gets it (tests)
  bool strict = false;                 // a backend that accepts a call it does not implement is an error (tests)
  const Registry* registry = nullptr;  // nullptr = the library's own
};

// Calls on one Context may come from several threads; they share its pool. Not copyable: it owns threads.
class FLA_API Context {
 public:
  explicit Context(ContextOptions options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Names the option that cannot be, if there is one: then every call on this context returns this and does nothing.
  const Status& status() const { return status_; }
  const ContextOptions& options() const { return options_; }
  const Registry& registry() const { return *registry_; }
  ThreadPool& pool() const { return pool_; }
  int threads() const { return pool_.size(); }

  // Forwards to the log callback the first time (key, kind) is seen. Costs nothing without a callback.
  void log_once(const void* key, int kind, const LogRecord& record) const;

 private:
  struct LogState;
  ContextOptions options_;
  const Registry* registry_;
  Status status_;
  mutable ThreadPool pool_;
  std::unique_ptr<LogState> log_state_;
};

}  // namespace fla
