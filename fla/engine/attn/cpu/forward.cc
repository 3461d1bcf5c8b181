// Forward of softmax-like attention.
// task     one query head of one sequence, or a share of its tiles of queries when those are few against the threads
#include <algorithm>
#include <cstdint>

#include "fla/engine/attn/cpu/entry.h"
#include "fla/engine/attn/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/attn/cpu/forward.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/attn/cpu/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {

std::size_t forward_bytes(const AttnProblem& p, bool stats) {
  Arena arena;
  ForwardTiles w;
  w.carve(arena, p.K, p.V, p.gk.present(), p.r.present(), stats);
  return arena.bytes();
}

template <class Policy, bool kStats>
HWY_NOINLINE void forward_items(const AttnProblem& p, const GateSums& sums, const RowStats* st, ThreadPool& pool,
                                std::byte* scratch) {
  const std::size_t bytes = forward_bytes(p, kStats);
  const std::int64_t heads = std::max<std::int64_t>(p.N * p.HQ, 1), threads = std::max<std::int64_t>(pool.size(), 1);
  const std::int64_t most = (p.TQ + kForwardRows - 1) / kForwardRows;
  const std::int64_t parts =
      std::clamp<std::int64_t>((8 * threads + heads - 1) / heads, 1, std::max<std::int64_t>(most, 1));
  run_items(pool, p.N * p.HQ * parts, threads, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    ForwardTiles w;
    w.carve(arena, p.K, p.V, Policy::kChannel, Policy::kSecond, kStats);
    const std::int64_t head = item / parts, n = head / p.HQ, h = head % p.HQ;
    const AttnSpan s = p.sequence(n);
    for (std::int64_t i0 = item % parts * kForwardRows; i0 < s.q_length; i0 += parts * kForwardRows)
      forward_tile<Policy, kStats>(p, w, sums, st, n, s, h, i0, std::min(kForwardRows, s.q_length - i0));
  });
}

void forward(const AttnProblem& p, const GateSums& sums, const RowStats* st, ThreadPool& pool, std::byte* scratch) {
  with_policy(p, [&](auto policy) {
    if (st != nullptr) return forward_items<decltype(policy), true>(p, sums, st, pool, scratch);
    forward_items<decltype(policy), false>(p, sums, st, pool, scratch);
  });
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(forward_bytes);
HWY_EXPORT(forward);

std::size_t attn_rows_bytes(const AttnProblem& p, bool stats) { return HWY_DYNAMIC_DISPATCH(forward_bytes)(p, stats); }

void attn_rows(const AttnProblem& p, const GateSums& sums, const RowStats* st, ThreadPool& pool, std::byte* scratch) {
  HWY_DYNAMIC_DISPATCH(forward)(p, sums, st, pool, scratch);
}

std::size_t attn_forward_workspace(const AttnProblem& p, int threads) {
  Arena arena;
  GateSums sums;
  sums.carve(arena, p);
  return arena.bytes() + attn_rows_bytes(p, false) * static_cast<std::size_t>(std::max(threads, 1));
}

Status attn_forward(const AttnProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (p.N == 0 || p.HQ == 0) return {};
  if (workspace.size() < attn_forward_workspace(p, pool.size()))
    return {Code::OutOfMemory, "attn_forward: workspace too small"};
  Arena arena(workspace.data());
  GateSums sums;
  sums.carve(arena, p);
  sum_gates(p, sums, pool);
  Arena measure;
  GateSums measured;
  measured.carve(measure, p);
  attn_rows(p, sums, nullptr, pool, workspace.data() + measure.bytes());
  return {};
}

}  // namespace fla::cpu
#endif
