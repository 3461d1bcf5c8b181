// Times samples of two builds on a machine that others use too.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

namespace fla::tools {

// What times samples, each of some calls.
class SampleClock {
 public:
  SampleClock() = default;
  virtual ~SampleClock() = default;
  SampleClock(const SampleClock&) = delete;
  SampleClock& operator=(const SampleClock&) = delete;

  virtual std::size_t take(int calls, const std::function<void()>& call) = 0;  // the sample's index
  virtual double wall_ms(std::size_t i) const = 0;
  virtual double took_ms(std::size_t i) const = 0;  // without waits, where they can be taken off
  virtual bool disturbed(std::size_t i) const = 0;
};

// A thread waits while it stands ready to run and somebody else has its processor; the system counts such times for
// each thread when they end (schedstat; where it does not, nothing ever waited). A sample of one thread gets the time
// back that it has waited, but never more than what leaves the processor time that this process has used: a helper that
// works while the caller waits is work. With several threads a wait cannot be told from its consequences. It is noted
// for every sample that it may have touched, also earlier ones, whose work another thread then did.
class Stopwatch final : public SampleClock {
 public:
  // Knows the threads that this process has now; one_thread: the calling one alone.
  explicit Stopwatch(bool one_thread);
  ~Stopwatch() override;
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  std::size_t take(int calls, const std::function<void()>& call) override {
    begin();
    for (int i = 0; i < calls; ++i) call();
    return end();
  }
  void begin();
  std::size_t end();
  double wall_ms(std::size_t i) const override { return ms(spans_[i].end - spans_[i].begin); }
  double took_ms(std::size_t i) const override { return ms(spans_[i].took); }
  bool disturbed(std::size_t i) const override { return spans_[i].disturbed; }

 private:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::duration;
  struct Thread {
    int fd;
    Time delay;
  };
  struct Span {
    Clock::time_point begin, end;
    Time took;
    bool disturbed;
  };
  static double ms(Time t) { return std::chrono::duration<double, std::milli>(t).count(); }
  Time look();  // the longest wait of a thread that ended since the last look

  bool one_thread_;
  std::vector<Thread> threads_;
  std::vector<Span> spans_;
  Time processor_{}, outside_{};  // of the last span; outside: between a look at the waits and one at the clock
  Clock::time_point last_ = Clock::now();
};

}  // namespace fla::tools
