// The example plug-in with one defect, which the environment variable FLA_CPP_TEST_PLUGIN names; without it none.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "fla/plugin.h"

extern "C" const fla_plugin* good_plugin_get(uint32_t abi);  // examples/plugin/simple_gla.c

namespace {

const std::string& defect() {
  static const std::string name = [] {
    const char* v = std::getenv("FLA_CPP_TEST_PLUGIN");
    return std::string(v != nullptr ? v : "");
  }();
  return name;
}
bool is(const char* name) { return defect() == name; }

const fla_plugin_function& good() { return good_plugin_get(FLA_PLUGIN_ABI)->functions[0]; }

std::atomic<int> calls{0};

volatile float* elements(const fla_plugin_call* call, const char* name) {
  return static_cast<volatile float*>(fla_plugin_find(call, name)->data);
}

// The element that lies furthest from the first one.
std::int64_t last(const DLTensor* t) {
  std::int64_t offset = 0;
  for (int i = 0; i < t->ndim; ++i) offset += (t->shape[i] - 1) * t->strides[i];
  return offset;
}

fla_code forward(const fla_plugin_call* call) {
  const DLTensor* o = fla_plugin_find(call, "out.o");
  const int n = ++calls;
  if (is("segv") || (is("segv_later") && n > 3)) std::raise(SIGSEGV);
  if (is("null")) *static_cast<volatile int*>(nullptr) = 1;
  if (is("abort")) std::abort();
  if (is("throw")) throw std::runtime_error("out of ideas");
  if (is("exit0")) std::exit(0);
  if (is("exit3")) _exit(3);
  if (is("hang"))
    for (;;) usleep(1000);
  if (is("code77")) return static_cast<fla_code>(77);
  if (is("late_refusal")) return FLA_UNSUPPORTED;
  if (is("fails")) {
    fla_plugin_refuse(call, "no device");
    return FLA_DEVICE_ERROR;
  }
  const fla_code code = good().forward(call);
  if (o == nullptr || o->shape[0] * o->shape[1] == 0) return code;
  const std::int64_t end = last(o);
  volatile float* x = elements(call, "out.o");
  if (is("write_after") || (is("write_after_later") && n > 3)) x[end + 1] = 1.0F;
  if (is("write_before")) x[-1] = 1.0F;
  if (is("write_far")) x[end + 3000] = 1.0F;
  if (is("write_input")) elements(call, "q")[0] = 1.0F;
  if (is("write_workspace")) static_cast<volatile char*>(call->workspace)[call->workspace_bytes + 64] = 1;
  if (is("unwritten")) {
    const unsigned poison = 0xffffffffU;
    float f = 0;
    std::memcpy(&f, &poison, sizeof f);
    x[end] = f;  // as it was before the call
  }
  if (is("wrong")) x[end] = x[end] + 1.0F;
  if (is("zero"))
    for (std::int64_t i = 0; i <= end; ++i) x[i] = 0.0F;
  if (is("unstable") && n % 2 == 0) x[end] = x[end] * 1.000001F;
  return code;
}

int verify(const fla_plugin_call* call) {
  if (is("verify_segv")) std::raise(SIGSEGV);
  if (is("verify_throw")) throw std::runtime_error("verifier out of ideas");
  if (is("refuse_all"))
    return fla_plugin_refuse(call, "T: needs a multiple of 1000003, got %lld",
                             static_cast<long long>(fla_plugin_find(call, "q")->shape[1]));
  if (is("reads_data") && fla_plugin_find(call, "q")->data != nullptr) std::abort();
  return good().verify(call);
}

std::size_t workspace(const fla_plugin_call* call) {
  return is("workspace_huge") ? SIZE_MAX / 2 : good().workspace(call);
}

}  // namespace

FLA_PLUGIN_EXPORT const fla_plugin* fla_plugin_get(uint32_t abi) {
  static fla_plugin p;
  static std::vector<fla_plugin_function> functions;
  p = *good_plugin_get(abi);
  functions = {good()};
  functions[0].verify = verify;
  functions[0].workspace = workspace;
  functions[0].forward = forward;
  p.name = "bad";
  if (is("get_null")) return nullptr;
  if (is("get_segv")) std::raise(SIGSEGV);
  if (is("get_throw")) throw std::runtime_error("no");
  if (is("get_exit")) std::exit(0);
  if (is("get_hang"))
    for (;;) usleep(1000);
  if (is("abi")) p.abi = FLA_PLUGIN_ABI + 1;
  if (is("name_null")) p.name = nullptr;
  if (is("name_cpu")) p.name = "cpu";
  if (is("name_reference")) p.name = "reference";
  if (is("name_upper")) p.name = "Mine!";
  if (is("device")) p.device = static_cast<DLDeviceType>(99);
  if (is("function_unknown")) functions[0].function = "chunk_simple_glaa";
  if (is("function_null")) functions[0].function = nullptr;
  if (is("function_backward")) functions[0].function = "chunk_simple_gla_backward";
  if (is("function_twice")) functions.push_back(functions[0]);
  if (is("function_empty")) functions[0].forward = nullptr;
  if (is("first")) p.priority = 1;
  if (is("unavailable")) p.available = [] { return 0; };
  p.functions = functions.data();
  p.function_count = is("functions_none") ? 0 : functions.size();
  return &p;
}

// A green result stays green whatever happens afterwards.
namespace {
struct AtEnd {
  ~AtEnd() {
    if (is("dies_at_end")) std::raise(SIGSEGV);
  }
} at_end;
}  // namespace
