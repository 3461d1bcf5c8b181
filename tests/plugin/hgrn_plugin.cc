// A plug-in with a backward: fused_recurrent_hgrn in F32, one channel of one sequence after the other. With
// FLA_CPP_TEST_PLUGIN=wrong_backward its gradient of the gates lacks the newest token, segv_backward crashes there.
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "fla/plugin.h"

namespace {

bool is(const char* defect) {
  const char* v = std::getenv("FLA_CPP_TEST_PLUGIN");
  return v != nullptr && std::strcmp(v, defect) == 0;
}

std::int64_t boundary(const DLTensor* cu_seqlens, std::int64_t i) {
  const std::int64_t offset = i * cu_seqlens->strides[0];
  return cu_seqlens->dtype.bits == 32 ? static_cast<const std::int32_t*>(cu_seqlens->data)[offset]
                                      : static_cast<const std::int64_t*>(cu_seqlens->data)[offset];
}

float* at(const DLTensor* t, std::int64_t a, std::int64_t b) {
  return static_cast<float*>(t->data) + a * t->strides[0] + b * t->strides[1];
}
float* at(const DLTensor* t, std::int64_t a, std::int64_t b, std::int64_t c) { return at(t, a, b) + c * t->strides[2]; }

struct Problem {
  const DLTensor *x, *g, *h0, *cu_seqlens, *o, *ht, *up, *up_ht, *dx, *dg, *dh0;
  std::int64_t T, D;
  float* memory;  // of each thread: a state per token
};

// One channel of one sequence: its tokens and its place in the state.
struct Channel {
  std::int64_t n, d, row, begin, end;
  Channel(const Problem& p, std::int64_t task) : n(task / p.D), d(task % p.D), row(n), begin(0), end(p.T) {
    if (p.cu_seqlens == nullptr) return;
    row = 0;
    begin = boundary(p.cu_seqlens, n);
    end = boundary(p.cu_seqlens, n + 1);
  }
  float start(const Problem& p) const { return p.h0 != nullptr ? *at(p.h0, n, d) : 0.0F; }
};

void run_forward(void* user, std::int64_t task, int /*worker*/) {
  const Problem& p = *static_cast<const Problem*>(user);
  const Channel c(p, task);
  float h = c.start(p);
  for (std::int64_t t = c.begin; t < c.end; ++t) {
    h = std::exp(*at(p.g, c.row, t, c.d)) * h + *at(p.x, c.row, t, c.d);
    if (p.o != nullptr) *at(p.o, c.row, t, c.d) = h;
  }
  if (p.ht != nullptr) *at(p.ht, c.n, c.d) = h;
}

void run_backward(void* user, std::int64_t task, int worker) {
  const Problem& p = *static_cast<const Problem*>(user);
  const Channel c(p, task);
  float* before = p.memory + worker * p.T;  // the state before each token
  float h = c.start(p);
  for (std::int64_t t = c.begin; t < c.end; ++t) {
    before[t - c.begin] = h;
    h = std::exp(*at(p.g, c.row, t, c.d)) * h + *at(p.x, c.row, t, c.d);
  }
  float d = p.up_ht != nullptr ? *at(p.up_ht, c.n, c.d) : 0.0F;
  for (std::int64_t t = c.end - 1; t >= c.begin; --t) {
    if (p.up != nullptr) d += *at(p.up, c.row, t, c.d);
    if (p.dx != nullptr) *at(p.dx, c.row, t, c.d) = d;
    d *= std::exp(*at(p.g, c.row, t, c.d));
    const bool lost = t + 1 == c.end && is("wrong_backward");
    if (p.dg != nullptr) *at(p.dg, c.row, t, c.d) = lost ? 0.0F : d * before[t - c.begin];
  }
  if (p.dh0 != nullptr) *at(p.dh0, c.n, c.d) = d;
}

fla_code run(const fla_plugin_call* call, void (*fn)(void*, std::int64_t, int)) {
  const auto find = [&](const char* name) { return fla_plugin_find(call, name); };
  Problem p{find("x"),
            find("g"),
            find("initial_state"),
            find("cu_seqlens"),
            find("out.o"),
            find("out.final_state"),
            find("grad_out.o"),
            find("grad_out.final_state"),
            find("grad.x"),
            find("grad.g"),
            find("grad.initial_state"),
            0,
            0,
            static_cast<float*>(call->workspace)};
  p.T = p.x->shape[1];
  p.D = p.x->shape[2];
  const std::int64_t N = p.cu_seqlens != nullptr ? p.cu_seqlens->shape[0] - 1 : p.x->shape[0];
  call->parallel_for(call, N * p.D, fn, &p);
  return FLA_OK;
}

fla_code forward(const fla_plugin_call* call) { return run(call, run_forward); }
fla_code backward(const fla_plugin_call* call) {
  if (is("segv_backward")) std::raise(SIGSEGV);
  return run(call, run_backward);
}

int verify(const fla_plugin_call* call) {
  if (fla_plugin_knows(call,
                       "x g initial_state cu_seqlens output_final_state out.o out.final_state grad_out.o "
                       "grad_out.final_state grad.x grad.g grad.initial_state") == 0)
    return 0;
  for (std::size_t i = 0; i < call->tensor_count; ++i) {
    const DLDataType t = call->tensors[i].tensor.dtype;
    if (t.code != kDLInt && (t.code != kDLFloat || t.bits != 32))
      return fla_plugin_refuse(call, "%s: needs F32", call->tensors[i].name);
  }
  return 1;
}

std::size_t workspace(const fla_plugin_call* call) {
  return static_cast<std::size_t>(call->threads * fla_plugin_find(call, "x")->shape[1]) * sizeof(float);
}

}  // namespace

FLA_PLUGIN_EXPORT const fla_plugin* fla_plugin_get(uint32_t /*abi*/) {
  static fla_plugin_function function;
  static fla_plugin p;
  function.function = "fused_recurrent_hgrn";
  function.kernel = "channel";
  function.verify = verify;
  function.workspace = workspace;
  function.forward = forward;
  function.backward = backward;
  p.abi = FLA_PLUGIN_ABI;
  p.name = "channels";
  p.priority = 9;
  p.device = kDLCPU;
  p.functions = &function;
  p.function_count = 1;
  return &p;
}
