#include "fla/engine/common/ref_access.h"
#include "fla/engine/delta/engine.h"
#include "fla/ops/rwkv7/rwkv7_mul.h"
#include "fla/ops/rwkv7/rwkv7_problem.h"

namespace fla {

namespace {

double load(const TensorView& t, const std::byte* at) {
  TensorView one = t;
  one.data = const_cast<std::byte*>(at);
  return reference::load(one, 0);
}
void store(const TensorView& t, std::byte* at, double x) {
  TensorView one = t;
  one.data = at;
  one.ndim = 1;
  reference::store(one, x, 0);
}

}  // namespace

void register_rwkv7_ref(Registry& r) {
  register_delta_reference(r, kRwkv7Functions);
  register_rwkv7_mul<double>(r, kReference,
                             {load, store, reference::delta_forward_workspace, reference::delta_forward,
                              reference::delta_backward_workspace, reference::delta_backward});
}

}  // namespace fla
