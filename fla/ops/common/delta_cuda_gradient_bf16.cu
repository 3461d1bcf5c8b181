#include "fla/ops/common/delta_cuda_gradient.cuh"

namespace fla::cuda {

std::int64_t delta_gradient_bytes(const DeltaProblem& p, const DeltaPlan& plan) {
  const int value_tiles = static_cast<int>(plan.parts * plan.columns / 16);
  const bool group = p.HV > p.H;
  return plan.width == 64    ? GradientLayout<64>(value_tiles, group).bytes
         : plan.width == 128 ? GradientLayout<128>(value_tiles, group).bytes
                             : GradientLayout<256>(value_tiles, group).bytes;
}

template Status launch_gradient<bf16>(const DeltaProblem&, const DeltaPlan&, const DeltaChunkSpace<bf16>&, Stream);

}  // namespace fla::cuda
