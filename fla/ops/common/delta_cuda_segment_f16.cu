#include "fla/ops/common/delta_cuda_segment.cuh"

namespace fla::cuda {

template Status launch_segments<f16>(const DeltaProblem&, const DeltaPlan&, const DeltaChunkSpace<f16>&, Stream);

}  // namespace fla::cuda
