// What the statistics of a comparison say about samples that are known: synthetic ones, so no clock decides here.
#include "tools/compare/paired_stats.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tools/common/cases.h"

namespace fla::tools {
namespace {

struct Pairs {
  std::vector<Sample> base, candidate;
  Paired stats() const { return paired(base, candidate); }
};

// A busy machine: both sides of a pair share its slow drift and bursts of load that last for several pairs; each has
// its own jitter; now and then one of the two alone is interrupted for as long as it runs.
Pairs noisy(double speedup, std::size_t n, std::uint64_t seed, double jitter = 0.04) {
  Pairs p;
  const std::uint64_t s = stream_of(seed, "noise");
  for (std::size_t i = 0; i < n; ++i) {
    const double drift = 1.0 + 0.2 * std::sin(static_cast<double>(i) / 9.0) + (uniform(s, i / 7) < 0.3 ? 0.7 : 0.0);
    const auto one = [&](std::uint64_t k) {
      const double hit = uniform(s + 1, 2 * i + k) < 0.05 ? 2.0 : 1.0;
      return drift * hit * std::exp(jitter * normal(s + 2, 2 * i + k));
    };
    p.base.push_back({3.0 * one(0)});
    p.candidate.push_back({3.0 / speedup * one(1)});
  }
  return p;
}

TEST(PairedStats, EqualBuildsAreNoWinAndTheIntervalCoversOne) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const Paired p = noisy(1.0, 40 + seed, seed).stats();
    EXPECT_LE(p.low, 1.0) << seed;
    EXPECT_GE(p.high, 1.0) << seed;
    EXPECT_FALSE(p.faster()) << seed;
    EXPECT_FALSE(p.slower()) << seed;
  }
}

TEST(PairedStats, TenPercentIsToldFromNoiseInBothDirections) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    EXPECT_TRUE(noisy(1.1, 100, seed).stats().faster()) << seed;
    EXPECT_TRUE(noisy(1 / 1.1, 100, seed).stats().slower()) << seed;
  }
}

TEST(PairedStats, VerdictOfEightRowsOfEqualBuilds) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<Paired> rows;
    for (std::uint64_t r = 0; r < 8; ++r) rows.push_back(noisy(1.0, 60, 1000 * seed + r).stats());
    EXPECT_EQ(verdict_of(rows, false), Verdict::NoWin) << seed;
    const Geomean g = geomean(rows);
    EXPECT_LE(g.low, 1.0) << seed;
    EXPECT_GE(g.high, 1.0) << seed;
    EXPECT_NEAR(g.value, 1.0, 0.02) << seed;
  }
}

TEST(PairedStats, OneSlowerRowMakesARegressionOfAWin) {
  std::vector<Paired> rows = {noisy(1.4, 100, 1).stats(), noisy(1.3, 100, 2).stats()};
  EXPECT_EQ(verdict_of(rows, false), Verdict::Win);
  rows.push_back(noisy(0.9, 100, 3).stats());
  EXPECT_EQ(verdict_of(rows, false), Verdict::Regression);
  EXPECT_EQ(verdict_of(rows, true), Verdict::Blocked);
  EXPECT_EQ(verdict_of({}, false), Verdict::Blocked);
}

TEST(PairedStats, TooFewPairsKnowNothing) {
  const Paired p = noisy(2.0, 5, 1, 0.0).stats();
  EXPECT_FALSE(p.faster());
  EXPECT_EQ(p.low, 0.0);
  EXPECT_TRUE(std::isinf(p.high));
  EXPECT_EQ(paired({}, {}).n, 0U);
  EXPECT_FALSE(paired({}, {}).faster());
}

// One side of every second pair met other people's work, the candidate's side more often.
TEST(PairedStats, DisturbedPairsAreLeftOut) {
  Pairs p;
  const std::uint64_t s = stream_of(7, "disturbed");
  for (std::size_t i = 0; i < 200; ++i) {
    const bool hit = i % 2 == 0, base = i % 10 == 0;
    const double jitter = std::exp(0.01 * normal(s, i));
    p.base.push_back({hit && base ? 9.0 : 3.0, hit && base});
    p.candidate.push_back({(hit && !base ? 9.0 : 3.0) * jitter, hit && !base});
  }
  Paired r = p.stats();
  EXPECT_EQ(r.n, 100U);
  EXPECT_EQ(r.timed, 200U);
  EXPECT_NEAR(r.speedup, 1.0, 0.01);
  EXPECT_NEAR(r.candidate.median, 3.0, 0.03);
  EXPECT_EQ(r.base.n, 100U);
  EXPECT_GT(r.low, 0.97);
  EXPECT_LT(r.high, 1.03);
  // Too few remain: all count.
  p.base.resize(48);
  p.candidate.resize(48);
  r = p.stats();
  EXPECT_EQ(r.n, 48U);
}

TEST(PairedStats, ASideThatDisturbsItselfIsNotSparedItsSlowSamples) {
  Pairs p;
  for (std::size_t i = 0; i < 300; ++i) {
    const bool own = i % 3 != 0;
    p.base.push_back({3.0});
    p.candidate.push_back({own ? 6.0 : 2.0, own});
  }
  const Paired r = p.stats();
  EXPECT_EQ(r.n, 300U);
  EXPECT_TRUE(r.slower());
}

TEST(PairedStats, AChangeBelowResolutionIsNoWinHoweverSure) {
  const Pairs p{std::vector<Sample>(500, {1.015}), std::vector<Sample>(500, {1.0})};
  EXPECT_GT(p.stats().low, 1.0);
  EXPECT_FALSE(p.stats().faster());
}

TEST(PairedStats, StatisticsOfKnownSamples) {
  const Samples s = describe(std::vector<double>{4, 1, 3, 2, 5});
  EXPECT_EQ(s.n, 5U);
  EXPECT_DOUBLE_EQ(s.median, 3);
  EXPECT_DOUBLE_EQ(s.mean, 3);
  EXPECT_DOUBLE_EQ(s.min, 1);
  EXPECT_DOUBLE_EQ(s.sd, std::sqrt(2.5));
  EXPECT_DOUBLE_EQ(s.p10, 1.4);
  EXPECT_DOUBLE_EQ(s.p90, 4.6);
}

TEST(PairedStats, IntervalMissesTheMedianAsSeldomAsItSays) {
  int misses = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Pairs p;
    const std::uint64_t s = stream_of(seed, "coverage");
    for (std::size_t i = 0; i < 31; ++i) {
      p.base.push_back({std::exp(0.1 * normal(s, i))});
      p.candidate.push_back({1.0});
    }
    const Paired r = p.stats();
    // The share of loading taken off again: the bare interval is what has the stated probability.
    misses += r.low * (1 + kLoadShare) > 1.0 || r.high / (1 + kLoadShare) < 1.0 ? 1 : 0;
  }
  EXPECT_LE(misses, 8);  // 2 expected
}

TEST(BlockingFlags, ATimeBelowTheFloorIsASkipSuspect) {
  RowEvidence e{.base_ms = 4, .new_ms = 1.1, .floor_ms = 1.0, .err_base = 1e-3, .err_new = 1e-3};
  EXPECT_TRUE(blocking_flags(e).empty());
  e.new_ms = 0.9;
  EXPECT_EQ(blocking_flags(e), std::vector<std::string>{"skip suspect"});
  e.floor_ms = 4.1;  // which the base beats as well
  EXPECT_EQ(blocking_flags(e), std::vector<std::string>{"broken roof"});
  e.floor_ms = 0;  // no model
  EXPECT_TRUE(blocking_flags(e).empty());
}

TEST(BlockingFlags, AnErrorAboveTheRatioIsARelaxation) {
  RowEvidence e{.base_ms = 1, .new_ms = 1, .err_base = 1e-4, .err_new = 1.49e-4};
  EXPECT_TRUE(blocking_flags(e).empty());
  e.err_new = 1.51e-4;
  EXPECT_EQ(blocking_flags(e), std::vector<std::string>{"numeric relaxation"});
  e.err_base = e.err_new = 1e-8;
  EXPECT_TRUE(blocking_flags(e).empty());
  e.err_new = 2e-7;  // 20 times as much, but rounding of F32 all the same
  EXPECT_TRUE(blocking_flags(e).empty());
  e.err_new = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(blocking_flags(e), std::vector<std::string>{"numeric relaxation"});
}

TEST(BlockingFlags, OtherBuildFlagsBlock) {
  const RowEvidence e{.base_ms = 1, .new_ms = 1, .err_base = 1e-7, .err_new = 1e-7, .same_flags = false};
  EXPECT_EQ(blocking_flags(e), std::vector<std::string>{"different build flags"});
}

}  // namespace
}  // namespace fla::tools
