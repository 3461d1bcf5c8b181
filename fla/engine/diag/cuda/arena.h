// The workspace of the diagonal-decay engine, cut into parts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fla::cuda {

inline constexpr std::size_t kAlignment = 256;

inline std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Hands out parts of the workspace; with no memory it only counts.
class Arena {
 public:
  explicit Arena(void* base)
      : base_(reinterpret_cast<std::uintptr_t>(base)), at_(base == nullptr ? 0 : aligned(base_)) {}
  void* take(std::size_t bytes) {
    const std::uintptr_t here = at_;
    at_ += aligned(bytes);
    return reinterpret_cast<void*>(here);
  }
  // An upper bound of what was taken, wherever the memory starts.
  std::size_t bytes() const { return at_ == 0 ? 0 : at_ + kAlignment; }
  void* rest() const { return reinterpret_cast<void*>(at_); }

 private:
  std::uintptr_t base_, at_;
};

}  // namespace fla::cuda
