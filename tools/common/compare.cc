#include "tools/common/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "tools/common/buffer.h"

namespace fla::tools {

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

std::vector<std::int64_t> unravel(std::int64_t flat, std::span<const std::int64_t> dims) {
  std::vector<std::int64_t> at(dims.size());
  for (std::size_t i = dims.size(); i-- > 0;) {
    at[i] = flat % dims[i];
    flat /= dims[i];
  }
  return at;
}

double rms(double sum_of_squares, std::size_t n) {
  return n == 0 ? 0.0 : std::sqrt(sum_of_squares / static_cast<double>(n));
}

}  // namespace

double rms(const TensorView& t) {
  double sum = 0.0;
  for (const double x : values(t)) sum += x * x;
  return rms(sum, static_cast<std::size_t>(t ? t.numel() : 0));
}

Difference compare(const TensorView& reference, const TensorView& candidate, const Limits& limits) {
  Difference d;
  d.limit = limits.R;
  if (!std::ranges::equal(reference.dims(), candidate.dims())) {
    d.R = d.max_abs = d.block_R = kNaN;
    d.reason = "shape: expected " + shape_string(reference.dims()) + ", got " + shape_string(candidate.dims());
    return d;
  }
  const std::vector<double> x = values(reference), y = values(candidate);
  const std::size_t n = x.size();
  if (n == 0) {
    d.ok = true;
    return d;
  }

  // Whole tensor. A NaN makes the largest error NaN, so that no floor lets it pass.
  double sum_x = 0.0, sum_e = 0.0;
  std::size_t worst = 0, first_nan = n;
  bool nan_reference = false, nan_candidate = false, all_zero = true;
  for (std::size_t i = 0; i < n; ++i) {
    nan_reference |= std::isnan(x[i]);
    nan_candidate |= std::isnan(y[i]);
    all_zero &= x[i] == 0.0;
    const double e = std::abs(x[i] - y[i]);
    if (std::isnan(e)) {
      first_nan = std::min(first_nan, i);
    } else if (e > d.max_abs) {
      d.max_abs = e;
      worst = i;
    }
    sum_x += x[i] * x[i];
    sum_e += e * e;
  }
  d.zero_reference = all_zero;
  const double rms_x = rms(sum_x, n);
  d.R = rms(sum_e, n) / (rms_x + 1e-8);
  if (first_nan != n) {
    d.max_abs = d.R = kNaN;
    worst = first_nan;
  }
  d.index = unravel(static_cast<std::int64_t>(worst), reference.dims());

  // Blocks of rows.
  const auto width = static_cast<std::size_t>(reference.ndim > 0 ? reference.dim(reference.ndim - 1) : 1);
  const std::size_t block = width * static_cast<std::size_t>(kBlockRows);
  for (std::size_t begin = 0; begin < n; begin += block) {
    const std::size_t end = std::min(n, begin + block);
    double bx = 0.0, be = 0.0;
    for (std::size_t i = begin; i < end; ++i) {
      const double e = x[i] - y[i];
      bx += x[i] * x[i];
      be += e * e;
    }
    const double r = rms(be, end - begin) / (std::max(rms(bx, end - begin), kBlockFraction * rms_x) + 1e-8);
    if (std::isnan(r) || r > d.block_R) {
      d.block_R = r;
      d.block = static_cast<std::int64_t>(begin / block);
      if (std::isnan(r)) break;
    }
  }

  if (d.zero_reference) d.limit = std::max(limits.zero, limits.floor);
  if (d.max_abs <= limits.floor) {
    d.ok = true;
    return d;
  }
  if (nan_reference) {
    d.reason = "the reference has a NaN";
  } else if (nan_candidate) {
    d.reason = "NaN";
  } else if (d.zero_reference) {
    d.ok = d.max_abs <= d.limit;
    if (!d.ok) d.reason = "expected zeros, largest value " + number(d.max_abs) + ", limit " + number(d.limit);
  } else if (!(d.R < limits.R)) {
    d.reason = "R = " + number(d.R) + ", limit " + number(limits.R);
  } else if (!(d.block_R <= limits.block)) {
    d.reason = "R = " + number(d.block_R) + " in block " + std::to_string(d.block) + " of " +
               std::to_string(kBlockRows) + " rows, limit " + number(limits.block);
  } else {
    d.ok = true;
  }
  if (!d.ok)
    d.reason += "; largest error " + number(d.max_abs) + " at " + shape_string(d.index) + ": expected " +
                number(x[worst]) + ", got " + number(y[worst]);
  return d;
}

}  // namespace fla::tools
