#include "fla/ops/precond_gated_delta_rule/precond_gated_delta_rule.h"

namespace fla {

constinit const Function<PrecondGatedDeltaRuleArgs> chunk_precond_gated_delta_rule{kChunkPrecondGatedDeltaRule};
constinit const Function<PrecondGatedDeltaRuleBackwardArgs> chunk_precond_gated_delta_rule_backward{
    kChunkPrecondGatedDeltaRuleBackward};
constinit const Function<PrecondGatedDeltaRuleArgs> fused_recurrent_precond_gated_delta_rule{
    kFusedRecurrentPrecondGatedDeltaRule};
constinit const Function<PrecondGatedDeltaRuleBackwardArgs> fused_recurrent_precond_gated_delta_rule_backward{
    kFusedRecurrentPrecondGatedDeltaRuleBackward};

}  // namespace fla
