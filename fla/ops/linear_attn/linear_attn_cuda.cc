#include "fla/ops/linear_attn/linear_attn_cuda.h"

#include "fla/engine/diag/cuda_engine.h"
#include "fla/ops/linear_attn/linear_attn_problem.h"

namespace fla {
namespace {

// The normalised form is a pass of the family's own around the engine's. Each form is an implementation of its own, which
// refuses the calls of the other.
template <bool NORMALIZE, bool DEFAULT, typename A>
Verdict serves_form(const A& a, const CallInfo& c) {
  if (a.normalize.value_or(DEFAULT) == NORMALIZE) return accept();
  return reject(c, [] { return std::string(NORMALIZE ? "normalize: is false" : "normalize: is true"); });
}

template <bool NORMALIZE, bool DEFAULT, typename A, typename P, typename L>
void add(Registry& r, FunctionId<A> function, const char* name, const CudaPass<P, L>& pass) {
  ErasedKernel k = detail::cuda_kernel(function, name, pass);
  k.make = [make = std::move(k.make)](const void* a, const CallInfo& c, PlanMemory& memory, Verdict& v) -> Plan* {
    v = serves_form<NORMALIZE, DEFAULT>(*static_cast<const A*>(a), c);
    return v.accepted ? make(a, c, memory, v) : nullptr;
  };
  r.add(std::move(k));
}

constexpr CudaPass<LinearAttnArgs, cuda::NormalisedPlan> kForward = {
    cuda::normalised_plan,      cuda::normalised_kernel, cuda::normalised_text,
    cuda::normalised_workspace, cuda::normalised,        cuda::normalised_forward_kernels};
constexpr CudaPass<LinearAttnBackwardArgs, cuda::NormalisedPlan> kBackward = {
    cuda::normalised_plan,      cuda::normalised_kernel, cuda::normalised_text,
    cuda::normalised_workspace, cuda::normalised,        cuda::normalised_backward_kernels};

template <bool DEFAULT>
void add_forms(Registry& r, FunctionId<LinearAttnArgs> forward, FunctionId<LinearAttnBackwardArgs> backward) {
  add<false, DEFAULT>(r, forward, "diag", kDiagCuda.forward);
  add<true, DEFAULT>(r, forward, "linear", kForward);
  add<false, DEFAULT>(r, backward, "diag", kDiagCuda.backward);
  add<true, DEFAULT>(r, backward, "linear", kBackward);
}

}  // namespace

void register_linear_attn_cuda(Registry& r) {
  r.add_backend("linear_attn", cuda_backend());
  add_forms<true>(r, kChunkLinearAttn, kChunkLinearAttnBackward);
  add_forms<true>(r, kFusedChunkLinearAttn, kFusedChunkLinearAttnBackward);
  add_forms<false>(r, kFusedRecurrentLinearAttn, kFusedRecurrentLinearAttnBackward);
}

}  // namespace fla
