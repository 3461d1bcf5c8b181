// A callable that is passed down and not kept: no copy, no allocation.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace fla {

template <typename... Args>
class Visitor {
 public:
  template <typename F, typename = std::enable_if_t<!std::is_same_v<std::remove_cvref_t<F>, Visitor>>>
  Visitor(F&& f)  // NOLINT(google-explicit-constructor)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))), call_([](void* o, Args... args) {
          (*static_cast<std::remove_reference_t<F>*>(o))(std::forward<Args>(args)...);
        }) {}
  void operator()(Args... args) const { call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  void (*call_)(void*, Args...);
};

}  // namespace fla
