// Any text as custom shapes, and as a shape list: an error, or sizes within the limits.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tools/common/shape_text.h"

namespace {

void check(const fla::tools::NamedShape& s) {
  for (const auto& [key, n] : s.dims) {
    if (key.empty() || n < 0 || n > fla::tools::kMaxDim) std::abort();
  }
  for (const std::int64_t n : s.cu_seqlens) {
    if (n < 0 || n > fla::tools::kMaxDim) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto shapes = fla::tools::parse_custom_shapes(text);
  if (shapes.ok()) {
    if (shapes->empty()) std::abort();
    for (const auto& s : *shapes) {
      if (s.name.empty()) std::abort();
      check(s);
    }
  }
  if (const auto list = fla::tools::parse_shape_list(text); list.ok()) {
    if (list->dims.empty()) std::abort();
    check(*list);
  }
  return 0;
}
