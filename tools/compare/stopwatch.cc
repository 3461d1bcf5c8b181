#include "tools/compare/stopwatch.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <string>
#include <utility>

namespace fla::tools {
namespace {

using Time = std::chrono::steady_clock::duration;

constexpr double kWaitShare = 0.005;  // of a sample's time: a wait that is shorter is not one

Time processor_time() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec);
}

// "time on a processor, time ready without one, turns": ns, ns, a count.
Time delay_of(int fd) {
  char text[96];
  const ssize_t n = pread(fd, text, sizeof text - 1, 0);
  if (n <= 0) return {};
  text[n] = '\0';
  char* at = nullptr;
  std::strtoll(text, &at, 10);
  return std::chrono::nanoseconds(std::strtoll(at, nullptr, 10));
}

}  // namespace

Stopwatch::Stopwatch(bool one_thread) : one_thread_(one_thread) {
  std::error_code ignored;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    if (one_thread && thread.path().filename() != std::to_string(gettid())) continue;
    if (const int fd = open((thread.path() / "schedstat").c_str(), O_RDONLY | O_CLOEXEC); fd >= 0)
      threads_.push_back({fd, delay_of(fd)});
  }
}

Stopwatch::~Stopwatch() {
  for (const Thread& t : threads_) close(t.fd);
}

void Stopwatch::begin() {
  const auto before = Clock::now();
  look();
  processor_ = processor_time();
  spans_.push_back({Clock::now(), {}, {}, false});
  outside_ = spans_.back().begin - before;
}

std::size_t Stopwatch::end() {
  Span& s = spans_.back();
  s.end = Clock::now();
  const Time used = processor_time() - processor_, wall = s.end - s.begin, waited = look();
  // A wait between the look at the waits and the look at the clock may lie outside the span.
  outside_ += Clock::now() - s.end;
  const Time inside = std::max(waited - outside_, Time{});
  s.took = one_thread_ ? std::min(wall, std::max(wall - inside, used)) : wall;
  return spans_.size() - 1;
}

Time Stopwatch::look() {
  Time longest{};
  for (Thread& t : threads_) {
    const Time now = delay_of(t.fd);
    longest = std::max(longest, now - std::exchange(t.delay, now));
  }
  if (!one_thread_ && longest > Time{})
    for (auto s = spans_.rbegin(); s != spans_.rend() && s->end > last_ - longest; ++s)
      s->disturbed = s->disturbed || longest > kWaitShare * (s->end - s->begin);
  last_ = Clock::now();
  return longest;
}

}  // namespace fla::tools
