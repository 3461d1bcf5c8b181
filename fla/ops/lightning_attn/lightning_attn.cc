#include "fla/ops/lightning_attn/lightning_attn.h"

namespace fla {

constinit const Function<LightningAttnArgs> chunk_lightning_attn{kChunkLightningAttn};
constinit const Function<LightningAttnBackwardArgs> chunk_lightning_attn_backward{kChunkLightningAttnBackward};
constinit const Function<LightningAttnArgs> fused_recurrent_lightning_attn{kFusedRecurrentLightningAttn};
constinit const Function<LightningAttnBackwardArgs> fused_recurrent_lightning_attn_backward{
    kFusedRecurrentLightningAttnBackward};
constinit const Function<LightningStepArgs> lightning_step{kLightningStep};

}  // namespace fla
