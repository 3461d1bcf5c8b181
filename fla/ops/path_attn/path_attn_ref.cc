#include "fla/engine/attn/engine.h"
#include "fla/ops/path_attn/path_attn_problem.h"

namespace fla {

void register_path_attn_ref(Registry& r) { register_reference(r, kPathAttnFunctions, kPathReference); }

}  // namespace fla
