#include "fla/engine/delta/engine.h"
#include "fla/ops/gated_delta_product/gated_delta_product_problem.h"

namespace fla {

void register_gated_delta_product_cpu(Registry& r) {
  r.add_backend("gated_delta_product", cpu_backend());
  register_delta_cpu(r, kChunkGatedDeltaProduct, kChunkGatedDeltaProductBackward, Form::Chunk);
}

}  // namespace fla
