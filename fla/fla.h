/* fla.cpp, the C interface: calls by name on DLPack tensors. No exception crosses it, nothing is printed.
 *
 *   fla_context* ctx;  fla_context_create(NULL, &ctx);
 *   fla_call* call;    fla_call_create(ctx, "chunk_gla", &call);
 *   fla_call_set_tensor(call, "q", &q); ...            inputs by argument name
 *   fla_call_set_double(call, "scale", 0.125);         flags by name
 *   fla_call_bind(call, "out.o", &o);                  outputs by name
 *   if (fla_call_run(call, NULL, 0) != FLA_OK) puts(fla_last_error());
 *
 * Arguments and flags are named as `fla ops --signature` prints them, outputs "out.NAME". A backward
 * ("chunk_gla_backward") takes the forward's inputs and "grad_out.o", "grad_out.final_state", ..., and gives "grad.q",
 * "grad.k", ... An argument that is a list of tensors ("residuals" of fused_attnres) has one name for each of them:
 * "residuals.0", "residuals.1", ..., in any order and without gaps, with gradients "grad.residuals.0", ...; refusals call
 * them residuals[0]. How many were set is a size of the call; a list of one call object grows, but does not shrink.
 * A call may be run again after its tensors' contents changed; set and bind replace what was there.
 * Tensors are views: their memory must outlive the runs.
 */
#ifndef FLA_FLA_H_
#define FLA_FLA_H_

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define FLA_C_API
#else
#define FLA_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fla_code {
  FLA_OK = 0,
  FLA_INVALID_ARGUMENT = 1, /* the operator's contract forbids the call */
  FLA_UNSUPPORTED = 2,      /* legal, but no backend took it */
  FLA_OUT_OF_MEMORY = 3,    /* an allocation failed, or the given workspace is too small */
  FLA_DEVICE_ERROR = 4,
  FLA_INTERNAL = 5 /* a defect of the library */
} fla_code;

typedef struct fla_context fla_context;
typedef struct fla_call fla_call;

/* level: 0 information, 1 warning. Strings live during the call only. */
typedef void (*fla_log_fn)(void* user, int level, const char* function, const char* backend, const char* message);

/* Set size = sizeof(fla_context_options); zero everything else for the defaults. The struct only grows: a library takes
 * the smaller one of a program built against an earlier version, and the larger one of a later version as long as what
 * it does not know is zero. */
typedef struct fla_context_options {
  size_t size;
  int threads;         /* at most 4096; 0: one per processor this process may run on */
  const int* affinity; /* processors to pin workers to, one per worker, cyclic; or NULL */
  size_t affinity_count;
  const char* backend; /* only this backend may serve calls; NULL: dispatch decides */
  fla_log_fn log;      /* NULL: silent */
  void* log_user;
  void* stream;      /* cudaStream_t on which calls on a GPU's tensors start; NULL: the device's default stream */
  int stream_device; /* the device that the stream belongs to */
  /* 1: calls refuse inputs and upstream gradients that hold a NaN or an infinity, log gates above 0, and on a GPU also
   * boundaries and slots out of range, and wait. Copies every input to the host: for finding a fault. */
  int check_values;
} fla_context_options;

FLA_C_API const char* fla_version(void);
/* How this library was built: key is "commit" ("3f2a1b9c0d4e", "3f2a1b9c0d4e-dirty" or "unknown"), "compiler", "flags",
 * "build_type", "version" or "cuda" (the GPUs that its CUDA code is for, "" without any). NULL for any other key. */
FLA_C_API const char* fla_build_info(const char* key);
/* What went wrong in this thread's last call that did not return FLA_OK. Never NULL. */
FLA_C_API const char* fla_last_error(void);

/* Makes the plug-in (fla/plugin.h) at this path a backend of every context. name, when not NULL, gets its backend's
 * name, which lives as long as the process. Its code runs in this process: prove it with `fla gate --plugin` first. No
 * call may be under way in another thread. */
FLA_C_API fla_code fla_load_plugin(const char* path, const char** name);

FLA_C_API fla_code fla_context_create(const fla_context_options* options, fla_context** out);
FLA_C_API void fla_context_destroy(fla_context* ctx);

/* The context must outlive the call object. One call object is for one thread at a time. */
FLA_C_API fla_code fla_call_create(fla_context* ctx, const char* function, fla_call** out);
FLA_C_API void fla_call_destroy(fla_call* call);

/* tensor NULL takes an optional argument away again; a list's tensors are not optional. */
FLA_C_API fla_code fla_call_set_tensor(fla_call* call, const char* name, const DLTensor* tensor);
FLA_C_API fla_code fla_call_set_bool(fla_call* call, const char* name, int value);
FLA_C_API fla_code fla_call_set_int(fla_call* call, const char* name, int64_t value);
FLA_C_API fla_code fla_call_set_double(fla_call* call, const char* name, double value);

/* What the call produces, given what was set: name and shape live until the next fla_call_output_count. An axis that
 * the host cannot tell is -1: the chunks of packed sequences whose boundaries lie on a device and not in
 * cu_seqlens_cpu, too. The caller knows it, and binds a tensor of that size. */
typedef struct fla_output {
  const char* name;
  DLDataType dtype;
  int ndim;
  const int64_t* shape;
} fla_output;
FLA_C_API fla_code fla_call_output_count(fla_call* call, size_t* count);
FLA_C_API fla_code fla_call_output(fla_call* call, size_t index, fla_output* out);
/* tensor NULL: the output is not computed. */
FLA_C_API fla_code fla_call_bind(fla_call* call, const char* output, const DLTensor* tensor);

/* Calls on a GPU's tensors start on this cudaStream_t, of that device, instead of the context's. */
FLA_C_API fla_code fla_call_set_stream(fla_call* call, void* stream, int device);

/* Checks, dispatches, plans and sizes the call once, with what was set and bound. Later runs may set and bind other
 * memory of the same shapes, types and strides, and do no more than launch: nothing is allocated. Another shape, type,
 * stride or flag is refused by the run; prepare again. From any thread, one at a time, also inside a captured graph. */
FLA_C_API fla_code fla_call_prepare(fla_call* call);
FLA_C_API fla_code fla_call_workspace(fla_call* call, size_t* bytes);
/* What a forward can leave for its backward, or a backward use of it, so that it is not computed again: bytes (0:
 * nothing) and their layout, which both directions must agree on. Prepares the call. */
FLA_C_API fla_code fla_call_keeps(fla_call* call, size_t* bytes, uint64_t* layout);
/* workspace NULL: the library allocates what it needs and frees it again; a call on a GPU that needs one is refused. */
FLA_C_API fla_code fla_call_run(fla_call* call, void* workspace, size_t workspace_bytes);
/* The same with memory for what the forward keeps: it writes there, its backward reads. */
FLA_C_API fla_code fla_call_run_kept(fla_call* call, void* workspace, size_t workspace_bytes, void* kept,
                                     size_t kept_bytes, uint64_t layout);
/* The backend that served this call object's last successful run ("cpu"), or "". */
FLA_C_API const char* fla_call_backend(const fla_call* call);

#ifdef __cplusplus
}
#endif

#endif /* FLA_FLA_H_ */
