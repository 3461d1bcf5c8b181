#include "fla/engine/delta/engine.h"
#include "fla/ops/rwkv7/rwkv7_mul.h"
#include "fla/ops/rwkv7/rwkv7_problem.h"

namespace fla {

namespace {

double load(const TensorView& t, const std::byte* at) {
  switch (t.dtype) {
    case DType::F32: return *reinterpret_cast<const float*>(at);
    case DType::F16: return to_float(*reinterpret_cast<const f16*>(at));
    case DType::BF16: return to_float(*reinterpret_cast<const bf16*>(at));
    default: return 0.0;
  }
}
void store(const TensorView& t, std::byte* at, double x) {
  switch (t.dtype) {
    case DType::F32: *reinterpret_cast<float*>(at) = static_cast<float>(x); break;
    case DType::F16: *reinterpret_cast<f16*>(at) = to_f16(static_cast<float>(x)); break;
    case DType::BF16: *reinterpret_cast<bf16*>(at) = to_bf16(static_cast<float>(x)); break;
    default: break;
  }
}

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
