// Why an engine refuses a problem: told where somebody asks, and free where nobody does.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace fla {

class Why {
 public:
  Why() = default;
  explicit Why(std::string* text) : text_(text) {}
  // Takes down the reason; always false, so that a verifier can return it.
  template <typename... Parts>
  bool operator()(const Parts&... parts) const {
    if (text_ != nullptr) {
      text_->clear();
      (add(parts), ...);
    }
    return false;
  }

 private:
  template <typename Part>
  void add(const Part& part) const {
    if constexpr (std::is_arithmetic_v<Part>)
      *text_ += std::to_string(part);
    else
      *text_ += std::string_view(part);
  }
  std::string* text_ = nullptr;
};

}  // namespace fla
