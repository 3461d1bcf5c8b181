#include "fla/ops/attnres/attnres.h"

namespace fla {

constinit const Function<AttnresArgs> fused_attnres{kFusedAttnres};
constinit const Function<AttnresBackwardArgs> fused_attnres_backward{kFusedAttnresBackward};

}  // namespace fla
