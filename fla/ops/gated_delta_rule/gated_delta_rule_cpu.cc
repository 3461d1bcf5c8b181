#include "fla/engine/delta/engine.h"
#include "fla/ops/gated_delta_rule/gated_delta_rule_problem.h"

namespace fla {

void register_gated_delta_rule_cpu(Registry& r) {
  r.add_backend("gated_delta_rule", cpu_backend());
  register_delta_cpu(r, kChunkGatedDeltaRule, kChunkGatedDeltaRuleBackward, Form::Chunk);
  register_delta_cpu(r, kChunkGdn, kChunkGdnBackward, Form::Chunk);
  register_delta_cpu(r, kFusedRecurrentGatedDeltaRule, kFusedRecurrentGatedDeltaRuleBackward, Form::Step);
  register_delta_cpu(r, kFusedRecurrentGdn, kFusedRecurrentGdnBackward, Form::Step);
  register_engine(r, kGdnStep, kDeltaStep);
}

}  // namespace fla
