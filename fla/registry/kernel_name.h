// The name of a kernel, as plans and `fla explain` tell it: "delta.chunk.bf16.k128.v32.head.forward". A plan that runs
// several kernels that are chosen apart names each, with a + between.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "fla/core/dtype.h"

namespace fla {

// "bf16", as names of kernels have it.
constexpr const char* short_name(DType t) {
  switch (t) {
    case DType::F32: return "f32";
    case DType::F16: return "f16";
    case DType::BF16: return "bf16";
    case DType::F64: return "f64";
    case DType::I32: return "i32";
    case DType::I64: return "i64";
  }
  return "?";
}

// A kernel's own name, made without an allocation: "delta.chunk.bf16.k128.head".
class KernelName {
 public:
  KernelName() = default;
  KernelName(std::string_view text) { add(text); }  // NOLINT(google-explicit-constructor)
  KernelName& add(std::string_view text) {
    const std::size_t n = text.size() < kMost - size_ ? text.size() : kMost - size_;
    std::memcpy(text_ + size_, text.data(), n);
    size_ += n;
    text_[size_] = '\0';
    return *this;
  }
  KernelName& add(std::int64_t number) {
    char digits[24];
    std::size_t at = sizeof digits;
    std::uint64_t rest = number < 0 ? 0 : static_cast<std::uint64_t>(number);
    do digits[--at] = static_cast<char>('0' + rest % 10);
    while ((rest /= 10) > 0);
    return add(std::string_view(digits + at, sizeof digits - at));
  }
  const char* c_str() const { return text_; }
  std::string_view view() const { return {text_, size_}; }
  // fn(name) for each of the names that it joins, mostly one.
  template <typename Fn>
  void for_each(Fn&& fn) const {
    for (std::string_view rest = view(); !rest.empty();) {
      const std::size_t end = std::min(rest.find('+'), rest.size());
      fn(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  bool has(std::string_view kernel) const {
    bool found = false;
    for_each([&](std::string_view name) { found |= name == kernel; });
    return found;
  }
  // Adds the names that are not there yet to a list.
  template <typename List>
  void append_to(List& names) const {
    for_each([&](std::string_view name) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.emplace_back(name);
    });
  }

 private:
  static constexpr std::size_t kMost = 111;
  std::size_t size_ = 0;
  char text_[kMost + 1] = {};
};

}  // namespace fla
