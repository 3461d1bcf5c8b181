#include "fla/ops/common/delta_cuda_segment.cuh"

namespace fla::cuda {

template Status launch_segments<bf16>(const DeltaProblem&, const DeltaPlan&, const DeltaChunkSpace<bf16>&, Stream);

}  // namespace fla::cuda
