#include "fla/engine/slot/engine.h"
#include "fla/ops/gsa/gsa_problem.h"

namespace fla {

void register_gsa_cpu(Registry& r) { register_cpu(r, "gsa", kGsaFunctions, kSlotChunk, kSlotStep); }

}  // namespace fla
