#include "fla/engine/attn/engine.h"
#include "fla/ops/path_attn/path_attn_problem.h"

namespace fla {

void register_path_attn_cpu(Registry& r) { register_cpu(r, "path_attn", kPathAttnFunctions, kPathBlocks, kPathBlocks); }

}  // namespace fla
