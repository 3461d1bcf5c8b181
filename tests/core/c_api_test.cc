// The C interface where its types do not protect the caller: versions of the options, wrong values, warnings.
#include "fla/fla.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

bool last_error_has(const std::string& text) { return std::string(fla_last_error()).find(text) != std::string::npos; }

// Options of a version with more members than this one's.
struct LaterOptions {
  fla_context_options known{};
  std::uint64_t unknown[3] = {};
  LaterOptions() { known.size = sizeof(LaterOptions); }
};

fla_code create(const fla_context_options& o) {
  fla_context* ctx = nullptr;
  const fla_code code = fla_context_create(&o, &ctx);
  EXPECT_EQ(ctx != nullptr, code == FLA_OK);
  fla_context_destroy(ctx);
  return code;
}

TEST(CApi, OptionsOfOtherVersions) {
  LaterOptions later;
  later.known.threads = 1;
  EXPECT_EQ(create(later.known), FLA_OK) << fla_last_error();
  later.unknown[2] = std::uint64_t{1} << 40;
  EXPECT_EQ(create(later.known), FLA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("options.size: expected 72 bytes")) << fla_last_error();
  EXPECT_TRUE(last_error_has("got 96 with byte 93 set")) << fla_last_error();
  later.known.size = sizeof(fla_context_options);  // what lies behind is not the options' any more
  EXPECT_EQ(create(later.known), FLA_OK);

  // 0.1.0's struct ends with log_user; everything later must take it.
  fla_context_options first{};
  first.threads = 1;
  first.size = offsetof(fla_context_options, log_user) + sizeof(void*);
  EXPECT_EQ(create(first), FLA_OK) << fla_last_error();
  for (const std::size_t size : {std::size_t{0}, sizeof(std::size_t), first.size - 1}) {
    first.size = size;
    EXPECT_EQ(create(first), FLA_INVALID_ARGUMENT);
    EXPECT_TRUE(last_error_has("options.size: expected at least 56, got " + std::to_string(size))) << fla_last_error();
  }
}

TEST(CApi, OptionsThatCannotBe) {
  fla_context_options o{};
  o.size = sizeof o;
  o.threads = -1;
  EXPECT_EQ(create(o), FLA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("threads: expected 0 (one per processor) to 4096, got -1")) << fla_last_error();
  o.threads = 1;
  o.backend = "fast";
  EXPECT_EQ(create(o), FLA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("backend: expected one of cpu, reference, got 'fast'")) << fla_last_error();
  o.backend = nullptr;
  const int processors[] = {-3};
  o.affinity = processors;
  o.affinity_count = 1;
  EXPECT_EQ(create(o), FLA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("affinity[0]: expected a processor")) << fla_last_error();
  o.affinity = nullptr;
  EXPECT_EQ(create(o), FLA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("options.affinity: expected a pointer, got NULL")) << fla_last_error();
}

TEST(CApi, ADeprecatedFunctionWarnsOnceThroughTheLog) {
  std::vector<std::string> warnings;
  fla_context_options o{};
  o.size = sizeof o;
  o.threads = 1;
  o.log_user = &warnings;
  o.log = [](void* user, int level, const char*, const char*, const char* message) {
    if (level == 1) static_cast<std::vector<std::string>*>(user)->emplace_back(message);
  };
  fla_context* ctx = nullptr;
  ASSERT_EQ(fla_context_create(&o, &ctx), FLA_OK);
  float x[4] = {-1, -2, -3, -4}, y[4];
  std::int64_t shape[] = {1, 2, 1, 2};
  DLTensor t{};
  t.data = x;
  t.device = {kDLCPU, 0};
  t.ndim = 4;
  t.dtype = {kDLFloat, 32, 1};
  t.shape = shape;
  for (const char* function : {"chunk_gla", "fused_chunk_gla", "fused_chunk_gla_backward"})
    for (int run = 0; run < 2; ++run) {
      const bool backward = std::strstr(function, "backward") != nullptr;
      fla_call* call = nullptr;
      ASSERT_EQ(fla_call_create(ctx, function, &call), FLA_OK) << fla_last_error();
      t.data = x;
      for (const char* name : {"q", "k", "v", "g"}) ASSERT_EQ(fla_call_set_tensor(call, name, &t), FLA_OK);
      if (backward) {
        ASSERT_EQ(fla_call_set_tensor(call, "grad_out.o", &t), FLA_OK) << fla_last_error();
      }
      t.data = y;
      ASSERT_EQ(fla_call_bind(call, backward ? "grad.q" : "out.o", &t), FLA_OK) << fla_last_error();
      EXPECT_EQ(fla_call_run(call, nullptr, 0), FLA_OK) << fla_last_error();
      fla_call_destroy(call);
    }
  fla_context_destroy(ctx);
  EXPECT_EQ(warnings, std::vector<std::string>{"fused_chunk_gla: deprecated; use chunk_gla"});
}

}  // namespace
