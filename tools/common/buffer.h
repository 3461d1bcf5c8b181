// Buffer: memory of a tensor for tests and tools, between guard regions and full of NaN, so that a read of what nobody
// wrote and a write beside the tensor both become visible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "fla/core/tensor.h"

namespace fla::tools {

using Shape = std::vector<std::int64_t>;

// Where a tensor's elements lie. Gaps between them are filled with all ones (NaN in every float type) and guarded.
struct Layout {
  std::int64_t row_pad = 0;      // elements between one row of the last axis and the next
  std::int64_t last_stride = 1;  // elements from one element of a row to the next
  bool reversed = false;         // the first axis longer than 1 runs backwards (a negative stride)
  std::size_t offset_bytes = 0;  // past the 64-byte boundary; the element size divides it unless a test wants otherwise
};

enum class Fill : std::uint8_t { Poison, Zero };

class Buffer {
 public:
  Buffer() = default;
  Buffer(DType dtype, Shape shape, Fill fill = Fill::Poison, Layout layout = {});
  Buffer(Buffer&&) noexcept = default;
  Buffer& operator=(Buffer&&) noexcept = default;

  // Raw bytes, poisoned, `offset_bytes` past a 64-byte boundary: a workspace.
  static Buffer bytes(std::size_t count, std::size_t offset_bytes = 0);
  std::span<std::byte> span() const;  // of bytes()

  bool empty() const { return memory_ == nullptr; }
  DType dtype() const { return view_.dtype; }
  Shape shape() const { return {view_.dims().begin(), view_.dims().end()}; }
  std::int64_t numel() const { return view_.numel(); }
  const TensorView& view() const { return view_; }

  // False when a byte before, after or between the elements has changed since the buffer was made.
  bool guards_intact() const;
  // Of everything: guards, gaps and elements.
  std::uint64_t checksum() const;

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t total_ = 0;   // bytes, guards included
  std::size_t begin_ = 0;   // of the region that the elements lie in
  std::size_t extent_ = 0;  // its bytes
  TensorView view_;
};

// Elements in row-major order whatever the strides are; integers are read as double too.
std::vector<double> values(const TensorView& t);
void assign(const TensorView& t, std::span<const double> x);  // rounds to t's type
void fill(const TensorView& t, double x);
// Calls fn(element's address) in row-major order.
void for_each(const TensorView& t, const std::function<void(std::byte*)>& fn);

double load(const void* p, DType t);
void store(void* p, DType t, double x);

// A contiguous copy in another type (or the same).
Buffer cast(const TensorView& t, DType to);
inline Buffer clone(const TensorView& t) { return cast(t, t.dtype); }

// Same type, shape and bits, element by element.
bool same_bits(const TensorView& a, const TensorView& b);

// [begin, begin + length) of one axis, sharing memory.
TensorView slice(TensorView t, int axis, std::int64_t begin, std::int64_t length);

}  // namespace fla::tools
