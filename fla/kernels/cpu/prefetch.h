// Prefetching of rows while other work is done.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fla/kernels/cpu/rows.h"

namespace fla::cpu {

// Rows that will be needed soon, asked for a few cache lines at a time between register tiles. They usually lie H * D
// elements apart, too far for the hardware to guess; all of them at once would wait for the fill buffers (a third of
// the time of a gla forward); and as the distance is often a multiple of 4 KB they go to L2: in L1 they would share a
// few sets and push out the tiles.
class Prefetcher {
 public:
  void clear() { count_ = next_ = row_ = line_ = total_ = 0; }
  // The next n rows from t0, columns [c0, c0 + width).
  void add(const Rows& x, std::int64_t t0, std::int64_t n, std::int64_t c0, std::int64_t width) {
    if (!x || n <= 0 || x.last != 1 || count_ == kMax) return;
    const std::int64_t lines = (width * static_cast<std::int64_t>(size_of(x.dtype)) + 63) / 64;
    list_[count_++] = {x.at(t0, c0), x.step, n, lines};
    total_ += n * lines;
  }
  // Spreads what was added over so many calls of issue().
  void spread(std::int64_t calls) { per_call_ = (total_ + calls - 1) / std::max<std::int64_t>(calls, 1); }
  void issue() {
    for (std::int64_t i = 0; i < per_call_ && next_ < count_; ++i) {
      const Entry& e = list_[next_];
      __builtin_prefetch(e.base + row_ * e.step + line_ * 64, 0, 2);
      if (++line_ < e.lines) continue;
      line_ = 0;
      if (++row_ < e.rows) continue;
      row_ = 0;
      ++next_;
    }
  }

 private:
  static constexpr std::int64_t kMax = 10;
  struct Entry {
    const std::byte* base;
    std::int64_t step, rows, lines;
  };
  Entry list_[kMax];
  std::int64_t count_ = 0, next_ = 0, row_ = 0, line_ = 0, total_ = 0, per_call_ = 0;
};

}  // namespace fla::cpu
