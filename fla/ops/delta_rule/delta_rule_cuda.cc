#include "fla/engine/delta/cuda_engine.h"
#include "fla/ops/delta_rule/delta_rule_problem.h"

namespace fla {

void register_delta_rule_cuda(Registry& r) { register_cuda(r, "delta_rule", kDeltaRuleFunctions, kDeltaCuda); }

}  // namespace fla
