// The CPU kernels of hgrn. README.md says how chunks of time are joined.
//
// Every element goes through the same vector operations, whichever block, tile tail or thread it falls to, and chunks
// have a fixed length: results do not depend on the thread count, and appended tokens do not move earlier bits.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/ops/hgrn/hgrn_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

#include "fla/kernels/cpu/io-inl.h"
#include "fla/kernels/cpu/math-inl.h"

#ifndef FLA_OPS_HGRN_HGRN_CPU_ONCE_
#define FLA_OPS_HGRN_HGRN_CPU_ONCE_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "fla/engine/diag/engine.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/ops/hgrn/hgrn.h"

namespace fla::cpu {

// Tokens between two stored states. Part of the chunk form's arithmetic, so a constant.
inline constexpr std::int64_t kHgrnChunk = 32;

// One call, forward or backward, and how it is cut. `width` channels form a block.
struct HgrnPlan {
  std::int64_t B = 0, T = 0, D = 0, N = 0;
  std::int64_t width = 0, blocks = 0;
  std::int64_t groups = 1;  // chunk form: runs of consecutive chunks that are worked on side by side
  std::int64_t chunks = 0;  // chunk form: chunks of a sequence

  // As few blocks as keep the threads evenly busy, none narrower than 64 channels: a block that is a part of wide rows
  // touches a new page with every token, which costs four times the reading of whole rows.
  void cut(const CallInfo& c, std::int64_t widest) {
    B = c.dims["B"];
    T = c.dims["T"];
    D = c.dims["D"];
    N = c.dims["N"];
    std::int64_t parts = 1;
    while (N > 0 && N * parts % c.threads != 0 && N * parts < std::int64_t{4} * c.threads) ++parts;
    width = std::min(pad_up(D), std::clamp<std::int64_t>(pad_up((D + parts - 1) / parts), 64, widest));
    blocks = (D + width - 1) / width;
    chunks = (T + kHgrnChunk - 1) / kHgrnChunk;
  }
  void cut_time(int threads) {
    const std::int64_t side = std::max<std::int64_t>(N * blocks, 1);
    groups = side >= threads ? 1 : std::min(chunks, (std::int64_t{4} * threads + side - 1) / side);
    groups = std::max<std::int64_t>(groups, 1);
  }

  // Rows of a [*, pad_up(D)] table with one row per chunk of every sequence; at most one row is lost per sequence.
  std::int64_t table_rows() const { return B * T / kHgrnChunk + N; }
  std::int64_t table_size() const { return table_rows() * pad_up(D); }
  std::int64_t first_row(std::int64_t n, const Sequence& s) const { return (s.row * T + s.begin) / kHgrnChunk + n; }
};

// [T, D] of one sequence, rows counted from its first token.
inline Rows hgrn_rows(const TensorView& x, const Sequence& s) {
  if (!x || s.length == 0) return {};
  return {x.at(s.row, s.begin), x.dtype, x.stride[1] * static_cast<std::int64_t>(size_of(x.dtype)), x.stride[2]};
}

struct HgrnForwardScratch {
  float *h, *a, *b, *carry, *x, *g;  // [width]
  void carve(Arena& m, std::int64_t width) {
    for (float** f : {&h, &a, &b, &carry, &x, &g}) *f = m.floats(width);
  }
};

struct HgrnBackwardScratch {
  float *h, *d, *x, *g, *up, *dx, *dg;  // [width]
  float *before, *decay;                // [kHgrnChunk, width]: h_{t-1} and e^{g_t}
  void carve(Arena& m, std::int64_t width) {
    for (float** f : {&h, &d, &x, &g, &up, &dx, &dg}) *f = m.floats(width);
    before = m.floats(kHgrnChunk * width);
    decay = m.floats(kHgrnChunk * width);
  }
};

// [table]: of every chunk the product of its decays (a), its state from zero, later its entering state (h), its
// gradient from zero, later that of its leaving state (d).
struct HgrnTables {
  float *a = nullptr, *h = nullptr, *d = nullptr;
};

enum class HgrnForm : std::uint8_t { Step, Chunk };

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace {

using F = hn::ScalableTag<float>;

struct Block {
  std::int64_t c0, width, padded;
  Block(const HgrnPlan& p, std::int64_t i)
      : c0(i * p.width), width(std::min(p.width, p.D - c0)), padded(pad_up(width)) {}
};

HWY_INLINE bool plain(const Rows& x, const Block& k) {
  return x.dtype == DType::F32 && x.last == 1 && k.width == k.padded;
}

// A block's part of row t as floats: in place where it is plain, else a padded copy in buf. An absent tensor is zeros,
// which the caller has put into buf.
HWY_INLINE const float* row_in(const Rows& x, std::int64_t t, const Block& k, float* buf) {
  if (!x) return buf;
  if (plain(x, k)) return reinterpret_cast<const float*>(x.at(t, k.c0));
  load_row(x.at(t, k.c0), x.dtype, x.last, k.width, buf);
  for (std::int64_t c = k.width; c < k.padded; ++c) buf[c] = 0.0F;
  return buf;
}

void load_state(const TensorView& s, std::int64_t n, const Block& k, float* to) {
  const std::int64_t given = s ? k.width : 0;
  if (s) load_row(s.at(n, k.c0), s.dtype, s.stride[1], k.width, to);
  std::fill_n(to + given, k.padded - given, 0.0F);
}

void store_state(const float* from, const TensorView& s, std::int64_t n, const Block& k) {
  if (s) store_row(from, s.at(n, k.c0), s.dtype, s.stride[1], k.width);
}

// A product of decays that has become negligible is made zero before it turns subnormal, which costs x86 over 100
// cycles a multiplication.
template <class V>
HWY_INLINE V flush(F d, V a) {
  return hn::IfThenElseZero(hn::Ge(a, hn::Set(d, 0x1p-100F)), a);
}

// Tokens [t0, t0 + n): the state h runs through them and o is written (kRun); a becomes the product of their decays and
// b the state they leave from zero (kSummary).
template <bool kRun, bool kSummary>
void forward_rows(const Rows& x, const Rows& g, const Rows& o, std::int64_t t0, std::int64_t n, const Block& k,
                  const HgrnForwardScratch& w) {
  const F d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const bool direct = kRun && o && plain(o, k);
  if (kSummary) {
    std::fill_n(w.a, k.padded, 1.0F);
    std::fill_n(w.b, k.padded, 0.0F);
  }
  for (std::int64_t t = t0; t < t0 + n; ++t) {
    const float* xr = row_in(x, t, k, w.x);
    const float* gr = row_in(g, t, k, w.g);
    float* out = direct ? reinterpret_cast<float*>(o.at(t, k.c0)) : nullptr;
    for (std::int64_t c = 0; c < k.padded; c += lanes) {
      const auto e = exp_v(d, hn::LoadU(d, gr + c));
      const auto xv = hn::LoadU(d, xr + c);
      if (kRun) {
        const auto h = hn::MulAdd(e, hn::Load(d, w.h + c), xv);
        hn::Store(h, d, w.h + c);
        if (direct) hn::StoreU(h, d, out + c);
      }
      if (kSummary) {
        hn::Store(hn::MulAdd(e, hn::Load(d, w.b + c), xv), d, w.b + c);
        hn::Store(flush(d, hn::Mul(e, hn::Load(d, w.a + c))), d, w.a + c);
      }
    }
    if (kRun && o && !direct) store_row(w.h, o.at(t, k.c0), o.dtype, o.last, k.width);
  }
}

// carry = a carry + b over one chunk
HWY_INLINE void join(const float* a, const float* b, std::int64_t n, float* carry) {
  const F d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < n; c += lanes)
    hn::Store(hn::MulAdd(hn::Load(d, a + c), hn::Load(d, carry + c), hn::Load(d, b + c)), d, carry + c);
}

// The same, leaving in b what carry was before.
HWY_INLINE void join_exchange(const float* a, float* b, std::int64_t n, float* carry) {
  const F d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t c = 0; c < n; c += lanes) {
    const auto old = hn::Load(d, carry + c);
    hn::Store(hn::MulAdd(hn::Load(d, a + c), old, hn::Load(d, b + c)), d, carry + c);
    hn::Store(old, d, b + c);
  }
}

HWY_INLINE std::int64_t chunk_length(std::int64_t length, std::int64_t chunk) {
  return std::min(kHgrnChunk, length - chunk * kHgrnChunk);
}

// A block's part of the table row of sequence n's i-th chunk.
HWY_INLINE float* at(float* table, const HgrnPlan& p, const Sequence& s, std::int64_t n, std::int64_t i,
                     const Block& k) {
  return table + (p.first_row(n, s) + i) * pad_up(p.D) + k.c0;
}

// ---- forward

struct Forward {
  const HgrnArgs& a;
  const HgrnPlan& p;
  HgrnTables tables;

  void step(std::int64_t n, const Block& k, const HgrnForwardScratch& w) const {
    const Sequence s = sequence_at(a.cu_seqlens, p.T, n);
    load_state(a.initial_state, n, k, w.h);
    forward_rows<true, false>(hgrn_rows(a.x, s), hgrn_rows(a.g, s), hgrn_rows(a.o, s), 0, s.length, k, w);
    store_state(w.h, a.final_state, n, k);
  }

  // Chunk after chunk in one sweep, each from the state that joining the earlier chunks' summaries gives: the bits of
  // the side-by-side schedule at the price of reading once.
  void chunks_in_turn(std::int64_t n, const Block& k, const HgrnForwardScratch& w) const {
    const Sequence s{n, 0, p.T};
    const Rows x = hgrn_rows(a.x, s), g = hgrn_rows(a.g, s), o = hgrn_rows(a.o, s);
    const std::int64_t last = std::max<std::int64_t>(p.chunks - 1, 0) * kHgrnChunk;
    load_state(a.initial_state, n, k, w.h);
    if (last > 0) std::copy_n(w.h, k.padded, w.carry);
    for (std::int64_t t = 0; t < last; t += kHgrnChunk) {
      forward_rows<true, true>(x, g, o, t, kHgrnChunk, k, w);
      join(w.a, w.b, k.padded, w.carry);
      std::copy_n(w.carry, k.padded, w.h);
    }
    // What the last chunk leaves is the final state: nobody joins it.
    forward_rows<true, false>(x, g, o, last, p.T - last, k, w);
    store_state(w.h, a.final_state, n, k);
  }

  void summarise(std::int64_t n, const Block& k, std::int64_t i, const HgrnForwardScratch& w) const {
    const Sequence s{n, 0, p.T};
    forward_rows<false, true>(hgrn_rows(a.x, s), hgrn_rows(a.g, s), {}, i * kHgrnChunk, chunk_length(p.T, i), k, w);
    std::copy_n(w.a, k.padded, at(tables.a, p, s, n, i, k));
    std::copy_n(w.b, k.padded, at(tables.h, p, s, n, i, k));
  }

  void join_chunks(std::int64_t n, const Block& k, const HgrnForwardScratch& w) const {
    const Sequence s{n, 0, p.T};
    load_state(a.initial_state, n, k, w.carry);
    for (std::int64_t i = 0; i < p.chunks; ++i)
      join_exchange(at(tables.a, p, s, n, i, k), at(tables.h, p, s, n, i, k), k.padded, w.carry);
  }

  void run(std::int64_t n, const Block& k, std::int64_t i, const HgrnForwardScratch& w) const {
    const Sequence s{n, 0, p.T};
    std::copy_n(at(tables.h, p, s, n, i, k), k.padded, w.h);
    forward_rows<true, false>(hgrn_rows(a.x, s), hgrn_rows(a.g, s), hgrn_rows(a.o, s), i * kHgrnChunk,
                              chunk_length(p.T, i), k, w);
    if (i == p.chunks - 1) store_state(w.h, a.final_state, n, k);
  }
};

// fn(n, block, worker) for every sequence and block.
template <typename Fn>
void each_block(const HgrnPlan& p, ThreadPool& pool, Fn&& fn) {
  pool.run(p.N * p.blocks,
           [&](std::int64_t task, int worker) { fn(task / p.blocks, Block(p, task % p.blocks), worker); });
}

// fn(n, block, chunk, worker) for every sequence, block and chunk, runs of chunks side by side.
template <typename Fn>
void each_chunk(const HgrnPlan& p, ThreadPool& pool, Fn&& fn) {
  pool.run(p.N * p.blocks * p.groups, [&](std::int64_t task, int worker) {
    const std::int64_t group = task % p.groups, rest = task / p.groups;
    const std::int64_t lo = p.chunks * group / p.groups, hi = p.chunks * (group + 1) / p.groups;
    for (std::int64_t i = lo; i < hi; ++i) fn(rest / p.blocks, Block(p, rest % p.blocks), i, worker);
  });
}

void hgrn_forward(const HgrnArgs& a, const HgrnPlan& p, HgrnForm form, const HgrnTables& tables,
                  const HgrnForwardScratch* w, ThreadPool& pool) {
  const Forward f{a, p, tables};
  if (form == HgrnForm::Step) {
    each_block(p, pool, [&](std::int64_t n, const Block& k, int worker) { f.step(n, k, w[worker]); });
    return;
  }
  if (p.groups == 1) {
    each_block(p, pool, [&](std::int64_t n, const Block& k, int worker) { f.chunks_in_turn(n, k, w[worker]); });
    return;
  }
  each_chunk(p, pool,
             [&](std::int64_t n, const Block& k, std::int64_t i, int worker) { f.summarise(n, k, i, w[worker]); });
  each_block(p, pool, [&](std::int64_t n, const Block& k, int worker) { f.join_chunks(n, k, w[worker]); });
  each_chunk(p, pool, [&](std::int64_t n, const Block& k, std::int64_t i, int worker) { f.run(n, k, i, w[worker]); });
}

// ---- backward

struct Backward {
  const HgrnBackwardArgs& a;
  const HgrnPlan& p;
  HgrnTables tables;

  // Token by token through a sequence: up for the states at the chunks' beginnings, then down.
  void step(std::int64_t n, const Block& k, const HgrnBackwardScratch& w) const {
    const Sequence s = sequence_at(a.cu_seqlens, p.T, n);
    const std::int64_t chunks = (s.length + kHgrnChunk - 1) / kHgrnChunk;
    if (a.dg) {
      load_state(a.initial_state, n, k, w.h);
      for (std::int64_t i = 0; i < chunks; ++i) {
        std::copy_n(w.h, k.padded, at(tables.h, p, s, n, i, k));
        if (i + 1 == chunks) break;
        forward_rows<true, false>(hgrn_rows(a.x, s), hgrn_rows(a.g, s), {}, i * kHgrnChunk, kHgrnChunk, k,
                                  {.h = w.h, .a = nullptr, .b = nullptr, .carry = nullptr, .x = w.x, .g = w.g});
      }
    }
    load_state(a.dht, n, k, w.d);
    for (std::int64_t i = chunks - 1; i >= 0; --i) {
      if (a.dg) std::copy_n(at(tables.h, p, s, n, i, k), k.padded, w.h);
      rows(s, i * kHgrnChunk, chunk_length(s.length, i), k, w);
    }
    store_state(w.d, a.dh0, n, k);
  }

  // Tokens [t0, t0 + n) downwards. d: gradient of the state after the last of them, then of the state before the first;
  // h: the state before the first (for dg).
  void rows(const Sequence& s, std::int64_t t0, std::int64_t n, const Block& k, const HgrnBackwardScratch& w) const {
    const F d;
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
    const Rows x = hgrn_rows(a.x, s), g = hgrn_rows(a.g, s), up = hgrn_rows(a.do_, s), dx = hgrn_rows(a.dx, s),
               dg = hgrn_rows(a.dg, s);
    for (std::int64_t i = 0; i < n; ++i) {
      const float* gr = row_in(g, t0 + i, k, w.g);
      float* decay = w.decay + i * p.width;
      if (!dg) {
        for (std::int64_t c = 0; c < k.padded; c += lanes) hn::Store(exp_v(d, hn::LoadU(d, gr + c)), d, decay + c);
        continue;
      }
      const float* xr = row_in(x, t0 + i, k, w.x);
      float* before = w.before + i * p.width;
      for (std::int64_t c = 0; c < k.padded; c += lanes) {
        const auto e = exp_v(d, hn::LoadU(d, gr + c)), h = hn::Load(d, w.h + c);
        hn::Store(e, d, decay + c);
        hn::Store(h, d, before + c);
        hn::Store(hn::MulAdd(e, h, hn::LoadU(d, xr + c)), d, w.h + c);
      }
    }

    const bool dx_direct = dx && plain(dx, k), dg_direct = dg && plain(dg, k);
    if (!up) std::fill_n(w.up, k.padded, 0.0F);
    for (std::int64_t i = n - 1; i >= 0; --i) {
      const float* ur = row_in(up, t0 + i, k, w.up);
      const float* decay = w.decay + i * p.width;
      const float* before = w.before + i * p.width;
      float* dxr = dx_direct ? reinterpret_cast<float*>(dx.at(t0 + i, k.c0)) : w.dx;
      float* dgr = dg_direct ? reinterpret_cast<float*>(dg.at(t0 + i, k.c0)) : w.dg;
      for (std::int64_t c = 0; c < k.padded; c += lanes) {
        const auto dh = hn::Add(hn::Load(d, w.d + c), hn::LoadU(d, ur + c));
        hn::StoreU(dh, d, dxr + c);  // (2)
        const auto next = hn::Mul(hn::Load(d, decay + c), dh);
        hn::Store(next, d, w.d + c);
        if (dg) hn::StoreU(hn::Mul(next, hn::Load(d, before + c)), d, dgr + c);  // (3)
      }
      if (dx && !dx_direct) store_row(dxr, dx.at(t0 + i, k.c0), dx.dtype, dx.last, k.width);
      if (dg && !dg_direct) store_row(dgr, dg.at(t0 + i, k.c0), dg.dtype, dg.last, k.width);
    }
  }

  // One chunk alone: the product of its decays, the state from zero, and what its upstream gradients give the state
  // before it, sum over t of do_t times the decays up to t.
  void summarise(std::int64_t n, const Block& k, std::int64_t i, const HgrnBackwardScratch& w) const {
    const F d;
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
    const Sequence s{n, 0, p.T};
    const Rows x = hgrn_rows(a.x, s), g = hgrn_rows(a.g, s), up = hgrn_rows(a.do_, s);
    float* product = at(tables.a, p, s, n, i, k);
    float* h = at(tables.h, p, s, n, i, k);
    float* down = at(tables.d, p, s, n, i, k);
    std::fill_n(product, k.padded, 1.0F);
    std::fill_n(h, k.padded, 0.0F);
    std::fill_n(down, k.padded, 0.0F);
    std::fill_n(w.up, k.padded, 0.0F);
    for (std::int64_t t = i * kHgrnChunk; t < i * kHgrnChunk + chunk_length(p.T, i); ++t) {
      const float* gr = row_in(g, t, k, w.g);
      const float* xr = row_in(x, t, k, w.x);
      const float* ur = row_in(up, t, k, w.up);
      for (std::int64_t c = 0; c < k.padded; c += lanes) {
        const auto e = exp_v(d, hn::LoadU(d, gr + c));
        const auto to_here = flush(d, hn::Mul(e, hn::Load(d, product + c)));
        hn::Store(to_here, d, product + c);
        hn::Store(hn::MulAdd(e, hn::Load(d, h + c), hn::LoadU(d, xr + c)), d, h + c);
        hn::Store(hn::MulAdd(to_here, hn::LoadU(d, ur + c), hn::Load(d, down + c)), d, down + c);
      }
    }
  }

  void join_chunks(std::int64_t n, const Block& k, const HgrnBackwardScratch& w) const {
    const Sequence s{n, 0, p.T};
    load_state(a.initial_state, n, k, w.h);
    for (std::int64_t i = 0; i < p.chunks; ++i)
      join_exchange(at(tables.a, p, s, n, i, k), at(tables.h, p, s, n, i, k), k.padded, w.h);
    load_state(a.dht, n, k, w.d);
    for (std::int64_t i = p.chunks - 1; i >= 0; --i)
      join_exchange(at(tables.a, p, s, n, i, k), at(tables.d, p, s, n, i, k), k.padded, w.d);
    if (p.chunks == 0) store_state(w.d, a.dh0, n, k);
  }

  void run(std::int64_t n, const Block& k, std::int64_t i, const HgrnBackwardScratch& w) const {
    const Sequence s{n, 0, p.T};
    std::copy_n(at(tables.h, p, s, n, i, k), k.padded, w.h);
    std::copy_n(at(tables.d, p, s, n, i, k), k.padded, w.d);
    rows(s, i * kHgrnChunk, chunk_length(p.T, i), k, w);
    if (i == 0) store_state(w.d, a.dh0, n, k);
  }
};

void hgrn_backward(const HgrnBackwardArgs& a, const HgrnPlan& p, HgrnForm form, const HgrnTables& tables,
                   const HgrnBackwardScratch* w, ThreadPool& pool) {
  const Backward f{a, p, tables};
  if (form == HgrnForm::Step) {
    each_block(p, pool, [&](std::int64_t n, const Block& k, int worker) { f.step(n, k, w[worker]); });
    return;
  }
  each_chunk(p, pool,
             [&](std::int64_t n, const Block& k, std::int64_t i, int worker) { f.summarise(n, k, i, w[worker]); });
  each_block(p, pool, [&](std::int64_t n, const Block& k, int worker) { f.join_chunks(n, k, w[worker]); });
  each_chunk(p, pool, [&](std::int64_t n, const Block& k, std::int64_t i, int worker) { f.run(n, k, i, w[worker]); });
}

}  // namespace
}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla {
namespace cpu {
namespace {

HWY_EXPORT(hgrn_forward);
HWY_EXPORT(hgrn_backward);

// What a call takes from its workspace. Without memory it measures.
template <typename Scratch>
struct HgrnMemory {
  HgrnTables tables;
  Scratch* scratch;
  std::size_t bytes;

  HgrnMemory(std::byte* base, const HgrnPlan& p, int threads, bool a, bool h, bool d) {
    Arena m = base == nullptr ? Arena() : Arena(base);
    if (a) tables.a = m.floats(p.table_size());
    if (h) tables.h = m.floats(p.table_size());
    if (d) tables.d = m.floats(p.table_size());
    scratch = m.take<Scratch>(threads);
    for (int i = 0; i < threads; ++i) {
      Scratch s;
      s.carve(m, p.width);
      if (base != nullptr) scratch[i] = s;
    }
    bytes = m.bytes();
  }
};

HgrnPlan forward_plan(const CallInfo& c, HgrnForm form) {
  HgrnPlan p;
  p.cut(c, 4096);
  if (form == HgrnForm::Chunk) p.cut_time(c.threads);
  return p;
}

HgrnMemory<HgrnForwardScratch> forward_memory(std::byte* base, const HgrnPlan& p, int threads) {
  return {base, p, threads, p.groups > 1, p.groups > 1, false};
}

// 1024 channels: a chunk's states and decays, 256 KB, stay in L2.
HgrnPlan backward_plan(const CallInfo& c, HgrnForm form) {
  HgrnPlan p;
  p.cut(c, 1024);
  if (form == HgrnForm::Chunk) p.cut_time(c.threads);
  return p;
}

HgrnMemory<HgrnBackwardScratch> backward_memory(std::byte* base, const HgrnPlan& p, int threads, HgrnForm form) {
  return {base, p, threads, form == HgrnForm::Chunk, true, form == HgrnForm::Chunk};
}

void add(Registry& r, FunctionId<HgrnArgs> f, FunctionId<HgrnBackwardArgs> b, HgrnForm form) {
  const bool step = form == HgrnForm::Step;
  r.add(Kernel<HgrnArgs>{.function = f,
                         .backend = "cpu",
                         .name = step ? "hgrn.step.forward" : "hgrn.chunk.forward",
                         .verify = [](const HgrnArgs& a, const CallInfo& c) { return verify_cpu(c, a.x.dtype); },
                         .workspace =
                             [form](const HgrnArgs&, const CallInfo& c) {
                               return forward_memory(nullptr, forward_plan(c, form), c.threads).bytes;
                             },
                         .launch =
                             [form](const HgrnArgs& a, const CallInfo& c, const LaunchInfo& l) {
                               const HgrnPlan p = forward_plan(c, form);
                               const auto m = forward_memory(l.workspace.data(), p, c.threads);
                               HWY_DYNAMIC_DISPATCH(hgrn_forward)(a, p, form, m.tables, m.scratch, *l.pool);
                               return Status();
                             }});
  r.add(Kernel<HgrnBackwardArgs>{
      .function = b,
      .backend = "cpu",
      .name = step ? "hgrn.step.backward" : "hgrn.chunk.backward",
      .verify = [](const HgrnBackwardArgs& a, const CallInfo& c) { return verify_cpu(c, a.x.dtype); },
      .workspace =
          [form](const HgrnBackwardArgs&, const CallInfo& c) {
            return backward_memory(nullptr, backward_plan(c, form), c.threads, form).bytes;
          },
      .launch =
          [form](const HgrnBackwardArgs& a, const CallInfo& c, const LaunchInfo& l) {
            const HgrnPlan p = backward_plan(c, form);
            const auto m = backward_memory(l.workspace.data(), p, c.threads, form);
            HWY_DYNAMIC_DISPATCH(hgrn_backward)(a, p, form, m.tables, m.scratch, *l.pool);
            return Status();
          }});
}

}  // namespace
}  // namespace cpu

void register_hgrn_cpu(Registry& r) {
  r.add_backend("hgrn", cpu_backend());
  cpu::add(r, kFusedRecurrentHgrn, kFusedRecurrentHgrnBackward, cpu::HgrnForm::Step);
  cpu::add(r, kChunkHgrn, kChunkHgrnBackward, cpu::HgrnForm::Chunk);
}

}  // namespace fla
#endif
