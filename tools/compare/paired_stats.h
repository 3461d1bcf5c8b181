// What interleaved pairs of timings say: how much faster, how sure, and whether that is a win. Pure arithmetic, so that
// tests feed it synthetic samples.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace fla::tools {

// Two loads of the same code differ by up to this share (placement of code and stacks), however long they are timed.
inline constexpr double kLoadShare = 0.01;
// A median nearer to 1 than this is no change, however narrow its interval.
inline constexpr double kResolution = 0.02;
// An error against the reference in double above this multiple of the base's is a numeric relaxation.
inline constexpr double kErrorRatio = 1.5;
// Pairs that an interval is worth reading from.
inline constexpr std::size_t kLeastPairs = 25;
// Errors below this (two units in the last place of F32) are rounding on both sides.
inline constexpr double kErrorFloor = 0x1p-22;

double percentile(std::span<const double> sorted, double p);

struct Samples {
  double median = 0, mean = 0, sd = 0, min = 0, p10 = 0, p90 = 0;
  std::size_t n = 0;
};
Samples describe(std::span<const double> ms);

struct Paired {
  Samples base, candidate;   // of the pairs that are looked at
  double speedup = 0;        // median of base / candidate over the pairs
  double p10 = 0, p90 = 0;   // of those ratios
  double low = 0, high = 0;  // holds the true median with 99.9 %, widened by kLoadShare
  double half_width = 0;     // of its logarithm, before widening; infinite for too few pairs
  std::size_t n = 0;         // pairs looked at
  std::size_t timed = 0;     // pairs timed

  bool faster() const { return low > 1.0 && speedup >= 1.0 + kResolution; }
  bool slower() const { return high < 1.0 && speedup <= 1.0 / (1.0 + kResolution); }
};
// One timed sample; `disturbed`: a thread of it stood ready to run while others had its processor.
struct Sample {
  double ms = 0;
  bool disturbed = false;
};
// base[i] and candidate[i] were timed next to each other. Pairs of which a sample was disturbed are left out, as long
// as that leaves enough of them and both sides were disturbed about as often: who disturbs himself must not gain by it.
Paired paired(std::span<const Sample> base, std::span<const Sample> candidate);

struct Geomean {
  double value = 0, low = 0, high = 0;
};
Geomean geomean(std::span<const Paired> rows);

// What speaks against a row, whatever its speed; empty: nothing does. A blocked row blocks the verdict.
struct RowEvidence {
  double base_ms = 0, new_ms = 0, floor_ms = 0;  // floor_ms 0: no model
  double err_base = 0, err_new = 0;
  bool same_flags = true;  // both sides were compiled with the same flags
};
std::vector<std::string> blocking_flags(const RowEvidence& e);

enum class Verdict { Win, NoWin, Regression, Blocked };
const char* name_of(Verdict v);
// A regressed row makes a regression of the whole; a win needs the geometric mean beyond noise.
Verdict verdict_of(std::span<const Paired> rows, bool blocked);

}  // namespace fla::tools
