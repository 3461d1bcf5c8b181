// What a context and the calls that were prepared on it share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "fla/core/context.h"

namespace fla::detail {

// Counted references: the context's, and one of every prepared call. When the context goes, it closes the core: later
// runs are refused, and the destructor waits for those that are under way.
struct ContextCore {
  explicit ContextCore(ContextOptions o);
  ContextOptions options;
  const Registry* registry;
  Status status;
  ThreadPool pool;
  std::unique_ptr<std::atomic<std::uintptr_t>[]>
      logged;  // what was seen; no lock, which a child of fork() might find taken

  void log_once(const void* key, int kind, const LogRecord& record);

  // Whether a run may begin; then end() has to follow.
  bool begin() {
    if ((users.fetch_add(2, std::memory_order_acquire) & kClosed) == 0) return true;
    end();
    return false;
  }
  void end() {
    if ((users.fetch_sub(2, std::memory_order_release) & kClosed) != 0) users.notify_all();
  }
  void close();

  void retain() { references.fetch_add(1, std::memory_order_relaxed); }
  void release() {
    if (references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  static constexpr unsigned kClosed = 1;
  std::atomic<unsigned> users{0};  // twice the runs under way, and the lowest bit when closed
  std::atomic<long> references{1};
};

}  // namespace fla::detail
