// What rwkv6, based, gsa, abc and log_linear_attn are special cases of, and what is a special case of them.
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

// ---- based

// The same numbers with and without features: 16 channels, and 17 of which one is zero.
TEST(Based, FeaturesAreThePairs) {
  for (const bool norm : {false, true})
    for (const std::int64_t T : {1, 70, 300, 600}) {
      const Case c = make_case("parallel_based", sizes(1, T, 2, 16, 20)).flag("use_norm", norm).flag("scale", 0.25);
      Case wide = make_case("parallel_based", sizes(1, T, 2, 17, 20)).flag("use_norm", norm).flag("scale", 0.25);
      for (const char* name : {"q", "k"}) {
        Buffer b(DType::F32, {1, T, 2, 17}, tools::Fill::Zero);
        tools::assign(tools::slice(b.view(), 3, 0, 16), tools::values(c.input(name)));
        wide = wide.with(name, b.view());
      }
      wide = wide.with("v", c.input("v"));
      const Outcome a = c.run(context("cpu")), b = wide.run(context("cpu"));
      const Outcome da = c.run_backward(context("cpu")), db = wide.run_backward(context("cpu"));
      if (!a.ok() || !b.ok() || !da.ok() || !db.ok())
        return expect_ok(a, c.text()), expect_ok(b, wide.text()), expect_ok(da, c.text()), expect_ok(db, wide.text());
      expect_tensor(b["out.o"], a["out.o"], c.text());
      expect_tensor(db["grad.v"], da["grad.v"], c.text() + ": dv");
      for (const char* name : {"grad.q", "grad.k"})
        expect_tensor(tools::slice(db[name], 3, 0, 16), da[name], c.text() + ": " + name, 1e-4);
    }
}

// Weights sum to one but for the 1e-6.
TEST(Based, NormalisedWeightsSumToOne) {
  for (const char* f : {"fused_chunk_based", "parallel_based"}) {
    const Case c = make_case(f, sizes(2, 300, 2, 16, 5)).fill("v", 1.0);
    const Outcome o = c.run(context("cpu"));
    if (!o.ok()) return expect_ok(o, c.text());
    for (const double x : tools::values(o["out.o"])) ASSERT_NEAR(x, 1.0, 1e-5) << f;
  }
}

// ---- gsa

// One slot has all the weight, and is gla with one key channel.
TEST(Gsa, OneSlotIsGlaOfWidthOne) {
  for (const GateRegime r : tools::kGateRegimes)
    for (const char* f : {"chunk_gsa", "fused_recurrent_gsa"}) {
      Sizes s = sizes(2, 70, 2, 20, 17);
      s.M = 1;
      const Case c = make_case(f, s, {.regime = r}).with("initial_state").with("initial_state.1");
      Case g = make_case("fused_recurrent_gla", sizes(2, 70, 2, 1, 17)).fill("q", 1.0).flag("scale", 1.0);
      g = g.with("k", c.input("s")).with("v", c.input("v")).with("gk", c.input("g"));
      g = g.with("initial_state", c.input("initial_state.1"));
      const Outcome x = c.run(context("cpu")), y = g.run(context("cpu"));
      if (!x.ok() || !y.ok()) return expect_ok(x, c.text()), expect_ok(y, g.text());
      expect_tensor(y["out.o"], x["out.o"], c.text());
      expect_tensor(y["out.final_state"], x["out.final_state.1"], c.text() + ": state");
    }
}

// Heads repeated: what the queries of a group share.
TEST(Gsa, AGroupOfQueriesIsItsHeadRepeated) {
  for (const char* f : {"chunk_gsa", "fused_recurrent_gsa"}) {
    Sizes s = sizes(2, 70, 2, 12, 17);
    s.HQ = 6;
    s.M = 9;
    const Case c = make_case(f, s).with("initial_state").with("initial_state.1");
    Sizes all = s;
    all.H = 6;
    Case d = make_case(f, all).with("q", c.input("q")).with("initial_state").with("initial_state.1");
    for (const char* name : {"k", "v", "s", "g", "initial_state", "initial_state.1"}) {
      const int axis = std::string(name).starts_with("initial") ? 1 : 2;
      const TensorView from = c.input(name);
      tools::Shape shape(from.dims().begin(), from.dims().end());
      shape[static_cast<std::size_t>(axis)] = 6;
      Buffer b(from.dtype, shape);
      for (std::int64_t h = 0; h < 6; ++h)
        tools::assign(tools::slice(b.view(), axis, h, 1), tools::values(tools::slice(from, axis, h / 3, 1)));
      d = d.with(name, b.view());
    }
    const Outcome x = c.run(context("cpu")), y = d.run(context("cpu"));
    if (!x.ok() || !y.ok()) return expect_ok(x, c.text()), expect_ok(y, d.text());
    expect_tensor(y["out.o"], x["out.o"], c.text());
    for (const char* name : {"out.final_state.0", "out.final_state.1"})
      for (std::int64_t h = 0; h < 2; ++h)
        expect_tensor(tools::slice(y[name], 1, 3 * h, 1), tools::slice(x[name], 1, h, 1), c.text() + ": " + name);
  }
}

TEST(Gsa, RefusesHeadsThatDoNotDivideTheQueries) {
  Sizes s = sizes(1, 3, 2, 4, 5);
  s.HQ = 3;
  for (const char* f : {"chunk_gsa", "fused_recurrent_gsa"}) {
    const Outcome o = make_case(f, s).run(context("cpu"));
    EXPECT_EQ(o.status.code(), Code::InvalidArgument);
    EXPECT_NE(o.status.message().find(": q: expected a multiple of the 2 heads of k, got 3"), std::string::npos)
        << o.status.message();
  }
}

// ---- abc

// gsa, given the weights of the running softmax over time as strengths and its shrinking as gates.
TEST(Abc, IsGsaWithARunningSoftmax) {
  for (const double wide : {1.0, 30.0}) {
    Sizes s = sizes(2, 70, 2, 12, 17);
    s.M = 9;
    Case c = make_case("chunk_abc", s).with("initial_state").with("initial_state.1");
    Buffer logits = tools::clone(c.input("s")), w = tools::clone(c.input("s")), g = tools::clone(c.input("s"));
    std::vector<double> x = tools::values(logits.view()), weight(x.size()), gate(x.size());
    for (double& v : x) v = static_cast<float>(v * wide);
    tools::assign(logits.view(), x);
    c = c.with("s", logits.view());
    const std::size_t row = 2 * 9, length = 70 * row;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t t = i % length / row;
      double sum = 0.0, before = 0.0;
      for (std::size_t j = 0; j <= t; ++j) {
        before = sum;
        sum += std::exp(x[i - (t - j) * row]);
      }
      weight[i] = std::exp(x[i]) / sum;
      gate[i] = t == 0 ? 0.0 : std::log(before / sum);
    }
    tools::assign(w.view(), weight);
    tools::assign(g.view(), gate);
    Case d = make_case("chunk_gsa", s).with("s", w.view()).with("g", g.view());
    for (const char* name : {"q", "k", "v", "initial_state", "initial_state.1"}) d = d.with(name, c.input(name));
    const Outcome a = c.run(context("cpu")), b = d.run(context("cpu"));
    if (!a.ok() || !b.ok()) return expect_ok(a, c.text()), expect_ok(b, d.text());
    for (const char* name : {"out.o", "out.final_state.0", "out.final_state.1"})
      expect_tensor(b[name], a[name], c.text() + ": " + name, 1e-4);
  }
}

// Of one token the weight is 1 whatever its logits are.
TEST(Abc, OneTokenHasNoGradientOfItsLogits) {
  const Case c = make_case("chunk_abc", sizes(2, 1, 2, 12, 17));
  const Outcome d = c.run_backward(context("cpu")), o = c.run(context("cpu"));
  if (!o.ok() || !d.ok()) return expect_ok(o, c.text()), expect_ok(d, c.text());
  for (const double x : tools::values(d["grad.s"])) EXPECT_EQ(x, 0.0);
  expect_tensor(c.input("v"), o["out.o"], "o = v");
}

// ---- log_linear_attn

// [B, T, 1, K] as [B, T, H, K].
Buffer for_all_heads(const TensorView& x, std::int64_t H) {
  TensorView spread = x;
  spread.shape[2] = H;
  spread.stride[2] = 0;
  Buffer b(x.dtype, {x.dim(0), x.dim(1), H, x.dim(3)});
  tools::assign(b.view(), tools::values(spread));
  return b;
}

TEST(LogLinearAttn, WithAllLevelsOneIsSimpleGla) {
  for (const GateRegime r : tools::kGateRegimes)
    for (const Sizes& s : {sizes(2, 200, 3, 20, 17), packed({0, 1, 1, 64, 65, 230}, 2, 12, 17)}) {
      const Case c = make_case("chunk_log_linear_attn", s, {.regime = r}).fill("level_scales", 1.0);
      Case d = make_case("chunk_simple_gla", s, {.regime = r}).flag("scale", 1.0);
      d = d.with("q", for_all_heads(c.input("q"), s.H).view()).with("k", for_all_heads(c.input("k"), s.H).view());
      d = d.with("v", c.input("v")).with("g", c.input("g")).without_upstream("final_state");
      const Outcome a = c.run(context("cpu")), b = d.run(context("cpu"));
      const Outcome da = c.run_backward(context("cpu")), db = d.run_backward(context("cpu"));
      if (!a.ok() || !b.ok() || !da.ok() || !db.ok())
        return expect_ok(a, c.text()), expect_ok(b, d.text()), expect_ok(da, c.text()), expect_ok(db, d.text());
      expect_tensor(b["out.o"], a["out.o"], c.text());
      expect_tensor(db["grad.v"], da["grad.v"], c.text() + ": dv");
      expect_tensor(db["grad.g"], da["grad.g"], c.text() + ": dg", 1e-4);
      for (const char* name : {"grad.q", "grad.k"}) {
        Buffer sum = tools::clone(da[name]);
        std::vector<double> x(static_cast<std::size_t>(sum.numel()), 0.0);
        for (std::int64_t h = 0; h < s.H; ++h) {
          const std::vector<double> part = tools::values(tools::slice(db[name], 2, h, 1));
          for (std::size_t i = 0; i < x.size(); ++i) x[i] += part[i];
        }
        tools::assign(sum.view(), x);
        expect_tensor(sum.view(), da[name], c.text() + ": " + name);
      }
    }
}

// A sequence in parts of any lengths, each from the state of the one before.
TEST(LogLinearAttn, PartsAreTheWhole) {
  for (const std::string backend : {"cpu", kReference}) {
    const Context& ctx = context(backend);
    const Case c = make_case("chunk_log_linear_attn", sizes(2, 300, 2, 12, 17));
    const Outcome whole = c.run(ctx);
    if (!whole.ok()) return expect_ok(whole, c.text());
    for (const std::vector<std::int64_t>& cuts : {std::vector<std::int64_t>{0, 64, 300},
                                                  {0, 90, 300},
                                                  {0, 1, 2, 3, 64, 65, 127, 128, 200, 200, 299, 300},
                                                  {0, 0, 63, 191, 256, 300, 300}}) {
      Buffer o(DType::F32, whole.tensors.at("out.o").shape()), state, past(DType::I64, {2});
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        Case part = c.tokens(cuts[i], cuts[i + 1]);
        tools::fill(past.view(), static_cast<double>(cuts[i]));
        if (!state.empty()) part = part.with("past_state", state.view()).with("past_tokens", past.view());
        const Outcome x = part.run(ctx);
        if (!x.ok()) return expect_ok(x, part.text());
        tools::assign(tools::slice(o.view(), 1, cuts[i], cuts[i + 1] - cuts[i]), tools::values(x["out.o"]));
        state = tools::clone(x["out.final_state"]);
      }
      expect_tensor(whole["out.o"], o.view(), backend + ": o");
      expect_tensor(whole["out.final_state"], state.view(), backend + ": state");
    }
  }
}

TEST(LogLinearAttn, TokenByTokenIsTheChunkFormOverAThousandTokens) {
  const Context& ctx = context("cpu");
  const Case c = make_case("chunk_log_linear_attn", sizes(1, 1000, 2, 16, 32));
  const Outcome whole = c.run(ctx);
  if (!whole.ok()) return expect_ok(whole, c.text());
  Buffer o(DType::F32, whole.tensors.at("out.o").shape()), state, past(DType::I64, {1});
  for (std::int64_t t = 0; t < 1000; ++t) {
    Case one = c.tokens(t, t + 1);
    tools::fill(past.view(), static_cast<double>(t));
    if (t > 0) one = one.with("past_state", state.view()).with("past_tokens", past.view());
    const Outcome x = one.run(ctx);
    if (!x.ok()) return expect_ok(x, one.text());
    tools::assign(tools::slice(o.view(), 1, t, 1), tools::values(x["out.o"]));
    state = tools::clone(x["out.final_state"]);
  }
  expect_tensor(whole["out.o"], o.view(), "o");
  expect_tensor(whole["out.final_state"], state.view(), "state");
}

TEST(LogLinearAttn, Refuses) {
  const Context& ctx = context("cpu");
  const auto refused = [&](const Case& c, const char* text) {
    const Outcome o = c.run(ctx);
    EXPECT_EQ(o.status.code(), Code::InvalidArgument);
    EXPECT_NE(o.status.message().find(text), std::string::npos) << o.status.message();
  };
  Sizes s = sizes(1, 65, 2, 4, 5);
  s.L = 7;
  refused(make_case("chunk_log_linear_attn", s), ": level_scales: expected 8 levels or more");
  const Case c = make_case("chunk_log_linear_attn", sizes(1, 65, 2, 4, 5));
  refused(c.with("past_state"), ": past_state: expected with past_tokens");
  refused(c.with("past_tokens"), ": past_tokens: expected with past_state");
  const Case resumed = c.with("past_state").with("past_tokens");
  expect_ok(resumed.run(ctx), resumed.text());
  Buffer past(DType::I64, {1});
  tools::fill(past.view(), 64.0);
  refused(resumed.with("past_tokens", past.view()), ": level_scales: expected 9 levels or more");
  tools::fill(past.view(), -1.0);
  refused(resumed.with("past_tokens", past.view()), ": past_tokens: sequence 0: expected 0 or more, got -1");
}

}  // namespace
}  // namespace fla::gate
