#include "fla/engine/common/ref_access.h"
#include "fla/engine/delta/engine.h"
#include "fla/ops/rwkv7/rwkv7_mul.h"
#include "fla/ops/rwkv7/rwkv7_problem.h"

namespace fla {

namespace {

// -kk reads the state, kk o a writes what was read.
void make(const FusedMulRwkv7Args& x, const DeltaProblem& p, ThreadPool& /*pool*/) {
  for (std::int64_t n = 0; n < p.B; ++n)
    for (std::int64_t t = 0; t < p.T; ++t)
      for (std::int64_t h = 0; h < p.H; ++h)
        for (std::int64_t i = 0; i < p.K; ++i) {
          const double kk = reference::load(x.kk, n, t, h, i);
          reference::store(p.a, -kk, n, t, h, i);
          reference::store(p.b, reference::load(x.a, n, t, h, i) * kk, n, t, h, i);
        }
}

// kk stands in both, a in the second alone.
void put(const FusedMulRwkv7BackwardArgs& x, const DeltaBackwardProblem& p, ThreadPool& /*pool*/) {
  for (std::int64_t n = 0; n < p.B; ++n)
    for (std::int64_t t = 0; t < p.T; ++t)
      for (std::int64_t h = 0; h < p.H; ++h)
        for (std::int64_t i = 0; i < p.K; ++i) {
          const double dread = reference::load(p.da, n, t, h, i), dwrite = reference::load(p.db, n, t, h, i);
          if (x.dkk) reference::store(x.dkk, dwrite * reference::load(x.a, n, t, h, i) - dread, n, t, h, i);
          if (x.da) reference::store(x.da, dwrite * reference::load(x.kk, n, t, h, i), n, t, h, i);
        }
}

}  // namespace

void register_rwkv7_ref(Registry& r) {
  register_delta_reference(r, kRwkv7Functions);
  register_rwkv7_mul<double>(r, kReference,
                             {make, put, reference::delta_forward_workspace, reference::delta_forward,
                              reference::delta_backward_workspace, reference::delta_backward});
}

}  // namespace fla
