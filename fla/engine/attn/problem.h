// Softmax-like attention, the problem that attn, forgetting_attn, wall_attn, parallax and the dense branches of nsa
// hand to a backend. For query i of a sequence, which stands at key position t = i + offset, query head h and key head
// h / G:
//   s_ij = scale sum_c q_ic k_jc e^{P_tc - P_jc} + (C_t - C_j),   C and P running sums of the gates          (1)
//   p_ij = e^{s_ij} / (sum_j e^{s_ij} + e^{b_h})  over the keys j that i may see,   o_i = sum_j p_ij v_j     (2)
// and with a second query r, u_ij = <r_i, k_j>, ubar_i = sum_j p_ij u_ij:
//   o_i = sum_j p_ij (1 + ubar_i - u_ij) v_j                                                                 (3)
// A family's file translates its arguments into an AttnProblem; a backend knows no family.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "fla/core/index_table.h"
#include "fla/core/tensor.h"
#include "fla/engine/common/sequences.h"

namespace fla {

inline constexpr std::int64_t kNoWindow = std::numeric_limits<std::int64_t>::max() / 4;

// Sequence n: its queries and keys in batch row `row`. Query i stands at key position i + offset.
struct AttnSpan {
  std::int64_t row = 0, q_begin = 0, q_length = 0, k_begin = 0, k_length = 0, offset = 0;
};

// Keys [lo, hi) of a sequence.
struct KeyRange {
  std::int64_t lo = 0, hi = 0;
  bool empty() const { return hi <= lo; }
};

struct AttnProblem {
  std::int64_t B = 0, TQ = 0, TK = 0, HQ = 0, H = 0, K = 0, V = 0;
  std::int64_t N = 0;       // sequences: B, or the number of packed ones
  TensorView cu_seqlens_q;  // [N + 1] I32 or I64 on the host; absent: N dense sequences
  TensorView cu_seqlens_k;  // the same for keys; absent: those of the queries
  bool one_query = false;   // query n is the last position of sequence n; cu_seqlens_k alone
  // A cache: k, v and g are [pages, page, ...], and sequence n has `lengths` tokens in it, of which the queries are the
  // last. Token j is in page pages[n][j / page]. Without a table page n is all of sequence n.
  bool cached = false;
  TensorView pages;    // [N, M] I32 or I64 on the host
  TensorView lengths;  // [N] I32 or I64 on the host; absent: TK
  double scale = 1.0;

  // Which keys a query sees: up to its own position, the last `window` of them, none before its sequence's first_key.
  std::int64_t window = kNoWindow;
  TensorView first_key;  // [N] I32 or I64 on the host; absent: 0
  // Keys that stand for blocks of so many tokens each: a query sees those that have wholly passed. Boundaries are then
  // in tokens, and a sequence of n tokens has ceil(n / pool) keys.
  std::int64_t pool = 1;
  std::int64_t tokens = 0;  // of a dense sequence, with pool > 1

  // Inputs, any float dtype, any strides.
  TensorView q;  // [B, TQ, HQ, K]
  TensorView r;  // [B, TQ, HQ, K]  second query; absent: (2)
  TensorView k;  // [B, TK, H, K]
  TensorView v;  // [B, TK, H, V]
  TensorView g;  // [B, TK, HQ]     C is the running sum of gate_scale * g
  double gate_scale = 1.0;
  TensorView gk;    // [B, TK, HQ, K]  P is its running sum
  TensorView sink;  // [HQ] b

  // Outputs of the forward; an absent one is not computed. A query without any key has o = 0, lse = 0 (b with a sink).
  TensorView o;    // [B, TQ, HQ, V]
  TensorView lse;  // [B, TQ, HQ] natural logarithm of the denominator

  // The backward: upstream gradient (absent = zeros) and requested gradients (absent = not computed).
  TensorView do_;     // [B, TQ, HQ, V]
  TensorView dq, dr;  // [B, TQ, HQ, K]
  TensorView dk;      // [B, TK, H, K]
  TensorView dv;      // [B, TK, H, V]
  TensorView dg;      // [B, TK, HQ]
  TensorView dgk;     // [B, TK, HQ, K]
  TensorView dsink;   // [HQ]
  // Of a branch that enters a sum with a weight of its own for each row: do_ is the sum's gradient.
  TensorView weight;   // [B, TQ, HQ]; absent = 1
  TensorView dweight;  // [B, TQ, HQ]

  std::int64_t group() const { return HQ / H; }
  std::int64_t pooled(std::int64_t length) const { return (length + pool - 1) / pool; }

  AttnSpan sequence(std::int64_t n) const {
    AttnSpan s;
    if (cached) {
      s = {n, 0, TQ, 0, lengths ? read_index(lengths, n) : TK, 0};
      s.offset = s.k_length - TQ;
      return s;
    }
    if (!cu_seqlens_q && !cu_seqlens_k) {
      s = {n, 0, TQ, 0, TK, 0};
      s.offset = (pool > 1 ? tokens : TK) - TQ;
      return s;
    }
    const TensorView& cu = cu_seqlens_k ? cu_seqlens_k : cu_seqlens_q;
    const std::int64_t k_lo = read_index(cu, n), k_tokens = read_index(cu, n + 1) - k_lo;
    s.k_begin = k_lo;
    s.k_length = k_tokens;
    if (pool > 1) {
      s.k_begin = 0;
      for (std::int64_t i = 0; i < n; ++i) s.k_begin += pooled(read_index(cu, i + 1) - read_index(cu, i));
      s.k_length = pooled(k_tokens);
    }
    if (one_query) {
      s.q_begin = n;
      s.q_length = 1;
    } else {
      const TensorView& cq = cu_seqlens_q ? cu_seqlens_q : cu;
      s.q_begin = read_index(cq, n);
      s.q_length = read_index(cq, n + 1) - s.q_begin;
    }
    s.offset = k_tokens - s.q_length;
    return s;
  }
  // Calls fn(row, at, rows, j) for each run of tokens [a, b) of sequence n: `rows` of them from token j on are in x's batch
  // row, or page, `row` from `at` on.
  template <typename Fn>
  void runs(const AttnSpan& s, std::int64_t n, std::int64_t a, std::int64_t b, const Fn& fn) const {
    if (!pages) {
      if (b > a) fn(s.row, s.k_begin + a, b - a, a);
      return;
    }
    const std::int64_t page = k.dim(1);
    for (std::int64_t j = a; j < b;) {
      const std::int64_t end = std::min(b, (j / page + 1) * page);
      fn(read_index(pages, n, j / page), j % page, end - j, j);
      j = end;
    }
  }
  // The keys that query i of sequence n sees.
  KeyRange visible(const AttnSpan& s, std::int64_t n, std::int64_t i) const {
    const std::int64_t t = i + s.offset;
    KeyRange x{std::max<std::int64_t>(0, t + 1 - window), std::clamp<std::int64_t>((t + 1) / pool, 0, s.k_length)};
    if (first_key) x.lo = std::max(x.lo, read_index(first_key, n));
    return x;
  }
};

// What every family fills in the same way; k and v carry the sizes of the keys.
inline AttnProblem attn_problem(const TensorView& q, const TensorView& k, const TensorView& v,
                                std::optional<double> scale, const TensorView& cu_seqlens) {
  AttnProblem p;
  p.B = k.dim(0);
  p.TQ = q.dim(1);
  p.TK = k.dim(1);
  p.HQ = q.dim(2);
  p.H = k.dim(2);
  p.K = k.dim(3);
  p.V = v.dim(3);
  p.cu_seqlens_q = cu_seqlens;
  p.N = count_sequences(cu_seqlens, p.B);
  p.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(p.K)));
  p.q = q;
  p.k = k;
  p.v = v;
  return p;
}

}  // namespace fla
