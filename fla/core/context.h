// Context: what a caller decides once and every call uses: threads, logging, a forced backend, test modes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
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

// Any callable that takes a LogRecord. A type of its own, as the standard's one makes every user read a large header.
class LogFn {
 public:
  LogFn() = default;
  template <typename F, typename = std::enable_if_t<!std::is_same_v<std::decay_t<F>, LogFn>>>
  LogFn(F&& f)  // NOLINT(google-explicit-constructor)
      : target_(new std::decay_t<F>(std::forward<F>(f))), table_(&kTable<std::decay_t<F>>) {}
  LogFn(const LogFn& o) : target_(o.table_ != nullptr ? o.table_->copy(o.target_) : nullptr), table_(o.table_) {}
  LogFn(LogFn&& o) noexcept : target_(std::exchange(o.target_, nullptr)), table_(std::exchange(o.table_, nullptr)) {}
  LogFn& operator=(LogFn o) noexcept {
    std::swap(target_, o.target_);
    std::swap(table_, o.table_);
    return *this;
  }
  ~LogFn() {
    if (table_ != nullptr) table_->destroy(target_);
  }
  explicit operator bool() const { return table_ != nullptr; }
  void operator()(const LogRecord& r) const { table_->call(target_, r); }

 private:
  struct Table {
    void (*call)(void*, const LogRecord&);
    void* (*copy)(const void*);
    void (*destroy)(void*);
  };
  template <typename F>
  static constexpr Table kTable = {
      [](void* f, const LogRecord& r) { (*static_cast<F*>(f))(r); },
      [](const void* f) -> void* { return new F(*static_cast<const F*>(f)); },
      [](void* f) { delete static_cast<F*>(f); },
  };
  void* target_ = nullptr;
  const Table* table_ = nullptr;
};

struct ContextOptions {
  int threads = 0;            // pool size, at most 4096; 0 = one per processor this process may run on
  std::vector<int> affinity;  // processors to pin workers to; empty = the system decides
  LogFn log;                  // called at most once per (operation, function, backend) hit and refusal of this context
  std::string backend;        // only this backend may serve calls ("reference", "cpu"); empty = dispatch decides
  Stream stream;  // calls on tensors of an accelerator start here and do not wait, unless a run names another
  // Refuse inputs and upstream gradients that hold a NaN or an infinity, and log gates above 0 (minus infinity is a
  // gate that forgets everything, and allowed); on an accelerator also look into tables of boundaries and slots, and wait for the
  // call so that its errors are its own. Copies every input to the host: for finding a fault.
  bool check_values = false;
  bool poison = false;                 // fill every workspace with NaN before a kernel gets it (tests)
  bool strict = false;                 // a backend that accepts a call it does not implement is an error (tests)
  std::string kernel;                  // only this kernel may serve calls, by its name in `fla explain` (tests)
  const Registry* registry = nullptr;  // nullptr = the library's own
};

namespace detail {
struct ContextCore;  // lives as long as the context, or as a prepared call that is running on it
}

// Calls on one Context may come from several threads; they share its pool. Not copyable: it owns threads.
class FLA_API Context {
 public:
  explicit Context(ContextOptions options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Names the option that cannot be, if there is one: then every call on this context returns this and does nothing.
  const Status& status() const;
  const ContextOptions& options() const;
  const Registry& registry() const;
  ThreadPool& pool() const;
  int threads() const { return pool().size(); }

  // Forwards to the log callback the first time (key, kind) is seen. Costs nothing without a callback.
  void log_once(const void* key, int kind, const LogRecord& record) const;

  detail::ContextCore* core() const { return core_; }  // for the library

 private:
  detail::ContextCore* core_;
};

}  // namespace fla
