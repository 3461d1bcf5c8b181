/* A plug-in for fla.cpp: chunk_simple_gla on the CPU, forward only, the recurrence as it is written, in F32.
 *
 *   S_t = e^{g_t} S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t
 *
 * It takes every shape, stride and flag of the function; what it cannot serve, other element types, it refuses. */
#include <fla/plugin.h>
#include <math.h>

static int verify(const fla_plugin_call* call) {
  if (!fla_plugin_knows(call,
                        "q k v g g_gamma initial_state cu_seqlens cu_seqlens_cpu scale state_v_first chunk_size "
                        "out.o out.final_state"))
    return 0;
  for (size_t i = 0; i < call->tensor_count; ++i) {
    const DLDataType t = call->tensors[i].tensor.dtype;
    if (t.code != kDLInt && (t.code != kDLFloat || t.bits != 32))
      return fla_plugin_refuse(call, "%s: needs F32", call->tensors[i].name);
  }
  return 1;
}

/* Of each thread: a state and one row of v and o. */
static int64_t scratch(int64_t K, int64_t V) { return K * V + 2 * V; }

static size_t workspace(const fla_plugin_call* call) {
  const int64_t K = fla_plugin_find(call, "q")->shape[3], V = fla_plugin_find(call, "v")->shape[3];
  return (size_t)(call->threads * scratch(K, V)) * sizeof(float);
}

static float* at(const DLTensor* t, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t index[4] = {a, b, c, d};
  int64_t offset = 0;
  for (int i = 0; i < t->ndim; ++i) offset += index[i] * t->strides[i];
  return (float*)t->data + offset;
}

static int64_t boundary(const DLTensor* cu_seqlens, int64_t i) {
  const int64_t offset = i * cu_seqlens->strides[0];
  return cu_seqlens->dtype.bits == 32 ? ((const int32_t*)cu_seqlens->data)[offset]
                                      : ((const int64_t*)cu_seqlens->data)[offset];
}

typedef struct problem {
  const DLTensor *q, *k, *v, *g, *g_gamma, *h0, *cu_seqlens, *o, *ht;
  int64_t H, K, V;
  float scale;
  int v_first;
  float* memory;
} problem;

/* One head of one sequence. */
static void run(void* user, int64_t task, int worker) {
  const problem* p = (const problem*)user;
  const int64_t n = task / p->H, h = task % p->H, K = p->K, V = p->V;
  const int64_t row = p->cu_seqlens != NULL ? 0 : n; /* packed sequences share batch row 0 */
  const int64_t begin = p->cu_seqlens != NULL ? boundary(p->cu_seqlens, n) : 0;
  const int64_t end = p->cu_seqlens != NULL ? boundary(p->cu_seqlens, n + 1) : p->q->shape[1];
  float* S = p->memory + worker * scratch(K, V); /* [K, V] */
  float *v = S + K * V, *o = v + V;
  for (int64_t i = 0; i < K; ++i)
    for (int64_t j = 0; j < V; ++j)
      S[i * V + j] = p->h0 == NULL ? 0.0f : *at(p->h0, n, h, p->v_first ? j : i, p->v_first ? i : j);
  for (int64_t t = begin; t < end; ++t) {
    float log_decay = 0.0f;
    if (p->g != NULL) log_decay = *at(p->g, row, t, h, 0);
    if (p->g_gamma != NULL) log_decay = *at(p->g_gamma, h, 0, 0, 0);
    const float decay = expf(log_decay);
    for (int64_t j = 0; j < V; ++j) {
      v[j] = *at(p->v, row, t, h, j);
      o[j] = 0.0f;
    }
    for (int64_t i = 0; i < K; ++i) {
      const float k = *at(p->k, row, t, h, i), q = p->scale * *at(p->q, row, t, h, i);
      for (int64_t j = 0; j < V; ++j) {
        S[i * V + j] = decay * S[i * V + j] + k * v[j];
        o[j] += q * S[i * V + j];
      }
    }
    if (p->o != NULL)
      for (int64_t j = 0; j < V; ++j) *at(p->o, row, t, h, j) = o[j];
  }
  if (p->ht != NULL)
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j) *at(p->ht, n, h, p->v_first ? j : i, p->v_first ? i : j) = S[i * V + j];
}

static fla_code forward(const fla_plugin_call* call) {
  problem p;
  p.q = fla_plugin_find(call, "q");
  p.k = fla_plugin_find(call, "k");
  p.v = fla_plugin_find(call, "v");
  p.g = fla_plugin_find(call, "g");
  p.g_gamma = fla_plugin_find(call, "g_gamma");
  p.h0 = fla_plugin_find(call, "initial_state");
  p.cu_seqlens = fla_plugin_find(call, "cu_seqlens");
  p.o = fla_plugin_find(call, "out.o");
  p.ht = fla_plugin_find(call, "out.final_state");
  p.H = p.q->shape[2];
  p.K = p.q->shape[3];
  p.V = p.v->shape[3];
  p.scale = (float)fla_plugin_number(call, "scale", 1.0 / sqrt((double)p.K));
  p.v_first = fla_plugin_is_on(call, "state_v_first");
  p.memory = (float*)call->workspace;
  const int64_t N = p.cu_seqlens != NULL ? p.cu_seqlens->shape[0] - 1 : p.q->shape[0];
  call->parallel_for(call, N * p.H, run, &p);
  return FLA_OK;
}

static const fla_plugin_function functions[] = {{.function = "chunk_simple_gla",
                                                 .kernel = "recurrence",
                                                 .verify = verify,
                                                 .workspace = workspace,
                                                 .forward = forward}};

static const fla_plugin plugin = {.abi = FLA_PLUGIN_ABI,
                                  .name = "example",
                                  .priority = 9, /* after cpu: served when asked for, or where cpu refuses */
                                  .device = kDLCPU,
                                  .functions = functions,
                                  .function_count = sizeof functions / sizeof functions[0]};

FLA_PLUGIN_EXPORT const fla_plugin* fla_plugin_get(uint32_t abi) {
  (void)abi; /* the host compares plugin.abi with its own */
  return &plugin;
}
