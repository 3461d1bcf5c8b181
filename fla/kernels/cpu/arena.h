// Scratch memory of the CPU kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fla::cpu {

// Cuts 64-byte aligned pieces from a workspace. Without memory it only measures; `bytes` then bounds what is needed.
class Arena {
 public:
  Arena() = default;
  explicit Arena(std::byte* p) : base_(p) {
    const auto a = reinterpret_cast<std::uintptr_t>(p);
    used_ = static_cast<std::size_t>((kAlign - a % kAlign) % kAlign);
  }
  template <typename T>
  T* take(std::int64_t n) {
    T* p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::size_t>(n) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return p;
  }
  float* floats(std::int64_t n) { return take<float>(n); }
  std::size_t bytes() const { return used_ + kAlign; }

 private:
  static constexpr std::size_t kAlign = 64;
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace fla::cpu
