#include <type_traits>

#include "fla/engine/attn/engine.h"
#include "fla/ops/nsa/nsa_problem.h"

namespace fla {

void register_nsa_cpu(Registry& r) {
  register_cpu(r, "nsa", kNsaFunctions, kNsaBranches, kNsaBranches);
  register_cpu_engine(r, kParallelNsaCompression, std::false_type(), kAttnTiles);
  register_cpu_engine(r, kParallelNsaCompressionBackward, std::true_type(), kAttnTiles);
  register_cpu_engine(r, kParallelNsaTopk, std::false_type(), kNsaChoice);
}

}  // namespace fla
