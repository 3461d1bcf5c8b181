// A small pool of threads that stays hot between calls. One per Context; its size never changes a result.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "fla/core/export.h"
#include "fla/core/status.h"

namespace fla {

class FLA_API ThreadPool {
 public:
  static constexpr int kMaxThreads = 4096;
  // What the constructor takes; a refusal starts with the option ("threads: expected ...").
  static Status check(int threads, std::span<const int> affinity);

  // threads: 0 is one per processor this process may run on. affinity: processor numbers, one per worker (cyclic);
  // empty leaves placement to the system. The calling thread is worker 0, so size() - 1 threads are created, on the
  // first run that needs them.
  explicit ThreadPool(int threads = 0, std::span<const int> affinity = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls fn(task, worker) once for every task in [0, tasks) and returns when all are done. worker is in [0, size())
  // and no two concurrent calls of one run share it, so it indexes per-thread scratch.
  // - fn must not throw.
  // - Called from inside a task, or while another thread is using the pool, it runs every task on the calling thread
  //   as worker 0. Callers' scratch belongs to the call, so that is safe, and results do not depend on it.
  // - In a child after fork() the threads are gone; the first run there creates new ones.
  template <typename Fn>
  void run(std::int64_t tasks, Fn&& fn) {
    using F = std::remove_reference_t<Fn>;
    run_erased(
        tasks, [](void* f, std::int64_t task, int worker) { (*static_cast<F*>(f))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

 private:
  using TaskFn = void (*)(void*, std::int64_t, int);
  void run_erased(std::int64_t tasks, TaskFn fn, void* arg);

  struct Impl;
  Impl* impl_;  // owned
};

}  // namespace fla
