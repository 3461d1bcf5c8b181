#include "fla/engine/delta/engine.h"
#include "fla/ops/gated_delta_product/gated_delta_product_problem.h"

namespace fla {

void register_gated_delta_product_ref(Registry& r) { register_delta_reference(r, kGatedDeltaProductFunctions); }

}  // namespace fla
