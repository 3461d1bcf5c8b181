// From a user's shape to the sizes of one operator's call.
#pragma once

#include <string>

#include "fla/registry/spec.h"
#include "tools/common/cases.h"
#include "tools/common/shape_text.h"

namespace fla::tools {

// Refuses a shape that lacks a size the operator needs or gives one that it does not have. B defaults to 1, K and V to
// D; an operator over channels ([B, T, D]) gets H * D of them.
Sizes sizes_for(const FunctionSpec& spec, const NamedShape& shape);

bool uses(const FunctionSpec& spec, const std::string& symbol);

}  // namespace fla::tools
