#include "fla/core/threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/wait.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#if defined(__SANITIZE_THREAD__)
#define FLA_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FLA_TSAN 1
#endif
#endif
#if defined(FLA_TSAN)
// The sanitizer by itself ends a forked child that makes threads, which is what the fork tests are about.
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

namespace fla {
namespace {

// Plain, unsynchronised counters: the thread sanitizer sees whether run() orders the writes before the reads.
bool every_task_once(ThreadPool& pool, std::int64_t tasks) {
  std::vector<int> count(static_cast<std::size_t>(tasks), 0);
  std::vector<int> per_worker(static_cast<std::size_t>(pool.size()), 0);
  pool.run(tasks, [&](std::int64_t task, int worker) {
    ++count[static_cast<std::size_t>(task)];
    ++per_worker[static_cast<std::size_t>(worker)];
  });
  std::int64_t sum = 0;
  for (const int n : per_worker) sum += n;
  for (const int n : count) {
    if (n != 1) return false;
  }
  return sum == tasks;
}

void busy_wait(std::chrono::microseconds t) {
  const auto end = std::chrono::steady_clock::now() + t;
  while (std::chrono::steady_clock::now() < end) {
  }
}

TEST(ThreadPool, RunsEveryTaskOnceAtEverySize) {
  for (int size = 1; size <= 8; ++size) {
    ThreadPool pool(size);
    ASSERT_EQ(pool.size(), size);
    for (const std::int64_t tasks : {0, 1, 2, 3, 7, 8, 9, 64, 1000}) {
      EXPECT_TRUE(every_task_once(pool, tasks)) << "size " << size << ", tasks " << tasks;
    }
  }
}

TEST(ThreadPool, ManyShortRuns) {
  ThreadPool pool(4);
  for (int i = 0; i < 5000; ++i) ASSERT_TRUE(every_task_once(pool, i % 9));
}

TEST(ThreadPool, WakesAfterIdleTime) {
  ThreadPool pool(3);
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(every_task_once(pool, 50));
    std::this_thread::sleep_for(std::chrono::milliseconds(i % 3));
  }
}

TEST(ThreadPool, UsesItsThreads) {
  ThreadPool pool(4);
  std::atomic<int> here{0};
  // Each task waits for the other three, so they end only if four threads run at once.
  pool.run(4, [&](std::int64_t, int) {
    here.fetch_add(1);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (here.load() < 4 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  });
  EXPECT_EQ(here.load(), 4);
}

TEST(ThreadPool, DefaultSizeIsTheProcessorsAllowed) {
  ThreadPool pool;
  EXPECT_GE(pool.size(), 1);
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    EXPECT_EQ(pool.size(), CPU_COUNT(&set));
  }
#endif
  EXPECT_TRUE(every_task_once(pool, 10));
  EXPECT_EQ(ThreadPool(-5).size(), pool.size());
}

TEST(ThreadPool, UnusedPoolIsDestroyed) { ThreadPool pool(8); }

TEST(ThreadPool, NothingToDoCallsNothing) {
  ThreadPool pool(4);
  int calls = 0;
  pool.run(0, [&](std::int64_t, int) { ++calls; });
  pool.run(-3, [&](std::int64_t, int) { ++calls; });
  EXPECT_EQ(calls, 0);
}

TEST(ThreadPool, OneTaskStaysOnTheCaller) {
  ThreadPool pool(4);
  std::thread::id where;
  int as = -1;
  pool.run(1, [&](std::int64_t, int worker) {
    where = std::this_thread::get_id();
    as = worker;
  });
  EXPECT_EQ(where, std::this_thread::get_id());
  EXPECT_EQ(as, 0);
}

TEST(ThreadPool, CallerIsWorkerZero) {
  ThreadPool pool(4);
  std::vector<std::thread::id> of_worker(4);
  for (int i = 0; i < 100; ++i) {
    pool.run(64, [&](std::int64_t, int worker) {
      of_worker[static_cast<std::size_t>(worker)] = std::this_thread::get_id();
    });
  }
  if (of_worker[0] != std::thread::id()) {
    EXPECT_EQ(of_worker[0], std::this_thread::get_id());
  }
  for (std::size_t i = 1; i < 4; ++i) EXPECT_NE(of_worker[i], std::this_thread::get_id());
}

TEST(ThreadPool, NestedRunStaysOnItsThread) {
  ThreadPool pool(4);
  for (const std::int64_t outer : {1, 5}) {
    std::vector<int> sums(5, 0);
    std::atomic<int> strangers{0};
    pool.run(outer, [&](std::int64_t task, int) {
      const auto self = std::this_thread::get_id();
      pool.run(20, [&](std::int64_t inner, int worker) {
        if (std::this_thread::get_id() != self || worker != 0) strangers.fetch_add(1);
        sums[static_cast<std::size_t>(task)] += static_cast<int>(inner);
      });
    });
    EXPECT_EQ(strangers.load(), 0);
    for (std::int64_t i = 0; i < outer; ++i) EXPECT_EQ(sums[static_cast<std::size_t>(i)], 190);
  }
}

TEST(ThreadPool, PoolInsideAnotherPool) {
  ThreadPool a(3), b(2);
  std::atomic<int> calls{0};
  a.run(6, [&](std::int64_t, int) {
    b.run(4, [&](std::int64_t, int) { a.run(2, [&](std::int64_t, int) { calls.fetch_add(1); }); });
  });
  EXPECT_EQ(calls.load(), 48);
}

TEST(ThreadPool, TwoCallersShareOnePool) {
  ThreadPool pool(3);
  std::atomic<bool> good{true};
  const auto caller = [&] {
    for (int i = 0; i < 1000; ++i) {
      if (!every_task_once(pool, i % 17)) good = false;
    }
  };
  std::thread other(caller);
  caller();
  other.join();
  EXPECT_TRUE(good.load());
}

TEST(ThreadPool, SecondCallerRunsInlineAsWorkerZero) {
  ThreadPool pool(2);
  std::atomic<int> phase{0};
  std::thread first([&] {
    pool.run(2, [&](std::int64_t task, int) {
      if (task == 0) phase = 1;
      while (phase.load() != 2) std::this_thread::yield();
    });
  });
  while (phase.load() != 1) std::this_thread::yield();
  int strangers = 0;
  pool.run(10, [&](std::int64_t, int worker) { strangers += worker != 0; });
  EXPECT_EQ(strangers, 0);
  phase = 2;
  first.join();
}

// Workers have bodies of very different lengths, so some post is taken back while its worker is just waking up.
TEST(ThreadPool, UnevenTasks) {
  ThreadPool pool(6);
  for (int i = 0; i < 200; ++i) {
    std::vector<int> done(12, 0);
    pool.run(12, [&](std::int64_t task, int) {
      busy_wait(std::chrono::microseconds((task * 7 + i) % 60));
      done[static_cast<std::size_t>(task)] = 1;
    });
    for (const int d : done) ASSERT_EQ(d, 1);
  }
}

TEST(ThreadPool, AffinityIsForCreatedThreads) {
#if defined(__linux__)
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  int first = 0;
  while (!CPU_ISSET(static_cast<unsigned>(first), &before)) ++first;
  const int processors[] = {first, 1 << 20};  // one that cannot be is ignored
  ThreadPool pool(3, processors);
  std::atomic<int> here{0};
  std::vector<int> allowed(3, 0);
  pool.run(3, [&](std::int64_t, int worker) {
    here.fetch_add(1);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (here.load() < 3 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) allowed[static_cast<std::size_t>(worker)] = CPU_COUNT(&set);
  });
  EXPECT_EQ(allowed[0], CPU_COUNT(&before));
  EXPECT_EQ(allowed[1], CPU_COUNT(&before));
  EXPECT_EQ(allowed[2], 1);
#else
  GTEST_SKIP() << "needs Linux";
#endif
}

#if defined(__unix__) || defined(__APPLE__)
// Runs fn in a forked child; true when the child ended by itself and fn was true.
template <typename Fn>
bool in_child(Fn fn) {
  const pid_t child = fork();
  if (child == 0) _exit(fn() ? 0 : 1);
  if (child < 0) return false;
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// False unless the run had two threads at once.
bool two_at_once(ThreadPool& pool) {
  std::atomic<int> here{0};
  pool.run(2, [&](std::int64_t, int) {
    here.fetch_add(1);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (here.load() < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  });
  return here.load() == 2;
}

TEST(ThreadPoolFork, ChildMakesNewThreads) {
  auto pool = std::make_unique<ThreadPool>(4);
  ASSERT_TRUE(every_task_once(*pool, 100));
  const bool child_good = in_child([&] {
    const bool good = every_task_once(*pool, 1000) && two_at_once(*pool) &&
                      in_child([&] { return every_task_once(*pool, 100); });  // a child of the child
#if !defined(FLA_TSAN)
    // The child's threads get the ids of the parent's, and the sanitizer ends a process that joins such a thread ("dup
    // thread with used id"), even where plain std::thread made it.
    pool.reset();
#endif
    return good;
  });
  EXPECT_TRUE(child_good);
  EXPECT_TRUE(every_task_once(*pool, 100));
}

TEST(ThreadPoolFork, ChildDestroysAPoolItNeverUsed) {
  auto pool = std::make_unique<ThreadPool>(4);
  ASSERT_TRUE(every_task_once(*pool, 100));
  EXPECT_TRUE(in_child([&] {
    pool.reset();
    return true;
  }));
}

TEST(ThreadPoolFork, ForkWhileAnotherThreadUsesThePool) {
  ThreadPool pool(3);
  std::atomic<int> phase{0};
  std::thread user([&] {
    pool.run(3, [&](std::int64_t, int) {
      int before = 0;
      phase.compare_exchange_strong(before, 1);  // a late task must not take the 2 back
      while (phase.load() != 2) std::this_thread::yield();
    });
  });
  while (phase.load() != 1) std::this_thread::yield();
  EXPECT_TRUE(in_child([&] { return two_at_once(pool) && every_task_once(pool, 100); }));
  phase = 2;
  user.join();
}

TEST(ThreadPoolFork, ForkInsideATask) {
  ThreadPool pool(2);
  bool good = false;
  pool.run(2, [&](std::int64_t task, int) {
    if (task == 1)
      good = in_child([&] {
        int calls = 0;
        pool.run(10, [&](std::int64_t, int) { ++calls; });
        return calls == 10;
      });
  });
  EXPECT_TRUE(good);
}
#endif

}  // namespace
}  // namespace fla
