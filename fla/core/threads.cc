#include "fla/core/threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#define FLA_HAS_FORK 1
#endif
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace fla {
namespace {

// Long enough to bridge the gap between two stages of one operator, short enough that an idle pool costs nothing.
constexpr std::chrono::microseconds kSpin{40};
constexpr std::size_t kCacheLine = 64;

long process_id() {
#if defined(FLA_HAS_FORK)
  return static_cast<long>(getpid());
#else
  return 0;
#endif
}

int processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Whether the system did it; else it places the thread, and results are equal.
bool pin_this_thread([[maybe_unused]] int processor) {
#if defined(__linux__)
  if (processor < 0 || processor >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(processor), &set);
  return pthread_setaffinity_np(pthread_self(), sizeof(set), &set) == 0;
#else
  return processor >= 0;
#endif
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns once `a` differs from `value`; sleeps in the kernel after a short spin.
void wait_while(const std::atomic<int>& a, int value, bool spin) {
  if (spin) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 16; ++i) {
        if (a.load(std::memory_order_acquire) != value) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
  }
  while (a.load(std::memory_order_acquire) == value) a.wait(value, std::memory_order_acquire);
}

// The pools whose tasks this thread is inside of, innermost first.
struct Frame {
  const void* pool;
  const Frame* outer;
};
thread_local const Frame* innermost = nullptr;

bool inside_task_of(const void* pool) {
  for (const Frame* f = innermost; f != nullptr; f = f->outer) {
    if (f->pool == pool) return true;
  }
  return false;
}

class Enter {
 public:
  explicit Enter(const void* pool) : frame_{pool, innermost} { innermost = &frame_; }
  ~Enter() { innermost = frame_.outer; }
  Enter(const Enter&) = delete;
  Enter& operator=(const Enter&) = delete;

 private:
  Frame frame_;
};

}  // namespace

struct ThreadPool::Impl {
  // A worker's slot goes Idle -> Posted (caller) -> Taken (worker) -> Idle (worker). What no worker has taken when the
  // tasks run out, the caller takes back, so a worker that is slow to wake delays nobody, and the plain fields of Job
  // are read only by workers that the caller waits for.
  enum Phase : int { Idle, Posted, Taken, Stop };
  struct alignas(kCacheLine) Slot {
    std::atomic<int> phase{Idle};
    std::thread thread;
  };
  struct Job {
    TaskFn fn = nullptr;
    void* arg = nullptr;
    std::uint64_t tasks = 0;
    int workers = 0;
  };

  // All that belongs to the threads of one process. fork() copies it without them, in whatever state it is just then,
  // so a child makes its own and never touches or frees its parent's.
  struct Team {
    Team(const Impl& owner, Team* parents_team)
        : pool(owner), pid(process_id()), parent(parents_team), slots(static_cast<std::size_t>(owner.size)) {}

    const Impl& pool;
    const long pid;
    Team* const parent;       // keeps the parent process's team reachable for leak checkers
    std::vector<Slot> slots;  // slot 0, the caller's, stays unused
    Job job;
    int started = 1;  // workers that exist, the caller included
    alignas(kCacheLine) std::atomic<bool> busy{false};
    alignas(kCacheLine) std::atomic<std::uint64_t> next{0};

    void start() {
      try {
        while (started < pool.size) {
          slots[static_cast<std::size_t>(started)].thread = std::thread(&Team::serve, this, started);
          ++started;
        }
      } catch (const std::system_error&) {
        // The system gives no more threads: those that exist do the work.
      }
    }

    void stop() {
      for (Slot& s : slots) {
        if (!s.thread.joinable()) continue;
        s.phase.store(Stop, std::memory_order_release);
        s.phase.notify_one();
        s.thread.join();
      }
    }

    // Workers wake one another in a binary tree: a wake-up costs microseconds, too many for the caller to pay for all.
    void wake_children(int worker) {
      for (int child = 2 * worker + 1; child <= 2 * worker + 2 && child < job.workers; ++child) {
        slots[static_cast<std::size_t>(child)].phase.notify_one();
      }
    }

    void work(int worker) {
      for (;;) {
        const std::uint64_t task = next.fetch_add(1, std::memory_order_relaxed);
        if (task >= job.tasks) return;
        job.fn(job.arg, static_cast<std::int64_t>(task), worker);
      }
    }

    void serve(int worker) {
      const Enter enter(&pool);
      if (!pool.affinity.empty())
        pin_this_thread(pool.affinity[static_cast<std::size_t>(worker) % pool.affinity.size()]);
      std::atomic<int>& phase = slots[static_cast<std::size_t>(worker)].phase;
      for (;;) {
        wait_while(phase, Idle, pool.spin);
        int expected = Posted;
        if (phase.compare_exchange_strong(expected, Taken, std::memory_order_acq_rel)) {
          wake_children(worker);
          work(worker);
          phase.store(Idle, std::memory_order_release);
          phase.notify_one();
        } else if (expected == Stop) {
          return;
        }
      }
    }

    void run(const Job& new_job) {
      if (started < pool.size) start();
      job = new_job;
      job.workers = static_cast<int>(std::min<std::uint64_t>(job.tasks, static_cast<std::uint64_t>(started)));
      next.store(0, std::memory_order_relaxed);
      for (int i = 1; i < job.workers; ++i) {
        slots[static_cast<std::size_t>(i)].phase.store(Posted, std::memory_order_release);
      }
      wake_children(0);
      work(0);
      for (int i = 1; i < job.workers; ++i) {
        std::atomic<int>& phase = slots[static_cast<std::size_t>(i)].phase;
        int expected = Posted;
        if (!phase.compare_exchange_strong(expected, Idle, std::memory_order_acq_rel) && expected == Taken) {
          wait_while(phase, Taken, pool.spin);
        }
      }
    }
  };

  Impl(int threads, std::span<const int> processors_of_workers)
      : size(threads > 0 ? threads : processors()),
        spin(size <= processors()),
        affinity(processors_of_workers.begin(), processors_of_workers.end()) {
    if (size > 1) team.store(new Team(*this, nullptr), std::memory_order_release);
  }

  ~Impl() {
    Team* t = team.load(std::memory_order_acquire);
    if (t == nullptr || t->pid != process_id()) return;  // after a fork: there is nobody to join
    t->stop();
    delete t;
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // This process's team. Two threads of a child may both find the parent's: one of their new teams wins.
  Team& current_team() {
    Team* t = team.load(std::memory_order_acquire);
    const long pid = process_id();
    if (t->pid == pid) return *t;
    auto fresh = std::make_unique<Team>(*this, t);
    if (team.compare_exchange_strong(t, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
    return *t;
  }

  const int size;
  const bool spin;  // not when the workers outnumber the processors: spinning would keep the others from their work
  const std::vector<int> affinity;  // applied to created threads only; the caller's placement is the caller's
  std::atomic<Team*> team{nullptr};
};

Status ThreadPool::check(int threads, std::span<const int> affinity) {
  if (threads < 0 || threads > kMaxThreads)
    return {Code::InvalidArgument, "threads: expected 0 (one per processor) to " + std::to_string(kMaxThreads) +
                                       ", got " + std::to_string(threads)};
  if (affinity.empty()) return {};
  // Only trying tells: which processors exist, and which this process may use, are two questions to different parts of
  // the system. A thread of its own tries, as the caller's placement is the caller's.
  std::size_t bad = affinity.size();
  const auto attempt = [&] {
    for (bad = 0; bad < affinity.size() && pin_this_thread(affinity[bad]);) ++bad;
  };
  try {
    std::thread(attempt).join();
  } catch (const std::system_error&) {
    return {Code::OutOfMemory, "affinity: the system gives no thread to try it with"};
  }
  if (bad == affinity.size()) return {};
  return {Code::InvalidArgument, "affinity[" + std::to_string(bad) +
                                     "]: expected a processor that this process may run on, got " +
                                     std::to_string(affinity[bad])};
}

ThreadPool::ThreadPool(int threads, std::span<const int> affinity) : impl_(new Impl(threads, affinity)) {}

ThreadPool::~ThreadPool() { delete impl_; }

int ThreadPool::size() const { return impl_->size; }

void ThreadPool::run_erased(std::int64_t tasks, TaskFn fn, void* arg) {
  if (tasks <= 0) return;
  Impl& pool = *impl_;
  const bool nested = inside_task_of(&pool);
  const Enter enter(&pool);
  if (tasks > 1 && pool.size > 1 && !nested) {
    Impl::Team& team = pool.current_team();
    if (!team.busy.exchange(true, std::memory_order_acquire)) {
      team.run({.fn = fn, .arg = arg, .tasks = static_cast<std::uint64_t>(tasks)});
      team.busy.store(false, std::memory_order_release);
      return;
    }
  }
  for (std::int64_t task = 0; task < tasks; ++task) fn(arg, task, 0);
}

}  // namespace fla
