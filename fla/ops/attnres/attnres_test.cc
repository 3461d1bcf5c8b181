// What only attnres has: a list of tensors as an argument, rows of any width and tokens of any shape.
#include "fla/ops/attnres/attnres.h"

#include <cmath>
#include <numeric>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

Case sources(std::int64_t L, std::int64_t B, std::int64_t T, std::int64_t D, CaseOptions o = {}) {
  Sizes s = sizes(B, T, 1, 4, 4);
  s.D = D;
  s.L = L;
  return make_case("fused_attnres", s, o).without("output_rms_weight");
}

std::string residual(std::int64_t l) { return "residuals." + std::to_string(l); }

Case with_output_norm(const Case& c) { return c.with("output_rms_weight"); }

TEST(Attnres, AnyNumberOfSources) {
  for (const std::int64_t L : {1, 2, 9, 29, 70})
    for (const DType t : {DType::F32, DType::BF16, DType::F16}) {
      const Case c = sources(L, 2, 9, 40, {.dtype = t}).flag("scale", 0.3);
      expect_agrees(c, "cpu");
      expect_agrees(with_output_norm(c), "cpu");
    }
}

TEST(Attnres, EachSourceHasStridesOfItsOwn) {
  const Layout layouts[] = {
      {}, {.row_pad = 3}, {.last_stride = 2}, {.reversed = true}, {.row_pad = 5, .last_stride = 3}};
  for (const DType t : {DType::F32, DType::BF16}) {
    Case c = with_output_norm(sources(9, 2, 9, 33, {.dtype = t}));
    for (std::int64_t l = 0; l < 9; ++l) c = c.layout(residual(l), layouts[l % 5]);
    expect_agrees(c.expand(residual(4), 0).expand(residual(7), 1), "cpu");
    const Case plain = with_output_norm(sources(9, 2, 9, 33, {.dtype = t}));
    expect_same_bits(plain.run(context("cpu")), c.run(context("cpu")), "strides move bits");
  }
}

// What lies where in the list comes out there.
TEST(Attnres, OrderOfSources) {
  const std::vector<std::int64_t> order = {2, 0, 3, 1};
  const Case c = with_output_norm(sources(4, 2, 9, 40)).flag("scale", 0.3).prepared();
  Case other = c;
  for (std::int64_t l = 0; l < 4; ++l)
    other = other.with(residual(l), c.input(residual(order[static_cast<std::size_t>(l)])));
  Outcome a = c.run(context("cpu")), b = other.run(context("cpu"));
  ASSERT_TRUE(a.ok() && b.ok()) << a.problem() << b.problem();
  Outcome da = c.run_backward(context("cpu")), db = other.run_backward(context("cpu"));
  ASSERT_TRUE(da.ok() && db.ok()) << da.problem() << db.problem();
  const tools::Limits close{.R = 1e-5};
  for (std::int64_t l = 0; l < 4; ++l) {
    const std::int64_t from = order[static_cast<std::size_t>(l)];
    EXPECT_TRUE(tools::compare(tools::slice(a["out.p"], 0, from, 1), tools::slice(b["out.p"], 0, l, 1), close).ok);
    EXPECT_FALSE(tools::compare(tools::slice(a["out.p"], 0, l, 1), tools::slice(b["out.p"], 0, l, 1), close).ok);
    EXPECT_TRUE(tools::compare(da["grad." + residual(from)], db["grad." + residual(l)], close).ok) << l;
  }
  EXPECT_TRUE(tools::compare(a["out.o"], b["out.o"], close).ok);
  EXPECT_TRUE(tools::compare(da["grad.query"], db["grad.query"], close).ok);
}

// The softmax over one source is constant: nothing of it may be left in a gradient, not even a rounding.
TEST(Attnres, OneSourceHasExactZeros) {
  for (const std::string& backend : {std::string("cpu"), std::string(kReference)}) {
    const Case c = sources(1, 2, 9, 41).prepared();
    const Outcome o = c.run(context(backend)), d = c.run_backward(context(backend));
    ASSERT_TRUE(o.ok() && d.ok()) << o.problem() << d.problem();
    EXPECT_EQ(tools::values(o["out.o"]), tools::values(c.input(residual(0))));
    for (const double p : tools::values(o["out.p"])) EXPECT_EQ(p, 1.0);
    for (const char* name : {"grad.query", "grad.rms_weight"})
      for (const double x : tools::values(d[name])) EXPECT_EQ(x, 0.0) << backend << " " << name;
    EXPECT_EQ(tools::values(d["grad." + residual(0)]), tools::values(c.upstream("o")));
    const Case normed = with_output_norm(sources(1, 2, 9, 41));
    const Outcome n = normed.run_backward(context(backend));
    ASSERT_TRUE(n.ok()) << n.problem();
    for (const double x : tools::values(n["grad.query"])) EXPECT_EQ(x, 0.0) << backend;
  }
}

// As wide as FLA's tests, with a softmax that is nearly one-hot and with one that is not.
TEST(Attnres, WideRows) {
  for (const DType t : {DType::F32, DType::F16, DType::BF16})
    for (const std::int64_t D : {4096, 7186})
      for (const double scale : {1.0, 1.0 / std::sqrt(static_cast<double>(D))}) {
        const Case c = sources(5, 1, 19, D, {.dtype = t}).flag("scale", scale);
        expect_agrees(c, "cpu");
        expect_agrees(with_output_norm(c), "cpu");
      }
}

// The squares of such rows are no floats.
TEST(Attnres, LongRows) {
  Case c = sources(3, 1, 7, 40);
  for (const std::int64_t l : {0, 2}) {
    const Buffer b = tools::clone(c.input(residual(l)));
    std::vector<double> x = tools::values(b.view());
    for (double& e : x) e *= 1e25;
    tools::assign(b.view(), x);
    c = c.with(residual(l), b.view());
  }
  const auto expected = c.run(reference()), got = c.run(context("cpu"));
  expect_close(expected, got, 1e-5, "long rows");
  expect_close(with_output_norm(c).run(reference()), with_output_norm(c).run(context("cpu")), 1e-5, "normalised");
  for (const auto& [name, b] : got.tensors)
    for (const double x : tools::values(b.view())) ASSERT_TRUE(std::isfinite(x)) << name;
}

TEST(Attnres, CheckpointLevelsAreTheSame) {
  const Case c = with_output_norm(sources(4, 2, 21, 33, {.dtype = DType::BF16}));
  for (const bool backward : {false, true}) {
    const auto run = [&](std::int64_t level) {
      const Case with = c.flag("checkpoint_level", level);
      return backward ? with.run_backward(context("cpu")) : with.run(context("cpu"));
    };
    expect_same_bits(run(0), run(1), "checkpoint_level");
  }
}

// ---- the typed call ----------------------------------------------------------------------------------------------

struct Memory {
  std::int64_t N, D;
  std::vector<std::vector<float>> sources, gradients;
  std::vector<float> query, weight, o, p, up, dquery, dweight;
  std::vector<TensorView> residuals, dresiduals;
  AttnresBackwardArgs a;

  explicit Memory(std::size_t L, std::int64_t tokens = 6, std::int64_t width = 5) : N(tokens), D(width) {
    const auto n = static_cast<std::size_t>(N * D), d = static_cast<std::size_t>(D);
    for (std::size_t l = 0; l < L; ++l) {
      sources.emplace_back(n);
      for (std::size_t i = 0; i < n; ++i) sources[l][i] = static_cast<float>(tools::normal(7 + l, i));
      gradients.emplace_back(n, 9.0F);
      residuals.emplace_back(sources[l].data(), std::initializer_list<std::int64_t>{N, D});
      dresiduals.emplace_back(gradients[l].data(), std::initializer_list<std::int64_t>{N, D});
    }
    query.resize(d);
    weight.assign(d, 0.5F);
    for (std::size_t i = 0; i < d; ++i) query[i] = static_cast<float>(tools::normal(3, i));
    o.assign(n, 9.0F), up.assign(n, 0.25F), p.assign(L * static_cast<std::size_t>(N), 9.0F);
    dquery.assign(d, 9.0F), dweight.assign(d, 9.0F);
    a.query = {query.data(), {D}};
    a.rms_weight = {weight.data(), {D}};
    a.residuals = residuals;
    a.o = {o.data(), {N, D}};
    a.p = {p.data(), {static_cast<std::int64_t>(L), N}};
  }
  // Of the backward.
  AttnresBackwardArgs back() {
    AttnresBackwardArgs b = a;
    b.o = b.p = {};
    b.do_ = {up.data(), {N, D}};
    b.dquery = {dquery.data(), {D}};
    b.drms_weight = {dweight.data(), {D}};
    b.dresiduals = dresiduals;
    return b;
  }
};

void expect_refused(const Status& s, const std::string& text) {
  EXPECT_EQ(s.code(), Code::InvalidArgument) << s.message();
  EXPECT_NE(s.message().find(text), std::string::npos) << s.message();
}

TEST(Attnres, RefusesByElement) {
  const Context& ctx = context("cpu");
  Memory m(5);
  ASSERT_TRUE(fused_attnres(ctx, m.a).ok());
  const std::vector<float> good = m.o;
  std::ranges::fill(m.o, 9.0F);
  const auto refused = [&](const auto& spoil, const std::string& text) {
    std::vector<TensorView> list = m.residuals;
    AttnresArgs a = m.a;
    a.residuals = list;
    spoil(a, list);
    a.residuals = a.residuals.empty() ? a.residuals : TensorList(list);
    expect_refused(fused_attnres(ctx, a), "fused_attnres: " + text);
    for (const float x : m.o) ASSERT_EQ(x, 9.0F) << text;
  };
  using List = std::vector<TensorView>;
  refused([](AttnresArgs& a, List&) { a.residuals = {}; }, "residuals: required, but not given: expected at least one");
  refused([](AttnresArgs&, List& l) { l[3].dtype = DType::BF16; },
          "residuals[3]: expected dtype F32 (as residuals[0]), got BF16");
  refused([](AttnresArgs&, List& l) { l[2].dtype = DType::I32; }, "residuals[2]: expected dtype");
  refused([](AttnresArgs&, List& l) { l[1].shape[0] = 5; }, "residuals[1]: expected shape [6,5] ([T,D]");
  refused([](AttnresArgs&, List& l) { l[1].shape[1] = 4; }, "residuals[1]: expected shape [6,5]");
  refused([](AttnresArgs&, List& l) { l[4].ndim = 1; }, "residuals[4]: expected shape [6,5]");
  refused([](AttnresArgs&, List& l) { l[4] = {}; }, "residuals[4]: required, but not given");
  refused([](AttnresArgs&, List& l) { l[4].data = nullptr; }, "residuals[4]: data pointer is null");
  refused([](AttnresArgs&, List& l) { l[2].data = reinterpret_cast<std::byte*>(l[2].data) + 1; },
          "residuals[2]: data pointer is not aligned to its 4-byte elements");
  refused(
      [](AttnresArgs&, List& l) {
        l[2].device = {DeviceType::Cuda, 0};
      },
      "residuals[2]: expected on cpu (as query)");
  refused([&](AttnresArgs& a, List&) { a.o = m.residuals[1]; }, "o: overlaps residuals[1] in memory");
  refused([](AttnresArgs& a, List&) { a.o.ndim = 1; }, "o: expected shape [6,5] ([T,D]");
  refused([](AttnresArgs& a, List&) { a.p.shape[0] = 4; }, "p: expected shape [5,6] ([L,T]");
  refused([](AttnresArgs& a, List&) { a.checkpoint_level = 2; }, "checkpoint_level: expected 0 to 1, got 2");
  ASSERT_TRUE(fused_attnres(ctx, m.a).ok());
  EXPECT_EQ(m.o, good);
}

TEST(Attnres, RefusesGradientsByElement) {
  const Context& ctx = context("cpu");
  Memory m(70);  // more tensors than the check of overlaps holds at a time
  AttnresBackwardArgs b = m.back();
  ASSERT_TRUE(fused_attnres_backward(ctx, b).ok());
  std::vector<TensorView> list = m.dresiduals;
  b.dresiduals = list;
  const auto refused = [&](const std::string& text) {
    expect_refused(fused_attnres_backward(ctx, b), "fused_attnres_backward: " + text);
    list = m.dresiduals;
    b = m.back();
    b.dresiduals = list;
  };
  list.pop_back();
  b.dresiduals = list;
  refused("dresiduals: expected 70 tensors (L, as residuals), got 69");
  list[66].dtype = DType::F16;
  refused("dresiduals[66]: expected dtype F32 (as residuals[0]), got F16");
  list[66].stride[0] = 1;
  refused("dresiduals[66]: an output whose elements overlap");
  list[66] = m.residuals[3];
  refused("dresiduals[66]: overlaps residuals[3] in memory");
  list[2] = m.residuals[69];
  refused("dresiduals[2]: overlaps residuals[69] in memory");
  list[68] = list[5];
  refused("dresiduals[5]: overlaps dresiduals[68] in memory");
  b.dquery = {m.sources[68].data(), {m.D}};
  refused("dquery: overlaps residuals[68] in memory");

  // Absent ones are not computed, and the others are the same.
  Memory some(4);
  AttnresBackwardArgs c = some.back();
  ASSERT_TRUE(fused_attnres_backward(ctx, c).ok());
  const auto all = some.gradients;
  for (auto& g : some.gradients) std::ranges::fill(g, 9.0F);
  some.dresiduals[1] = {};
  c.dquery = c.drms_weight = {};
  ASSERT_TRUE(fused_attnres_backward(ctx, c).ok());
  for (const std::size_t l : {0, 2, 3}) EXPECT_EQ(some.gradients[l], all[l]);
  for (const float x : some.gradients[1]) EXPECT_EQ(x, 9.0F);
}

TEST(Attnres, PreparedOnAnotherList) {
  const Context ctx({.threads = 1});
  for (const std::size_t L : {1, 3, 70}) {
    Memory m(L), other(L), more(L + 1);
    for (auto& s : other.sources)
      for (float& x : s) x *= 0.5F;
    const auto forward = fused_attnres.prepare(ctx, m.a);
    ASSERT_TRUE(forward) << forward.status().message();
    const auto backward = fused_attnres_backward.prepare(ctx, m.back());
    ASSERT_TRUE(backward) << backward.status().message();
    std::vector<TensorView> gone = std::move(m.residuals);  // the call has its own copy of the list
    std::ranges::fill(gone, TensorView());
    ASSERT_TRUE(forward->run());
    ASSERT_TRUE(backward->run());
    ASSERT_TRUE(forward->run(other.a));
    ASSERT_TRUE(backward->run(other.back()));
    Memory expected(L);
    for (auto& s : expected.sources)
      for (float& x : s) x *= 0.5F;
    ASSERT_TRUE(fused_attnres(ctx, expected.a));
    ASSERT_TRUE(fused_attnres_backward(ctx, expected.back()));
    EXPECT_EQ(other.o, expected.o);
    EXPECT_EQ(other.gradients, expected.gradients);
    EXPECT_EQ(other.dquery, expected.dquery);
    expect_refused(forward->run(static_cast<const AttnresArgs&>(more.a)),
                   "residuals: the call was prepared for " + std::to_string(L) + " tensors, got " +
                       std::to_string(L + 1) + "; prepare another");
    other.residuals[L - 1].stride[0] = 1;
    expect_refused(forward->run(other.a),
                   "residuals[" + std::to_string(L - 1) + "]: the call was prepared for strides [5,1], got [1,1]");
  }
}

// Tokens of any shape are the same tokens.
TEST(Attnres, TokensOfAnyShape) {
  const Context& ctx = context("cpu");
  for (const Context* c : {&ctx, &reference()}) {
    Memory flat(3, 24);
    ASSERT_TRUE(fused_attnres(*c, flat.a).ok());
    ASSERT_TRUE(fused_attnres_backward(*c, flat.back()).ok());
    for (const std::vector<std::int64_t>& shape :
         {std::vector<std::int64_t>{2, 12}, {2, 3, 4}, {2, 3, 2, 2}, {1, 24}, {24, 1, 1, 1}}) {
      Memory m(3, 24);
      std::vector<std::int64_t> of_o = shape, of_p = shape;
      of_o.push_back(m.D);
      of_p.insert(of_p.begin(), 3);
      const auto reshape = [](TensorView& t, const std::vector<std::int64_t>& dims) {
        t = TensorView(t.data, t.dtype, dims);
      };
      for (auto* list : {&m.residuals, &m.dresiduals})
        for (TensorView& t : *list) reshape(t, of_o);
      reshape(m.a.o, of_o);
      reshape(m.a.p, of_p);
      m.a.query = {m.query.data(), {m.D, 1}};
      ASSERT_TRUE(fused_attnres(*c, m.a).ok()) << fused_attnres(*c, m.a).message();
      AttnresBackwardArgs b = m.back();
      reshape(b.do_, of_o);
      b.dquery = {m.dquery.data(), {m.D, 1}};
      const Status s = fused_attnres_backward(*c, b);
      ASSERT_TRUE(s.ok()) << s.message();
      EXPECT_EQ(m.o, flat.o);
      EXPECT_EQ(m.p, flat.p);
      EXPECT_EQ(m.gradients, flat.gradients);
      EXPECT_EQ(m.dquery, flat.dquery);
      b.dquery = {m.dquery.data(), {m.D}};
      expect_refused(fused_attnres_backward(*c, b), "dquery: expected shape [5,1]");
    }
    Memory one(3, 1);  // no axis but D
    for (auto* list : {&one.residuals, &one.dresiduals})
      for (TensorView& t : *list) t = TensorView(t.data, t.dtype, std::vector<std::int64_t>{one.D});
    one.a.o = {one.o.data(), {one.D}};
    one.a.p = {one.p.data(), {3}};
    ASSERT_TRUE(fused_attnres(*c, one.a).ok());
    for (std::size_t i = 0; i < one.o.size(); ++i) EXPECT_EQ(one.o[i], flat.o[i]);
  }
  Memory m(2);
  for (TensorView& t : m.residuals) t = TensorView(t.data, t.dtype, std::vector<std::int64_t>{1, 1, 1, 1, 6, 5});
  expect_refused(fused_attnres(ctx, m.a), "residuals[0]: expected shape");
}

TEST(Attnres, NamesOfTheList) {
  const Registry& r = Registry::global();
  Memory m(3);
  const auto call = [&] {
    Result<DynamicCall> c = DynamicCall::make(r, "fused_attnres");
    EXPECT_TRUE(c->set("query", m.a.query).ok());
    EXPECT_TRUE(c->set("rms_weight", m.a.rms_weight).ok());
    return std::move(*c);
  };
  DynamicCall c = call();
  expect_refused(c.set("residuals", m.residuals[0]), "residuals: a list of tensors: name them one by one, residuals.0");
  expect_refused(c.set("query.0", m.a.query), "query.0: unknown argument; this function takes query, residuals.0");
  for (const char* name :
       {"residuals.", "residuals.x", "residuals.01", "residuals.-1", "residuals[1", "residuals.99999999"})
    EXPECT_FALSE(c.set(name, m.residuals[0]).ok()) << name;
  expect_refused(c.set("residuals.65536", m.residuals[0]), "expected at most 65536 tensors");
  // In any order, under either name; the last one given counts.
  EXPECT_TRUE(c.set("residuals.2", m.residuals[0]).ok());
  EXPECT_TRUE(c.set("residuals[2]", m.residuals[2]).ok());
  EXPECT_TRUE(c.set("residuals.0", m.residuals[0]).ok());
  expect_refused(c.outputs(context("cpu")).status(), "residuals[1]: required, but not given");
  EXPECT_TRUE(c.set("residuals.1", m.residuals[1]).ok());
  EXPECT_TRUE(c.set_flag("return_weights", true).ok());
  const auto outputs = c.outputs(context("cpu"));
  ASSERT_TRUE(outputs.ok()) << outputs.status().message();
  ASSERT_EQ(outputs->size(), 2U);
  EXPECT_EQ((*outputs)[1].shape, (std::vector<std::int64_t>{3, 6}));
  std::vector<float> o(30);
  ASSERT_TRUE(fused_attnres(context("cpu"), m.a).ok());
  EXPECT_TRUE(c.bind("out.o", {o.data(), {6, 5}}).ok());
  ASSERT_TRUE(c.run(context("cpu")).ok());
  EXPECT_EQ(o, m.o);

  // The gradients have the names of what they belong to. Weights have none that could be given.
  Result<DynamicCall> b = c.backward(r);
  ASSERT_TRUE(b.ok()) << b.status().message();
  EXPECT_TRUE(b->set("grad_out.o", m.back().do_).ok());
  expect_refused(b->set("grad_out.p", m.a.p), "grad_out.p: unknown argument");
  std::vector<std::string> names;
  const auto gradients = b->outputs(context("cpu"));
  ASSERT_TRUE(gradients.ok()) << gradients.status().message();
  for (const auto& x : *gradients) names.push_back(x.name);
  EXPECT_EQ(names, (std::vector<std::string>{"grad.query", "grad.residuals.0", "grad.residuals.1", "grad.residuals.2",
                                             "grad.rms_weight"}));
  ASSERT_TRUE(fused_attnres_backward(context("cpu"), m.back()).ok());
  std::vector<float> d(30);
  EXPECT_TRUE(b->bind("grad.residuals.1", {d.data(), {6, 5}}).ok());
  EXPECT_FALSE(b->bind("grad.residuals.3", {d.data(), {6, 5}}).ok());
  ASSERT_TRUE(b->run(context("cpu")).ok());
  EXPECT_EQ(d, m.gradients[1]);
}

}  // namespace
}  // namespace fla::gate
