// What a sample on a busy processor is said to have taken.
#include "tools/compare/stopwatch.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace fla::tools {
namespace {

double used_ms() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}
void work(double ms) {
  for (const double end = used_ms() + ms; used_ms() < end;) {
  }
}

// This thread on one processor, which two other processes want as well.
class BusyProcessor {
 public:
  BusyProcessor() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++i)
      if (CPU_ISSET(i, &before_)) CPU_SET(i, &one);
    sched_setaffinity(0, sizeof one, &one);
    for (pid_t& p : others_) {
      p = fork();
      if (p == 0)
        for (volatile int x = 0;;) x = x + 1;
    }
  }
  ~BusyProcessor() {
    for (const pid_t p : others_) {
      kill(p, SIGKILL);
      waitpid(p, nullptr, 0);
    }
    sched_setaffinity(0, sizeof before_, &before_);
  }
  BusyProcessor(const BusyProcessor&) = delete;
  BusyProcessor& operator=(const BusyProcessor&) = delete;

 private:
  cpu_set_t before_{};
  pid_t others_[2] = {-1, -1};
};

bool counted() { return std::filesystem::exists("/proc/self/schedstat"); }

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

TEST(Stopwatch, OneThreadGetsItsWaitsBack) {
  if (!counted()) GTEST_SKIP() << "the system counts no waits";
  const BusyProcessor busy;
  Stopwatch watch(true);
  std::vector<double> wall, took;
  for (int i = 0; i < 15; ++i) {
    watch.begin();
    work(8);
    const std::size_t s = watch.end();
    wall.push_back(watch.wall_ms(s));
    took.push_back(watch.took_ms(s));
  }
  EXPECT_GT(median(wall), 12.0);
  EXPECT_GE(median(took), 8.0);
  EXPECT_LT(median(took), 8.8);
}

TEST(Stopwatch, SleepAndHelpersAreWork) {
  if (!counted()) GTEST_SKIP() << "the system counts no waits";
  const BusyProcessor busy;
  Stopwatch watch(true);
  watch.begin();
  usleep(20000);
  std::size_t s = watch.end();
  EXPECT_GE(watch.took_ms(s), 19.0);
  watch.begin();
  std::thread helper([] { work(20); });  // on the same processor: who waits for it has not worked the less
  work(4);
  helper.join();
  s = watch.end();
  EXPECT_GE(watch.took_ms(s), 23.5);
}

TEST(Stopwatch, WithSeveralThreadsAWaitIsNoted) {
  if (!counted()) GTEST_SKIP() << "the system counts no waits";
  Stopwatch watch(false);
  bool all = true;
  {
    const BusyProcessor busy;
    for (int i = 0; i < 5; ++i) {
      watch.begin();
      work(30);
      const std::size_t s = watch.end();
      EXPECT_EQ(watch.took_ms(s), watch.wall_ms(s));
      all = all && watch.disturbed(s);
    }
  }
  EXPECT_TRUE(all);
}

}  // namespace
}  // namespace fla::tools
