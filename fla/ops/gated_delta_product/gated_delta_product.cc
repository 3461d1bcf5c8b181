#include "fla/ops/gated_delta_product/gated_delta_product.h"

namespace fla {

constinit const Function<GatedDeltaProductArgs> chunk_gated_delta_product{kChunkGatedDeltaProduct};
constinit const Function<GatedDeltaProductBackwardArgs> chunk_gated_delta_product_backward{
    kChunkGatedDeltaProductBackward};

}  // namespace fla
