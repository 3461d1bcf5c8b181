// Vector exponential. Per-target code: include after hwy/highway.h, inside the foreach_target pattern.
#if defined(FLA_KERNELS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_KERNELS_CPU_MATH_INL_H_
#undef FLA_KERNELS_CPU_MATH_INL_H_
#else
#define FLA_KERNELS_CPU_MATH_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// e^{x - n ln 2} for n the whole number next to x / ln 2.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_rest(D d, V x, V& n) {
  n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504088896341f)));
  // ln 2 in two parts: n has at most 8 bits, so n * 0.693359375 is exact.
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  V p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  return hn::MulAdd(p, hn::Mul(r, r), hn::Add(r, hn::Set(d, 1.0f)));
}

// e^x for x that is at most a little above 0: exactly 0 below -87.3, NaN for NaN. Half the work of exp_v.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_down(D d, V x) {
  const hn::RebindToSigned<D> di;
  const auto below = hn::Lt(x, hn::Set(d, -87.33654f));
  V n;
  const V p = exp_rest(d, x, n);
  const V s = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127))));
  return hn::IfThenZeroElse(below, hn::Mul(p, s));
}

// e^x to about 1 ulp; exactly 1 at 0, exactly 0 below -87.3 (no subnormal results), infinity above 88.7, NaN for NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_v(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V lo = hn::Set(d, -87.33654f), hi = hn::Set(d, 88.72283f);
  const auto below = hn::Lt(x, lo), above = hn::Gt(x, hi);
  const V xc = hn::Min(hn::Max(x, lo), hi);
  V n;
  const V p = exp_rest(d, xc, n);
  // 2^n in two factors, as n reaches 128 where 2^n alone is no float.
  const auto ni = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(ni);
  const auto bias = hn::Set(di, 127);
  const V s1 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V s2 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(ni, half), bias)));
  V y = hn::Mul(hn::Mul(p, s1), s2);
  y = hn::IfThenElse(below, hn::Zero(d), y);
  y = hn::IfThenElse(above, hn::Set(d, __builtin_inff()), y);
  return hn::IfThenElse(hn::IsNaN(x), x, y);  // Min and Max drop NaN on some targets
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
