// Rows of any float type and stride to and from fp32 tiles, and tile transposes. Per-target code.
#if defined(FLA_KERNELS_CPU_IO_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLA_KERNELS_CPU_IO_INL_H_
#undef FLA_KERNELS_CPU_IO_INL_H_
#else
#define FLA_KERNELS_CPU_IO_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "fla/core/dtype.h"
#include "fla/kernels/cpu/rows.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Highway's emulated half conversions truncate and flush; there the scalar conversions of core/dtype.h serve.
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
constexpr bool kVectorHalf = false;
#else
constexpr bool kVectorHalf = true;
#endif

// n elements, `stride` elements apart, widened to fp32.
HWY_INLINE void load_row(const std::byte* src, DType type, std::int64_t stride, std::int64_t n,
                         float* HWY_RESTRICT dst) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  switch (type) {
    case DType::F32: {
      const float* s = reinterpret_cast<const float*>(src);
      if (stride == 1) {
        for (; i + lanes <= n; i += lanes) hn::StoreU(hn::LoadU(d, s + i), d, dst + i);
      }
      for (; i < n; ++i) dst[i] = s[i * stride];
      return;
    }
    case DType::BF16: {
      const bf16* s = reinterpret_cast<const bf16*>(src);
      if (stride == 1) {
        const hn::Rebind<std::uint16_t, decltype(d)> d16;
        const hn::RebindToUnsigned<decltype(d)> du;
        for (; i + lanes <= n; i += lanes) {
          const auto u = hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(s + i)));
          hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(u)), d, dst + i);
        }
      }
      for (; i < n; ++i) dst[i] = to_float(s[i * stride]);
      return;
    }
    case DType::F16: {
      const f16* s = reinterpret_cast<const f16*>(src);
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
      if (stride == 1) {
        const hn::Rebind<hwy::float16_t, decltype(d)> d16;
        for (; i + lanes <= n; i += lanes) {
          hn::StoreU(hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(s + i))), d, dst + i);
        }
      }
#endif
      for (; i < n; ++i) dst[i] = to_float(s[i * stride]);
      return;
    }
    case DType::F64: {
      const double* s = reinterpret_cast<const double*>(src);
      for (; i < n; ++i) dst[i] = static_cast<float>(s[i * stride]);
      return;
    }
    default: return;
  }
}

// The way back; 16-bit results are rounded to nearest, ties to even.
inline HWY_NOINLINE void store_row(const float* HWY_RESTRICT src, std::byte* dst, DType type, std::int64_t stride,
                                   std::int64_t n) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  switch (type) {
    case DType::F32: {
      float* o = reinterpret_cast<float*>(dst);
      if (stride == 1) {
        for (; i + lanes <= n; i += lanes) hn::StoreU(hn::LoadU(d, src + i), d, o + i);
      }
      for (; i < n; ++i) o[i * stride] = src[i];
      return;
    }
    case DType::BF16: {
      bf16* o = reinterpret_cast<bf16*>(dst);
      if (stride == 1) {
        const hn::Rebind<std::uint16_t, decltype(d)> d16;
        const hn::RebindToUnsigned<decltype(d)> du;
        const hn::RebindToSigned<decltype(d)> di;
        for (; i + lanes <= n; i += lanes) {
          const auto x = hn::LoadU(d, src + i);
          const auto u = hn::BitCast(du, x);
          const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1U));
          auto r = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(du, 0x7fffU))));
          r = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), hn::Or(hn::ShiftRight<16>(u), hn::Set(du, 0x40U)), r);
          hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, r)), d16, reinterpret_cast<std::uint16_t*>(o + i));
        }
      }
      for (; i < n; ++i) o[i * stride] = to_bf16(src[i]);
      return;
    }
    case DType::F16: {
      f16* o = reinterpret_cast<f16*>(dst);
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
      if (stride == 1) {
        const hn::Rebind<hwy::float16_t, decltype(d)> d16;
        for (; i + lanes <= n; i += lanes) {
          hn::StoreU(hn::DemoteTo(d16, hn::LoadU(d, src + i)), d16, reinterpret_cast<hwy::float16_t*>(o + i));
        }
      }
#endif
      for (; i < n; ++i) o[i * stride] = to_f16(src[i]);
      return;
    }
    case DType::F64: {
      double* o = reinterpret_cast<double*>(dst);
      for (; i < n; ++i) o[i * stride] = static_cast<double>(src[i]);
      return;
    }
    default: return;
  }
}

// Columns [c0, c0 + width) of rows [t0, t0 + n) into a tile; columns up to the next multiple of kPad become zero.
inline HWY_NOINLINE void load_rows(const Rows& x, std::int64_t t0, std::int64_t n, std::int64_t c0, std::int64_t width,
                                   float* dst, std::int64_t ld) {
  const std::int64_t padded = pad_up(width);
  for (std::int64_t i = 0; i < n; ++i) {
    float* row = dst + i * ld;
    load_row(x.at(t0 + i, c0), x.dtype, x.last, width, row);
    for (std::int64_t c = width; c < padded; ++c) row[c] = 0.0F;
  }
}

inline HWY_NOINLINE void store_rows(const float* src, std::int64_t ld, const Rows& x, std::int64_t t0, std::int64_t n,
                                    std::int64_t c0, std::int64_t width) {
  const hn::ScalableTag<float> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  constexpr std::int64_t kLine = 64;  // a part of one would have to be read first after all
  const auto whole_lines = [&](std::int64_t t) {
    return reinterpret_cast<std::uintptr_t>(x.at(t, c0)) % kLine == 0 && width * 4 % kLine == 0;
  };
  for (std::int64_t i = 0; i < n; ++i) {
    if (!x.stream || x.dtype != DType::F32 || x.last != 1 || !whole_lines(t0 + i)) {
      store_row(src + i * ld, x.at(t0 + i, c0), x.dtype, x.last, width);
      continue;
    }
    float* to = reinterpret_cast<float*>(x.at(t0 + i, c0));
    for (std::int64_t c = 0; c < width; c += lanes) hn::Stream(hn::LoadU(d, src + i * ld + c), d, to + c);
  }
}

// dst[c * ldd + r] = src[r * lds + c]. Rows and columns are rounded up to multiples of 4: the source is read and the
// destination written that far, so both need the room.
inline HWY_NOINLINE void transpose(const float* HWY_RESTRICT src, std::int64_t lds, std::int64_t rows,
                                   std::int64_t cols, float* HWY_RESTRICT dst, std::int64_t ldd) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) dst[c * ldd + r] = src[r * lds + c];
  }
#else
  const hn::FixedTag<float, 4> d;
  for (std::int64_t r = 0; r < rows; r += 4) {
    for (std::int64_t c = 0; c < cols; c += 4) {
      const float* s = src + r * lds + c;
      float* o = dst + c * ldd + r;
      const auto a0 = hn::LoadU(d, s), a1 = hn::LoadU(d, s + lds), a2 = hn::LoadU(d, s + 2 * lds),
                 a3 = hn::LoadU(d, s + 3 * lds);
      const auto t0 = hn::InterleaveLower(d, a0, a2), t1 = hn::InterleaveLower(d, a1, a3);
      const auto u0 = hn::InterleaveUpper(d, a0, a2), u1 = hn::InterleaveUpper(d, a1, a3);
      hn::StoreU(hn::InterleaveLower(d, t0, t1), d, o);
      hn::StoreU(hn::InterleaveUpper(d, t0, t1), d, o + ldd);
      hn::StoreU(hn::InterleaveLower(d, u0, u1), d, o + 2 * ldd);
      hn::StoreU(hn::InterleaveUpper(d, u0, u1), d, o + 3 * ldd);
    }
  }
#endif
}

}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
