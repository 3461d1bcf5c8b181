#include "fla/ops/mesa_net/mesa_net.h"

namespace fla {

constinit const Function<MesaNetArgs> chunk_mesa_net{kChunkMesaNet};
constinit const Function<MesaNetBackwardArgs> chunk_mesa_net_backward{kChunkMesaNetBackward};
constinit const Function<MesaNetStepArgs> mesa_net_decoding_one_step{kMesaNetDecodingOneStep};

}  // namespace fla
