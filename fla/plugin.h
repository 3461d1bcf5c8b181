/* fla.cpp, the plug-in interface: a shared library that brings kernels of its own for functions of fla.cpp.
 *
 *   static fla_code forward(const fla_plugin_call* call) { ... }
 *   static const fla_plugin_function functions[] = {
 *       {.function = "chunk_gla", .kernel = "naive", .verify = verify, .workspace = NULL, .forward = forward}};
 *   static const fla_plugin plugin = {.abi = FLA_PLUGIN_ABI, .name = "mine", .priority = 3, .device = kDLCPU,
 *                                     .functions = functions, .function_count = 1};
 *   FLA_PLUGIN_EXPORT const fla_plugin* fla_plugin_get(uint32_t abi) { (void)abi; return &plugin; }
 *
 * A plug-in is a backend like any other: tried in order of priority, its verifier refuses what it cannot serve,
 * FLA_CPP_BACKEND_ and its name in capitals set to 0 disables it. `fla gate --plugin ./mine.so chunk_gla` proves it, `fla
 * verify --plugin
 * ./mine.so --op chunk_gla` times it too. docs/plugins.md tells the rest.
 */
#ifndef FLA_PLUGIN_H_
#define FLA_PLUGIN_H_

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fla/fla.h"

#if defined(__cplusplus)
#define FLA_PLUGIN_EXPORT extern "C" FLA_C_API
#else
#define FLA_PLUGIN_EXPORT FLA_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when anything below changes its meaning. A host loads plug-ins of its own number only. */
#define FLA_PLUGIN_ABI 1U

/* One present argument. Inputs by argument name ("q", "initial_state"), upstream gradients "grad_out.o", outputs
 * "out.o", gradients "grad.q"; the tensors of a list one by one, "residuals.0", "grad.residuals.0". What is not in the
 * list was not given, or is not wanted. */
typedef struct fla_plugin_tensor {
  const char* name;
  int is_output;   /* 0: must not be written */
  DLTensor tensor; /* strides are never NULL and may be anything; byte_offset is 0; aligned to its elements */
} fla_plugin_tensor;

typedef enum fla_plugin_flag_type {
  FLA_PLUGIN_NONE = 0, /* not given, and the function has no default in numbers: "scale" then is K^(-1/2) */
  FLA_PLUGIN_BOOL = 1,
  FLA_PLUGIN_INT = 2,
  FLA_PLUGIN_DOUBLE = 3
} fla_plugin_flag_type;

/* Every flag of the function has one, given or not. */
typedef struct fla_plugin_flag {
  const char* name;
  fla_plugin_flag_type type;
  int is_default;
  int64_t i; /* BOOL (0 or 1) and INT */
  double d;  /* DOUBLE; of BOOL and INT the same number */
} fla_plugin_flag;

typedef struct fla_plugin_call fla_plugin_call;

/* A call as the library has checked it: shapes, types and flags are legal and agree with each other. Everything here
 * lives during the call only. */
struct fla_plugin_call {
  size_t size;          /* of this struct; a later host may append members */
  const char* function; /* "chunk_gla"; of a backward "chunk_gla_backward" */
  int is_backward;
  const fla_plugin_tensor*
      tensors; /* in verify and workspace their data is NULL: a choice may not depend on contents */
  size_t tensor_count;
  const fla_plugin_flag* flags;
  size_t flag_count;
  DLDevice device;
  int threads;  /* of the host's pool, at least 1 */
  void* stream; /* CUDA: the cudaStream_t to enqueue on (NULL: the device's default stream). CPU: NULL */

  /* forward and backward only */
  void* workspace; /* as many bytes as `workspace` asked for, 64-byte aligned, of any content; NULL when none */
  size_t workspace_bytes;
  /* Runs body(user, task, worker) for each task in [0, tasks) on the host's threads and returns when all are done.
   * worker is in [0, threads), and no two tasks that run at once share it. CPU only, NULL elsewhere. */
  void (*parallel_for)(const fla_plugin_call* call, int64_t tasks, void (*body)(void* user, int64_t task, int worker),
                       void* user);
  void* host; /* the host's own */

  /* Why the call is refused, or failed: NUL-terminated text, see fla_plugin_refuse. */
  char* message;
  size_t message_size;
};

/* The kernels of one function. They may be called from several threads at once. Nothing may be thrown, and the process
 * neither ended nor forked. */
typedef struct fla_plugin_function {
  const char* function; /* the forward's name: "chunk_gla" */
  const char* kernel;   /* what `fla explain` calls it; NULL: the plug-in's name */
  /* Not 0: this call can be served. 0: it cannot, for the reason in `message`; the next backend is asked. Depends on
   * nothing but the call's shapes, strides, types, flags and device. Asked for forward and backward. NULL: everything
   * is taken. */
  int (*verify)(const fla_plugin_call* call);
  /* Bytes that the call needs; an upper bound for its shapes and threads. NULL: none. */
  size_t (*workspace)(const fla_plugin_call* call);
  /* Writes every element of every output in the list, and nothing else. Allocates nothing; on CUDA only enqueues on the
   * stream. There is no second try by another backend: what verify took must be computed. NULL: not served; one of the
   * two must be there. */
  fla_code (*forward)(const fla_plugin_call* call);
  fla_code (*backward)(const fla_plugin_call* call);
} fla_plugin_function;

typedef struct fla_plugin {
  uint32_t abi;           /* FLA_PLUGIN_ABI as it was compiled; stays first in every version */
  const char* name;       /* of the backend: lower-case letters, digits and _; not "cpu", "cuda" or "reference" */
  int priority;           /* lower is tried first; the built-in cpu backend has 5 */
  DLDeviceType device;    /* kDLCPU or kDLCUDA: whose tensors it takes */
  int (*available)(void); /* whether this machine can run it, asked at every call; NULL: always */
  const fla_plugin_function* functions;
  size_t function_count;
} fla_plugin;

/* The one symbol a plug-in exports. abi is the host's FLA_PLUGIN_ABI. The result lives as long as the process; NULL:
 * this plug-in does not work with that host. */
typedef const fla_plugin* (*fla_plugin_get_fn)(uint32_t abi);
#define FLA_PLUGIN_ENTRY "fla_plugin_get"
FLA_PLUGIN_EXPORT const fla_plugin* fla_plugin_get(uint32_t abi);

/* ---- helpers for plug-ins, in plain C -------------------------------------------------------------------------------
 */

/* The tensor of that name, or NULL when it is not part of the call. */
static inline const DLTensor* fla_plugin_find(const fla_plugin_call* call, const char* name) {
  for (size_t i = 0; i < call->tensor_count; ++i)
    if (strcmp(call->tensors[i].name, name) == 0) return &call->tensors[i].tensor;
  return NULL;
}

static inline const fla_plugin_flag* fla_plugin_find_flag(const fla_plugin_call* call, const char* name) {
  for (size_t i = 0; i < call->flag_count; ++i)
    if (strcmp(call->flags[i].name, name) == 0) return &call->flags[i];
  return NULL;
}

/* A flag's number; `otherwise` where it has none. */
static inline double fla_plugin_number(const fla_plugin_call* call, const char* name, double otherwise) {
  const fla_plugin_flag* f = fla_plugin_find_flag(call, name);
  return f != NULL && f->type != FLA_PLUGIN_NONE ? f->d : otherwise;
}
static inline int fla_plugin_is_on(const fla_plugin_call* call, const char* name) {
  return fla_plugin_number(call, name, 0.0) != 0.0;
}

/* Leaves the reason, as printf, and returns 0: `return fla_plugin_refuse(call, "K: needs 64, got %lld", K);` */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static inline int
fla_plugin_refuse(const fla_plugin_call* call, const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(call->message, call->message_size, format, list);
  va_end(list);
  return 0;
}

/* Whether every tensor of the call, and every flag that is not at its default, is one of `known`, a text of names with
 * a space between each two. A later version of a function may have arguments that this plug-in has never heard of. */
static inline int fla_plugin_knows(const fla_plugin_call* call, const char* known) {
  for (size_t i = 0; i < call->tensor_count + call->flag_count; ++i) {
    const int is_flag = i >= call->tensor_count;
    const char* name = is_flag ? call->flags[i - call->tensor_count].name : call->tensors[i].name;
    const size_t n = strlen(name);
    int found = is_flag && call->flags[i - call->tensor_count].is_default;
    for (const char* at = known; !found && *at != '\0'; at += strcspn(at, " "), at += strspn(at, " "))
      found = strcspn(at, " ") == n && memcmp(at, name, n) == 0;
    if (!found) return fla_plugin_refuse(call, "%s: not served", name);
  }
  return 1;
}

#ifdef __cplusplus
}
#endif

#endif /* FLA_PLUGIN_H_ */
