// Shapes given by the user: `fla bench --custom-shapes` and `fla explain --shape`.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fla/core/status.h"

namespace fla::tools {

inline constexpr std::int64_t kMaxDim = std::int64_t{1} << 40;

struct NamedShape {
  std::string name;                          // empty when it came from a list
  std::map<std::string, std::int64_t> dims;  // of B T H K V D HQ HV M L S, those that were given
  std::vector<std::int64_t> cu_seqlens;      // empty: not packed
};

// {"name": {"B": 1, "T": 64, "H": 2, "D": 64, "cu_seqlens": [0, 20, 64]}, ...}, in the text's order; at least one.
Result<std::vector<NamedShape>> parse_custom_shapes(std::string_view json);

// "B=1,T=64,H=2,D=64"
Result<NamedShape> parse_shape_list(std::string_view text);

}  // namespace fla::tools
