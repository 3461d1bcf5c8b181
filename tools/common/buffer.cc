#include "tools/common/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "tools/common/no_memory.h"

namespace fla::tools {

namespace {

constexpr std::size_t kAlign = 64;
constexpr std::size_t kGuard = 256;            // bytes before and after
constexpr std::size_t kWorkspaceGuard = 8192;  // after a workspace, where a wrong size is off by whole tiles
constexpr std::uint16_t kGuardWord = 0x7ff5;   // repeated, a NaN in every float type, and unlike the 0xffff of poison
constexpr std::byte kPoison{0xff};             // a NaN
constexpr std::byte kIndexPoison{0x3f};        // an index that nothing has; -1 is one that means something
std::byte poison_of(DType t) { return is_float(t) ? kPoison : kIndexPoison; }

std::byte guard_byte(std::size_t offset) {
  return static_cast<std::byte>(offset % 2 == 0 ? kGuardWord & 0xff : kGuardWord >> 8);
}

std::byte* allocate(std::size_t bytes) {
  void* p = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  if (p == nullptr) throw NoMemory(bytes);
  return static_cast<std::byte*>(p);
}

template <typename Fn>
void walk(const TensorView& t, Fn&& fn) {
  if (!t || t.numel() == 0) return;
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  const int last = t.ndim - 1;
  std::array<std::int64_t, kMaxDims> at{};
  std::byte* row = static_cast<std::byte*>(t.data);
  if (t.ndim == 0) {
    fn(row);
    return;
  }
  while (true) {
    std::byte* p = row;
    const std::int64_t step = t.stride[static_cast<std::size_t>(last)] * size;
    for (std::int64_t i = 0; i < t.dim(last); ++i, p += step) fn(p);
    int axis = last - 1;
    for (; axis >= 0; --axis) {
      const auto a = static_cast<std::size_t>(axis);
      row += t.stride[a] * size;
      if (++at[a] < t.shape[a]) break;
      row -= t.stride[a] * size * t.shape[a];
      at[a] = 0;
    }
    if (axis < 0) return;
  }
}

}  // namespace

void Buffer::Free::operator()(std::byte* p) const { std::free(p); }

Buffer::Buffer(DType dtype, Shape shape, Fill fill_with, Layout layout) {
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  TensorView v(nullptr, dtype, shape);
  if (!v.present()) throw std::invalid_argument("Buffer: too many axes");
  if (v.ndim > 0) {
    std::int64_t s = layout.last_stride;
    for (int i = v.ndim - 1; i >= 0; --i) {
      v.stride[static_cast<std::size_t>(i)] = s;
      s *= std::max<std::int64_t>(v.dim(i), 1);
      if (i == v.ndim - 1) s += layout.row_pad;
    }
  }
  std::int64_t reach = 0;
  for (int i = 0; i < v.ndim; ++i)
    reach += (std::max<std::int64_t>(v.dim(i), 1) - 1) * v.stride[static_cast<std::size_t>(i)];
  extent_ = v.numel() > 0 ? static_cast<std::size_t>((reach + 1) * size) : 0;
  begin_ = kGuard + layout.offset_bytes;
  total_ = begin_ + extent_ + kGuard;
  memory_.reset(allocate(total_));
  for (std::size_t i = 0; i < total_; ++i) memory_.get()[i] = guard_byte(i);
  std::memset(memory_.get() + begin_, static_cast<int>(poison_of(dtype)), extent_);
  v.data = memory_.get() + begin_;
  if (layout.reversed)
    for (int i = 0; i < v.ndim; ++i)
      if (v.dim(i) > 1) {
        auto& s = v.stride[static_cast<std::size_t>(i)];
        v.data = static_cast<std::byte*>(v.data) + (v.dim(i) - 1) * s * size;
        s = -s;
        break;
      }
  view_ = v;
  if (fill_with == Fill::Zero) walk(view_, [&](std::byte* p) { std::memset(p, 0, static_cast<std::size_t>(size)); });
}

Buffer Buffer::bytes(std::size_t count, std::size_t offset_bytes) {
  Buffer b;
  b.begin_ = kGuard + offset_bytes;
  b.extent_ = count;
  b.total_ = b.begin_ + count + kWorkspaceGuard;
  b.memory_.reset(allocate(b.total_));
  for (std::size_t i = 0; i < b.total_; ++i) b.memory_.get()[i] = guard_byte(i);
  std::memset(b.memory_.get() + b.begin_, static_cast<int>(kPoison), count);
  return b;
}

std::span<std::byte> Buffer::span() const { return {memory_.get() + begin_, extent_}; }

bool Buffer::guards_intact() const {
  if (!memory_) return true;
  const std::byte* p = memory_.get();
  for (std::size_t i = 0; i < begin_; ++i)
    if (p[i] != guard_byte(i)) return false;
  for (std::size_t i = begin_ + extent_; i < total_; ++i)
    if (p[i] != guard_byte(i)) return false;
  const std::size_t size = size_of(view_.dtype);
  if (!view_ || static_cast<std::size_t>(view_.numel()) * size == extent_) return true;
  std::vector<bool> element(extent_, false);
  walk(view_, [&](const std::byte* e) {
    const auto first = static_cast<std::size_t>(e - (p + begin_));
    for (std::size_t i = 0; i < size; ++i) element[first + i] = true;
  });
  for (std::size_t i = 0; i < extent_; ++i)
    if (!element[i] && p[begin_ + i] != poison_of(view_.dtype)) return false;
  return true;
}

std::uint64_t Buffer::checksum() const {
  std::uint64_t h = 0xcbf29ce484222325U;
  const std::byte* p = memory_.get();
  std::size_t i = 0;
  for (; i + 8 <= total_; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, p + i, 8);
    h = (h ^ word) * 0x9e3779b97f4a7c15U;
    h ^= h >> 29;
  }
  for (; i < total_; ++i) h = (h ^ static_cast<std::uint64_t>(p[i])) * 0x100000001b3U;
  return h;
}

double load(const void* p, DType t) {
  switch (t) {
    case DType::F32: {
      float x = 0;
      std::memcpy(&x, p, sizeof x);
      return x;
    }
    case DType::F64: {
      double x = 0;
      std::memcpy(&x, p, sizeof x);
      return x;
    }
    case DType::F16: {
      f16 x{};
      std::memcpy(&x, p, sizeof x);
      return to_float(x);
    }
    case DType::BF16: {
      bf16 x{};
      std::memcpy(&x, p, sizeof x);
      return to_float(x);
    }
    case DType::I32: {
      std::int32_t x = 0;
      std::memcpy(&x, p, sizeof x);
      return x;
    }
    case DType::I64: {
      std::int64_t x = 0;
      std::memcpy(&x, p, sizeof x);
      return static_cast<double>(x);
    }
  }
  return 0.0;
}

void store(void* p, DType t, double x) {
  const auto put = [p](auto v) { std::memcpy(p, &v, sizeof v); };
  switch (t) {
    case DType::F32: return put(static_cast<float>(x));
    case DType::F64: return put(x);
    case DType::F16: return put(to_f16(static_cast<float>(x)));
    case DType::BF16: return put(to_bf16(static_cast<float>(x)));
    case DType::I32: return put(static_cast<std::int32_t>(x));
    case DType::I64: return put(static_cast<std::int64_t>(x));
  }
}

std::vector<double> values(const TensorView& t) {
  std::vector<double> x;
  if (!t) return x;
  x.reserve(static_cast<std::size_t>(t.numel()));
  walk(t, [&](const std::byte* p) { x.push_back(load(p, t.dtype)); });
  return x;
}

void assign(const TensorView& t, std::span<const double> x) {
  if (static_cast<std::int64_t>(x.size()) != t.numel()) throw std::invalid_argument("assign: wrong number of values");
  std::size_t i = 0;
  walk(t, [&](std::byte* p) { store(p, t.dtype, x[i++]); });
}

void fill(const TensorView& t, double x) {
  walk(t, [&](std::byte* p) { store(p, t.dtype, x); });
}

void for_each(const TensorView& t, const std::function<void(std::byte*)>& fn) { walk(t, fn); }

Buffer cast(const TensorView& t, DType to) {
  Buffer b(to, {t.dims().begin(), t.dims().end()});
  if (to == t.dtype) {  // bits, so that NaNs and large integers survive
    std::byte* dst = static_cast<std::byte*>(b.view().data);
    const std::size_t size = size_of(to);
    walk(t, [&](const std::byte* p) {
      std::memcpy(dst, p, size);
      dst += size;
    });
    return b;
  }
  std::byte* dst = static_cast<std::byte*>(b.view().data);
  const std::size_t size = size_of(to);
  walk(t, [&](const std::byte* p) {
    store(dst, to, load(p, t.dtype));
    dst += size;
  });
  return b;
}

bool same_bits(const TensorView& a, const TensorView& b) {
  if (a.dtype != b.dtype || !std::ranges::equal(a.dims(), b.dims())) return false;
  const std::size_t size = size_of(a.dtype);
  std::vector<const std::byte*> at;
  at.reserve(static_cast<std::size_t>(a.numel()));
  walk(a, [&](const std::byte* p) { at.push_back(p); });
  std::size_t i = 0;
  bool same = true;
  walk(b, [&](const std::byte* p) { same = same && std::memcmp(p, at[i++], size) == 0; });
  return same;
}

TensorView slice(TensorView t, int axis, std::int64_t begin, std::int64_t length) {
  const auto a = static_cast<std::size_t>(axis);
  t.data = static_cast<std::byte*>(t.data) + begin * t.stride[a] * static_cast<std::int64_t>(size_of(t.dtype));
  t.shape[a] = length;
  return t;
}

}  // namespace fla::tools
