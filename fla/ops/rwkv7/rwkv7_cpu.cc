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
  register_delta_cpu(r, "rwkv7", kRwkv7Functions);
  register_rwkv7_mul<float>(r, "cpu",
                            {load, store, cpu::delta_step_forward_workspace, cpu::delta_step_forward,
                             cpu::delta_step_backward_workspace, cpu::delta_step_backward});
}

}  // namespace fla
