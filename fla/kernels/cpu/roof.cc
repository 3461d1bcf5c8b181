#include "fla/kernels/cpu/roof.h"

#include <algorithm>

#include "fla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/kernels/cpu/roof.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "fla/kernels/cpu/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Twelve independent chains cover the latency of two multiply-add units on every target and fit sixteen registers. In an
// array: twelve variables are kept on the stack by some compilers.
constexpr int kChains = 12;

double register_products(std::int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V a = hn::Set(d, 0.999F), b = hn::Set(d, 0.001F);
  V c[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) c[j] = hn::Iota(d, 0.1F * static_cast<float>(j));
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) c[j] = hn::MulAdd(c[j], a, b);
  }
  V sum = c[0];
#pragma GCC unroll 12
  for (int j = 1; j < kChains; ++j) sum = hn::Add(sum, c[j]);
  *sink = hn::GetLane(hn::SumOfLanes(d, sum));
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

double tile_products(std::int64_t rounds, float* x) {
  constexpr std::int64_t n = 48;
  const float *a = x, *b = x + n * n;
  float* c = x + 2 * n * n;
  for (std::int64_t i = 0; i < rounds; ++i) gemm<false>(n, n, {a, n, b, n, n}, {}, Tri::None, {}, c, n);
  return 2.0 * static_cast<double>(n * n * n) * static_cast<double>(rounds);
}

float read_all(const float* x, std::size_t n) {
  constexpr std::size_t kSums = 4;
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const std::size_t lanes = hn::Lanes(d);
  V s[kSums];
#pragma GCC unroll 4
  for (std::size_t j = 0; j < kSums; ++j) s[j] = hn::Zero(d);
  for (std::size_t i = 0; i < n; i += kSums * lanes) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kSums; ++j) s[j] = hn::Add(s[j], hn::LoadU(d, x + i + j * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla::cpu {
HWY_EXPORT(register_products);
HWY_EXPORT(tile_products);
HWY_EXPORT(read_all);

double register_products(std::int64_t rounds, float* sink) {
  return HWY_DYNAMIC_DISPATCH(register_products)(rounds, sink);
}
double tile_products(std::int64_t rounds, float* x) { return HWY_DYNAMIC_DISPATCH(tile_products)(rounds, x); }
float read_all(const float* x, std::size_t n) { return HWY_DYNAMIC_DISPATCH(read_all)(x, n); }

}  // namespace fla::cpu
#endif
