#include "fla/ops/abc/abc.h"

namespace fla {

constinit const Function<AbcArgs> chunk_abc{kChunkAbc};
constinit const Function<AbcBackwardArgs> chunk_abc_backward{kChunkAbcBackward};

}  // namespace fla
