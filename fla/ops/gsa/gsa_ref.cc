#include "fla/engine/slot/engine.h"
#include "fla/ops/gsa/gsa_problem.h"

namespace fla {

void register_gsa_ref(Registry& r) { register_reference(r, kGsaFunctions, kSlotReference); }

}  // namespace fla
