#include "fla/ops/delta_rule/delta_rule.h"

namespace fla {

constinit const Function<DeltaRuleArgs> chunk_delta_rule{kChunkDeltaRule};
constinit const Function<DeltaRuleBackwardArgs> chunk_delta_rule_backward{kChunkDeltaRuleBackward};
constinit const Function<DeltaRuleArgs> fused_recurrent_delta_rule{kFusedRecurrentDeltaRule};
constinit const Function<DeltaRuleBackwardArgs> fused_recurrent_delta_rule_backward{kFusedRecurrentDeltaRuleBackward};
constinit const Function<DeltaRuleArgs> fused_chunk_delta_rule{kFusedChunkDeltaRule};
constinit const Function<DeltaRuleBackwardArgs> fused_chunk_delta_rule_backward{kFusedChunkDeltaRuleBackward};
constinit const Function<DeltaStepArgs> delta_step{kDeltaRuleStep};

}  // namespace fla
