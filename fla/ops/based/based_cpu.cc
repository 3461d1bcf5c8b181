// The CPU kernels of based; README.md.
//
// K to 16    (5): the features of queries and keys, and the values with a one behind them, go through the engine of the
//            diagonal decay without a gate, kSegment tokens of all heads at a time: the state is carried from one
//            segment to the next, and the features of the whole sequence never exist at once. Backward: the states at
//            the starts of the segments forwards, then segment by segment backwards
// K above    (1), (2) by tiles of kTile queries and keys: the state would have more rows than most sequences tokens.
//            Backward: a sweep by queries, which leaves 1 / z and dz, then one by keys
// bits       a token's sums run over earlier tokens in one order: neither segments nor tiles depend on T
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "fla/engine/common/cpu_engine.h"
#include "fla/engine/diag/cpu/entry.h"
#include "fla/engine/diag/cpu/internal.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/schedule.h"
#include "fla/kernels/cpu/targets.h"
#include "fla/ops/based/based.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/ops/based/based_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/kernels/cpu/gemm-inl.h"
#include "fla/kernels/cpu/io-inl.h"

#ifndef FLA_OPS_BASED_CPU_CC_ONCE
#define FLA_OPS_BASED_CPU_CC_ONCE
namespace fla::cpu {

inline constexpr std::int64_t kWidestFeatures = 16;
inline constexpr std::int64_t kSegment = 256;
inline constexpr std::int64_t kTile = 64;
inline constexpr float kBasedEpsilon = 1e-6F;

struct BasedSizes {
  std::int64_t B, T, H, K, V;
  float scale;
  explicit BasedSizes(const BasedArgs& a)
      : B(a.q.dim(0)),
        T(a.q.dim(1)),
        H(a.q.dim(2)),
        K(a.q.dim(3)),
        V(a.v.dim(3)),
        scale(static_cast<float>(a.scale.value_or(1.0 / std::sqrt(static_cast<double>(K))))) {}
};

// Tokens of one batch row and head.
inline Rows based_rows(const TensorView& x, std::int64_t b, std::int64_t h) {
  if (!x || x.dim(1) == 0) return {};
  return {x.at(b, 0, h), x.dtype, x.stride[1] * static_cast<std::int64_t>(size_of(x.dtype)), x.stride[3]};
}

inline TensorView floats(Arena& arena, std::initializer_list<std::int64_t> dims) {
  std::int64_t n = 1;
  for (const std::int64_t d : dims) n *= d;
  return {arena.floats(n), DType::F32, std::span(dims.begin(), dims.size())};
}

// The memory of the form with features, and what the engine is asked for. Without memory it measures.
struct Features {
  BasedSizes s;
  bool norm;
  std::int64_t F, W, segments;        // features, columns of the values with the one, segments
  TensorView q, k, v, o;              // [B, kSegment, H, F or W] of the current segment
  TensorView dq, dk, dv;              // likewise; o becomes do
  float* states = nullptr;            // [segments or 1][B, H, F, W] at the segments' starts
  TensorView d;                       // [B, H, F, W]
  float* rows = nullptr;              // per thread: [3][row_size]
  std::int64_t row_size, state_size;  // of one thread; of all heads
  std::span<std::byte> engine_memory;
  std::size_t bytes = 0;

  Features(const BasedArgs& a, bool backward, int threads, std::byte* base)
      : s(a),
        norm(a.use_norm),
        F(1 + s.K + s.K * (s.K + 1) / 2),
        W(s.V + (norm ? 1 : 0)),
        segments((s.T + kSegment - 1) / kSegment),
        row_size(pad_up(std::max(F, W)) + 2 * kPad),
        state_size(s.B * s.H * F * W) {
    Arena arena;
    if (base != nullptr) arena = Arena(base);
    const std::int64_t T = std::min(s.T, kSegment);
    q = floats(arena, {s.B, T, s.H, F});
    k = floats(arena, {s.B, T, s.H, F});
    v = floats(arena, {s.B, T, s.H, W});
    o = floats(arena, {s.B, T, s.H, W});
    if (backward) {
      dq = floats(arena, {s.B, T, s.H, F});
      dk = floats(arena, {s.B, T, s.H, F});
      dv = floats(arena, {s.B, T, s.H, W});
      d = floats(arena, {s.B, s.H, F, W});
    }
    states = arena.floats((backward ? std::max<std::int64_t>(segments, 1) : 1) * state_size);
    rows = arena.floats(std::int64_t{3} * threads * row_size);
    std::size_t engine = diag_chunk_forward_workspace(problem(0), 0, threads);
    if (backward) engine = std::max(engine, diag_chunk_backward_workspace(gradients(0), 0, threads));
    std::byte* rest = arena.take<std::byte>(static_cast<std::int64_t>(engine));
    engine_memory = {rest, rest == nullptr ? 0 : engine};
    bytes = arena.bytes();
  }

  std::int64_t length(std::int64_t segment) const { return std::min(kSegment, s.T - segment * kSegment); }
  TensorView state(std::int64_t segment) const {
    const std::int64_t dims[] = {s.B, s.H, F, W};
    return {states == nullptr ? nullptr : states + segment * state_size, DType::F32, std::span(dims)};
  }
  DiagProblem problem(std::int64_t segment) const {
    const auto cut = [&](TensorView x) {
      if (x) x.shape[1] = length(segment);
      return x;
    };
    DiagProblem p;
    p.B = p.N = s.B;
    p.T = length(segment);
    p.H = s.H;
    p.K = F;
    p.V = W;
    p.q = cut(q);
    p.k = cut(k);
    p.v = cut(v);
    return p;
  }
  DiagBackwardProblem gradients(std::int64_t segment) const {
    DiagBackwardProblem p(problem(segment));
    const auto cut = [&](TensorView x) {
      x.shape[1] = p.T;
      return x;
    };
    p.h0 = state(segment);
    p.do_ = cut(o);
    p.dq = cut(dq);
    p.dk = cut(dk);
    p.dv = cut(dv);
    p.dht = p.dh0 = d;
    return p;
  }
};

// Scratch of the form by tiles.
struct BasedTiles {
  float *q = nullptr, *k = nullptr, *dq = nullptr, *dk = nullptr;  // [kTile, kp]
  float *v = nullptr, *o = nullptr, *up = nullptr, *dv = nullptr;  // [kTile, vp]
  float *kt = nullptr, *vt = nullptr;                              // [kp, lt], [vp, lt]
  float *a = nullptr, *p = nullptr, *g = nullptr;                  // [kTile, lt] scores, P, dP then da
  float *z = nullptr, *inv = nullptr, *dz = nullptr;               // [lt]
  void carve(Arena& arena, std::int64_t K, std::int64_t V) {
    const std::int64_t kp = pad_up(K), vp = pad_up(V), lt = token_ld(kTile), rows = token_rows_padded(kTile);
    for (float** x : {&q, &k, &dq, &dk}) *x = arena.floats(rows * kp);
    for (float** x : {&v, &o, &up, &dv}) *x = arena.floats(rows * vp);
    kt = arena.floats(kp * lt);
    vt = arena.floats(vp * lt);
    for (float** x : {&a, &p, &g}) *x = arena.floats(rows * lt);
    for (float** x : {&z, &inv, &dz}) *x = arena.floats(lt);
  }
  static std::size_t bytes(std::int64_t K, std::int64_t V) {
    Arena arena;
    BasedTiles().carve(arena, K, V);
    return arena.bytes();
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

constexpr float kRoot2 = 1.41421356237309505F;

// out = the features of x [K], which has zeros behind it: 1, x_c, then by c x_c x_d for d >= c, squares over sqrt(2).
// A row's vectors run past its end and are overwritten by the next.
HWY_INLINE void features_of(const float* x, std::int64_t K, float* out) {
  const F32 d;
  out[0] = 1.0F;
  std::copy(x, x + K, out + 1);
  float* to = out + 1 + K;
  for (std::int64_t c = 0; c < K; to += K - c, ++c) {
    const auto xc = hn::Set(d, x[c]);
    for (std::int64_t e = c; e < K; e += lanes_of(d)) {
      hn::StoreU(hn::Mul(xc, hn::LoadU(d, x + e)), d, to + e - c);
    }
    to[0] = x[c] * x[c] * (1.0F / kRoot2);
  }
}

// dx [K] from the gradient of the features, whose memory has finite numbers behind it.
HWY_INLINE void features_back(const float* x, const float* df, std::int64_t K, float* dx) {
  const F32 d;
  std::copy(df + 1, df + 1 + K, dx);
  const float* from = df + 1 + K;
  for (std::int64_t c = 0; c < K; from += K - c, ++c) {
    const auto xc = hn::Set(d, x[c]);
    auto sum = hn::Zero(d);
    // The square's gradient is 2 x_c / sqrt(2): both sums below have it once, without the root.
    for (std::int64_t e = c; e < K; e += lanes_of(d)) {
      const auto f = hn::LoadU(d, from + e - c);
      sum = hn::MulAdd(f, hn::LoadU(d, x + e), sum);
      hn::StoreU(hn::MulAdd(f, xc, hn::LoadU(d, dx + e)), d, dx + e);
    }
    dx[c] += hn::GetLane(hn::SumOfLanes(d, sum)) - (2.0F - kRoot2) * from[0] * x[c];
  }
}

struct FeatureScratch {
  float *x, *y, *z;
  FeatureScratch(const Features& f, int worker) {
    float* base = f.rows + static_cast<std::int64_t>(worker) * 3 * f.row_size;
    x = base;
    y = base + f.row_size;
    z = base + 2 * f.row_size;
    std::fill(base, base + 3 * f.row_size, 0.0F);
  }
};

float* row_of(const TensorView& t, std::int64_t b, std::int64_t i, std::int64_t h) {
  return reinterpret_cast<float*>(t.at(b, i, h));
}

// q, k, v of a segment, scale in the query.
void make_features(const Features& f, const BasedArgs& a, std::int64_t segment, bool queries, ThreadPool& pool) {
  const std::int64_t t0 = segment * kSegment, T = f.length(segment), K = f.s.K, V = f.s.V;
  pool.run(f.s.B * f.s.H, [&](std::int64_t task, int worker) HWY_ATTR {
    const std::int64_t b = task / f.s.H, h = task % f.s.H;
    const Rows q = based_rows(a.q, b, h), k = based_rows(a.k, b, h), v = based_rows(a.v, b, h);
    const FeatureScratch w(f, worker);
    for (std::int64_t i = 0; i < T; ++i) {
      if (queries) {
        load_rows(q, t0 + i, 1, 0, K, w.x, pad_up(K));
        for (std::int64_t c = 0; c < K; ++c) w.x[c] *= f.s.scale;
        features_of(w.x, K, w.y);
        std::copy(w.y, w.y + f.F, row_of(f.q, b, i, h));
      }
      load_rows(k, t0 + i, 1, 0, K, w.x, pad_up(K));
      features_of(w.x, K, w.y);
      std::copy(w.y, w.y + f.F, row_of(f.k, b, i, h));
      float* to = row_of(f.v, b, i, h);
      load_row(v.at(t0 + i, 0), v.dtype, v.last, V, to);
      if (f.norm) to[V] = 1.0F;
    }
  });
}

void divide(const Features& f, const BasedArgs& a, std::int64_t segment, ThreadPool& pool) {
  const std::int64_t t0 = segment * kSegment, T = f.length(segment), V = f.s.V;
  pool.run(f.s.B * f.s.H, [&](std::int64_t task, int) HWY_ATTR {
    const std::int64_t b = task / f.s.H, h = task % f.s.H;
    const Rows o = based_rows(a.o, b, h);
    for (std::int64_t i = 0; i < T; ++i) {
      float* x = row_of(f.o, b, i, h);
      if (f.norm) {
        const float by = x[V] + kBasedEpsilon;
        for (std::int64_t c = 0; c < V; ++c) x[c] /= by;
      }
      store_row(x, o.at(t0 + i, 0), o.dtype, o.last, V);
    }
  });
}

// f.o: with norm the numerators and z, which become their gradients; without, do.
void upstream(const Features& f, const BasedBackwardArgs& a, std::int64_t segment, ThreadPool& pool) {
  const std::int64_t t0 = segment * kSegment, T = f.length(segment), V = f.s.V;
  pool.run(f.s.B * f.s.H, [&](std::int64_t task, int worker) HWY_ATTR {
    const std::int64_t b = task / f.s.H, h = task % f.s.H;
    const Rows up = based_rows(a.do_, b, h);
    const FeatureScratch w(f, worker);
    for (std::int64_t i = 0; i < T; ++i) {
      float* x = row_of(f.o, b, i, h);
      if (up) load_row(up.at(t0 + i, 0), up.dtype, up.last, V, w.x);
      if (!f.norm) {
        std::copy(w.x, w.x + V, x);
        continue;
      }
      const float by = x[V] + kBasedEpsilon;
      float dot = 0.0F;
      for (std::int64_t c = 0; c < V; ++c) {
        const float o = x[c] / by;
        x[c] = w.x[c] / by;
        dot += x[c] * o;
      }
      x[V] = -dot;
    }
  });
}

void store_gradients(const Features& f, const BasedBackwardArgs& a, std::int64_t segment, ThreadPool& pool) {
  const std::int64_t t0 = segment * kSegment, T = f.length(segment), K = f.s.K, V = f.s.V;
  pool.run(f.s.B * f.s.H, [&](std::int64_t task, int worker) HWY_ATTR {
    const std::int64_t b = task / f.s.H, h = task % f.s.H;
    const FeatureScratch w(f, worker);
    const auto back = [&](const TensorView& from, const TensorView& x, const TensorView& gradient, float scale)
                          HWY_ATTR {
                            if (!gradient) return;
                            const Rows in = based_rows(x, b, h), to = based_rows(gradient, b, h);
                            for (std::int64_t i = 0; i < T; ++i) {
                              load_rows(in, t0 + i, 1, 0, K, w.x, pad_up(K));
                              for (std::int64_t c = 0; c < K; ++c) w.x[c] *= scale;
                              const float* df = row_of(from, b, i, h);
                              std::copy(df, df + f.F, w.y);
                              features_back(w.x, w.y, K, w.z);
                              for (std::int64_t c = 0; c < K; ++c) w.z[c] *= scale;
                              store_row(w.z, to.at(t0 + i, 0), to.dtype, to.last, K);
                            }
                          };
    back(f.dq, a.q, a.dq, f.s.scale);
    back(f.dk, a.k, a.dk, 1.0F);
    if (!a.dv) return;
    const Rows to = based_rows(a.dv, b, h);
    for (std::int64_t i = 0; i < T; ++i) store_row(row_of(f.dv, b, i, h), to.at(t0 + i, 0), to.dtype, to.last, V);
  });
}

// ---- by tiles

struct TileHead {
  const BasedArgs& a;
  const BasedTiles& w;
  BasedSizes s;
  Rows q, k, v;
  std::int64_t kp, vp, lt = token_ld(kTile);

  TileHead(const BasedArgs& args, const BasedTiles& tiles, std::int64_t b, std::int64_t h)
      : a(args),
        w(tiles),
        s(args),
        q(based_rows(args.q, b, h)),
        k(based_rows(args.k, b, h)),
        v(based_rows(args.v, b, h)),
        kp(pad_up(s.K)),
        vp(pad_up(s.V)) {}

  std::int64_t rows(std::int64_t tile) const { return std::min(kTile, s.T - tile * kTile); }
  // Queries come with their scale.
  void load_queries(std::int64_t tile) const {
    const F32 d;
    const std::int64_t n = rows(tile);
    load_rows(q, tile * kTile, n, 0, s.K, w.q, kp);
    for (std::int64_t c = 0; c < n * kp; c += lanes_of(d))
      hn::StoreU(hn::Mul(hn::Set(d, s.scale), hn::LoadU(d, w.q + c)), d, w.q + c);
  }
  void load_keys(std::int64_t tile) const {
    const std::int64_t n = rows(tile);
    load_rows(k, tile * kTile, n, 0, s.K, w.k, kp);
    load_rows(v, tile * kTile, n, 0, s.V, w.v, vp);
    transpose(w.k, kp, n, s.K, w.kt, lt);
  }
  // a and P of queries in tile i and keys in tile j; 0 above the diagonal.
  void scores(std::int64_t i, std::int64_t j) const {
    const F32 d;
    const std::int64_t M = rows(i), N = rows(j);
    gemm<false>(M, N, {w.q, kp, w.kt, lt, s.K}, {}, Tri::None, {}, w.a, lt);
    const auto one = hn::Set(d, 1.0F), half = hn::Set(d, 0.5F);
    for (std::int64_t r = 0; r < M; ++r) {
      const std::int64_t live = i == j ? r + 1 : N;
      float *a_row = w.a + r * lt, *p_row = w.p + r * lt;
      for (std::int64_t c = 0; c < live; c += lanes_of(d)) {
        const auto x = hn::LoadU(d, a_row + c);
        hn::StoreU(hn::MulAdd(hn::MulAdd(half, x, one), x, one), d, p_row + c);
      }
      std::fill(p_row + live, p_row + lt, 0.0F);
    }
  }
  // Numerators and z of tile i in w.o and w.z.
  void outputs(std::int64_t i) const {
    const std::int64_t M = rows(i);
    std::fill(w.z, w.z + M, 0.0F);
    std::fill(w.o, w.o + M * vp, 0.0F);
    for (std::int64_t j = 0; j <= i; ++j) {
      load_keys(j);
      scores(i, j);
      for (std::int64_t r = 0; r < M; ++r) {
        float sum = 0.0F;
        for (std::int64_t c = 0, n = i == j ? r + 1 : rows(j); c < n; ++c) sum += w.p[r * lt + c];
        w.z[r] += sum;
      }
      if (i == j) {
        gemm<false>(M, vp, {}, {w.p, lt, w.v, vp, 0}, Tri::Lower, {w.o, vp}, w.o, vp);
      } else {
        gemm<false>(M, vp, {w.p, lt, w.v, vp, rows(j)}, {}, Tri::None, {w.o, vp}, w.o, vp);
      }
    }
  }
  float divisor(std::int64_t r) const { return a.use_norm ? w.z[r] + kBasedEpsilon : 1.0F; }
  // da of tile (i, j) in w.g: (<up_i, v_j> + dz_i)(1 + a), 0 above the diagonal.
  void score_gradients(std::int64_t i, std::int64_t j) const {
    const F32 d;
    const std::int64_t M = rows(i), N = rows(j);
    transpose(w.v, vp, N, s.V, w.vt, lt);
    gemm<false>(M, N, {w.up, vp, w.vt, lt, s.V}, {}, Tri::None, {}, w.g, lt);
    const auto one = hn::Set(d, 1.0F);
    for (std::int64_t r = 0; r < M; ++r) {
      const std::int64_t live = i == j ? r + 1 : N;
      const auto dz = hn::Set(d, w.dz[r]);
      float* g = w.g + r * lt;
      for (std::int64_t c = 0; c < live; c += lanes_of(d)) {
        const auto x = hn::Add(one, hn::LoadU(d, w.a + r * lt + c));
        hn::StoreU(hn::Mul(x, hn::Add(dz, hn::LoadU(d, g + c))), d, g + c);
      }
      std::fill(g + live, g + lt, 0.0F);
    }
  }
};

HWY_NOINLINE void tile_forward(const BasedArgs& a, const BasedTiles& w, std::int64_t b, std::int64_t h,
                               std::int64_t i) {
  const TileHead x(a, w, b, h);
  x.load_queries(i);
  x.outputs(i);
  const std::int64_t M = x.rows(i);
  for (std::int64_t r = 0; r < M; ++r) {
    const float by = x.divisor(r);
    for (std::int64_t c = 0; c < x.s.V; ++c) w.o[r * x.vp + c] /= by;
  }
  store_rows(w.o, x.vp, based_rows(a.o, b, h), i * kTile, M, 0, x.s.V);
}

// dq of tile i; 1 / z and dz of its rows into by_row [2, T].
HWY_NOINLINE void tile_queries_back(const BasedBackwardArgs& a, const BasedTiles& w, std::int64_t b, std::int64_t h,
                                    std::int64_t i, float* by_row) {
  const TileHead x(a, w, b, h);
  const std::int64_t M = x.rows(i), T = x.s.T, vp = x.vp;
  x.load_queries(i);
  load_rows(based_rows(a.do_, b, h), i * kTile, M, 0, x.s.V, w.up, vp);
  if (a.use_norm) x.outputs(i);
  for (std::int64_t r = 0; r < M; ++r) {
    const float inverse = 1.0F / x.divisor(r);
    float dot = 0.0F;
    for (std::int64_t c = 0; c < x.s.V; ++c) {
      float& up = w.up[r * vp + c];
      up *= inverse;
      if (a.use_norm) dot += up * (w.o[r * vp + c] * inverse);
    }
    w.dz[r] = -dot;
    by_row[i * kTile + r] = inverse;
    by_row[T + i * kTile + r] = -dot;
  }
  if (!a.dq) return;
  std::fill(w.dq, w.dq + M * x.kp, 0.0F);
  for (std::int64_t j = 0; j <= i; ++j) {
    x.load_keys(j);
    x.scores(i, j);
    x.score_gradients(i, j);
    gemm<false>(M, x.kp, {w.g, x.lt, w.k, x.kp, x.rows(j)}, {}, Tri::None, {w.dq, x.kp}, w.dq, x.kp);
  }
  for (std::int64_t c = 0; c < M * x.kp; ++c) w.dq[c] *= x.s.scale;
  store_rows(w.dq, x.kp, based_rows(a.dq, b, h), i * kTile, M, 0, x.s.K);
}

// dk and dv of tile j.
HWY_NOINLINE void tile_keys_back(const BasedBackwardArgs& a, const BasedTiles& w, std::int64_t b, std::int64_t h,
                                 std::int64_t j, const float* by_row) {
  const TileHead x(a, w, b, h);
  const std::int64_t N = x.rows(j), T = x.s.T, kp = x.kp, vp = x.vp, lt = x.lt;
  x.load_keys(j);
  std::fill(w.dk, w.dk + N * kp, 0.0F);
  std::fill(w.dv, w.dv + N * vp, 0.0F);
  for (std::int64_t i = j; i * kTile < T; ++i) {
    const std::int64_t M = x.rows(i);
    x.load_queries(i);
    load_rows(based_rows(a.do_, b, h), i * kTile, M, 0, x.s.V, w.up, vp);
    for (std::int64_t r = 0; r < M; ++r) {
      for (std::int64_t c = 0; c < vp; ++c) w.up[r * vp + c] *= by_row[i * kTile + r];
      w.dz[r] = by_row[T + i * kTile + r];
    }
    x.scores(i, j);
    x.score_gradients(i, j);
    gemm<true>(N, kp, {w.g, lt, w.q, kp, M}, {}, Tri::None, {w.dk, kp}, w.dk, kp);
    gemm<true>(N, vp, {w.p, lt, w.up, vp, M}, {}, Tri::None, {w.dv, vp}, w.dv, vp);
  }
  if (a.dk) store_rows(w.dk, kp, based_rows(a.dk, b, h), j * kTile, N, 0, x.s.K);
  if (a.dv) store_rows(w.dv, vp, based_rows(a.dv, b, h), j * kTile, N, 0, x.s.V);
}

template <typename Fn>
void for_tiles(const BasedArgs& a, ThreadPool& pool, std::byte* workspace, Fn&& fn) {
  const BasedSizes s(a);
  const std::int64_t tiles = (s.T + kTile - 1) / kTile;
  const std::size_t bytes = BasedTiles::bytes(s.K, s.V);
  run_items(pool, s.B * s.H * tiles, pool.size(), [&](std::int64_t item, std::int64_t slot) HWY_ATTR {
    Arena arena(workspace + static_cast<std::size_t>(slot) * bytes);
    BasedTiles w;
    w.carve(arena, s.K, s.V);
    const std::int64_t bh = item / tiles;
    fn(w, bh / s.H, bh % s.H, item % tiles);
  });
}

void tiles_forward(const BasedArgs& a, ThreadPool& pool, std::byte* workspace) {
  for_tiles(a, pool, workspace,
            [&](const BasedTiles& w, std::int64_t b, std::int64_t h, std::int64_t i) { tile_forward(a, w, b, h, i); });
}

// by_row: [B, H, 2, T]
void tiles_backward(const BasedBackwardArgs& a, ThreadPool& pool, float* by_row, std::byte* workspace) {
  const BasedSizes s(a);
  for_tiles(a, pool, workspace, [&](const BasedTiles& w, std::int64_t b, std::int64_t h, std::int64_t i) {
    tile_queries_back(a, w, b, h, i, by_row + (b * s.H + h) * 2 * s.T);
  });
  if (!a.dk && !a.dv) return;
  for_tiles(a, pool, workspace, [&](const BasedTiles& w, std::int64_t b, std::int64_t h, std::int64_t j) {
    tile_keys_back(a, w, b, h, j, by_row + (b * s.H + h) * 2 * s.T);
  });
}

}  // namespace

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla {
namespace cpu {
namespace {

HWY_EXPORT(make_features);
HWY_EXPORT(divide);
HWY_EXPORT(upstream);
HWY_EXPORT(store_gradients);
HWY_EXPORT(tiles_forward);
HWY_EXPORT(tiles_backward);

bool by_features(const BasedArgs& a) { return a.q.dim(3) <= kWidestFeatures; }

std::size_t tiles_workspace(const BasedArgs& a, int threads) {
  return BasedTiles::bytes(a.q.dim(3), a.v.dim(3)) * static_cast<std::size_t>(threads);
}

float* place_rows(Arena& arena, const BasedArgs& a) { return arena.floats(2 * a.q.dim(0) * a.q.dim(1) * a.q.dim(2)); }

std::size_t forward_workspace(const BasedArgs& a, const CallInfo& c) {
  return by_features(a) ? Features(a, false, c.threads, nullptr).bytes : tiles_workspace(a, c.threads);
}

std::size_t backward_workspace(const BasedBackwardArgs& a, const CallInfo& c) {
  if (by_features(a)) return Features(a, true, c.threads, nullptr).bytes;
  Arena arena;
  place_rows(arena, a);
  return arena.bytes() + tiles_workspace(a, c.threads);
}

void zero(const BasedBackwardArgs& a) {
  for (const TensorView* x : {&a.dq, &a.dk, &a.dv}) {
    if (!*x) continue;
    for (std::int64_t b = 0; b < x->dim(0); ++b)
      for (std::int64_t t = 0; t < x->dim(1); ++t)
        for (std::int64_t h = 0; h < x->dim(2); ++h)
          for (std::int64_t c = 0; c < x->dim(3); ++c) store_element(x->at(b, t, h, c), x->dtype, 0.0);
  }
}

Status forward(const BasedArgs& a, const CallInfo&, const LaunchInfo& l) {
  if (!by_features(a)) {
    HWY_DYNAMIC_DISPATCH(tiles_forward)(a, *l.pool, l.workspace.data());
    return {};
  }
  const Features f(a, false, l.pool->size(), l.workspace.data());
  for (std::int64_t i = 0; i < f.segments; ++i) {
    HWY_DYNAMIC_DISPATCH(make_features)(f, a, i, true, *l.pool);
    DiagProblem p = f.problem(i);
    if (i > 0) p.h0 = f.state(0);
    if (i + 1 < f.segments) p.ht = f.state(0);
    p.o = f.o;
    p.o.shape[1] = p.T;
    if (Status s = diag_chunk_forward(p, 0, *l.pool, f.engine_memory); !s) return s;
    HWY_DYNAMIC_DISPATCH(divide)(f, a, i, *l.pool);
  }
  return {};
}

Status backward(const BasedBackwardArgs& a, const CallInfo&, const LaunchInfo& l) {
  if (!a.do_) {
    zero(a);
    return {};
  }
  if (!by_features(a)) {
    Arena arena(l.workspace.data());
    float* rows = place_rows(arena, a);
    HWY_DYNAMIC_DISPATCH(tiles_backward)(a, *l.pool, rows, arena.take<std::byte>(0));
    return {};
  }
  const Features f(a, true, l.pool->size(), l.workspace.data());
  std::fill(f.states, f.states + f.state_size, 0.0F);
  for (std::int64_t i = 0; i + 1 < f.segments; ++i) {
    HWY_DYNAMIC_DISPATCH(make_features)(f, a, i, false, *l.pool);
    DiagProblem p = f.problem(i);
    p.h0 = f.state(i);
    p.ht = f.state(i + 1);
    if (Status s = diag_chunk_forward(p, 0, *l.pool, f.engine_memory); !s) return s;
  }
  for (std::int64_t i = f.segments - 1; i >= 0; --i) {
    HWY_DYNAMIC_DISPATCH(make_features)(f, a, i, true, *l.pool);
    if (a.use_norm) {
      DiagProblem p = f.problem(i);
      p.h0 = f.state(i);
      p.o = f.o;
      p.o.shape[1] = p.T;
      if (Status s = diag_chunk_forward(p, 0, *l.pool, f.engine_memory); !s) return s;
    }
    HWY_DYNAMIC_DISPATCH(upstream)(f, a, i, *l.pool);
    DiagBackwardProblem p = f.gradients(i);
    if (i + 1 == f.segments) p.dht = {};
    if (Status s = diag_chunk_backward(p, 0, *l.pool, f.engine_memory); !s) return s;
    HWY_DYNAMIC_DISPATCH(store_gradients)(f, a, i, *l.pool);
  }
  return {};
}

void add(Registry& r, FunctionId<BasedArgs> f, FunctionId<BasedBackwardArgs> b) {
  r.add(Kernel<BasedArgs>{.function = f,
                          .backend = "cpu",
                          .name = "based.chunk.forward",
                          .verify = [](const BasedArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
                          .workspace = forward_workspace,
                          .launch = forward});
  r.add(Kernel<BasedBackwardArgs>{
      .function = b,
      .backend = "cpu",
      .name = "based.chunk.backward",
      .verify = [](const BasedBackwardArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace = backward_workspace,
      .launch = backward});
}

}  // namespace
}  // namespace cpu

void register_based_cpu(Registry& r) {
  r.add_backend("based", cpu_backend());
  cpu::add(r, kFusedChunkBased, kFusedChunkBasedBackward);
  cpu::add(r, kParallelBased, kParallelBasedBackward);
}

}  // namespace fla
#endif
