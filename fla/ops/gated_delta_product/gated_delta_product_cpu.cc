#include "fla/engine/delta/engine.h"
#include "fla/ops/gated_delta_product/gated_delta_product_problem.h"

namespace fla {

void register_gated_delta_product_cpu(Registry& r) {
  register_delta_cpu(r, "gated_delta_product", kGatedDeltaProductFunctions);
}

}  // namespace fla
