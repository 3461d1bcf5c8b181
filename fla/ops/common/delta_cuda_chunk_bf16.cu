#include "fla/ops/common/delta_cuda_chunk_fwd.cuh"

namespace fla::cuda {

template std::size_t delta_chunk_forward_workspace<bf16>(const DeltaProblem&, const DeltaPlan&);
template Status delta_chunk_forward<bf16>(const DeltaProblem&, const DeltaPlan&, Stream, std::span<std::byte>);
template Status launch_chunk<bf16>(const DeltaProblem&, const DeltaPlan&, const DeltaChunkSpace<bf16>&, Stream);

}  // namespace fla::cuda
