#include "fla/ops/generalized_delta_rule/generalized_delta_rule.h"

namespace fla {

constinit const Function<IplrDeltaRuleArgs> chunk_iplr_delta_rule{kChunkIplrDeltaRule};
constinit const Function<IplrDeltaRuleBackwardArgs> chunk_iplr_delta_rule_backward{kChunkIplrDeltaRuleBackward};
constinit const Function<IplrDeltaRuleArgs> fused_recurrent_iplr_delta_rule{kFusedRecurrentIplrDeltaRule};
constinit const Function<IplrDeltaRuleBackwardArgs> fused_recurrent_iplr_delta_rule_backward{
    kFusedRecurrentIplrDeltaRuleBackward};
constinit const Function<DplrDeltaRuleArgs> chunk_dplr_delta_rule{kChunkDplrDeltaRule};
constinit const Function<DplrDeltaRuleBackwardArgs> chunk_dplr_delta_rule_backward{kChunkDplrDeltaRuleBackward};
constinit const Function<DplrDeltaRuleArgs> fused_recurrent_dplr_delta_rule{kFusedRecurrentDplrDeltaRule};
constinit const Function<DplrDeltaRuleBackwardArgs> fused_recurrent_dplr_delta_rule_backward{
    kFusedRecurrentDplrDeltaRuleBackward};

}  // namespace fla
