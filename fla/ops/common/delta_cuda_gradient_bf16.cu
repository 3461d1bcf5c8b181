#include "fla/ops/common/delta_cuda_gradient.cuh"

namespace fla::cuda {

template Status launch_gradient<bf16>(const DeltaProblem&, const DeltaPlan&, const DeltaChunkSpace<bf16>&, Stream);

}  // namespace fla::cuda
