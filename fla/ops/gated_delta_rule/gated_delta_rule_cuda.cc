#include "fla/engine/delta/cuda_engine.h"
#include "fla/ops/gated_delta_rule/gated_delta_rule_problem.h"

namespace fla {

void register_gated_delta_rule_cuda(Registry& r) {
  register_cuda(r, "gated_delta_rule", kGatedDeltaRuleFunctions, kDeltaCuda);
}

}  // namespace fla
