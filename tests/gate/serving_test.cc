// docs/serving.md: its code does what the page says, and the page shows this code.
#include <cmath>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "fla/fla.hpp"
#include "tests/gate/gate.h"

namespace fla::gate {
namespace serving {
#include "docs/serving_example.cc"
}  // namespace serving
namespace {

std::string read(const std::string& name) {
  std::ifstream in(std::string(FLA_SOURCE_DIR) + "/docs/" + name);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(Serving, ThePageShowsTheCode) {
  const std::string code = read("serving_example.cc");
  ASSERT_FALSE(code.empty());
  EXPECT_NE(read("serving.md").find("```cpp\n" + code + "```"), std::string::npos);
}

// One sequence's tokens, and views of some of them.
struct Stream {
  Case c;
  Outcome expected;
  explicit Stream(std::int64_t T, std::uint64_t seed)
      : c(make_case("fused_recurrent_gated_delta_rule", sizes(1, T, 2, 16, 32), {.seed = seed})),
        expected(c.run(context("cpu"))) {
    expect_ok(expected, c.text());
  }
};

// Tokens of several streams, side by side; a stream of null is padding with what memory holds.
struct Batch {
  std::int64_t T;
  std::vector<float> q, k, v, g, beta, o;

  Batch(const std::vector<std::pair<const Stream*, std::int64_t>>& rows, std::int64_t tokens) : T(tokens) {
    for (const auto& [stream, begin] : rows) {
      const std::pair<const char*, std::vector<float>*> parts[] = {
          {"q", &q}, {"k", &k}, {"v", &v}, {"g", &g}, {"beta", &beta}};
      for (const auto& [name, to] : parts) {
        const TensorView t = rows.front().first->c.input(name);
        const std::vector<double> x = stream == nullptr
                                          ? std::vector<double>(static_cast<std::size_t>(t.numel() / t.dim(1) * T), NAN)
                                          : tools::values(tools::slice(stream->c.input(name), 1, begin, T));
        to->insert(to->end(), x.begin(), x.end());
      }
    }
    o.assign(v.size(), NAN);
  }
  serving::Tokens tokens() {
    const auto B = static_cast<std::int64_t>(g.size()) / (2 * T);
    return {B, T, q.data(), k.data(), v.data(), g.data(), beta.data(), o.data()};
  }
  void expect(std::int64_t b, const Stream& s, std::int64_t begin, const char* what) const {
    const std::vector<double> want = tools::values(tools::slice(s.expected["out.o"], 1, begin, T));
    for (std::size_t i = 0; i < want.size(); ++i)
      ASSERT_NEAR(o[static_cast<std::size_t>(b) * want.size() + i], want[i], 1e-4) << what << ": sequence " << b;
  }
};

TEST(Serving, ALoopOfPrefillDecodeAndDraftsEqualsOneLongCall) {
  const Context ctx({.threads = 2});
  const Stream a(40, 1), b(40, 2);
  serving::Layer layer{.slots = 10, .H = 2, .HV = 2, .K = 16, .V = 32};
  Batch prompt_a({{&a, 0}}, 20), prompt_b({{&b, 0}}, 13);
  serving::prefill(ctx, layer, prompt_a.tokens(), 7);
  serving::prefill(ctx, layer, prompt_b.tokens(), 2);
  prompt_a.expect(0, a, 0, "prefill");
  prompt_b.expect(0, b, 0, "prefill");

  for (std::int64_t t = 0; t < 5; ++t) {
    Batch step({{&b, 13 + t}, {nullptr, 0}, {&a, 20 + t}}, 1);
    const std::int64_t slots[] = {2, -1, 7};
    serving::decode(ctx, layer, step.tokens(), slots);
    step.expect(0, b, 13 + t, "decode");
    step.expect(2, a, 20 + t, "decode");
    for (std::size_t i = 64; i < 128; ++i) ASSERT_EQ(step.o[i], 0.0F);
  }

  const std::int64_t slots[] = {7, 0, 4, 2, 9, 5};
  std::int64_t at_a = 25, at_b = 18, accepted[] = {1, 1};
  const std::pair<std::int64_t, std::int64_t> agreed[] = {{2, 3}, {1, 1}, {3, 2}};
  for (const auto& [next_a, next_b] : agreed) {
    Batch draft({{&a, at_a}, {&b, at_b}}, 3);
    serving::verify(ctx, layer, draft.tokens(), slots, 3, accepted);
    draft.expect(0, a, at_a, "drafts");
    draft.expect(1, b, at_b, "drafts");
    at_a += accepted[0] = next_a;
    at_b += accepted[1] = next_b;
  }
}

}  // namespace
}  // namespace fla::gate
