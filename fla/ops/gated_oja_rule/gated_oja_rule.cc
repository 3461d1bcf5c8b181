#include "fla/ops/gated_oja_rule/gated_oja_rule.h"

namespace fla {

constinit const Function<GatedOjaRuleArgs> chunk_gated_oja_rule{kChunkGatedOjaRule};
constinit const Function<GatedOjaRuleBackwardArgs> chunk_gated_oja_rule_backward{kChunkGatedOjaRuleBackward};
constinit const Function<GatedOjaRuleArgs> fused_recurrent_gated_oja_rule{kFusedRecurrentGatedOjaRule};
constinit const Function<GatedOjaRuleBackwardArgs> fused_recurrent_gated_oja_rule_backward{
    kFusedRecurrentGatedOjaRuleBackward};

}  // namespace fla
