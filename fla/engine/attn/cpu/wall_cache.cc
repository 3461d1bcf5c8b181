// Decoding of wall_attn over a cache, and the making of one.
// task     one batch row and query head
// bits     keys go in tiles that start at multiples of kKeys; a row's sums run over keys in order
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fla/engine/attn/cpu/internal.h"
#include "fla/engine/attn/wall_cache.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/engine/attn/cpu/wall_cache.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/engine/attn/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr double kLn2 = 0.69314718055994530942;

struct CacheTiles {
  float* q = nullptr;     // [kp]
  float* qd = nullptr;    // [kp] q 2^{p - r}
  float* p = nullptr;     // [kp]
  float* r = nullptr;     // [kp]
  float* k = nullptr;     // [kKeys, kp]
  float* v = nullptr;     // [kKeys, vp]
  float* s = nullptr;     // [kKeysLd]
  float* gate = nullptr;  // [kKeysLd]
  float* o = nullptr;     // [vp]
  float* f = nullptr;     // [kPad]

  void carve(Arena& arena, std::int64_t K, std::int64_t V) {
    const std::int64_t kp = pad_up(K), vp = pad_up(V);
    for (float** x : {&q, &qd, &p, &r}) *x = arena.floats(kp);
    k = arena.floats(kKeys * kp);
    v = arena.floats(kKeys * vp);
    s = arena.floats(kKeysLd);
    gate = arena.floats(kKeysLd);
    o = arena.floats(vp);
    f = arena.floats(kPad);
  }
};

std::size_t decode_bytes(const WallDecodeProblem& p) {
  Arena arena;
  CacheTiles w;
  w.carve(arena, p.K(), p.V());
  return arena.bytes();
}

// out = x 2^{a - b}
HWY_INLINE void scale_by_power(const float* x, const float* a, const float* b, std::int64_t width, float* out) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto ln2 = hn::Set(d, static_cast<float>(kLn2));
  for (std::int64_t c = 0; c < width; c += lanes) {
    const auto e = exp_v(d, hn::Mul(ln2, hn::Sub(hn::LoadU(d, a + c), hn::LoadU(d, b + c))));
    hn::StoreU(hn::Mul(e, hn::LoadU(d, x + c)), d, out + c);
  }
}

HWY_NOINLINE void decode_row(const WallDecodeProblem& p, CacheTiles& w, std::int64_t b, std::int64_t h,
                             std::int64_t i) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t K = p.K(), kp = pad_up(K), V = p.V(), vp = pad_up(V), T = p.T(), kv = h / p.group();
  const Rows k = head_rows(p.k, b, 0, T, h), v = head_rows(p.v, b, 0, T, kv), r = head_rows(p.r, b, 0, p.r.dim(1), h),
             c = head_rows(p.c, b, 0, T, h);
  load_rows(head_rows(p.q, b, i, 1, h), 0, 1, 0, K, w.q, kp);
  load_rows(head_rows(p.p, b, i, 1, h), 0, 1, 0, K, w.p, kp);
  const bool sink = p.sink.present();
  float m = -std::numeric_limits<float>::infinity(), l = 0.0F;
  if (sink) {
    m = static_cast<float>(scalar_at({p.sink.at(h), p.sink.dtype, 0, 1}, 0));
    l = 1.0F;
  }
  std::fill(w.o, w.o + vp, 0.0F);
  const double own = c ? scalar_at(c, T - p.Q() + i) : 0.0;
  std::int64_t at = -1;  // the chunk that qd stands for
  for (std::int64_t j0 = 0; j0 < T; j0 += kKeys) {
    const std::int64_t N = std::min(kKeys, T - j0), end = pad_up(N);
    load_rows(k, j0, N, 0, K, w.k, kp);
    load_rows(v, j0, N, 0, V, w.v, vp);
    for (std::int64_t j = 0; j < N; ++j) {
      if (const std::int64_t chunk = (j0 + j) / p.chunk; chunk != at) {
        at = chunk;
        load_rows(r, at, 1, 0, K, w.r, kp);
        scale_by_power(w.q, w.p, w.r, kp, w.qd);
      }
      w.s[j] = dot(w.qd, w.k + j * kp, kp);
      w.gate[j] = c ? static_cast<float>(kLn2 * (own - scalar_at(c, j0 + j))) : 0.0F;
    }
    const float next = std::max(m, logits<true>(w.s, 0, N, end, static_cast<float>(p.scale), w.gate));
    const float pivot = next == -std::numeric_limits<float>::infinity() ? 0.0F : next;
    hn::StoreU(exp_down(d, hn::Set(d, m - pivot)), d, w.f);
    m = next;
    auto sum = hn::Zero(d);
    for (std::int64_t x = 0; x < end; x += lanes) {
      const auto e = exp_down(d, hn::Sub(hn::LoadU(d, w.s + x), hn::Set(d, pivot)));
      hn::StoreU(e, d, w.s + x);
      sum = hn::Add(sum, e);
    }
    l = w.f[0] * l + hn::GetLane(hn::SumOfLanes(d, sum));
    gemm<false>(1, vp, {w.s, kKeysLd, w.v, vp, N}, {}, Tri::None, {w.o, vp, w.f}, w.o, vp);
  }
  const float norm = l == 0.0F ? 0.0F : 1.0F / l;
  for (std::int64_t x = 0; x < vp; x += lanes) hn::StoreU(hn::Mul(hn::Set(d, norm), hn::LoadU(d, w.o + x)), d, w.o + x);
  if (const Rows o = head_rows(p.o, b, i, 1, h); o) store_rows(w.o, vp, o, 0, 1, 0, V);
  if (const Rows lse = head_rows(p.lse, b, i, 1, h); lse) {
    const float value = l == 0.0F ? 0.0F : static_cast<float>((m + std::log(l)) / kLn2);
    store_row(&value, lse.at(0, 0), lse.dtype, 1, 1);
  }
}

void decode(const WallDecodeProblem& p, ThreadPool& pool, std::byte* scratch) {
  const std::size_t bytes = decode_bytes(p);
  run_items(pool, p.B() * p.HQ() * p.Q(), std::max<std::int64_t>(pool.size(), 1),
            [&](std::int64_t item, std::int64_t slot) {
              Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
              CacheTiles w;
              w.carve(arena, p.K(), p.V());
              const std::int64_t head = item / p.Q();
              decode_row(p, w, head / p.HQ(), head % p.HQ(), item % p.Q());
            });
}

std::size_t cache_bytes(const WallCacheProblem& p) {
  Arena arena;
  for (int i = 0; i < 4; ++i) arena.floats(pad_up(p.p.dim(3)));
  return arena.bytes();
}

void cache(const WallCacheProblem& p, ThreadPool& pool, std::byte* scratch) {
  const std::size_t bytes = cache_bytes(p);
  const std::int64_t T = p.p.dim(1), HQ = p.p.dim(2), K = p.p.dim(3), kp = pad_up(K), G = HQ / p.q.dim(2);
  run_items(pool, p.p.dim(0) * HQ, std::max<std::int64_t>(pool.size(), 1), [&](std::int64_t item, std::int64_t slot) {
    Arena arena(scratch + static_cast<std::size_t>(slot) * bytes);
    float *k = arena.floats(kp), *P = arena.floats(kp), *anchor = arena.floats(kp), *out = arena.floats(kp);
    const std::int64_t b = item / HQ, h = item % HQ;
    const Rows keys = head_rows(p.q, b, 0, T, h / G), sums = head_rows(p.p, b, 0, T, h),
               to = head_rows(p.k_tilde, b, 0, T, h), r = head_rows(p.r, b, 0, T, h);
    for (std::int64_t j = 0; j < T; ++j) {
      load_rows(sums, j, 1, 0, K, P, kp);
      if (j % p.chunk == 0) {
        load_rows(sums, j, 1, 0, K, anchor, kp);
        if (r) store_rows(anchor, kp, r, j / p.chunk, 1, 0, K);
      }
      if (!to) continue;
      load_rows(keys, j, 1, 0, K, k, kp);
      scale_by_power(k, anchor, P, kp, out);
      store_rows(out, kp, to, j, 1, 0, K);
    }
  });
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(decode_bytes);
HWY_EXPORT(decode);
HWY_EXPORT(cache_bytes);
HWY_EXPORT(cache);

std::size_t wall_decode_workspace(const WallDecodeProblem& p, int threads) {
  return HWY_DYNAMIC_DISPATCH(decode_bytes)(p) * static_cast<std::size_t>(std::max(threads, 1));
}
Status wall_decode(const WallDecodeProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (workspace.size() < wall_decode_workspace(p, pool.size()))
    return {Code::OutOfMemory, "wall_decode: workspace too small"};
  HWY_DYNAMIC_DISPATCH(decode)(p, pool, workspace.data());
  return {};
}

std::size_t wall_cache_workspace(const WallCacheProblem& p, int threads) {
  return HWY_DYNAMIC_DISPATCH(cache_bytes)(p) * static_cast<std::size_t>(std::max(threads, 1));
}
Status wall_cache(const WallCacheProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  if (workspace.size() < wall_cache_workspace(p, pool.size()))
    return {Code::OutOfMemory, "wall_cache: workspace too small"};
  HWY_DYNAMIC_DISPATCH(cache)(p, pool, workspace.data());
  return {};
}

}  // namespace fla::cpu
#endif
