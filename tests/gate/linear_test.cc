// What rwkv6 is a special case of, and what is a special case of it.
#include <cmath>
#include <string>
#include <vector>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

void expect_tensor(const TensorView& expected, const TensorView& got, const std::string& what, double R = kClose) {
  const auto d = tools::compare(expected, got, {.R = R});
  EXPECT_TRUE(d.ok) << what << ": " << d.reason;
}

// ---- rwkv6

// Nothing decays and the bonus is 1: what is read is the state after the token.
TEST(Rwkv6, WithoutDecayAndABonusOfOneIsLinearAttention) {
  for (const char* form : {"chunk", "fused_recurrent"}) {
    const std::string f = form;
    const Case c = make_case(f + "_rwkv6", sizes(2, 70, 2, 20, 17)).with("initial_state").fill("w", 0.0).fill("u", 1.0);
    const Case linear = c.without("w").without("u").as(f + "_linear_attn", {{"r", "q"}}).flag("normalize", false);
    expect_equal_families(c, linear);
    const Outcome dc = c.run_backward(context("cpu")), dl = linear.run_backward(context("cpu"));
    if (!dc.ok() || !dl.ok()) return expect_ok(dc, c.text()), expect_ok(dl, linear.text());
    expect_tensor(dl["grad.q"], dc["grad.r"], c.text() + ": dr");
  }
}

// Without a bonus token t + 1 reads what gla's token t would, given the query of token t + 1.
TEST(Rwkv6, WithoutABonusIsGlaReadOneTokenLater) {
  for (const GateRegime r : tools::kGateRegimes)
    for (const char* form : {"chunk", "fused_recurrent"}) {
      const std::string f = form, gate = f == "chunk" ? "g" : "gk";
      const Case c =
          make_case(f + "_rwkv6", sizes(2, 90, 2, 20, 17), {.regime = r}).with("initial_state").fill("u", 0.0);
      const Outcome o = c.run(context("cpu"));
      Case late = c.without("w").without("u").as(f + "_gla", {{"r", "q"}}).with(gate, c.input("w")).tokens(0, 89);
      late = late.with("q", tools::slice(c.input("r"), 1, 1, 89));
      const Outcome g = late.run(context("cpu"));
      if (!o.ok() || !g.ok()) return expect_ok(o, c.text()), expect_ok(g, late.text());
      expect_tensor(g["out.o"], tools::slice(o["out.o"], 1, 1, 89), c.text());
    }
}

TEST(Rwkv6, StepsAreTheChunkFormOverAThousandTokens) {
  const Case c = make_case("chunk_rwkv6", sizes(2, 1000, 2, 16, 32)).with("initial_state");
  const Case step = c.as("rwkv6_step", {{"initial_state", "state"}});
  const Context& ctx = context("cpu");
  const Outcome whole = c.run(ctx);
  if (!whole.ok()) return expect_ok(whole, c.text());
  Buffer o(DType::F32, whole.tensors.at("out.o").shape()), state = tools::clone(c.input("initial_state"));
  for (std::int64_t t = 0; t < 1000; ++t) {
    const Outcome one = step.tokens(t, t + 1).with("state", state.view()).run(ctx, {.state_in_place = true});
    if (!one.ok()) return expect_ok(one, step.text());
    tools::assign(tools::slice(o.view(), 1, t, 1), tools::values(one["out.o"]));
    state = tools::clone(one["out.state_out"]);
  }
  expect_tensor(whole["out.o"], o.view(), "o");
  expect_tensor(whole["out.final_state"], state.view(), "state");
}

}  // namespace
}  // namespace fla::gate
