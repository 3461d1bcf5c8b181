#include "fla/ops/linear_attn/linear_attn_cuda.h"

#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/linear_attn/linear_attn_problem.h"

namespace fla {
namespace {

// The normalised form is a pass of the family's own around the engine's.
template <typename P, typename A>
void add(Registry& r, FunctionId<A> function, const CudaPass<P>& engine, bool normalize) {
  const Kernel<A> plain = detail::cuda_kernel(function, kDiagCuda.name, engine),
                  normalised = detail::cuda_kernel(function, kDiagCuda.name,
                                                   CudaPass<A>{cuda::normalised_refusal, cuda::normalised_plan,
                                                               cuda::normalised_workspace, cuda::normalised});
  const auto of = [plain, normalised, normalize](const A& a) -> const Kernel<A>& {
    return a.normalize.value_or(normalize) ? normalised : plain;
  };
  Kernel<A> k = plain;
  k.verify = [of](const A& a, const CallInfo& c) { return of(a).verify(a, c); };
  k.workspace = [of](const A& a, const CallInfo& c) { return of(a).workspace(a, c); };
  k.launch = [of](const A& a, const CallInfo& c, std::span<std::byte> ws) { return of(a).launch(a, c, ws); };
  k.plan = [of](const A& a, const CallInfo& c) { return of(a).plan(a, c); };
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
