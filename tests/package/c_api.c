/* The C header compiles as C, and a call by name reaches the library. Returns what the library says its version is. */
#include "fla/fla.h"

const char* version_through_c(void);

const char* version_through_c(void) {
  fla_context* ctx = NULL;
  fla_call* call = NULL;
  if (fla_context_create(NULL, &ctx) != FLA_OK) return fla_last_error();
  const fla_code code = fla_call_create(ctx, "chunk_gla", &call);
  const char* answer = code == FLA_OK ? fla_version() : fla_last_error();
  if (fla_build_info("commit") == NULL || fla_build_info("no such key") != NULL) answer = "fla_build_info";
  fla_call_destroy(call);
  fla_context_destroy(ctx);
  return answer;
}
