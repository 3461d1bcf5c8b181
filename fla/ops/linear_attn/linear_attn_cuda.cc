#include "fla/ops/common/diag_cuda_kernels.h"
#include "fla/ops/linear_attn/linear_attn_problem.h"

namespace fla {
namespace {

template <typename A>
void add(Registry& r, FunctionId<A> function, const CudaPass<DiagProblem>& pass, bool normalize) {
  Kernel<A> k = detail::cuda_kernel(function, kDiagCuda.name, pass);
  k.verify = [plain = std::move(k.verify), normalize](const A& a, const CallInfo& c) {
    return a.normalize.value_or(normalize) ? reject("normalize: expected false on this backend, got true")
                                           : plain(a, c);
  };
  r.add(std::move(k));
}

}  // namespace

void register_linear_attn_cuda(Registry& r) {
  r.add_backend("linear_attn", cuda_backend());
  for (const auto& f : {kChunkLinearAttn, kFusedChunkLinearAttn}) add(r, f, kDiagCuda.forward, true);
  for (const auto& f : {kChunkLinearAttnBackward, kFusedChunkLinearAttnBackward}) add(r, f, kDiagCuda.backward, true);
  add(r, kFusedRecurrentLinearAttn, kDiagCuda.forward, false);
  add(r, kFusedRecurrentLinearAttnBackward, kDiagCuda.backward, false);
}

}  // namespace fla
