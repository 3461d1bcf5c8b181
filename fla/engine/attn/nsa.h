// Native sparse attention: three branches of softmax attention over the same keys, each with a gate of its own.
//   o_i = g_cmp o_cmp + g_slc o_slc + g_swa o_swa                                                           (1)
// compressed  over means of blocks of n keys, those that have wholly passed; weight only with g_cmp
// selected    over the keys of the blocks in the query's list, up to itself; weight 1 without g_slc
// sliding     over the last `window` keys, with scale K^(-1/2) whatever `scale` is
// Without a list a query's blocks are 0, the one before its own, its own, and those whose share of the compressed
// softmax, averaged over the G query heads of a key head, is largest.                                              (2)
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/core/status.h"
#include "fla/core/threads.h"
#include "fla/engine/attn/problem.h"

namespace fla {

// Sizes, q, k, v, boundaries and their gradients as in AttnProblem; scale is that of the compressed and selected
// branches.
struct NsaProblem : AttnProblem {
  std::int64_t block = 64;            // n
  std::int64_t slots = 16;            // entries of a list
  std::int64_t swa = 0;               // window of the sliding branch; 0: none
  TensorView g_cmp, g_slc, g_swa;     // [B, TQ, HQ]
  TensorView indices;                 // [B, TQ, H, slots] I32 or I64 on the host, -1: empty; absent: chosen by (2)
  TensorView counts;                  // [B, TQ, H] I32 or I64 on the host: how many entries count; absent: all
  TensorView dg_cmp, dg_slc, dg_swa;  // [B, TQ, HQ]
  // The choice (2) alone: k is then [B, C, H, K], the means themselves, while TK counts tokens.
  bool pooled_keys = false;
  TensorView chosen;  // [B, TQ, H, slots] I32 or I64 on the host: in increasing order, then -1

  NsaProblem() = default;
  explicit NsaProblem(const AttnProblem& p) : AttnProblem(p) {}

  bool has_cmp() const { return g_cmp.present(); }
  bool has_swa() const { return swa > 0; }
  bool packed() const { return cu_seqlens_q.present() || cu_seqlens_k.present(); }
  // Where the pooled keys of sequence n begin in its batch row.
  std::int64_t first_block(std::int64_t n) const {
    std::int64_t at = 0;
    for (std::int64_t i = 0; packed() && i < n; ++i) at += (sequence(i).k_length + block - 1) / block;
    return at;
  }
  // Pooled keys of a batch row: an upper bound for packed sequences, whose number of blocks the host may not know.
  std::int64_t most_blocks() const { return (TK + block - 1) / block + (packed() ? N : 0); }
  std::int64_t entry(const TensorView& t, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t s = 0) const {
    TensorView row = t;  // of the query
    row.data = t.at(b, i, h);
    row.stride[0] = t.ndim > 3 ? t.stride[3] : 0;
    return read_index(row, s);
  }
  void choose(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t s, std::int64_t index) const {
    std::byte* to = chosen.at(b, i, h, s);
    if (chosen.dtype == DType::I32)
      *reinterpret_cast<std::int32_t*>(to) = static_cast<std::int32_t>(index);
    else
      *reinterpret_cast<std::int64_t*>(to) = index;
  }
  std::int64_t count(const AttnSpan& s, std::int64_t i, std::int64_t kv) const {
    return counts ? std::clamp<std::int64_t>(entry(counts, s.row, s.q_begin + i, kv), 0, slots) : slots;
  }
};

namespace reference {
Status nsa_forward(const NsaProblem& p, ThreadPool& pool);
Status nsa_backward(const NsaProblem& p, ThreadPool& pool);
Status nsa_choose(const NsaProblem& p, ThreadPool& pool);
}  // namespace reference

namespace cpu {
std::size_t nsa_forward_workspace(const NsaProblem& p, int threads);
Status nsa_forward(const NsaProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
std::size_t nsa_backward_workspace(const NsaProblem& p, int threads);
Status nsa_backward(const NsaProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
std::size_t nsa_choose_workspace(const NsaProblem& p, int threads);
Status nsa_choose(const NsaProblem& p, ThreadPool& pool, std::span<std::byte> workspace);
}  // namespace cpu

}  // namespace fla
