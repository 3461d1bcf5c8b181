// An allocation that failed, with what was asked for.
#pragma once

#include <cstddef>
#include <new>
#include <string>

namespace fla::tools {

struct NoMemory : std::bad_alloc {
  explicit NoMemory(std::size_t bytes) : text("out of memory: " + std::to_string(bytes) + " bytes asked for") {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};

// What is said of a failed allocation, the size too where it is known.
inline std::string memory_text(const std::bad_alloc& e) {
  return dynamic_cast<const NoMemory*>(&e) != nullptr ? e.what() : "out of memory";
}

}  // namespace fla::tools
