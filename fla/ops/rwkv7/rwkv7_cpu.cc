#include "fla/engine/delta/engine.h"
#include "fla/kernels/cpu/element.h"
#include "fla/ops/rwkv7/rwkv7_mul.h"
#include "fla/ops/rwkv7/rwkv7_problem.h"

namespace fla {

namespace {

double load(const TensorView& t, const std::byte* at) { return cpu::load_element(at, t.dtype); }
void store(const TensorView& t, std::byte* at, double x) { cpu::store_element(at, t.dtype, x); }

}  // namespace

void register_rwkv7_cpu(Registry& r) {
  r.add_backend("rwkv7", cpu_backend());
  register_delta_cpu(r, kChunkRwkv7, kChunkRwkv7Backward, Form::Chunk);
  register_delta_cpu(r, kFusedRecurrentRwkv7, kFusedRecurrentRwkv7Backward, Form::Step);
  register_rwkv7_mul<float>(r, "cpu", "step",
                            {load, store, cpu::delta_step_forward_workspace, cpu::delta_step_forward,
                             cpu::delta_step_backward_workspace, cpu::delta_step_backward});
  register_engine(r, kRwkv7Step, kDeltaStep);
}

}  // namespace fla
