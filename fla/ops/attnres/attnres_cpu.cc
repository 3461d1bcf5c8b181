// The CPU kernels of attnres. README.md (1) to (9) and what it says about sums.
//
// forward   a token's L rows once each, in order: running maximum, denominator and u; a larger maximum scales these down
// backward  a token's rows twice (three times under an output norm): (1) to (3) again, then its gradients
// sums      over tokens in groups of kGroup: a row of S and one of dw_o for each group, added up in order at the end
// numerics  fp32; results are rounded once. One order of sums: the same bits for any number of threads
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fla/engine/common/cpu_engine.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/kernels/cpu/targets.h"
#include "fla/ops/attnres/attnres.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/ops/attnres/attnres_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/kernels/cpu/io-inl.h"

#ifndef FLA_OPS_ATTNRES_CPU_CC_ONCE
#define FLA_OPS_ATTNRES_CPU_CC_ONCE
namespace fla::cpu {

// Tokens that share a row of S. A constant, and counted from the first token: later tokens that add nothing do not move
// the sums of earlier ones.
inline constexpr std::int64_t kGroup = 16;

// The tokens of a call in row-major order of their axes, which every tensor has with strides of its own.
struct AttnresTokens {
  int axes = 0;  // before D
  std::array<std::int64_t, kMaxDims> shape{};
  std::int64_t count = 1, L = 0, D = 0, width = 0;  // width: D in whole vectors

  explicit AttnresTokens(const AttnresArgs& a)
      : axes(a.residuals[0].ndim - 1),
        shape(a.residuals[0].shape),
        L(static_cast<std::int64_t>(a.residuals.size())),
        D(a.residuals[0].dim(axes)),
        width(pad_up(D)) {
    for (int i = 0; i < axes; ++i) count *= shape[static_cast<std::size_t>(i)];
  }
  std::int64_t groups() const { return (count + kGroup - 1) / kGroup; }

  using Index = std::array<std::int64_t, kMaxDims>;
  Index index(std::int64_t n) const {
    Index at{};
    for (int i = axes - 1; i >= 0; --i) {
      at[static_cast<std::size_t>(i)] = n % shape[static_cast<std::size_t>(i)];
      n /= shape[static_cast<std::size_t>(i)];
    }
    return at;
  }
  // Where a token begins in a tensor whose axes from `first` on are the tokens'.
  std::byte* begin(const TensorView& t, const Index& at, int first = 0) const {
    std::int64_t offset = 0;
    const auto own = static_cast<std::size_t>(first), most = static_cast<std::size_t>(axes);
    for (std::size_t i = 0; i < most; ++i) offset += at[i] * t.stride[own + i];
    return static_cast<std::byte*>(t.data) + offset * static_cast<std::int64_t>(size_of(t.dtype));
  }
  std::int64_t step(const TensorView& t) const { return t.stride[static_cast<std::size_t>(axes)]; }
};

// What a token's rows say of themselves.
struct AttnresSource {
  float rho, z, p, d;  // d: <du, v>
};

// Rows of one call, [width] each and zero behind D.
struct AttnresShared {
  float *key, *query, *weight, *output_weight;
  float *S, *dw;  // [groups, width]
};

struct AttnresScratch {
  float *row, *u, *up, *du, *result;  // [width]
  AttnresSource* sources;             // [L]
};

struct AttnresMemory {
  AttnresShared shared;
  AttnresScratch* workers;
  std::size_t bytes;

  // Without memory it measures. groups: rows of the sums, 0 in a forward.
  AttnresMemory(std::byte* base, const AttnresTokens& t, int threads, std::int64_t groups, bool output_norm) {
    Arena m = base == nullptr ? Arena() : Arena(base);
    for (float** f : {&shared.key, &shared.query, &shared.weight, &shared.output_weight}) *f = m.floats(t.width);
    shared.S = m.floats(groups * t.width);
    shared.dw = m.floats(output_norm ? groups * t.width : 0);
    workers = m.take<AttnresScratch>(threads);
    for (int i = 0; i < threads; ++i) {
      AttnresScratch s{};
      for (float** f : {&s.row, &s.u, &s.up, &s.du, &s.result}) *f = m.floats(t.width);
      s.sources = m.take<AttnresSource>(t.L);
      if (base != nullptr) workers[i] = s;
    }
    bytes = m.bytes();
  }
};

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace {

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;

// A token's row as floats: in place where it fills whole vectors, else a padded copy in buf.
HWY_INLINE const float* row_in(const AttnresTokens& t, const TensorView& x, const AttnresTokens::Index& at,
                               float* buf) {
  const std::byte* p = t.begin(x, at);
  if (x.dtype == DType::F32 && t.step(x) == 1 && t.D == t.width) return reinterpret_cast<const float*>(p);
  load_row(p, x.dtype, t.step(x), t.D, buf);
  std::fill(buf + t.D, buf + t.width, 0.0F);
  return buf;
}

void load_vector(const AttnresTokens& t, const TensorView& x, float* to) {
  load_row(static_cast<const std::byte*>(x.data), x.dtype, x.stride[0], t.D, to);
  std::fill(to + t.D, to + t.width, 0.0F);
}

HWY_INLINE float sum_of(V a, V b) {
  const F f;
  return hn::GetLane(hn::SumOfLanes(f, hn::Add(a, b)));
}

float dot(const float* HWY_RESTRICT x, const float* HWY_RESTRICT y, std::int64_t width) {
  const F f;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
  V a = hn::Zero(f), b = hn::Zero(f);
  std::int64_t i = 0;
  for (; i + 2 * lanes <= width; i += 2 * lanes) {
    a = hn::MulAdd(hn::LoadU(f, x + i), hn::LoadU(f, y + i), a);
    b = hn::MulAdd(hn::LoadU(f, x + i + lanes), hn::LoadU(f, y + i + lanes), b);
  }
  for (; i < width; i += lanes) a = hn::MulAdd(hn::LoadU(f, x + i), hn::LoadU(f, y + i), a);
  return sum_of(a, b);
}

// <x, x> and <x, y> in one walk, of x times `by`.
void two_dots(const float* HWY_RESTRICT x, const float* HWY_RESTRICT y, std::int64_t width, float by, float& xx,
              float& xy) {
  const F f;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
  const V scale = hn::Set(f, by);
  V a = hn::Zero(f), b = hn::Zero(f), c = hn::Zero(f), d = hn::Zero(f);
  std::int64_t i = 0;
  for (; i + 2 * lanes <= width; i += 2 * lanes) {
    const V x0 = hn::Mul(scale, hn::LoadU(f, x + i)), x1 = hn::Mul(scale, hn::LoadU(f, x + i + lanes));
    a = hn::MulAdd(x0, x0, a);
    b = hn::MulAdd(x1, x1, b);
    c = hn::MulAdd(x0, hn::LoadU(f, y + i), c);
    d = hn::MulAdd(x1, hn::LoadU(f, y + i + lanes), d);
  }
  for (; i < width; i += lanes) {
    const V x0 = hn::Mul(scale, hn::LoadU(f, x + i));
    a = hn::MulAdd(x0, x0, a);
    c = hn::MulAdd(x0, hn::LoadU(f, y + i), c);
  }
  xx = sum_of(a, b);
  xy = sum_of(c, d);
}

// 1 / rms(x), and <x, y> times that. Squares of a long row leave fp32: beside those epsilon is nothing, and the row is
// scaled by a power of two.
float normalised(const AttnresTokens& t, const float* x, const float* y, float eps, float& product) {
  constexpr float kLongest = 0x1p120F, kShrink = 0x1p-96F;
  float xx = 0.0F, xy = 0.0F;
  two_dots(x, y, t.width, 1.0F, xx, xy);
  if (xx < kLongest || std::isnan(xx)) {
    const float rho = 1.0F / std::sqrt(xx / static_cast<float>(t.D) + eps);
    product = rho * xy;
    return rho;
  }
  two_dots(x, y, t.width, kShrink, xx, xy);
  const float rho = 1.0F / std::sqrt(xx / static_cast<float>(t.D));
  product = rho * xy;
  return rho * kShrink;
}

// to = by to + x_by x; by 0 reads no `to`.
void blend(float* HWY_RESTRICT to, float by, const float* HWY_RESTRICT x, float x_by, std::int64_t width) {
  const F f;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
  const V a = hn::Set(f, by), b = hn::Set(f, x_by);
  if (by == 0.0F) {
    for (std::int64_t i = 0; i < width; i += lanes) hn::StoreU(hn::Mul(b, hn::LoadU(f, x + i)), f, to + i);
  } else {
    for (std::int64_t i = 0; i < width; i += lanes)
      hn::StoreU(hn::MulAdd(b, hn::LoadU(f, x + i), hn::Mul(a, hn::LoadU(f, to + i))), f, to + i);
  }
}

void scale_row(float* x, float by, std::int64_t width) {
  const F f;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
  const V b = hn::Set(f, by);
  for (std::int64_t i = 0; i < width; i += lanes) hn::StoreU(hn::Mul(b, hn::LoadU(f, x + i)), f, x + i);
}

// (1) to (4) of a token; u only where it is wanted, d = <du, v_l> where du is known.
void weights(const AttnresArgs& a, const AttnresTokens& t, const AttnresShared& shared, const AttnresScratch& s,
             const AttnresTokens::Index& at, bool want_u, const float* du) {
  const auto eps = static_cast<float>(a.rms_eps), scale = static_cast<float>(a.scale);
  float most = 0.0F, sum = 0.0F;
  for (std::int64_t l = 0; l < t.L; ++l) {
    AttnresSource& x = s.sources[l];
    const float* row = row_in(t, a.residuals[static_cast<std::size_t>(l)], at, s.row);
    x.rho = normalised(t, row, shared.key, eps, x.z);
    if (du != nullptr) x.d = dot(row, du, t.width);
    const float logit = scale * x.z;
    float before = 1.0F, part = 1.0F;  // what is left of the sums so far, and the row's part in them
    if (l == 0) {
      before = 0.0F;
      most = logit;
      part = std::exp(logit - most);  // 1, or not a number
    } else if (logit > most) {
      before = std::exp(most - logit);
      most = logit;
    } else {
      part = std::exp(logit - most);
    }
    sum = (l == 0 ? 0.0F : before * sum) + part;
    if (want_u) blend(s.u, before, row, part, t.width);
  }
  const float inverse = 1.0F / sum;
  for (std::int64_t l = 0; l < t.L; ++l) s.sources[l].p = std::exp(scale * s.sources[l].z - most) * inverse;
  if (want_u) scale_row(s.u, inverse, t.width);
}

// to = x y by.
void multiply(const float* x, const float* y, float by, float* to, std::int64_t width) {
  const F f;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
  const V b = hn::Set(f, by);
  for (std::int64_t i = 0; i < width; i += lanes)
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(f, x + i), b), hn::LoadU(f, y + i)), f, to + i);
}

void prepare(const AttnresArgs& a, const AttnresTokens& t, const AttnresShared& shared) {
  load_vector(t, a.query, shared.query);
  load_vector(t, a.rms_weight, shared.weight);
  if (a.output_rms_weight) load_vector(t, a.output_rms_weight, shared.output_weight);
  multiply(shared.query, shared.weight, 1.0F, shared.key, t.width);
}

void attnres_forward(const AttnresArgs& a, const AttnresTokens& t, const AttnresMemory& m, ThreadPool& pool) {
  prepare(a, t, m.shared);
  // Few tokens to a task where there are few.
  const std::int64_t each = std::clamp<std::int64_t>(t.count / (std::int64_t{4} * pool.size()), 1, 16);
  pool.run((t.count + each - 1) / each, [&](std::int64_t task, int worker) {
    const AttnresScratch& s = m.workers[worker];
    for (std::int64_t n = task * each; n < std::min(t.count, (task + 1) * each); ++n) {
      const auto at = t.index(n);
      weights(a, t, m.shared, s, at, a.o.present(), nullptr);
      if (a.p) {
        std::byte* p = t.begin(a.p, at, 1);
        const std::int64_t step = a.p.stride[0] * static_cast<std::int64_t>(sizeof(float));
        for (std::int64_t l = 0; l < t.L; ++l) std::memcpy(p + l * step, &s.sources[l].p, sizeof(float));
      }
      if (!a.o) continue;
      if (a.output_rms_weight) {
        float product = 0.0F;
        const float r = normalised(t, s.u, s.u, static_cast<float>(a.rms_eps), product);
        multiply(s.u, m.shared.output_weight, r, s.u, t.width);  // (5)
      }
      store_row(s.u, t.begin(a.o, at), a.o.dtype, t.step(a.o), t.D);
    }
  });
}

// (6), and the token's part of dw_o. x^ takes u's place.
void through_norm(const AttnresArgs& a, const AttnresTokens& t, const AttnresShared& shared, const AttnresScratch& s,
                  float* dw) {
  const F f;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
  float product = 0.0F;
  const float r = normalised(t, s.u, s.u, static_cast<float>(a.rms_eps), product);
  scale_row(s.u, r, t.width);
  multiply(s.up, shared.output_weight, 1.0F, s.du, t.width);
  const float mean = dot(s.u, s.du, t.width) / static_cast<float>(t.D);
  for (std::int64_t i = 0; i < t.width; i += lanes) {
    const V x = hn::LoadU(f, s.u + i), g = hn::LoadU(f, s.du + i);
    hn::StoreU(hn::Mul(hn::Set(f, r), hn::NegMulAdd(x, hn::Set(f, mean), g)), f, s.du + i);
    if (dw != nullptr) hn::StoreU(hn::MulAdd(x, hn::LoadU(f, s.up + i), hn::LoadU(f, dw + i)), f, dw + i);
  }
}

// (8) of one source, and its part of S. e_rho is e_l rho_l, radial e_l rho_l z_l / D.
void source_gradient(const float* HWY_RESTRICT row, const float* HWY_RESTRICT du, const float* HWY_RESTRICT key,
                     const AttnresSource& x, float e_rho, float radial, std::int64_t width, float* HWY_RESTRICT dv,
                     float* HWY_RESTRICT S) {
  const F f;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
  const V p = hn::Set(f, x.p), rho = hn::Set(f, x.rho), c = hn::Set(f, e_rho), z = hn::Set(f, radial);
  for (std::int64_t i = 0; i < width; i += lanes) {
    const V v = hn::LoadU(f, row + i);
    if (dv != nullptr) {
      const V along = hn::NegMulAdd(hn::Mul(v, rho), z, hn::Mul(c, hn::LoadU(f, key + i)));
      hn::StoreU(hn::MulAdd(p, hn::LoadU(f, du + i), along), f, dv + i);
    }
    if (S != nullptr) hn::StoreU(hn::MulAdd(c, v, hn::LoadU(f, S + i)), f, S + i);
  }
}

void token_gradients(const AttnresBackwardArgs& a, const AttnresTokens& t, const AttnresShared& shared,
                     const AttnresScratch& s, const AttnresTokens::Index& at, float* S, float* dw) {
  const float* du = s.du;
  if (!a.do_) {
    std::fill(s.up, s.up + t.width, 0.0F);
    std::fill(s.du, s.du + t.width, 0.0F);
  }
  const float* up = a.do_ ? row_in(t, a.do_, at, s.up) : s.up;
  if (a.output_rms_weight) {
    if (up != s.up) std::copy(up, up + t.width, s.up);
    weights(a, t, shared, s, at, true, nullptr);
    through_norm(a, t, shared, s, dw);
    for (std::int64_t l = 0; l < t.L; ++l)
      s.sources[l].d = dot(row_in(t, a.residuals[static_cast<std::size_t>(l)], at, s.row), s.du, t.width);
  } else {
    du = up;
    weights(a, t, shared, s, at, false, up);
  }
  // (7) against the largest weight's source: with nearly all weight there, what is left of its own is the others'.
  std::int64_t largest = 0;
  for (std::int64_t l = 1; l < t.L; ++l)
    if (s.sources[l].p > s.sources[largest].p) largest = l;
  const float reference = s.sources[largest].d;
  float delta = 0.0F;
  for (std::int64_t l = 0; l < t.L; ++l) delta += s.sources[l].p * (s.sources[l].d - reference);
  for (std::int64_t l = 0; l < t.L; ++l) {
    const AttnresSource& x = s.sources[l];
    const TensorView dv = a.dresiduals.empty() ? TensorView() : a.dresiduals[static_cast<std::size_t>(l)];
    if (!dv && S == nullptr) continue;
    const float e = static_cast<float>(a.scale) * x.p * ((x.d - reference) - delta);
    const float* row = row_in(t, a.residuals[static_cast<std::size_t>(l)], at, s.row);
    source_gradient(row, du, shared.key, x, e * x.rho, e * x.rho * x.z / static_cast<float>(t.D), t.width,
                    dv ? s.result : nullptr, S);
    if (dv) store_row(s.result, t.begin(dv, at), dv.dtype, t.step(dv), t.D);
  }
}

// A column's sum over the groups in their order.
void add_groups(const float* rows, std::int64_t groups, std::int64_t width, std::int64_t begin, std::int64_t n,
                float* to) {
  const F f;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
  std::fill(to, to + n, 0.0F);
  for (std::int64_t g = 0; g < groups; ++g)
    for (std::int64_t i = 0; i < n; i += lanes)
      hn::StoreU(hn::Add(hn::LoadU(f, to + i), hn::LoadU(f, rows + g * width + begin + i)), f, to + i);
}

void store_columns(const AttnresTokens& t, const float* from, const TensorView& to, std::int64_t begin,
                   std::int64_t n) {
  store_row(from, to.at(begin), to.dtype, to.stride[0], std::min(n, t.D - begin));
}

void attnres_backward(const AttnresBackwardArgs& a, const AttnresTokens& t, const AttnresMemory& m, ThreadPool& pool) {
  prepare(a, t, m.shared);
  const bool want_S = a.dquery || a.drms_weight, want_dw = a.doutput_rms_weight.present();
  pool.run(t.groups(), [&](std::int64_t group, int worker) {
    float* S = want_S ? m.shared.S + group * t.width : nullptr;
    float* dw = want_dw ? m.shared.dw + group * t.width : nullptr;
    for (float* x : {S, dw})
      if (x != nullptr) std::fill(x, x + t.width, 0.0F);
    for (std::int64_t n = group * kGroup; n < std::min(t.count, (group + 1) * kGroup); ++n)
      token_gradients(a, t, m.shared, m.workers[worker], t.index(n), S, dw);
  });
  if (!want_S && !want_dw) return;

  constexpr std::int64_t kColumns = 256;
  pool.run((t.width + kColumns - 1) / kColumns, [&](std::int64_t task, int) {  // (9)
    const std::int64_t begin = task * kColumns, n = std::min(kColumns, t.width - begin);
    alignas(64) std::array<float, kColumns> sum, out;
    if (want_S) {
      add_groups(m.shared.S, t.groups(), t.width, begin, n, sum.data());
      if (a.dquery) {
        multiply(sum.data(), m.shared.weight + begin, 1.0F, out.data(), n);
        store_columns(t, out.data(), a.dquery, begin, n);
      }
      if (a.drms_weight) {
        multiply(sum.data(), m.shared.query + begin, 1.0F, out.data(), n);
        store_columns(t, out.data(), a.drms_weight, begin, n);
      }
    }
    if (want_dw) {
      add_groups(m.shared.dw, t.groups(), t.width, begin, n, sum.data());
      store_columns(t, sum.data(), a.doutput_rms_weight, begin, n);
    }
  });
}

}  // namespace
}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla {
namespace cpu {
namespace {

HWY_EXPORT(attnres_forward);
HWY_EXPORT(attnres_backward);

AttnresMemory forward_memory(std::byte* base, const AttnresTokens& t, int threads) {
  return {base, t, threads, 0, false};
}
AttnresMemory backward_memory(std::byte* base, const AttnresBackwardArgs& a, const AttnresTokens& t, int threads) {
  return {base, t, threads, t.groups(), a.output_rms_weight.present()};
}

Status forward(const AttnresArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const AttnresTokens t(a);
  HWY_DYNAMIC_DISPATCH(attnres_forward)(a, t, forward_memory(l.workspace.data(), t, c.threads), *l.pool);
  return {};
}
Status backward(const AttnresBackwardArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const AttnresTokens t(a);
  HWY_DYNAMIC_DISPATCH(attnres_backward)(a, t, backward_memory(l.workspace.data(), a, t, c.threads), *l.pool);
  return {};
}

}  // namespace
}  // namespace cpu

void register_attnres_cpu(Registry& r) {
  r.add_backend("attnres", cpu_backend());
  r.add(Kernel<AttnresArgs>{
      .function = kFusedAttnres,
      .backend = "cpu",
      .name = "attnres.forward",
      .verify = [](const AttnresArgs& a, const CallInfo& c) { return verify_cpu(c, a.residuals[0].dtype); },
      .workspace =
          [](const AttnresArgs& a, const CallInfo& c) {
            return cpu::forward_memory(nullptr, cpu::AttnresTokens(a), c.threads).bytes;
          },
      .launch = cpu::forward});
  r.add(Kernel<AttnresBackwardArgs>{
      .function = kFusedAttnresBackward,
      .backend = "cpu",
      .name = "attnres.backward",
      .verify = [](const AttnresBackwardArgs& a, const CallInfo& c) { return verify_cpu(c, a.residuals[0].dtype); },
      .workspace =
          [](const AttnresBackwardArgs& a, const CallInfo& c) {
            return cpu::backward_memory(nullptr, a, cpu::AttnresTokens(a), c.threads).bytes;
          },
      .launch = cpu::backward});
}

}  // namespace fla
#endif
