#include "fla/engine/precond/engine.h"
#include "fla/ops/precond_gated_delta_rule/precond_gated_delta_rule_problem.h"

namespace fla {

void register_precond_gated_delta_rule_cpu(Registry& r) {
  r.add_backend("precond_gated_delta_rule", cpu_backend());
  register_precond(r, kChunkPrecondGatedDeltaRule, kChunkPrecondGatedDeltaRuleBackward, kPrecondChunk);
  register_precond(r, kFusedRecurrentPrecondGatedDeltaRule, kFusedRecurrentPrecondGatedDeltaRuleBackward, kPrecondStep);
}

}  // namespace fla
