// Softmax-like attention: what the tables do not say. Plain softmax written out, windows and sinks around every tile,
// decode as the last row of training, what a mask hides.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Case windowed(const Case& c, std::int64_t w) { return c.flag("window_size", w); }

Case grouped(const char* function, std::int64_t HQ, Sizes s, const CaseOptions& o = {}) {
  s.HQ = HQ;
  return make_case(function, s, o);
}

Buffer like(const TensorView& t) { return Buffer(t.dtype, {t.dims().begin(), t.dims().end()}); }

// ---- attn --------------------------------------------------------------------------------------------------------

TEST(Attn, IsSoftmax) {
  const Case c = grouped("parallel_attn", 6, sizes(2, 70, 2, 20, 12));
  const Outcome o = c.run(context("cpu"));
  ASSERT_TRUE(o.ok()) << o.problem();
  const auto at = [](const TensorView& t, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t x) {
    return tools::load(t.at(b, i, h, x), t.dtype);
  };
  const TensorView q = c.input("q"), k = c.input("k"), v = c.input("v");
  Buffer expected(DType::F32, {2, 70, 6, 12});
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t h = 0; h < 6; ++h)
      for (std::int64_t i = 0; i < 70; ++i) {
        std::vector<double> e(static_cast<std::size_t>(i + 1));
        double Z = 0.0;
        for (std::int64_t j = 0; j <= i; ++j) {
          double s = 0.0;
          for (std::int64_t x = 0; x < 20; ++x) s += at(q, b, i, h, x) * at(k, b, j, h / 3, x);
          Z += e[static_cast<std::size_t>(j)] = std::exp(s / std::sqrt(20.0));
        }
        for (std::int64_t x = 0; x < 12; ++x) {
          double sum = 0.0;
          for (std::int64_t j = 0; j <= i; ++j) sum += e[static_cast<std::size_t>(j)] / Z * at(v, b, j, h / 3, x);
          tools::store(expected.view().at(b, i, h, x), DType::F32, sum);
        }
      }
  const auto d = tools::compare(expected.view(), o["out.o"], {.R = 2e-6});
  EXPECT_TRUE(d.ok) << d.reason;
}

// Around tiles of 64 keys and 128 queries.
TEST(Attn, WindowsSinksAndGates) {
  for (const std::int64_t w : {1, 2, 15, 63, 64, 65, 130, 500})
    for (const bool gate : {false, true})
      for (const bool sink : {false, true}) {
        Case c = windowed(grouped("parallel_attn", 4, sizes(1, 200, 2, 12, 17)), w);
        if (gate) c = c.with("g");
        if (sink) c = c.with("sink_bias");
        expect_agrees(c, "cpu");
        Case p = windowed(grouped("parallel_attn", 4, packed({0, 1, 1, 66, 199, 200}, 2, 12, 17)), w);
        if (gate) p = p.with("g");
        if (sink) p = p.with("sink_bias");
        expect_agrees(p, "cpu");
      }
}

TEST(Attn, GatesOfEitherSign) {
  for (const double scale : {1.0, 30.0}) {
    Case c = make_case("parallel_attn", sizes(1, 150, 2, 12, 17)).with("g");
    std::vector<double> g = tools::values(c.input("g"));
    for (std::size_t i = 0; i < g.size(); ++i) g[i] = scale * tools::normal(7, i);
    const Buffer b = like(c.input("g"));
    tools::assign(b.view(), g);
    expect_agrees(c.with("g", b.view()), "cpu");
  }
}

TEST(Attn, AWindowAsLongAsTheSequenceIsNone) {
  std::vector<Case> cases = {make_case("parallel_attn", sizes(2, 150, 2, 20, 33)).with("g").with("sink_bias")};
  for (const char* function : {"parallel_forgetting_attn", "parallel_wall_attn", "parallel_parallax"})
    cases.push_back(make_case(function, sizes(2, 150, 2, 20, 20)));
  for (const Case& of : cases) {
    const Case c = of.prepared();
    for (const std::int64_t w : {150, 151, 100000}) {
      expect_same_bits(c.run(context("cpu")), windowed(c, w).run(context("cpu")), c.text());
      expect_same_bits(c.run_backward(context("cpu")), windowed(c, w).run_backward(context("cpu")), c.text());
    }
  }
}

TEST(Attn, AWindowOfOneGivesTheValues) {
  const Case c = windowed(make_case("parallel_attn", sizes(1, 70, 2, 20, 33)), 1);
  const Outcome o = c.run(context("cpu"));
  ASSERT_TRUE(o.ok()) << o.problem();
  EXPECT_EQ(tools::values(o["out.o"]), tools::values(c.input("v")));
}

TEST(Attn, AWindowOfZeroLeavesTheSinkAlone) {
  const Case c = make_case("parallel_attn", sizes(1, 70, 2, 20, 33));
  const Case s = windowed(c.with("sink_bias"), 0).prepared();
  for (const char* backend : {"cpu", kReference})
    for (const Outcome& o : {s.run(context(backend)), s.run_backward(context(backend))}) {
      ASSERT_TRUE(o.ok()) << o.problem();
      for (const auto& [name, b] : o.tensors)
        for (const double x : tools::values(b.view())) ASSERT_EQ(x, 0.0) << backend << ": " << name;
    }
  const Outcome refused = windowed(c, 0).run(context("cpu"));
  EXPECT_EQ(refused.status.code(), Code::InvalidArgument);
  EXPECT_NE(refused.status.message().find("parallel_attn: window_size: "), std::string::npos)
      << refused.status.message();
}

TEST(Attn, AGroupThatIsNoneIsRefused) {
  const Case c = make_case("parallel_attn", sizes(1, 10, 2, 4, 4));
  const Buffer q(DType::F32, {1, 10, 3, 4}, tools::Fill::Zero);
  const Outcome o = c.with("q", q.view()).run(context("cpu"));
  EXPECT_EQ(o.status.code(), Code::InvalidArgument);
  EXPECT_NE(o.status.message().find(": q: "), std::string::npos) << o.status.message();
}

// Values, keys, queries and upstream gradients that a mask hides may be anything.
TEST(Attn, WhatIsHiddenIsNotRead) {
  const std::int64_t T = 150, cut = 90, w = 20;
  const Case c = windowed(make_case("parallel_attn", sizes(1, T, 2, 20, 33)), w).prepared();
  const Outcome o = c.run(context("cpu")), d = c.run_backward(context("cpu"));
  ASSERT_TRUE(o.ok() && d.ok()) << o.problem() << d.problem();
  for (const double x : {kInf, std::numeric_limits<double>::quiet_NaN()}) {
    const auto spoilt = [&](const TensorView& t, std::int64_t begin, std::int64_t n) {
      Buffer b = tools::clone(t);
      tools::fill(tools::slice(b.view(), 1, begin, n), x);
      return b;
    };
    const Case later = c.with("k", spoilt(c.input("k"), cut, T - cut).view())
                           .with("v", spoilt(c.input("v"), cut, T - cut).view())
                           .with("q", spoilt(c.input("q"), cut, T - cut).view())
                           .with_upstream("o", spoilt(c.upstream("o"), cut, T - cut).view());
    const auto same = [&](const TensorView& a, const TensorView& b, std::int64_t begin, std::int64_t n,
                          const char* what) {
      EXPECT_TRUE(tools::same_bits(tools::slice(a, 1, begin, n), tools::slice(b, 1, begin, n))) << what << " " << x;
    };
    const Outcome lo = later.run(context("cpu")), ld = later.run_backward(context("cpu"));
    ASSERT_TRUE(lo.ok() && ld.ok()) << lo.problem() << ld.problem();
    same(o["out.o"], lo["out.o"], 0, cut, "o");
    same(d["grad.q"], ld["grad.q"], 0, cut, "dq");
    // Keys are seen by queries up to w - 1 tokens later.
    same(d["grad.k"], ld["grad.k"], 0, cut - w + 1, "dk");
    same(d["grad.v"], ld["grad.v"], 0, cut - w + 1, "dv");
    // What the window has left behind.
    const Case earlier =
        c.with("k", spoilt(c.input("k"), 0, cut).view()).with("v", spoilt(c.input("v"), 0, cut).view());
    const Outcome eo = earlier.run(context("cpu")), ed = earlier.run_backward(context("cpu"));
    ASSERT_TRUE(eo.ok() && ed.ok()) << eo.problem() << ed.problem();
    same(o["out.o"], eo["out.o"], cut + w - 1, T - cut - w + 1, "o");
    same(d["grad.q"], ed["grad.q"], cut + w - 1, T - cut - w + 1, "dq");
  }
}

// Every prefix is a sequence of its own: its last query's row.
TEST(Attn, DecodeIsTheLastRowOfTraining) {
  for (const bool extras : {false, true}) {
    Case train = grouped("parallel_attn", 4, sizes(1, 200, 2, 20, 33));
    if (extras) train = train.with("g").with("sink_bias");
    const Outcome o = train.run(context("cpu"));
    ASSERT_TRUE(o.ok()) << o.problem();
    for (const std::int64_t n : {1, 2, 63, 64, 65, 128, 129, 200}) {
      Case step = grouped("attn_decoding_one_step", 4, packed({0, n}, 2, 20, 33));
      for (const char* input : {"k", "v", "g"})
        if (train.has(input)) step = step.with(input, tools::slice(train.input(input), 1, 0, n));
      if (extras) step = step.with("sink_bias", train.input("sink_bias"));
      step = step.with("q", tools::slice(train.input("q"), 1, n - 1, 1));
      const Outcome s = step.run(context("cpu"));
      ASSERT_TRUE(s.ok()) << s.problem();
      EXPECT_TRUE(tools::same_bits(s["out.o"], tools::slice(o["out.o"], 1, n - 1, 1))) << step.text();
    }
  }
}

TEST(Attn, AnEmptySequenceDecodesToZeros) {
  for (const bool sink : {false, true})
    for (const char* backend : {"cpu", kReference}) {
      Case c = make_case("attn_decoding_one_step", packed({0, 5, 5, 5, 9}, 2, 4, 3));
      if (sink) c = c.with("sink_bias");
      const Outcome o = c.run(context(backend));
      ASSERT_TRUE(o.ok()) << o.problem();
      for (const double x : tools::values(tools::slice(o["out.o"], 1, 1, 2))) EXPECT_EQ(x, 0.0) << backend;
    }
}

TEST(Attn, DecodeScalesTheGateWhenAsked) {
  const Case c = grouped("attn_decoding_one_step", 4, packed({0, 70, 140}, 2, 20, 33)).with("g").flag("scale", 0.3);
  std::vector<double> g = tools::values(c.input("g"));
  for (double& x : g) x *= 0.3;
  const Buffer b = like(c.input("g"));
  tools::assign(b.view(), g);
  expect_close(c.with("g", b.view()).run(context("cpu")), c.flag("do_gate_scale", true).run(context("cpu")), kClose,
               c.text());
  expect_agrees(c.flag("do_gate_scale", true), "cpu");
}

// Three sequences over a cache: its tokens, and the same in pages that lie backwards among pages of NaN.
struct Cache {
  Case slots, pages;
};

Buffer indices(const tools::Shape& shape, const std::vector<std::int64_t>& x, DType type = DType::I64) {
  Buffer b(type, shape);
  tools::assign(b.view(), std::vector<double>(x.begin(), x.end()));
  return b;
}

Cache cache(std::int64_t T, std::int64_t TQ, std::int64_t page, const std::vector<std::int64_t>& lengths, DType dtype,
            DType index) {
  const auto N = static_cast<std::int64_t>(lengths.size()), M = (T + page - 1) / page, P = N * M + 3;
  Sizes s = sizes(N, T, 2, 20, 33);
  s.TQ = TQ;
  const Case slots = grouped("attn_decode", 4, s, {.dtype = dtype})
                         .with("g_cache")
                         .with("sink_bias")
                         .with("lengths", indices({N}, lengths, index).view());
  std::vector<std::int64_t> table(static_cast<std::size_t>(N * M), -1);
  Sizes in_pages = s;
  in_pages.T = page;
  in_pages.P = P;
  Case pages = grouped("attn_decode", 4, in_pages, {.dtype = dtype})
                   .with("q", slots.input("q"))
                   .with("sink_bias", slots.input("sink_bias"))
                   .with("lengths", slots.input("lengths"));
  for (const char* name : {"k_cache", "v_cache", "g_cache"}) {
    const TensorView from = slots.input(name);
    tools::Shape shape(from.dims().begin(), from.dims().end());
    shape[0] = P;
    shape[1] = page;
    const Buffer to(from.dtype, shape);
    tools::fill(to.view(), std::numeric_limits<double>::quiet_NaN());
    for (std::int64_t n = 0; n < N; ++n)
      for (std::int64_t m = 0; m * page < lengths[static_cast<std::size_t>(n)]; ++m) {
        const std::int64_t at = P - 2 - (n * M + m), rows = std::min(page, T - m * page);
        table[static_cast<std::size_t>(n * M + m)] = at;
        const TensorView piece = tools::slice(tools::slice(from, 0, n, 1), 1, m * page, rows);
        tools::assign(tools::slice(tools::slice(to.view(), 0, at, 1), 1, 0, rows), tools::values(piece));
      }
    pages = pages.with(name, to.view());
  }
  return {slots, pages.with("block_table", indices({N, M}, table, index).view())};
}

TEST(Attn, ACacheInPagesIsOneBySlots) {
  for (const DType dtype : {DType::F32, DType::BF16, DType::F16})
    for (const std::int64_t page : {1, 16, 64, 100, 150})
      for (const std::int64_t TQ : {1, 3, 8})
        for (const std::int64_t w : {0, 1, 40}) {
          Cache c = cache(150, TQ, page, {150, 0, 67, 5}, dtype, TQ == 3 ? DType::I32 : DType::I64);
          if (w > 0) c = {windowed(c.slots, w), windowed(c.pages, w)};
          expect_agrees(c.slots, "cpu");
          expect_agrees(c.pages, "cpu");
          expect_same_bits(c.slots.run(context("cpu")), c.pages.run(context("cpu")), c.pages.text());
        }
}

TEST(Attn, QueriesOverACacheAreTheLastRowsOfTraining) {
  const Case train = grouped("parallel_attn", 4, sizes(2, 150, 2, 20, 33)).with("g").with("sink_bias");
  const Outcome o = train.run(context("cpu"));
  ASSERT_TRUE(o.ok()) << o.problem();
  for (const std::int64_t length : {8, 64, 65, 130, 150})
    for (const std::int64_t n : {1, 2, 8}) {
      Sizes s = sizes(2, 150, 2, 20, 33);
      s.TQ = n;
      const Outcome d = grouped("attn_decode", 4, s)
                            .with("q", tools::slice(train.input("q"), 1, length - n, n))
                            .with("k_cache", train.input("k"))
                            .with("v_cache", train.input("v"))
                            .with("g_cache", train.input("g"))
                            .with("sink_bias", train.input("sink_bias"))
                            .with("lengths", indices({2}, {length, length}).view())
                            .run(context("cpu"));
      ASSERT_TRUE(d.ok()) << d.problem();
      EXPECT_TRUE(tools::same_bits(d["out.o"], tools::slice(o["out.o"], 1, length - n, n))) << n << " of " << length;
    }
}

// A decode loop: prepared once, then every token makes its sequences longer.
TEST(Attn, APreparedDecodeFollowsItsLengths) {
  const Context& ctx = context("cpu");
  const Cache c = cache(20, 2, 8, {20, 20, 20}, DType::F32, DType::I32);
  const Buffer lengths(DType::I32, {3}), o(DType::F32, {3, 2, 4, 33});
  tools::assign(lengths.view(), std::vector<double>{2, 0, 5});
  Result<DynamicCall> call = c.pages.call();
  ASSERT_TRUE(call.ok()) << call.status().message();
  ASSERT_TRUE(call->set("lengths", lengths.view()).ok());
  ASSERT_TRUE(call->bind("out.o", o.view()).ok());
  const Result<PreparedCall> prepared = call->prepare(ctx);
  ASSERT_TRUE(prepared.ok()) << prepared.status().message();
  const Buffer memory = Buffer::bytes(prepared->workspace_bytes());
  const fla::RunOptions run{.workspace = memory.span()};
  for (const std::int32_t n : {1, 6, 7, 13}) {
    const std::vector<double> now = {2.0 + n, 0.0, 5.0 + n};
    tools::assign(lengths.view(), now);
    const Status s = prepared->run(run);
    ASSERT_TRUE(s.ok()) << s.message();
    const Outcome fresh = c.pages.with("lengths", lengths.view()).run(ctx);
    ASSERT_TRUE(fresh.ok()) << fresh.problem();
    EXPECT_TRUE(tools::same_bits(fresh["out.o"], o.view())) << n << " tokens later";
  }
  tools::assign(lengths.view(), std::vector<double>{25, 0, 20});
  const Status refused = prepared->run(run);
  EXPECT_EQ(refused.code(), Code::InvalidArgument);
  EXPECT_NE(refused.message().find("attn_decode: lengths: "), std::string::npos) << refused.message();
}

TEST(Attn, ACacheRefusesWhatItCannotHold) {
  const Cache c = cache(20, 2, 8, {20, 0, 9}, DType::F32, DType::I64);
  const auto refused = [](const Case& x, const char* name) {
    for (const char* backend : {"cpu", kReference}) {
      const Outcome o = x.run(context(backend));
      EXPECT_EQ(o.status.code(), Code::InvalidArgument) << x.text();
      EXPECT_NE(o.status.message().find(std::string("attn_decode: ") + name + ": "), std::string::npos)
          << o.status.message();
    }
  };
  refused(c.slots.with("lengths", indices({3}, {21, 0, 9}).view()), "lengths");
  refused(c.slots.with("lengths", indices({3}, {20, -1, 9}).view()), "lengths");
  refused(c.pages.with("lengths", indices({3}, {25, 0, 9}).view()), "lengths");
  refused(c.pages.without("block_table"), "k_cache");
  refused(c.pages.with("block_table", indices({3, 3}, {1, 2, 12, -1, -1, -1, 3, 4, -1}).view()), "block_table");
  refused(c.pages.with("block_table", indices({3, 3}, {1, 2, 3, -1, -1, -1, 4, -1, -1}).view()), "block_table");
  refused(c.pages.with("block_table", indices({2, 3}, {1, 2, 3, 4, 5, 6}).view()), "block_table");
}

// Of the gates between blocks that hardly see each other: as small as the decay, and no difference of what is not.
TEST(Attn, AStrongGateBetweenMildOnesKeepsTheDigitsOfItsGradient) {
  for (const char* function : {"parallel_attn", "parallel_forgetting_attn", "parallel_wall_attn", "parallel_path_attn"})
    for (const double strong : {-12.0, -25.0, -60.0}) {
      Case c = grouped(function, 4, sizes(1, 200, 2, 20, 17));
      if (!c.has("g")) c = c.with("g");
      const Buffer g = tools::clone(c.input("g"));
      tools::fill(g.view(), -0.2);
      for (std::int64_t t = 3; t < 200; t += 7) tools::fill(tools::slice(g.view(), 1, t, 1), strong);
      c = c.with("g", g.view());
      if (c.has_flag("scale")) c = c.flag("scale", 1.0);
      const Outcome want = c.run_backward(reference()), got = c.run_backward(context("cpu"));
      ASSERT_TRUE(want.ok() && got.ok()) << want.problem() << got.problem();
      double error = 0.0, size = 0.0;
      for (std::int64_t t = 3; t < 200; t += 7) {
        const std::vector<double> x = tools::values(tools::slice(want["grad.g"], 1, t, 1)),
                                  y = tools::values(tools::slice(got["grad.g"], 1, t, 1));
        for (std::size_t i = 0; i < x.size(); ++i) {
          error += (x[i] - y[i]) * (x[i] - y[i]);
          size += x[i] * x[i];
        }
      }
      EXPECT_GT(size, 0.0);
      EXPECT_LE(std::sqrt(error), 1e-4 * std::sqrt(size)) << c.text() << ": gate " << strong;
    }
}

// ---- forgetting_attn ---------------------------------------------------------------------------------------------

TEST(ForgettingAttn, IsAttnWithAGate) {
  for (const GateRegime r : tools::kGateRegimes) {
    const Case c = grouped("parallel_forgetting_attn", 4, sizes(2, 150, 2, 20, 33), {.regime = r});
    expect_equal_families(c, c.as("parallel_attn"));
    expect_equal_families(windowed(c, 40), windowed(c, 40).as("parallel_attn"));
  }
}

TEST(ForgettingAttn, ZeroGateIsAttn) {
  const Case c = grouped("parallel_forgetting_attn", 4, sizes(2, 150, 2, 20, 33)).fill("g", 0.0).prepared();
  const Case plain = c.without("g").as("parallel_attn");
  expect_equal_families(c, plain, {{"grad.g", "plain attention has none"}});
}

TEST(ForgettingAttn, DecodeIsTheLastRowOfTraining) {
  const Case train = grouped("parallel_forgetting_attn", 4, sizes(1, 150, 2, 20, 33));
  const Outcome o = train.run(context("cpu"));
  ASSERT_TRUE(o.ok()) << o.problem();
  for (const std::int64_t n : {1, 64, 65, 150}) {
    Case step = grouped("attn_decoding_one_step", 4, packed({0, n}, 2, 20, 33));
    for (const char* input : {"k", "v", "g"}) step = step.with(input, tools::slice(train.input(input), 1, 0, n));
    const Outcome s = step.with("q", tools::slice(train.input("q"), 1, n - 1, 1)).run(context("cpu"));
    ASSERT_TRUE(s.ok()) << s.problem();
    EXPECT_TRUE(tools::same_bits(s["out.o"], tools::slice(o["out.o"], 1, n - 1, 1))) << n << " tokens";
  }
}

TEST(ForgettingAttn, TheFirstGateOfASequenceHasNoGradient) {
  const Case c = make_case("parallel_forgetting_attn", packed({0, 1, 1, 66, 130}, 2, 20, 33));
  const Outcome d = c.run_backward(context("cpu"));
  ASSERT_TRUE(d.ok()) << d.problem();
  for (const std::int64_t t : {0, 1, 66})
    for (const double x : tools::values(tools::slice(d["grad.g"], 1, t, 1))) EXPECT_EQ(x, 0.0) << "token " << t;
}

// ---- parallax ----------------------------------------------------------------------------------------------------

TEST(Parallax, WithoutASecondQueryIsAttn) {
  const Case c = grouped("parallel_parallax", 4, sizes(2, 150, 2, 20, 20)).fill("r", 0.0).prepared();
  expect_equal_families(c, c.without("r").as("parallel_attn"), {{"grad.r", "attention has none"}});
}

TEST(Parallax, Windows) {
  for (const std::int64_t w : {1, 2, 63, 64, 65, 130, 500}) {
    expect_agrees(windowed(grouped("parallel_parallax", 4, sizes(1, 200, 2, 12, 12)), w), "cpu");
    expect_agrees(windowed(grouped("parallel_parallax", 4, packed({0, 1, 1, 66, 199, 200}, 2, 12, 12)), w), "cpu");
  }
}

TEST(Parallax, DecodeIsTheLastRowsOfTraining) {
  for (const std::int64_t w : {40, 1000}) {
    const Case train = windowed(grouped("parallel_parallax", 4, sizes(2, 150, 2, 20, 20)), w);
    const Outcome o = train.run(context("cpu"));
    ASSERT_TRUE(o.ok()) << o.problem();
    for (const std::int64_t n : {1, 7, 64, 130, 150}) {
      Case c = train.as("parallax_decode");
      for (const char* input : {"q", "r"}) c = c.with(input, tools::slice(train.input(input), 1, 150 - n, n));
      const Outcome d = c.run(context("cpu"));
      ASSERT_TRUE(d.ok()) << d.problem();
      const TensorView last = tools::slice(o["out.o"], 1, 150 - n, n);
      EXPECT_TRUE(tools::same_bits(d["out.o"], last)) << n << " rows, window " << w;
      if (n > 1) continue;
      const Outcome one = c.as("parallax_decode_one_step").run(context("cpu"));
      ASSERT_TRUE(one.ok()) << one.problem();
      EXPECT_TRUE(tools::same_bits(one["out.o"], last));
    }
  }
}

TEST(Parallax, KeysBeforeTheStartDoNotCount) {
  const Case c = grouped("parallax_decode", 4, sizes(3, 90, 2, 20, 20));
  Buffer start(DType::I64, {3});
  tools::assign(start.view(), std::vector<double>{0, 23, 90});
  const Case s = c.with("cache_start", start.view());
  expect_agrees(s, "cpu");
  const Outcome o = s.run(context("cpu"));
  ASSERT_TRUE(o.ok()) << o.problem();
  // From the start on it is a sequence of its own; before it, and where nothing counts, zeros.
  const Outcome suffix = c.sequence(1).tokens(23, 90).run(context("cpu"));
  ASSERT_TRUE(suffix.ok()) << suffix.problem();
  const TensorView rows = tools::slice(o["out.o"], 0, 1, 1);
  const auto d = tools::compare(suffix["out.o"], tools::slice(rows, 1, 23, 67), {.R = kClose});
  EXPECT_TRUE(d.ok) << d.reason;
  for (const double x : tools::values(tools::slice(rows, 1, 0, 23))) ASSERT_EQ(x, 0.0);
  for (const double x : tools::values(tools::slice(o["out.o"], 0, 2, 1))) ASSERT_EQ(x, 0.0);
}

// ---- wall_attn ---------------------------------------------------------------------------------------------------

TEST(WallAttn, ZeroGateIsAttn) {
  const Case c = grouped("parallel_wall_attn", 4, sizes(2, 150, 2, 20, 33)).fill("g", 0.0).prepared();
  expect_equal_families(c, c.without("g").as("parallel_attn"), {{"grad.g", "attention has none"}});
}

TEST(WallAttn, WindowsSinksAndScalarGates) {
  for (const std::int64_t w : {1, 2, 15, 17, 64, 65, 130, 500}) {
    Case c = windowed(grouped("parallel_wall_attn", 4, sizes(1, 200, 2, 12, 17)), w);
    expect_agrees(c, "cpu");
    expect_agrees(c.with("g_scalar").with("sink_bias"), "cpu");
    c = windowed(grouped("parallel_wall_attn", 4, packed({0, 1, 1, 66, 199, 200}, 2, 12, 17)), w);
    expect_agrees(c.with("g_scalar").with("sink_bias"), "cpu");
  }
}

TEST(WallAttn, DecodeOverACacheIsTheLastRowOfTraining) {
  const std::int64_t T = 150;
  const Case train =
      grouped("parallel_wall_attn", 4, sizes(2, T, 2, 20, 33)).with("g_scalar").with("sink_bias").flag("scale", 0.25);
  // Base-2 prefixes of mild gates.
  Buffer g = tools::clone(train.input("g")), P(DType::F32, g.shape()), C(DType::F32, {2, T, 4});
  Buffer gs = tools::clone(train.input("g_scalar"));
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t h = 0; h < 4; ++h) {
      double c = 0.0;
      std::vector<double> p(20, 0.0);
      for (std::int64_t t = 0; t < T; ++t) {
        c += tools::load(gs.view().at(b, t, h), DType::F32) / std::log(2.0);
        tools::store(C.view().at(b, t, h), DType::F32, c);
        for (std::int64_t x = 0; x < 20; ++x) {
          const double mild = 0.02 * tools::load(g.view().at(b, t, h, x), DType::F32);
          tools::store(g.view().at(b, t, h, x), DType::F32, mild);
          p[static_cast<std::size_t>(x)] += mild / std::log(2.0);
          tools::store(P.view().at(b, t, h, x), DType::F32, p[static_cast<std::size_t>(x)]);
        }
      }
    }
  const Outcome o = train.with("g", g.view()).run(context("cpu"));
  ASSERT_TRUE(o.ok()) << o.problem();
  for (const std::int64_t chunk : {1, 16, 32, 100, 200}) {
    const Outcome cache = grouped("build_wall_kv_cache", 4, sizes(2, T, 2, 20, 33))
                              .flag("chunk_size", chunk)
                              .with("k", train.input("k"))
                              .with("g_cumsum", P.view())
                              .run(context("cpu"));
    ASSERT_TRUE(cache.ok()) << cache.problem();
    Sizes one = sizes(2, T, 2, 20, 33);
    one.TQ = 1;
    const Case step = grouped("parallel_wall_attn_decode", 4, one)
                          .flag("cache_chunk_size", chunk)
                          .with("q", tools::slice(train.input("q"), 1, T - 1, 1))
                          .with("p_curr", tools::slice(P.view(), 1, T - 1, 1))
                          .with("v", train.input("v"))
                          .with("k_tilde", cache["out.k_tilde"])
                          .with("r_cache", cache["out.r_cache"])
                          .with("g_scalar_cumsum", C.view())
                          .with("sink_bias", train.input("sink_bias"));
    expect_agrees(step, "cpu");
    const Outcome d = step.run(context("cpu"));
    ASSERT_TRUE(d.ok()) << d.problem();
    const auto diff = tools::compare(tools::slice(o["out.o"], 1, T - 1, 1), d["out.o"], {.R = kClose});
    EXPECT_TRUE(diff.ok) << "chunk " << chunk << ": " << diff.reason;
  }
}

// ---- path_attn ---------------------------------------------------------------------------------------------------

TEST(PathAttn, WithoutStepsIsAttn) {
  for (const bool gate : {false, true}) {
    Case c = grouped("parallel_path_attn", 4, sizes(2, 150, 2, 20, 33)).fill("beta", 0.0).flag("scale", 0.3);
    if (gate) c = c.with("g");
    c = c.prepared();
    Case a = c.without("w").without("beta");
    if (gate) {  // scale multiplies the gate as well
      std::vector<double> g = tools::values(c.input("g"));
      for (double& x : g) x *= 0.3;
      const Buffer b = like(c.input("g"));
      tools::assign(b.view(), g);
      a = a.with("g", b.view());
    }
    expect_equal_families(c, a.as("parallel_attn"),
                          {{"grad.w", "attention has none"},
                           {"grad.beta", "attention has none"},
                           {"grad.g", "of the scaled gate"},
                           {"out.k_cache", "attention has none"}});
  }
}

TEST(PathAttn, GatesAndReflections) {
  for (const GateRegime r : tools::kGateRegimes)
    expect_agrees(grouped("parallel_path_attn", 4, sizes(1, 200, 2, 12, 17), {.regime = r}).with("g"), "cpu");
  for (const double beta : {1.0, 1.9, 2.0}) {
    expect_agrees(grouped("parallel_path_attn", 4, sizes(1, 200, 2, 12, 17)).fill("beta", beta), "cpu");
    expect_agrees(grouped("parallel_path_attn", 2, packed({0, 1, 1, 66, 199, 200}, 2, 12, 17)).fill("beta", beta),
                  "cpu");
  }
}

TEST(PathAttn, DecodeOverCarriedKeysIsTheLastRow) {
  for (const std::int64_t T : {1, 63, 64, 65, 200}) {
    const Case c = grouped("parallel_path_attn", 4, sizes(1, T, 2, 20, 33)).with("g");
    const Outcome o = c.run(context("cpu"));
    ASSERT_TRUE(o.ok()) << o.problem();
    const Case step = grouped("attn_decoding_one_step", 4, packed({0, T}, 2, 20, 33))
                          .flag("do_gate_scale", true)
                          .with("q", tools::slice(c.input("q"), 1, T - 1, 1))
                          .with("k", o["out.k_cache"])
                          .with("v", c.input("v"))
                          .with("g", c.input("g"));
    const Outcome d = step.run(context("cpu"));
    ASSERT_TRUE(d.ok()) << d.problem();
    const auto diff = tools::compare(tools::slice(o["out.o"], 1, T - 1, 1), d["out.o"], {.R = kClose});
    EXPECT_TRUE(diff.ok) << "T " << T << ": " << diff.reason;
  }
}

// ---- nsa ---------------------------------------------------------------------------------------------------------

// Small blocks, so that short sequences have many.
Case sparse(std::int64_t HQ, const Sizes& s, std::int64_t n, std::int64_t slots, const CaseOptions& o = {}) {
  return grouped("parallel_nsa", HQ, s, o)
      .without("block_indices")
      .flag("block_size", n)
      .flag("block_counts", slots)
      .with("block_indices");
}

TEST(Nsa, AllBlocksOfOneBranchAreAttn) {
  const std::int64_t T = 90, n = 16;
  Case c = sparse(4, sizes(2, T, 2, 20, 33), n, 6).without("g_cmp").without("g_slc");
  Buffer all = like(c.input("block_indices"));
  std::vector<double> x(static_cast<std::size_t>(all.numel()));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i % 6);
  tools::assign(all.view(), x);
  c = c.with("block_indices", all.view()).prepared();
  Case a = make_case("parallel_attn", c.sizes());
  for (const char* input : {"q", "k", "v"}) a = a.with(input, c.input(input));
  expect_equal_families(c, a.with_upstream("o", c.upstream("o")));
}

TEST(Nsa, TheSlidingBranchAloneIsAttnWithAWindow) {
  Case c = sparse(4, sizes(2, 90, 2, 20, 33), 16, 4).without("g_cmp").fill("g_slc", 0.0).fill("g_swa", 1.0);
  c = c.flag("window_size", std::int64_t{20}).flag("scale", 0.9).prepared();  // which does not reach it
  Case a = windowed(make_case("parallel_attn", c.sizes()), 20);
  for (const char* input : {"q", "k", "v"}) a = a.with(input, c.input(input));
  expect_equal_families(c, a.with_upstream("o", c.upstream("o")));
}

TEST(Nsa, BranchesBlocksAndWindows) {
  for (const std::int64_t n : {1, 5, 16, 70, 100})
    for (const std::int64_t w : {0, 1, 20, 500})
      for (const bool packed_rows : {false, true}) {
        const Sizes s = packed_rows ? packed({0, 1, 1, 66, 150}, 2, 12, 17) : sizes(2, 90, 2, 12, 17);
        Case c = sparse(6, s, n, 4).flag("window_size", w);
        if (w > 0) c = c.with("g_swa");
        expect_agrees(c, "cpu");
        expect_agrees(c.with("block_counts"), "cpu");
        expect_agrees(c.without("g_slc"), "cpu");
        expect_agrees(c.without("g_cmp"), "cpu");
      }
}

TEST(Nsa, ChoosesItsBlocks) {
  for (const std::int64_t slots : {3, 4, 8})
    for (const bool packed_rows : {false, true}) {
      const Sizes s = packed_rows ? packed({0, 1, 1, 120, 200}, 2, 12, 17) : sizes(1, 200, 2, 12, 17);
      expect_agrees(sparse(8, s, 16, slots).without("block_indices"), "cpu");
    }
}

TEST(Nsa, TheChoiceAloneIsWhatTheWholeChooses) {
  const std::int64_t T = 200, n = 16, C = 13, slots = 5;
  const Case whole = sparse(8, sizes(1, T, 2, 12, 17), n, slots).without("block_indices");
  Buffer means(DType::F32, {1, C, 2, 12});
  const TensorView k = whole.input("k");
  for (std::int64_t block = 0; block < C; ++block)
    for (std::int64_t h = 0; h < 2; ++h)
      for (std::int64_t x = 0; x < 12; ++x) {
        double sum = 0.0;
        const std::int64_t end = std::min(T, (block + 1) * n);
        for (std::int64_t j = block * n; j < end; ++j) sum += tools::load(k.at(0, j, h, x), k.dtype);
        tools::store(means.view().at(0, block, h, x), DType::F32, sum / static_cast<double>(end - block * n));
      }
  Case choice = grouped("parallel_nsa_topk", 8, sizes(1, T, 2, 12, 17)).flag("block_size", n);
  choice = choice.flag("block_counts", slots).with("q", whole.input("q")).with("k_cmp", means.view());
  const Outcome lists = choice.run(context("cpu"));
  ASSERT_TRUE(lists.ok()) << lists.problem();
  expect_close(whole.run(context("cpu")), whole.with("block_indices", lists["out.block_indices"]).run(context("cpu")),
               kClose, whole.text());
  // Its own, the one before it and the first; as many as there are, each once and in order.
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t h = 0; h < 2; ++h) {
      const std::int64_t own = t / n, found = std::min(own + 1, slots);
      std::vector<std::int64_t> list;
      for (std::int64_t s = 0; s < slots; ++s)
        list.push_back(*reinterpret_cast<const std::int64_t*>(lists["out.block_indices"].at(0, t, h, s)));
      for (std::int64_t s = found; s < slots; ++s) EXPECT_EQ(list[static_cast<std::size_t>(s)], -1);
      list.resize(static_cast<std::size_t>(found));
      EXPECT_TRUE(std::ranges::is_sorted(list, std::ranges::less_equal()) || found == 1) << "query " << t;
      for (const std::int64_t forced : {std::int64_t{0}, std::max<std::int64_t>(own - 1, 0), own})
        EXPECT_EQ(std::ranges::count(list, forced), 1) << "query " << t << ", block " << forced;
    }
}

TEST(Nsa, TheChoiceOfTheLastQueriesIsThatOfAll) {
  const Case all = grouped("parallel_nsa_topk", 8, sizes(2, 100, 2, 12, 17)).flag("block_size", std::int64_t{8});
  const Case some = all.flag("block_counts", std::int64_t{4});
  const Case c = some.with("k_cmp");
  const Outcome o = c.run(context("cpu"));
  ASSERT_TRUE(o.ok()) << o.problem();
  for (const std::int64_t n : {1, 7, 33}) {
    const Case last = c.flag("TK", std::int64_t{100}).with("q", tools::slice(c.input("q"), 1, 100 - n, n));
    const Outcome d = last.run(context("cpu"));
    ASSERT_TRUE(d.ok()) << d.problem();
    EXPECT_TRUE(tools::same_bits(d["out.block_indices"], tools::slice(o["out.block_indices"], 1, 100 - n, n))) << n;
  }
}

TEST(Nsa, AQueryWithoutABlockHasNothingSelected) {
  Case c = sparse(4, sizes(1, 40, 2, 12, 17), 16, 3).without("g_cmp");
  Buffer none = like(c.input("block_indices"));
  tools::fill(none.view(), -1.0);
  c = c.with("block_indices", none.view()).prepared();
  for (const char* backend : {"cpu", kReference})
    for (const Outcome& o : {c.run(context(backend)), c.run_backward(context(backend))}) {
      ASSERT_TRUE(o.ok()) << o.problem();
      for (const auto& [name, b] : o.tensors)
        for (const double x : tools::values(b.view())) ASSERT_EQ(x, 0.0) << backend << ": " << name;
    }
}

TEST(Nsa, BeforeABlockHasPassedNothingIsCompressed) {
  const std::int64_t n = 16, T = 40;
  const Case c = grouped("parallel_nsa_compression", 4, sizes(1, T, 2, 12, 17)).flag("block_size", n).with("k_cmp");
  const Case p = c.with("v_cmp").prepared();
  expect_agrees(p, "cpu");
  for (const char* backend : {"cpu", kReference}) {
    const Outcome o = p.run(context(backend)), d = p.run_backward(context(backend));
    ASSERT_TRUE(o.ok() && d.ok()) << o.problem() << d.problem();
    for (const TensorView& t : {o["out.o"], o["out.lse"], d["grad.q"]})
      for (const double x : tools::values(tools::slice(t, 1, 0, n - 1))) ASSERT_EQ(x, 0.0) << backend;
    for (const double x : tools::values(tools::slice(o["out.lse"], 1, n - 1, 1))) ASSERT_NE(x, 0.0) << backend;
    // The last block has not passed at the end either.
    for (const char* name : {"grad.k_cmp", "grad.v_cmp"})
      for (const double x : tools::values(tools::slice(d[name], 1, 2, 1))) ASSERT_EQ(x, 0.0) << backend;
  }
}

TEST(Nsa, TheLastQueriesOverACacheAreRowsOfTraining) {
  const std::int64_t T = 90;
  Case c = sparse(4, sizes(2, T, 2, 20, 33), 16, 4).with("g_swa").flag("window_size", std::int64_t{20});
  const Outcome o = c.run(context("cpu"));
  ASSERT_TRUE(o.ok()) << o.problem();
  for (const std::int64_t n : {1, 3, 33}) {
    Case last = c;
    for (const char* input : {"q", "g_cmp", "g_slc", "g_swa", "block_indices"})
      last = last.with(input, tools::slice(c.input(input), 1, T - n, n));
    const Outcome d = last.run(context("cpu"));
    ASSERT_TRUE(d.ok()) << d.problem();
    EXPECT_TRUE(tools::same_bits(d["out.o"], tools::slice(o["out.o"], 1, T - n, n))) << n;
    const Outcome refused = last.run_backward(context("cpu"));
    EXPECT_EQ(refused.status.code(), Code::InvalidArgument) << "gradients of cached queries";
    EXPECT_NE(refused.status.message().find(": q: "), std::string::npos) << refused.status.message();
  }
}

TEST(Nsa, RefusesWhatCannotBe) {
  const Case c = sparse(4, sizes(1, 40, 2, 12, 17), 16, 3);
  const auto refused = [](const Case& x, const char* name) {
    const Outcome o = x.run(context("cpu"));
    EXPECT_EQ(o.status.code(), Code::InvalidArgument) << x.text();
    EXPECT_NE(o.status.message().find(std::string("parallel_nsa: ") + name + ": "), std::string::npos)
        << o.status.message();
  };
  refused(c.without("g_swa").flag("window_size", std::int64_t{4}), "g_swa");
  refused(c.without("block_indices").without("g_cmp"), "block_indices");
  refused(c.flag("block_counts", std::int64_t{4}), "block_indices");
  refused(c.without("block_indices").flag("block_counts", std::int64_t{9}), "block_size");
}

}  // namespace
}  // namespace fla::gate
