#include "fla/ops/nsa/nsa.h"

namespace fla {

constinit const Function<NsaArgs> parallel_nsa{kParallelNsa};
constinit const Function<NsaBackwardArgs> parallel_nsa_backward{kParallelNsaBackward};
constinit const Function<NsaCompressionArgs> parallel_nsa_compression{kParallelNsaCompression};
constinit const Function<NsaCompressionBackwardArgs> parallel_nsa_compression_backward{kParallelNsaCompressionBackward};
constinit const Function<NsaTopkArgs> parallel_nsa_topk{kParallelNsaTopk};

}  // namespace fla
