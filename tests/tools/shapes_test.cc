#include "tools/common/shape_text.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fla::tools {
namespace {

TEST(Shapes, CustomShapes) {
  const auto r = parse_custom_shapes(R"({"z": {"B": 1, "T": 64, "H": 2, "D": 64},
      "a": {"B": 0, "T": 80, "HQ": 4, "HV": 2, "H": 2, "K": 60, "V": 33, "M": 3, "L": 5, "S": 7,
            "cu_seqlens": [0, 20, 80]}})");
  ASSERT_TRUE(r.ok()) << r.status().message();
  ASSERT_EQ(r->size(), 2U);
  EXPECT_EQ((*r)[0].name, "z");  // the text's order
  EXPECT_EQ((*r)[0].dims, (std::map<std::string, std::int64_t>{{"B", 1}, {"T", 64}, {"H", 2}, {"D", 64}}));
  EXPECT_TRUE((*r)[0].cu_seqlens.empty());
  EXPECT_EQ((*r)[1].dims.size(), 10U);
  EXPECT_EQ((*r)[1].dims.at("V"), 33);
  EXPECT_EQ((*r)[1].cu_seqlens, (std::vector<std::int64_t>{0, 20, 80}));
}

TEST(Shapes, CustomShapesRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "expected JSON, got an error at byte"},
      {"{", "expected JSON, got an error at byte 2"},
      {"[]", "expected an object of shapes by name, got array"},
      {"3", "got 3"},
      {"{}", "expected at least one shape, got none"},
      {R"({"": {"B": 1}})", "expected a name for every shape"},
      {R"({"x": 3})", "'x': expected an object of sizes, got 3"},
      {R"({"x": {"Q": 3}})", "'x': expected B, T, H, K, V, D, HQ, HV, M, L, S or cu_seqlens, got 'Q'"},
      {R"({"x": {"b": 3}})", "got 'b'"},
      {R"({"x": {"T": -1}})", "'x': T: expected an integer from 0 to 2^40, got -1"},
      {R"({"x": {"T": 1.5}})", "'x': T: expected an integer from 0 to 2^40, got 1.5"},
      {R"({"x": {"T": "64"}})", "'x': T: expected an integer from 0 to 2^40, got \"64\""},
      {R"({"x": {"T": true}})", "got true"},
      {R"({"x": {"T": null}})", "got null"},
      {R"({"x": {"T": [64]}})", "got array"},
      {R"({"x": {"T": 1099511627777}})", "'x': T: expected an integer from 0 to 2^40, got 1099511627777"},
      {R"({"x": {"T": 18446744073709551615}})", "got 18446744073709551615"},
      {R"({"x": {"T": 99999999999999999999}})", "'x': T: expected an integer"},
      {R"({"x": {"T": 1e999}})", "expected JSON, got a number that does not fit"},
      {R"({"x": {"B": 1048576, "T": 1099511627776, "H": 2}})", "'x': B T H D: expected at most 2^60 elements"},
      {R"({"x": {"T": 1}, "x": {"T": 2}})", "expected every name once, got 'x' twice"},
      {R"({"x": {"T": 1, "T": 2}})", "got 'T' twice"},
      {R"({"x": {"cu_seqlens": 5}})", "'x': cu_seqlens: expected an array of integers, got 5"},
      {R"({"x": {"cu_seqlens": [0, "a"]}})", "'x': cu_seqlens[1]: expected an integer from 0 to 2^40, got \"a\""},
      {R"({"x": {"cu_seqlens": [-1]}})", "'x': cu_seqlens[0]"},
      {"{\"x\": {\"\xff\": 1}}", "expected JSON"},
  };
  for (const auto& [text, message] : cases) {
    const auto r = parse_custom_shapes(text);
    ASSERT_FALSE(r.ok()) << text;
    EXPECT_EQ(r.status().code(), Code::InvalidArgument);
    EXPECT_EQ(r.status().message().rfind("custom shapes: ", 0), 0U) << r.status().message();
    EXPECT_NE(r.status().message().find(message), std::string::npos) << r.status().message() << "\nfor " << text;
  }
}

TEST(Shapes, DeepNestingIsAnError) {
  EXPECT_FALSE(parse_custom_shapes(std::string(200000, '[')).ok());
  EXPECT_FALSE(parse_custom_shapes(std::string(200000, '[') + std::string(200000, ']')).ok());
}

TEST(Shapes, LargestSizesFit) {
  EXPECT_TRUE(parse_custom_shapes(R"({"x": {"T": 1099511627776, "H": 64, "D": 256}})").ok());
  EXPECT_TRUE(parse_custom_shapes(R"({"x": {"T": 0}})").ok());
}

TEST(Shapes, List) {
  const auto r = parse_shape_list("B=1,T=64,H=2,D=64");
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(r->dims, (std::map<std::string, std::int64_t>{{"B", 1}, {"T", 64}, {"H", 2}, {"D", 64}}));
  EXPECT_TRUE(r->name.empty());
  EXPECT_EQ(parse_shape_list("T=0")->dims.at("T"), 0);
}

TEST(Shapes, ListRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "expected KEY=SIZE, got ''"},
      {"B=1,", "expected KEY=SIZE, got ''"},
      {",B=1", "expected KEY=SIZE, got ''"},
      {"B", "got 'B'"},
      {"B=", "B: expected an integer from 0 to 2^40, got ''"},
      {"B=1x", "got '1x'"},
      {"B= 1", "got ' 1'"},
      {"B=-1", "got '-1'"},
      {"B=+1", "got '+1'"},
      {"B=1=2", "got '1=2'"},
      {"X=1", "expected B, T, H, K, V, D, HQ, HV, M, L, S, got 'X'"},
      {" B=1", "got ' B'"},
      {"B=1,B=2", "B: expected once, got it twice"},
      {"T=1099511627777", "T: expected an integer"},
      {"T=99999999999999999999999", "T: expected an integer"},
      {"T=1099511627776,B=1099511627776", "2^60"},
      {"cu_seqlens=3", "got 'cu_seqlens'"},
  };
  for (const auto& [text, message] : cases) {
    const auto r = parse_shape_list(text);
    ASSERT_FALSE(r.ok()) << text;
    EXPECT_EQ(r.status().code(), Code::InvalidArgument);
    EXPECT_NE(r.status().message().find(message), std::string::npos) << r.status().message() << "\nfor " << text;
  }
}

}  // namespace
}  // namespace fla::tools
