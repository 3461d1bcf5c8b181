#include "tools/compare/paired_stats.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fla::tools {
namespace {

constexpr double kMiss = 0.001;  // of the interval of one row

// How many of the n sorted ratios lie outside the interval at either end: the largest k whose interval
// [x[k], x[n-1-k]] misses the true median with at most kMiss. -1 when n is too small for any.
int cut_of(std::size_t n) {
  const double half = std::log(0.5) * static_cast<double>(n);
  double tail = 0.0, log_choose = 0.0;
  int k = -1;
  for (std::size_t i = 0; i < n / 2; ++i) {
    tail += std::exp(log_choose + half);
    if (2 * tail > kMiss) break;
    k = static_cast<int>(i);
    log_choose += std::log(static_cast<double>(n - i)) - std::log(static_cast<double>(i + 1));
  }
  return k;
}

// Pairs neither of whose samples was disturbed; all of them when that is not a fair choice.
std::vector<std::size_t> chosen(std::span<const Sample> base, std::span<const Sample> candidate) {
  const std::size_t n = std::min(base.size(), candidate.size());
  std::vector<std::size_t> quiet, all(n);
  std::size_t quiet_base = 0, quiet_candidate = 0;
  for (std::size_t i = 0; i < n; ++i) {
    all[i] = i;
    quiet_base += base[i].disturbed ? 0 : 1;
    quiet_candidate += candidate[i].disturbed ? 0 : 1;
    if (!base[i].disturbed && !candidate[i].disturbed) quiet.push_back(i);
  }
  const bool fair = quiet_base <= 2 * quiet_candidate && quiet_candidate <= 2 * quiet_base;
  return fair && quiet.size() >= kLeastPairs ? quiet : all;
}

}  // namespace

double percentile(std::span<const double> sorted, double p) {
  const double at = p * static_cast<double>(sorted.size() - 1);
  const auto i = static_cast<std::size_t>(at);
  const double next = sorted[std::min(i + 1, sorted.size() - 1)];
  return sorted[i] + (at - static_cast<double>(i)) * (next - sorted[i]);
}

Samples describe(std::span<const double> ms) {
  Samples s;
  s.n = ms.size();
  if (ms.empty()) return s;
  std::vector<double> x(ms.begin(), ms.end());
  std::sort(x.begin(), x.end());
  s.median = percentile(x, 0.5);
  s.p10 = percentile(x, 0.1);
  s.p90 = percentile(x, 0.9);
  s.min = x.front();
  for (const double v : x) s.mean += v / static_cast<double>(x.size());
  for (const double v : x) s.sd += (v - s.mean) * (v - s.mean);
  s.sd = x.size() > 1 ? std::sqrt(s.sd / static_cast<double>(x.size() - 1)) : 0.0;
  return s;
}

Paired paired(std::span<const Sample> base, std::span<const Sample> candidate) {
  Paired r;
  r.timed = std::min(base.size(), candidate.size());
  std::vector<double> base_ms, candidate_ms, ratio;
  for (const std::size_t i : chosen(base, candidate)) {
    base_ms.push_back(base[i].ms);
    candidate_ms.push_back(candidate[i].ms);
    ratio.push_back(base[i].ms / candidate[i].ms);
  }
  r.base = describe(base_ms);
  r.candidate = describe(candidate_ms);
  r.n = ratio.size();
  r.half_width = std::numeric_limits<double>::infinity();
  if (r.n == 0) return r;
  std::sort(ratio.begin(), ratio.end());
  r.speedup = percentile(ratio, 0.5);
  r.p10 = percentile(ratio, 0.1);
  r.p90 = percentile(ratio, 0.9);
  const int k = cut_of(r.n);
  if (k < 0) {
    r.high = r.half_width;  // [0, inf): nothing is known
    return r;
  }
  const double low = ratio[static_cast<std::size_t>(k)], high = ratio[r.n - 1 - static_cast<std::size_t>(k)];
  r.half_width = std::log(high / low) / 2;
  r.low = low / (1.0 + kLoadShare);
  r.high = high * (1.0 + kLoadShare);
  return r;
}

Geomean geomean(std::span<const Paired> rows) {
  Geomean g;
  if (rows.empty()) return g;
  const auto m = static_cast<double>(rows.size());
  double sum = 0.0, below = 0.0, above = 0.0;
  for (const Paired& r : rows) {
    sum += std::log(r.speedup);
    // The rows' own deviations are independent and shrink together; the share of loading does not.
    below += std::pow(std::log(r.speedup / (r.low * (1.0 + kLoadShare))), 2);
    above += std::pow(std::log(r.high / (1.0 + kLoadShare) / r.speedup), 2);
  }
  g.value = std::exp(sum / m);
  g.low = std::exp(sum / m - std::sqrt(below) / m) / (1.0 + kLoadShare);
  g.high = std::exp(sum / m + std::sqrt(above) / m) * (1.0 + kLoadShare);
  return g;
}

std::vector<std::string> blocking_flags(const RowEvidence& e) {
  std::vector<std::string> flags;
  // A base below the floor shows that the floor is none: the roof was measured while others used the machine, and
  // nothing can be said of the candidate.
  if (e.base_ms > 0 && e.base_ms < e.floor_ms)
    flags.emplace_back("broken roof");
  else if (e.new_ms > 0 && e.new_ms < e.floor_ms)
    flags.emplace_back("skip suspect");
  // Not written as err_new > ...: a NaN must block too.
  const bool close = e.err_new <= std::max(kErrorRatio * e.err_base, kErrorFloor);
  if (!close) flags.emplace_back("numeric relaxation");
  if (!e.same_flags) flags.emplace_back("different build flags");
  return flags;
}

const char* name_of(Verdict v) {
  switch (v) {
    case Verdict::Win: return "win";
    case Verdict::NoWin: return "no_win";
    case Verdict::Regression: return "regression";
    case Verdict::Blocked: return "blocked";
  }
  return "?";
}

Verdict verdict_of(std::span<const Paired> rows, bool blocked) {
  if (blocked || rows.empty()) return Verdict::Blocked;
  if (std::any_of(rows.begin(), rows.end(), [](const Paired& r) { return r.slower(); })) return Verdict::Regression;
  const Geomean g = geomean(rows);
  return g.low > 1.0 && g.value >= 1.0 + kResolution ? Verdict::Win : Verdict::NoWin;
}

}  // namespace fla::tools
