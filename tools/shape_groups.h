// The benchmark's own shapes (contract/system-bench.md): what --shapes and --varlen name.
#pragma once

#include <string>
#include <vector>

#include "tools/common/shape_text.h"

namespace fla::tools {

// A group is a name that stands for several shapes.
struct ShapeGroup {
  std::string name, doc;
  std::vector<NamedShape> shapes;
};
const std::vector<ShapeGroup>& shape_groups();

// Of --shapes and --custom-shapes and --varlen, in that order; the CPU set when none is given. Refuses unknown names.
std::vector<NamedShape> bench_shapes(const std::string& names, const std::string& custom, const std::string& varlen);

}  // namespace fla::tools
