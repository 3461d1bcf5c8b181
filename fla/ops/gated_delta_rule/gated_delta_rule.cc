#include "fla/ops/gated_delta_rule/gated_delta_rule.h"

namespace fla {

constinit const Function<GatedDeltaRuleArgs> chunk_gated_delta_rule{kChunkGatedDeltaRule};
constinit const Function<GatedDeltaRuleBackwardArgs> chunk_gated_delta_rule_backward{kChunkGatedDeltaRuleBackward};
constinit const Function<GatedDeltaRuleArgs> chunk_gdn{kChunkGdn};
constinit const Function<GatedDeltaRuleBackwardArgs> chunk_gdn_backward{kChunkGdnBackward};
constinit const Function<GatedDeltaRuleArgs> fused_recurrent_gated_delta_rule{kFusedRecurrentGatedDeltaRule};
constinit const Function<GatedDeltaRuleBackwardArgs> fused_recurrent_gated_delta_rule_backward{
    kFusedRecurrentGatedDeltaRuleBackward};
constinit const Function<GatedDeltaRuleArgs> fused_recurrent_gdn{kFusedRecurrentGdn};
constinit const Function<GatedDeltaRuleBackwardArgs> fused_recurrent_gdn_backward{kFusedRecurrentGdnBackward};
constinit const Function<GdnStepArgs> gdn_step{kGdnStep};

}  // namespace fla
