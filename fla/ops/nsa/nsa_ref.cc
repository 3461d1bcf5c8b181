#include "fla/engine/attn/engine.h"
#include "fla/ops/nsa/nsa_problem.h"

namespace fla {

void register_nsa_ref(Registry& r) {
  register_reference(r, kNsaFunctions, kNsaReference);
  register_reference(r, kNsaCompressionFunctions, kAttnReference);
  register_reference(r, kNsaTopkFunctions, kNsaChoiceReference);
}

}  // namespace fla
