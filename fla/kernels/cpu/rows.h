// What the CPU kernels share that is not vector code: row views, padding, the scratch arena.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "fla/core/dtype.h"
#include "fla/core/threads.h"
#include "fla/kernels/cpu/element.h"

namespace fla::cpu {

// Tiles are padded to the widest vector (16 floats), on every target, so that workspace sizes do not depend on it.
inline constexpr std::int64_t kPad = 16;
constexpr std::int64_t pad_up(std::int64_t n, std::int64_t to = kPad) { return (n + to - 1) / to * to; }

// A matrix in somebody's memory: row t, column c. Steps may be negative.
struct Rows {
  std::byte* base = nullptr;
  DType dtype = DType::F32;
  std::int64_t step = 0;  // bytes from row to row
  std::int64_t last = 1;  // elements from column to column
  bool stream = false;    // store_rows goes past the caches: for results that are larger than these

  explicit operator bool() const { return base != nullptr; }
  std::byte* at(std::int64_t t, std::int64_t c) const {
    return base + t * step + c * last * static_cast<std::int64_t>(size_of(dtype));
  }
};

inline double scalar_at(const Rows& x, std::int64_t t, std::int64_t c = 0) { return load_element(x.at(t, c), x.dtype); }

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

// Cuts 64-byte aligned pieces from a workspace. Without memory it only measures; `bytes` then bounds what is needed.
class Arena {
 public:
  Arena() = default;
  explicit Arena(std::byte* p) : base_(p) {
    const auto a = reinterpret_cast<std::uintptr_t>(p);
    used_ = static_cast<std::size_t>((kAlign - a % kAlign) % kAlign);
  }
  template <typename T>
  T* take(std::int64_t n) {
    T* p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::size_t>(n) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return p;
  }
  float* floats(std::int64_t n) { return take<float>(n); }
  std::size_t bytes() const { return used_ + kAlign; }

 private:
  static constexpr std::size_t kAlign = 64;
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
};

// Runs fn(item, slot) for every item on at most `slots` workers at once; scratch is indexed by slot. Items are handed
// out one by one, so uneven ones balance.
template <typename Fn>
void run_items(ThreadPool& pool, std::int64_t items, std::int64_t slots, Fn&& fn) {
  std::atomic<std::int64_t> next{0};
  pool.run(std::min(items, slots), [&](std::int64_t slot, int) {
    for (;;) {
      const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      fn(item, slot);
    }
  });
}

}  // namespace fla::cpu
