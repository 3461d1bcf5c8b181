// The CPU kernels of log_linear_attn; README.md (3), (4). Chunks of kLevelChunk tokens lie at multiples of their length
// in the sequence, whatever call a token comes in, so levels inside a chunk come from one table and above it from the
// bits of the chunk's index.
//
// buckets   of chunks: bucket b holds 2^b chunks. Each keeps the decay since it was written beside it, so that a chunk
//           touches a bucket only to read or to merge it. Buckets below a chunk exist where a call begins inside one,
//           and are read by the rest of that chunk
// backward  a walk upwards with the buckets (transposed) gives dq and dlambda, one downwards with their gradients dk,
//           dv and dg: where a bit of the chunk's index is set, the chunk's reads of that bucket are collected; where
//           the walk leaves that block downwards, the collection is what the sources of the bucket get
// gates     dg_t is the sum over pairs (source before t, use at or after t); pairs (i, i) are left out from the start
// task      one sequence and head; dq and dk of a head in fp32, summed over heads in order at the end
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/diag/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"
#include "fla/ops/log_linear_attn/log_linear_attn_sequence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/ops/log_linear_attn/log_linear_attn_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/kernels/cpu/gemm-inl.h"
#include "fla/kernels/cpu/io-inl.h"
#include "fla/kernels/cpu/math-inl.h"

#ifndef FLA_OPS_LOG_LINEAR_ATTN_CPU_CC_ONCE
#define FLA_OPS_LOG_LINEAR_ATTN_CPU_CC_ONCE
namespace fla::cpu {

inline constexpr std::int64_t kChunkBits = 6, kLevelChunk = std::int64_t{1} << kChunkBits;

inline std::int64_t bits_of(std::int64_t x) {
  return static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(x)));
}

struct LevelSizes {
  std::int64_t N, T, H, K, V, L, kp, vp, lt, above;  // above: buckets of chunks
  explicit LevelSizes(const LogLinearAttnArgs& a)
      : N(log_linear_sequences(a)),
        T(a.q.dim(1)),
        H(a.v.dim(2)),
        K(a.q.dim(3)),
        V(a.v.dim(3)),
        L(a.level_scales.dim(3)),
        kp(pad_up(K)),
        vp(pad_up(V)),
        lt(token_ld(kLevelChunk)),
        above(std::max<std::int64_t>(L - kChunkBits, 1)) {}
  std::int64_t state() const { return std::max(kp * vp, vp * kp); }
};

struct LevelTiles {
  float *q = nullptr, *k = nullptr, *scaled = nullptr;  // [C, kp]
  float *v = nullptr, *o = nullptr;                     // [C, vp]
  float *kt = nullptr, *a = nullptr, *e = nullptr;      // [kp, lt], [C, lt] scores, [C, lt] e^{G_i - G_j}
  float* lambda = nullptr;                              // [C, pad_up(L)]
  float *eg = nullptr, *ec = nullptr;                   // [lt] e^{G_i}, e^{G_C - G_i}
  double* gsum = nullptr;                               // [lt]
  float* buckets = nullptr;                             // [above][state]
  float* below = nullptr;                               // [kChunkBits][state]
  float* carry = nullptr;                               // [state]
  double* gone = nullptr;                               // [above + kChunkBits] log decay since a bucket was written
  // backward
  float *vt = nullptr, *p = nullptr, *dp = nullptr;                     // [vp, lt], [C, lt], [C, lt]
  float *up = nullptr, *dv = nullptr, *dq = nullptr, *dk = nullptr;     // [C, vp], [C, vp], [C, kp], [C, kp]
  float *part = nullptr, *dlambda = nullptr;                            // [C, kp], [C, pad_up(L)]
  float *d = nullptr, *dt = nullptr, *source = nullptr, *dg = nullptr;  // [K, vp], [V, kp], [lt], [lt]

  void carve(Arena& arena, const LevelSizes& s, bool backward) {
    const std::int64_t rows = token_rows_padded(kLevelChunk), lp = pad_up(s.L);
    for (float** x : {&q, &k, &scaled}) *x = arena.floats(rows * s.kp);
    for (float** x : {&v, &o}) *x = arena.floats(rows * s.vp);
    kt = arena.floats(s.kp * s.lt);
    for (float** x : {&a, &e}) *x = arena.floats(rows * s.lt);
    lambda = arena.floats(rows * lp);
    for (float** x : {&eg, &ec}) *x = arena.floats(s.lt);
    gsum = arena.take<double>(s.lt);
    buckets = arena.floats(s.above * s.state());
    below = arena.floats(kChunkBits * s.state());
    carry = arena.floats(s.state());
    gone = arena.take<double>(s.above + kChunkBits);
    if (!backward) return;
    vt = arena.floats(s.vp * s.lt);
    for (float** x : {&p, &dp}) *x = arena.floats(rows * s.lt);
    for (float** x : {&up, &dv}) *x = arena.floats(rows * s.vp);
    for (float** x : {&dq, &dk, &part}) *x = arena.floats(rows * s.kp);
    dlambda = arena.floats(rows * lp);
    for (float** x : {&d, &dt}) *x = arena.floats(s.state() + 4 * std::max(s.kp, s.vp));
    for (float** x : {&source, &dg}) *x = arena.floats(s.lt);
  }
  static std::size_t bytes(const LevelSizes& s, bool backward) {
    Arena arena;
    LevelTiles().carve(arena, s, backward);
    return arena.bytes();
  }
};

// What the backward keeps of all heads: gradients of q and k by heads, and what each token reads through buckets.
struct LevelGradients {
  TensorView dq, dk, use;  // [B, T, H, K], [B, T, H, K], [B, T, H]
  LevelGradients(const LogLinearAttnBackwardArgs& a, Arena& arena) {
    const LevelSizes s(a);
    const std::int64_t wide[] = {a.q.dim(0), s.T, s.H, s.K}, narrow[] = {a.q.dim(0), s.T, s.H};
    const std::int64_t rows = a.q.dim(0) * s.T * s.H;
    dq = {arena.floats(rows * s.K), DType::F32, wide};
    dk = {arena.floats(rows * s.K), DType::F32, wide};
    use = {arena.floats(rows), DType::F32, narrow};
  }
};

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace {

using F32 = hn::ScalableTag<float>;

HWY_INLINE std::int64_t lanes_of(F32 d) { return static_cast<std::int64_t>(hn::Lanes(d)); }

HWY_NOINLINE void scale_row(float f, const float* x, float* to, std::int64_t n) {
  const F32 d;
  for (std::int64_t c = 0; c < n; c += lanes_of(d)) hn::StoreU(hn::Mul(hn::Set(d, f), hn::LoadU(d, x + c)), d, to + c);
}
HWY_NOINLINE void add_row(float f, const float* x, float* to, std::int64_t n) {
  const F32 d;
  for (std::int64_t c = 0; c < n; c += lanes_of(d))
    hn::StoreU(hn::MulAdd(hn::Set(d, f), hn::LoadU(d, x + c), hn::LoadU(d, to + c)), d, to + c);
}
HWY_NOINLINE float dot(const float* x, const float* y, std::int64_t n) {
  const F32 d;
  auto s = hn::Zero(d);
  for (std::int64_t c = 0; c < n; c += lanes_of(d)) s = hn::MulAdd(hn::LoadU(d, x + c), hn::LoadU(d, y + c), s);
  return hn::GetLane(hn::SumOfLanes(d, s));
}

// One sequence and head. first: the chunk row of the call's first token in its chunk, 0 in all later ones.
struct LevelHead {
  const LogLinearAttnArgs& a;
  const LevelTiles& w;
  LevelSizes z;
  LogLinearSequence s;
  std::int64_t n, h;
  bool transposed;  // buckets are [V, kp] instead of [K, vp]
  std::int64_t chunk = 0, first = 0, t0 = 0, C = 0;
  Rows q, k, v, g, lambda;

  LevelHead(const LogLinearAttnArgs& args, const LevelTiles& tiles, std::int64_t sequence, std::int64_t head,
            bool backward)
      : a(args), w(tiles), z(args), s(args, sequence), n(sequence), h(head), transposed(backward) {
    q = rows(args.q, 0);
    k = rows(args.k, 0);
    v = rows(args.v, h);
    g = rows(args.g, h);
    lambda = rows(args.level_scales, h);
  }
  Rows rows(const TensorView& x, std::int64_t head) const {
    if (!x || s.length == 0) return {};
    return {x.at(s.row, s.begin, head), x.dtype, x.stride[1] * static_cast<std::int64_t>(size_of(x.dtype)),
            x.ndim > 3 ? x.stride[3] : 1};
  }
  std::int64_t chunks() const {
    return s.length == 0 ? 0 : (s.past + s.length - 1) / kLevelChunk - s.past / kLevelChunk + 1;
  }
  // The i-th chunk of the call.
  void enter(std::int64_t i) {
    chunk = s.past / kLevelChunk + i;
    first = i == 0 ? s.past % kLevelChunk : 0;
    t0 = chunk * kLevelChunk + first - s.past;
    C = std::min(kLevelChunk - first, s.length - t0);
  }
  bool whole() const { return first + C == kLevelChunk; }
  std::int64_t level(std::int64_t i, std::int64_t j) const { return bits_of((first + i) ^ (first + j)); }
  float scale_of(std::int64_t i, std::int64_t l) const { return w.lambda[i * pad_up(z.L) + l]; }

  // ---- buckets
  std::int64_t state_rows_() const { return transposed ? z.V : z.K; }
  std::int64_t ld() const { return transposed ? z.kp : z.vp; }
  std::int64_t size() const { return state_rows_() * ld(); }
  float* bucket(std::int64_t b) const { return w.buckets + b * z.state(); }
  float* lower(std::int64_t b) const { return w.below + b * z.state(); }
  double& gone(std::int64_t b) const { return w.gone[b]; }
  double& gone_lower(std::int64_t b) const { return w.gone[z.above + b]; }
  // Where the tokens of a bucket below a chunk begin in it.
  std::int64_t start_of(std::int64_t b, std::int64_t position) const { return position >> (b + 1) << (b + 1); }

  Rows past_rows(std::int64_t b) const {
    const TensorView& x = a.past_state;
    const std::int64_t bytes = static_cast<std::int64_t>(size_of(x.dtype));
    if (transposed) return {x.at(n, h, b), x.dtype, x.stride[4] * bytes, x.stride[3]};
    return {x.at(n, h, b), x.dtype, x.stride[3] * bytes, x.stride[4]};
  }
  void load_past() const {
    std::fill(w.gone, w.gone + z.above + kChunkBits, 0.0);
    for (std::int64_t b = 0; b < z.L && a.past_state; ++b) {
      if ((s.past >> b & 1) == 0) continue;
      load_rows(past_rows(b), 0, state_rows_(), 0, transposed ? z.K : z.V,
                b < kChunkBits ? lower(b) : bucket(b - kChunkBits), ld());
    }
  }
  // fn(state, decay until the chunk's start, level of row i): the buckets that the chunk's rows read.
  template <typename Fn>
  void for_buckets(const Fn& fn) const {
    for (std::int64_t b = 0; b < kChunkBits; ++b) {
      if ((first >> b & 1) == 0) continue;
      const std::int64_t start = start_of(b, first);
      fn(lower(b), gone_lower(b), [this, start](std::int64_t i) { return bits_of((first + i) ^ start); });
    }
    for (std::int64_t b = 0; b < z.above; ++b) {
      if ((chunk >> b & 1) == 0) continue;
      fn(bucket(b), gone(b), [b](std::int64_t) { return kChunkBits + 1 + b; });
    }
  }

  // ---- a chunk
  void load() const {
    const F32 d;
    load_rows(q, t0, C, 0, z.K, w.q, z.kp);
    load_rows(k, t0, C, 0, z.K, w.k, z.kp);
    load_rows(v, t0, C, 0, z.V, w.v, z.vp);
    load_rows(lambda, t0, C, 0, z.L, w.lambda, pad_up(z.L));
    double sum = 0.0;
    for (std::int64_t i = 0; i < C; ++i) w.gsum[i] = sum += bounded_gate(scalar_at(g, t0 + i));
    for (std::int64_t i = C; i < z.lt; ++i) w.gsum[i] = sum;
    const auto exp_row = [&](float* x, std::int64_t n_) HWY_ATTR {
      for (std::int64_t j = 0; j < n_; j += lanes_of(d)) hn::StoreU(exp_v(d, hn::LoadU(d, x + j)), d, x + j);
    };
    for (std::int64_t i = 0; i < z.lt; ++i) {
      w.eg[i] = static_cast<float>(w.gsum[i]);
      w.ec[i] = static_cast<float>(sum - w.gsum[i]);
    }
    exp_row(w.eg, z.lt);
    exp_row(w.ec, z.lt);
    transpose(w.k, z.kp, C, z.K, w.kt, z.lt);
    gemm<false>(C, C, {w.q, z.kp, w.kt, z.lt, z.K}, {}, Tri::None, {}, w.a, z.lt, 0);
    for (std::int64_t i = 0; i < C; ++i) {
      float* e = w.e + i * z.lt;
      for (std::int64_t j = 0; j <= i; ++j) e[j] = static_cast<float>(w.gsum[i] - w.gsum[j]);
      std::fill(e + i + 1, e + z.lt, 0.0F);
      exp_row(e, pad_up(i + 1));
    }
  }
  double decay() const { return w.gsum[C - 1]; }
  // e^{G_i} and the bucket's own decay.
  float reach(double gone_by, std::int64_t i) const { return static_cast<float>(std::exp(gone_by + w.gsum[i])); }

  // to = sum over rows [from, C) of their key and value, decayed to the chunk's end.
  void write(std::int64_t from, std::int64_t to_row, float* to) const {
    for (std::int64_t j = from; j < to_row; ++j) scale_row(w.ec[j], w.k + j * z.kp, w.scaled + j * z.kp, z.kp);
    const std::int64_t depth = to_row - from;
    const float *x = w.scaled + from * z.kp, *y = w.v + from * z.vp;
    if (transposed) {
      gemm<true>(z.V, z.kp, {y, z.vp, x, z.kp, depth}, {}, Tri::None, {}, to, z.kp);
    } else {
      gemm<true>(z.K, z.vp, {x, z.kp, y, z.vp, depth}, {}, Tri::None, {}, to, z.vp);
    }
  }
  // The states behind the chunk; all of it becomes one bucket where it is whole.
  void advance() const {
    for (std::int64_t b = 0; b < z.above; ++b) gone(b) += decay();
    for (std::int64_t b = 0; b < kChunkBits; ++b) gone_lower(b) += decay();
    if (!whole()) return;
    write(0, C, w.carry);
    for (std::int64_t b = 0; b < kChunkBits; ++b)
      if ((first >> b & 1) != 0) add_row(static_cast<float>(std::exp(gone_lower(b))), lower(b), w.carry, size());
    std::int64_t b = 0;
    for (; (chunk >> b & 1) != 0; ++b) add_row(static_cast<float>(std::exp(gone(b))), bucket(b), w.carry, size());
    std::copy(w.carry, w.carry + size(), bucket(b));
    gone(b) = 0.0;
  }

  // Bucket b of the state after the call's last token.
  void store_bucket(std::int64_t b) const {
    const TensorView& x = a.final_state;
    const std::int64_t total = s.past + s.length;
    float* to = w.carry;
    std::fill(to, to + size(), 0.0F);
    if ((total >> b & 1) != 0) {
      if (b >= kChunkBits) {
        add_row(static_cast<float>(std::exp(gone(b - kChunkBits))), bucket(b - kChunkBits), to, size());
      } else if (s.length == 0) {
        add_row(1.0F, lower(b), to, size());
      } else {  // within the last chunk, which is not whole
        const std::int64_t start = start_of(b, total % kLevelChunk), end = start + (std::int64_t{1} << b);
        const std::int64_t from = std::max<std::int64_t>(start - first, 0);
        if (end > first) write(from, end - first, to);
        for (std::int64_t c = 0; c < kChunkBits; ++c) {
          if ((first >> c & 1) == 0) continue;
          const std::int64_t at = start_of(c, first);
          if (at >= start && at < end) add_row(static_cast<float>(std::exp(gone_lower(c))), lower(c), to, size());
        }
      }
    }
    const Rows out = {x.at(n, h, b), x.dtype, x.stride[3] * static_cast<std::int64_t>(size_of(x.dtype)), x.stride[4]};
    store_rows(to, z.vp, out, 0, z.K, 0, z.V);
  }
};

HWY_NOINLINE void forward_head(const LogLinearAttnArgs& a, const LevelTiles& w, std::int64_t n, std::int64_t h) {
  LevelHead x(a, w, n, h, false);
  const LevelSizes& z = x.z;
  const Rows o = x.rows(a.o, h);
  x.load_past();
  for (std::int64_t i = 0, count = x.chunks(); i < count; ++i) {
    x.enter(i);
    x.load();
    if (a.o) {
      std::fill(w.o, w.o + x.C * z.vp, 0.0F);
      x.for_buckets([&](const float* state, double gone, const auto& level) HWY_ATTR {
        for (std::int64_t r = 0; r < x.C; ++r)
          scale_row(x.scale_of(r, level(r)) * x.reach(gone, r), w.q + r * z.kp, w.scaled + r * z.kp, z.kp);
        gemm<false>(x.C, z.vp, {w.scaled, z.kp, state, z.vp, z.K}, {}, Tri::None, {w.o, z.vp}, w.o, z.vp);
      });
      for (std::int64_t r = 0; r < x.C; ++r)
        for (std::int64_t j = 0; j <= r; ++j) w.a[r * z.lt + j] *= x.scale_of(r, x.level(r, j)) * w.e[r * z.lt + j];
      gemm<false>(x.C, z.vp, {}, {w.a, z.lt, w.v, z.vp, 0}, Tri::Lower, {w.o, z.vp}, w.o, z.vp);
      store_rows(w.o, z.vp, o, x.t0, x.C, 0, z.V);
    }
    x.advance();
  }
  for (std::int64_t b = 0; b < z.L && a.final_state; ++b) x.store_bucket(b);
}

// dP and P of the chunk, 0 above the diagonal: w.dp = do v^T, w.p = lambda e <q, k>.
HWY_NOINLINE void chunk_scores(const LevelHead& x, const Rows& up) {
  const LevelTiles& w = x.w;
  const LevelSizes& z = x.z;
  if (up) {
    load_rows(up, x.t0, x.C, 0, z.V, w.up, z.vp);
  } else {
    std::fill(w.up, w.up + x.C * z.vp, 0.0F);
  }
  transpose(w.v, z.vp, x.C, z.V, w.vt, z.lt);
  gemm<false>(x.C, x.C, {w.up, z.vp, w.vt, z.lt, z.V}, {}, Tri::None, {}, w.dp, z.lt, 0);
  for (std::int64_t r = 0; r < x.C; ++r) {
    float *p = w.p + r * z.lt, *dp = w.dp + r * z.lt;
    for (std::int64_t j = 0; j <= r; ++j) p[j] = x.scale_of(r, x.level(r, j)) * w.e[r * z.lt + j] * w.a[r * z.lt + j];
    std::fill(p + r + 1, p + z.lt, 0.0F);
    std::fill(dp + r + 1, dp + z.lt, 0.0F);
  }
}

// Upwards: dq of the head, dlambda, and what each token reads through buckets.
HWY_NOINLINE void backward_up(const LogLinearAttnBackwardArgs& a, const LevelGradients& all, const LevelTiles& w,
                              std::int64_t n, std::int64_t h) {
  LevelHead x(a, w, n, h, true);
  const LevelSizes& z = x.z;
  const std::int64_t lp = pad_up(z.L);
  const Rows up = x.rows(a.do_, h), dq = x.rows(all.dq, h), use = x.rows(all.use, h),
             dlambda = x.rows(a.dlevel_scales, h);
  x.load_past();
  for (std::int64_t i = 0, count = x.chunks(); i < count; ++i) {
    x.enter(i);
    x.load();
    chunk_scores(x, up);
    std::fill(w.dq, w.dq + x.C * z.kp, 0.0F);
    std::fill(w.dlambda, w.dlambda + x.C * lp, 0.0F);
    std::fill(w.source, w.source + x.C, 0.0F);
    x.for_buckets([&](const float* state, double gone, const auto& level) HWY_ATTR {
      gemm<false>(x.C, z.kp, {w.up, z.vp, state, z.kp, z.V}, {}, Tri::None, {}, w.part, z.kp);
      for (std::int64_t r = 0; r < x.C; ++r) {
        const std::int64_t l = level(r);
        const float reach = x.reach(gone, r), lambda = x.scale_of(r, l);
        const float read = reach * dot(w.q + r * z.kp, w.part + r * z.kp, z.kp);
        w.dlambda[r * lp + l] += read;
        w.source[r] += lambda * read;
        add_row(lambda * reach, w.part + r * z.kp, w.dq + r * z.kp, z.kp);
      }
    });
    store_rows(w.source, 1, use, x.t0, x.C, 0, 1);
    for (std::int64_t r = 0; r < x.C; ++r) {
      float* dp = w.dp + r * z.lt;
      for (std::int64_t j = 0; j <= r; ++j) {
        const std::int64_t l = x.level(r, j);
        const float decayed = dp[j] * w.e[r * z.lt + j];
        w.dlambda[r * lp + l] += decayed * w.a[r * z.lt + j];
        dp[j] = decayed * x.scale_of(r, l);
      }
    }
    gemm<false>(x.C, z.kp, {}, {w.dp, z.lt, w.k, z.kp, 0}, Tri::Lower, {w.dq, z.kp}, w.dq, z.kp);
    store_rows(w.dq, z.kp, dq, x.t0, x.C, 0, z.K);
    if (dlambda) store_rows(w.dlambda, lp, dlambda, x.t0, x.C, 0, z.L);
    x.advance();
  }
}

// Downwards: dk of the head, dv, dg. w.buckets hold the collected reads, [K, vp] each, gone their decay since.
HWY_NOINLINE void backward_down(const LogLinearAttnBackwardArgs& a, const LevelGradients& all, const LevelTiles& w,
                                std::int64_t n, std::int64_t h) {
  LevelHead x(a, w, n, h, false);
  const LevelSizes& z = x.z;
  const Rows up = x.rows(a.do_, h), dk = x.rows(all.dk, h), use = x.rows(all.use, h), dv = x.rows(a.dv, h),
             dg = x.rows(a.dg, h);
  const std::int64_t size = z.K * z.vp;
  std::fill(w.buckets, w.buckets + z.above * z.state(), 0.0F);
  std::fill(w.gone, w.gone + z.above, 0.0);
  // Padding of what is transposed.
  std::fill(w.d, w.d + pad_up(z.K, 4) * z.vp, 0.0F);
  std::fill(w.dt, w.dt + z.V * z.kp, 0.0F);
  double crossing = 0.0;  // of all pairs with the source before and the use at or after the boundary
  for (std::int64_t i = x.chunks() - 1; i >= 0; --i) {
    x.enter(i);
    x.load();
    chunk_scores(x, up);
    // What the sources of this chunk get through buckets.
    std::fill(w.d, w.d + size, 0.0F);
    for (std::int64_t b = 0; b < z.above; ++b)
      if ((x.chunk >> b & 1) == 0) add_row(static_cast<float>(std::exp(x.gone(b))), x.bucket(b), w.d, size);
    transpose(w.d, z.vp, z.K, z.V, w.dt, z.kp);
    gemm<false>(x.C, z.kp, {w.v, z.vp, w.dt, z.kp, z.V}, {}, Tri::None, {}, w.dk, z.kp);
    gemm<false>(x.C, z.vp, {w.k, z.kp, w.d, z.vp, z.K}, {}, Tri::None, {}, w.dv, z.vp);
    double sources = 0.0, uses = 0.0;
    for (std::int64_t r = 0; r < x.C; ++r) {
      scale_row(w.ec[r], w.dk + r * z.kp, w.dk + r * z.kp, z.kp);
      scale_row(w.ec[r], w.dv + r * z.vp, w.dv + r * z.vp, z.vp);
      w.source[r] = dot(w.k + r * z.kp, w.dk + r * z.kp, z.kp);
      sources += static_cast<double>(w.source[r]);
      uses += scalar_at(use, x.t0 + r);
    }
    // Through the chunk itself.
    gemm<true>(x.C, z.vp, {w.p, z.lt, w.up, z.vp, x.C}, {}, Tri::None, {w.dv, z.vp}, w.dv, z.vp);
    if (dg) {
      const double through = crossing - sources;
      for (std::int64_t t = 0; t < x.C; ++t) w.dg[t] = 0.0F;
      for (std::int64_t r = 0; r < x.C; ++r) {
        float before = static_cast<float>(scalar_at(use, x.t0 + r));
        for (std::int64_t t = 0; t <= r; ++t) {
          w.dg[t] += before;
          before += w.p[r * z.lt + t] * w.dp[r * z.lt + t];
        }
      }
      float before = static_cast<float>(through);
      for (std::int64_t t = 0; t < x.C; ++t) {
        w.dg[t] += before;
        before += w.source[t];
      }
      store_rows(w.dg, 1, dg, x.t0, x.C, 0, 1);
    }
    crossing += uses - sources;
    for (std::int64_t r = 0; r < x.C; ++r) {
      float* dp = w.dp + r * z.lt;
      for (std::int64_t j = 0; j <= r; ++j) dp[j] *= w.e[r * z.lt + j] * x.scale_of(r, x.level(r, j));
    }
    gemm<true>(x.C, z.kp, {w.dp, z.lt, w.q, z.kp, x.C}, {}, Tri::None, {w.dk, z.kp}, w.dk, z.kp);
    store_rows(w.dk, z.kp, dk, x.t0, x.C, 0, z.K);
    if (dv) store_rows(w.dv, z.vp, dv, x.t0, x.C, 0, z.V);
    // The chunk's own reads, and the way to the chunk before.
    std::fill(w.carry, w.carry + z.K, static_cast<float>(std::exp(x.decay())));
    for (std::int64_t b = 0; b < z.above; ++b) {
      const bool reads = (x.chunk >> b & 1) != 0, reads_before = (x.chunk - 1) >> b & 1;
      if (reads) {
        for (std::int64_t r = 0; r < x.C; ++r)
          scale_row(x.scale_of(r, kChunkBits + 1 + b) * w.eg[r], w.q + r * z.kp, w.scaled + r * z.kp, z.kp);
        gemm<true>(z.K, z.vp, {w.scaled, z.kp, w.up, z.vp, x.C}, {}, Tri::None, {x.bucket(b), z.vp, w.carry},
                   x.bucket(b), z.vp);
        x.gone(b) = 0.0;
      } else {
        x.gone(b) += x.decay();
        if (reads_before) std::fill(x.bucket(b), x.bucket(b) + size, 0.0F);
      }
    }
  }
}

void level_forward(const LogLinearAttnArgs& a, std::int64_t slots, ThreadPool& pool, std::byte* workspace) {
  const LevelSizes s(a);
  const std::size_t bytes = LevelTiles::bytes(s, false);
  run_items(pool, s.N * s.H, slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    LevelTiles w;
    w.carve(arena, s, false);
    forward_head(a, w, item / s.H, item % s.H);
  });
}

// x of all heads, summed in their order, into the gradient of what they share.
void sum_heads(const TensorView& x, const TensorView& to, ThreadPool& pool) {
  const std::int64_t T = x.dim(1), H = x.dim(2), K = x.dim(3);
  pool.run(x.dim(0) * T, [&](std::int64_t task, int) {
    const std::int64_t b = task / T, t = task % T;
    for (std::int64_t c = 0; c < K; ++c) {
      float sum = 0.0F;
      for (std::int64_t h = 0; h < H; ++h) sum += *reinterpret_cast<const float*>(x.at(b, t, h, c));
      store_element(to.at(b, t, 0, c), to.dtype, static_cast<double>(sum));
    }
  });
}

void level_backward(const LogLinearAttnBackwardArgs& a, const LevelGradients& all, std::int64_t slots, ThreadPool& pool,
                    std::byte* workspace) {
  const LevelSizes s(a);
  const std::size_t bytes = LevelTiles::bytes(s, true);
  run_items(pool, s.N * s.H, slots, [&](std::int64_t item, std::int64_t slot) {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    LevelTiles w;
    w.carve(arena, s, true);
    backward_up(a, all, w, item / s.H, item % s.H);
    backward_down(a, all, w, item / s.H, item % s.H);
  });
  if (a.dq) sum_heads(all.dq, a.dq, pool);
  if (a.dk) sum_heads(all.dk, a.dk, pool);
}

}  // namespace

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla {
namespace cpu {
namespace {

HWY_EXPORT(level_forward);
HWY_EXPORT(level_backward);

std::int64_t slots_for(const LogLinearAttnArgs& a, int threads) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(threads, log_linear_sequences(a) * a.v.dim(2)));
}

std::size_t tiles_of(const LogLinearAttnArgs& a, int threads, bool backward) {
  return LevelTiles::bytes(LevelSizes(a), backward) * static_cast<std::size_t>(slots_for(a, threads));
}

Status forward(const LogLinearAttnArgs& a, const CallInfo&, const LaunchInfo& l) {
  HWY_DYNAMIC_DISPATCH(level_forward)(a, slots_for(a, l.pool->size()), *l.pool, l.workspace.data());
  return {};
}

Status backward(const LogLinearAttnBackwardArgs& a, const CallInfo&, const LaunchInfo& l) {
  Arena arena(l.workspace.data());
  const LevelGradients all(a, arena);
  HWY_DYNAMIC_DISPATCH(level_backward)
  (a, all, slots_for(a, l.pool->size()), *l.pool, arena.take<std::byte>(0));
  return {};
}

std::size_t backward_workspace(const LogLinearAttnBackwardArgs& a, const CallInfo& c) {
  Arena arena;
  const LevelGradients all(a, arena);
  return arena.bytes() + tiles_of(a, c.threads, true);
}

}  // namespace
}  // namespace cpu

void register_log_linear_attn_cpu(Registry& r) {
  r.add_backend("log_linear_attn", cpu_backend());
  r.add(Kernel<LogLinearAttnArgs>{
      .function = kChunkLogLinearAttn,
      .backend = "cpu",
      .name = "log_linear.chunk.forward",
      .verify = [](const LogLinearAttnArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace = [](const LogLinearAttnArgs& a, const CallInfo& c) { return cpu::tiles_of(a, c.threads, false); },
      .launch = cpu::forward});
  r.add(Kernel<LogLinearAttnBackwardArgs>{
      .function = kChunkLogLinearAttnBackward,
      .backend = "cpu",
      .name = "log_linear.chunk.backward",
      .verify = [](const LogLinearAttnBackwardArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace = cpu::backward_workspace,
      .launch = cpu::backward});
}

}  // namespace fla
#endif
