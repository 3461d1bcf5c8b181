// Which worker does what.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "fla/core/threads.h"

namespace fla::cpu {

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
