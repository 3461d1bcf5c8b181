#include "fla/ops/common/delta_cuda_chunk_bwd.cuh"

namespace fla::cuda {

template std::size_t delta_chunk_backward_workspace<bf16>(const DeltaProblem&, const DeltaPlan&);
template Status delta_chunk_backward<bf16>(const DeltaProblem&, const DeltaPlan&, Stream, std::span<std::byte>);

}  // namespace fla::cuda
