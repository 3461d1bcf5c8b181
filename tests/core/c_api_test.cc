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

// A list of tensors, one by one, in any order; a prepared call runs on another list of as many.
TEST(CApi, ListsOfTensors) {
  fla_context_options o{};
  o.size = sizeof o;
  o.threads = 1;
  fla_context* ctx = nullptr;
  ASSERT_EQ(fla_context_create(&o, &ctx), FLA_OK);
  fla_call* call = nullptr;
  ASSERT_EQ(fla_call_create(ctx, "fused_attnres", &call), FLA_OK) << fla_last_error();
  float weight[2] = {1, 1}, zero[2] = {0, 0}, out[4] = {};
  float x[3][4] = {{1, 2, 3, 4}, {10, 20, 30, 40}, {100, 200, 300, 400}};
  std::int64_t row[] = {2}, shape[] = {2, 2};
  const auto tensor = [](float* data, int ndim, std::int64_t* dims) {
    DLTensor t{};
    t.data = data;
    t.device = {kDLCPU, 0};
    t.ndim = ndim;
    t.dtype = {kDLFloat, 32, 1};
    t.shape = dims;
    return t;
  };
  const auto set = [&](const char* name, float* data, int ndim, std::int64_t* dims) {
    const DLTensor t = tensor(data, ndim, dims);
    return fla_call_set_tensor(call, name, &t);
  };
  ASSERT_EQ(set("query", zero, 1, row), FLA_OK);  // equal logits: o is the mean
  ASSERT_EQ(set("rms_weight", weight, 1, row), FLA_OK);
  EXPECT_EQ(set("residuals", x[0], 2, shape), FLA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("residuals: a list of tensors: name them one by one, residuals.0")) << fla_last_error();
  ASSERT_EQ(set("residuals.2", x[2], 2, shape), FLA_OK) << fla_last_error();
  ASSERT_EQ(set("residuals[0]", x[0], 2, shape), FLA_OK) << fla_last_error();
  std::size_t count = 0;
  EXPECT_EQ(fla_call_output_count(call, &count), FLA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("residuals[1]: required, but not given")) << fla_last_error();
  ASSERT_EQ(set("residuals.1", x[1], 2, shape), FLA_OK) << fla_last_error();
  const DLTensor result = tensor(out, 2, shape);
  ASSERT_EQ(fla_call_bind(call, "out.o", &result), FLA_OK) << fla_last_error();
  ASSERT_EQ(fla_call_prepare(call), FLA_OK) << fla_last_error();
  ASSERT_EQ(fla_call_run(call, nullptr, 0), FLA_OK) << fla_last_error();
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(out[i], 37.0F * static_cast<float>(i + 1), 1e-3F);
  ASSERT_EQ(set("residuals.1", x[0], 2, shape), FLA_OK) << fla_last_error();
  ASSERT_EQ(fla_call_run(call, nullptr, 0), FLA_OK) << fla_last_error();
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(out[i], 34.0F * static_cast<float>(i + 1), 1e-3F);
  ASSERT_EQ(set("residuals.3", x[1], 2, shape), FLA_OK) << fla_last_error();
  EXPECT_EQ(fla_call_run(call, nullptr, 0), FLA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("residuals: the call was prepared for 3 tensors, got 4")) << fla_last_error();
  fla_call_destroy(call);

  // Gradients have the names of what they belong to.
  ASSERT_EQ(fla_call_create(ctx, "fused_attnres_backward", &call), FLA_OK) << fla_last_error();
  ASSERT_EQ(set("query", zero, 1, row), FLA_OK);
  ASSERT_EQ(set("rms_weight", weight, 1, row), FLA_OK);
  ASSERT_EQ(set("residuals.0", x[0], 2, shape), FLA_OK);
  ASSERT_EQ(set("residuals.1", x[1], 2, shape), FLA_OK);
  ASSERT_EQ(set("grad_out.o", x[2], 2, shape), FLA_OK) << fla_last_error();
  ASSERT_EQ(fla_call_output_count(call, &count), FLA_OK) << fla_last_error();
  ASSERT_EQ(count, 4U);
  fla_output listed{};
  ASSERT_EQ(fla_call_output(call, 2, &listed), FLA_OK);
  EXPECT_STREQ(listed.name, "grad.residuals.1");
  ASSERT_EQ(fla_call_bind(call, "grad.residuals.1", &result), FLA_OK) << fla_last_error();
  ASSERT_EQ(fla_call_run(call, nullptr, 0), FLA_OK) << fla_last_error();
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(out[i], 50.0F * static_cast<float>(i + 1), 1e-3F);  // p du: no key, no more
  EXPECT_EQ(fla_call_bind(call, "grad.residuals.2", &result), FLA_INVALID_ARGUMENT);
  fla_call_destroy(call);
  fla_context_destroy(ctx);
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
