// Functions over a pool of states: equal to the recurrent form on the states that the tables name, and nothing else
// changes. The generic tests run them without tables.
#include <algorithm>
#include <functional>
#include <map>

#include "fla/fla.hpp"
#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

bool is_step(const FunctionSpec& spec) { return takes(spec, "state"); }

std::string recurrent_form(const std::string& step) {
  static const std::map<std::string, std::string> forms = {{"gdn_step", "fused_recurrent_gated_delta_rule"},
                                                           {"kda_step", "fused_recurrent_kda"},
                                                           {"gla_step", "fused_recurrent_gla"},
                                                           {"rwkv6_step", "fused_recurrent_rwkv6"},
                                                           {"rwkv7_step", "fused_recurrent_rwkv7"},
                                                           {"delta_step", "fused_recurrent_delta_rule"},
                                                           {"lightning_step", "fused_recurrent_lightning_attn"},
                                                           {"simple_gla_step", "fused_recurrent_simple_gla"}};
  const auto it = forms.find(step);
  if (it == forms.end()) throw std::invalid_argument("no recurrent form of " + step);
  return it->second;
}

Buffer table(const tools::Shape& shape, const std::vector<double>& x, DType t = DType::I64) {
  Buffer b(t, shape);
  tools::assign(b.view(), x);
  return b;
}

std::vector<std::string> with_reference(const Registry::Entry& e) {
  std::vector<std::string> names = backends(e);
  names.emplace_back(kReference);
  return names;
}

TensorView row(const TensorView& t, std::int64_t i) { return tools::slice(t, 0, i, 1); }

void expect_row(const TensorView& expected, std::int64_t i, const TensorView& got, std::int64_t j,
                const std::string& what) {
  EXPECT_TRUE(tools::same_bits(row(expected, i), row(got, j)))
      << what << ": row " << j << " is not the expected row " << i;
}

void expect_zero(const TensorView& t, const std::string& what) {
  for (const double x : tools::values(t))
    if (x != 0.0) {
      ADD_FAILURE() << what << " is not zero";
      return;
    }
}

// Odd widths go through scratch, whole vectors stay in the pool; value-first and 16-bit states go through scratch.
std::vector<Case> pool_cases(const FunctionSpec& spec, std::int64_t B, std::int64_t T, std::int64_t P) {
  std::vector<Case> list;
  for (const auto& [K, V] : {std::pair<std::int64_t, std::int64_t>{20, 33}, {32, 64}, {5, 80}}) {
    Sizes s = sizes(B, T, 2, K, V);
    s.P = P;
    list.push_back(make_case(spec.name, s));
  }
  const Case whole = list[1];
  if (whole.has_flag("state_v_first")) list.push_back(whole.flag("state_v_first", true));
  for (const DType t : {DType::BF16, DType::F16}) list.push_back(whole.cast("state", t));
  list.push_back(whole.layout("state", {.row_pad = 3, .last_stride = 2}));
  Sizes s = sizes(B, T, 2, 32, 64);
  s.P = P;
  list.push_back(make_case(spec.name, s, {.dtype = DType::BF16}));
  if (spec.find_arg("v")->dims[2] == "HV") {
    s.HV = 6;
    list.push_back(make_case(spec.name, s));
  }
  return list;
}

// The same call without tables, on the slots given: sequence b of it starts from slots[b] of the pool.
Case on_slots(const Case& c, const std::vector<std::int64_t>& slots) {
  const TensorView pool = c.input("state");
  tools::Shape shape(pool.dims().begin(), pool.dims().end());
  shape[0] = static_cast<std::int64_t>(slots.size());
  Buffer b(pool.dtype, shape);
  for (std::size_t i = 0; i < slots.size(); ++i)
    tools::assign(row(b.view(), static_cast<std::int64_t>(i)), tools::values(row(pool, slots[i])));
  Case d = c.with("state", b.view());
  for (const char* name : {"state_indices", "num_accepted_tokens"})
    if (d.has(name)) d = d.without(name);
  return d;
}

// Whole calls and token by token: the bits of the recurrent form.
void IsRecurrent(const Registry::Entry& e) {
  for (const auto& backend : with_reference(e))
    for (const Case& c : pool_cases(e.spec, 3, 7, 0)) {
      const Context& ctx = context(backend);
      const Outcome whole = c.run(ctx),
                    recurrent = c.as(recurrent_form(e.spec.name), {{"state", "initial_state"}}).run(ctx);
      if (!whole.ok() || !recurrent.ok()) return expect_ok(whole, c.text()), expect_ok(recurrent, c.text());
      EXPECT_TRUE(tools::same_bits(whole["out.o"], recurrent["out.o"])) << backend << ": " << c.text();
      const bool narrow = c.input("state").dtype != DType::F32;
      if (!narrow) {
        EXPECT_TRUE(tools::same_bits(whole["out.state_out"], recurrent["out.final_state"]))
            << backend << ": " << c.text();
      }
      if (narrow || backend == kReference) continue;  // rounded between the calls
      Buffer state = tools::clone(c.input("state"));
      for (std::int64_t t = 0; t < 7; ++t) {
        const Outcome one = c.tokens(t, t + 1).with("state", state.view()).run(ctx, {.state_in_place = true});
        if (!one.ok()) return expect_ok(one, c.text());
        EXPECT_TRUE(tools::same_bits(tools::slice(whole["out.o"], 1, t, 1), one["out.o"]))
            << backend << ": " << c.text() << ": token " << t << " alone";
        state = tools::clone(one["out.state_out"]);
      }
      EXPECT_TRUE(tools::same_bits(whole["out.state_out"], state.view())) << backend << ": " << c.text();
    }
}

void Slots(const Registry::Entry& e) {
  for (const auto& backend : with_reference(e))
    for (const DType index : {DType::I32, DType::I64})
      for (const Case& plain : pool_cases(e.spec, 4, 3, 9)) {
        const Context& ctx = context(backend);
        const std::string what = backend + ": " + plain.text();
        const Case c = plain.with("state_indices", table({4}, {7, -1, 0, 4}, index).view());
        const Outcome dense = on_slots(c, {7, 1, 0, 4}).run(ctx);
        if (!dense.ok()) return expect_ok(dense, what);
        for (const bool in_place : {false, true}) {
          const Outcome o = c.run(ctx, {.state_in_place = in_place});
          if (!o.ok()) return expect_ok(o, what);
          for (std::int64_t b = 0; b < 4; ++b) {
            if (b == 1) continue;
            expect_row(dense["out.o"], b, o["out.o"], b, what + ": o");
            expect_row(dense["out.step_states"], b, o["out.step_states"], b, what + ": step_states");
          }
          expect_zero(row(o["out.o"], 1), what + ": o of padding");
          expect_zero(row(o["out.step_states"], 1), what + ": step_states of padding");
          for (const auto& [b, slot] : {std::pair<int, int>{0, 7}, {2, 0}, {3, 4}})
            expect_row(dense["out.state_out"], b, o["out.state_out"], slot, what + ": state");
          for (const std::int64_t slot : {1, 2, 3, 5, 6, 8})
            expect_row(c.input("state"), slot, o["out.state_out"], slot, what + ": a slot that no sequence has");
        }
      }
}

void StepStates(const Registry::Entry& e) {
  for (const auto& backend : with_reference(e))
    for (const Case& c : pool_cases(e.spec, 2, 5, 0)) {
      const Context& ctx = context(backend);
      const Outcome whole = c.run(ctx);
      if (!whole.ok()) return expect_ok(whole, c.text());
      for (std::int64_t t = 0; t < 5; ++t) {
        const Outcome part = c.tokens(0, t + 1).run(ctx);
        if (!part.ok()) return expect_ok(part, c.text());
        TensorView after = tools::slice(whole["out.step_states"], 1, t, 1);
        for (int i = 1; i < 4; ++i) {  // without the axis of tokens
          after.shape[static_cast<std::size_t>(i)] = after.shape[static_cast<std::size_t>(i + 1)];
          after.stride[static_cast<std::size_t>(i)] = after.stride[static_cast<std::size_t>(i + 1)];
        }
        after.ndim = 4;
        EXPECT_TRUE(tools::same_bits(part["out.state_out"], after))
            << backend << ": " << c.text() << ": state after token " << t;
      }
    }
}

// A table of a slot per token: every state is kept, and the next call starts from the last one that was accepted.
void Drafts(const Registry::Entry& e) {
  for (const auto& backend : with_reference(e))
    for (const Case& plain : pool_cases(e.spec, 3, 4, 16)) {
      const Context& ctx = context(backend);
      const std::string what = backend + ": " + plain.text();
      const std::vector<double> slots = {13, 7, 4, 2, 12, -1, -1, -1, -1, -1, 0, 14, 11, 9, 3};
      const Case c = plain.with("state_indices", table({3, 5}, slots).view())
                         .with("num_accepted_tokens", table({3}, {2, 0, 5}).view());
      const Case dense = on_slots(c, {7, 1, 3});
      const Outcome expected = dense.run(ctx);
      for (const bool in_place : {false, true}) {
        const Outcome o = c.run(ctx, {.state_in_place = in_place});
        if (!expected.ok() || !o.ok()) return expect_ok(expected, what), expect_ok(o, what);
        std::vector<std::int64_t> written;
        for (const std::int64_t b : {0, 2}) {
          expect_row(expected["out.o"], b, o["out.o"], b, what + ": o");
          const TensorView states = row(expected["out.step_states"], b);
          for (std::int64_t t = 0; t < 4; ++t) {
            const auto slot = static_cast<std::int64_t>(slots[static_cast<std::size_t>(b * 5 + t)]);
            written.push_back(slot);
            const std::vector<double> want = tools::values(tools::slice(states, 1, t, 1));
            EXPECT_EQ(want, tools::values(row(o["out.state_out"], slot))) << what << ": slot " << slot;
          }
        }
        expect_zero(row(o["out.o"], 1), what + ": o of padding");
        for (std::int64_t slot = 0; slot < 16; ++slot)
          if (std::ranges::count(written, slot) == 0)
            expect_row(c.input("state"), slot, o["out.state_out"], slot, what + ": a slot that no token has");
      }
    }
}

void Rollback(const Registry::Entry& e) {
  for (const auto& backend : with_reference(e)) {
    const Context& ctx = context(backend);
    Sizes s = sizes(2, 6, 2, 32, 48);
    s.P = 8;
    const Case c = make_case(e.spec.name, s);
    const Buffer slots = table({2, 4}, {6, 1, 0, 5, 3, 2, 7, 4});
    // Four draft tokens, of which two and one are accepted; then one more from there, which is token 2 of the first
    // sequence and token 1 of the second.
    const Outcome draft = c.tokens(0, 4).with("state_indices", slots.view()).run(ctx);
    if (!draft.ok()) return expect_ok(draft, c.text());
    Case next = c.tokens(2, 3);
    for (const auto& name : c.input_names()) {
      const ArgSpec& a = *e.spec.find_arg(name);
      if (a.dims.size() < 2 || a.dims[1] != "T") continue;
      const Buffer b = tools::clone(next.input(name));
      tools::assign(row(b.view(), 1), tools::values(row(tools::slice(c.input(name), 1, 1, 1), 1)));
      next = next.with(name, b.view());
    }
    next = next.with("state", draft["out.state_out"])
               .with("state_indices", slots.view())
               .with("num_accepted_tokens", table({2}, {2, 1}).view());
    const Outcome o = next.run(ctx), straight = on_slots(c, {6, 3}).run(ctx);
    if (!o.ok() || !straight.ok()) return expect_ok(o, c.text()), expect_ok(straight, c.text());
    for (const auto& [b, t] : {std::pair<int, int>{0, 2}, {1, 1}}) {
      const TensorView want = row(tools::slice(straight["out.o"], 1, t, 1), b);
      const auto d = tools::compare(want, row(o["out.o"], b), {.R = 1e-6});
      EXPECT_TRUE(d.ok) << backend << ": " << c.text() << ": sequence " << b << ": " << d.reason;
    }
  }
}

// ---- refusals ----------------------------------------------------------------------------------------------------

void expect_refused(const Case& c, const std::string& arg, const std::string& why) {
  for (const char* backend : {"cpu", kReference}) {
    Result<DynamicCall> call = c.call();
    ASSERT_TRUE(call.ok()) << call.status().message();
    Buffer state = tools::clone(c.input(c.takes("state") ? "state" : "initial_state"));
    const std::uint64_t before = state.checksum();
    ASSERT_TRUE(call->set(c.takes("state") ? "state" : "initial_state", state.view()).ok());
    const TensorView& v = c.input("v");
    Buffer o(v.dtype, {v.dim(0), v.dim(1), v.dim(2), v.dim(3)});
    const std::uint64_t untouched = o.checksum();
    ASSERT_TRUE(call->bind("out.o", o.view()).ok());
    const Status s = call->run(context(backend));
    const std::string what = c.text() + ": " + why + ": \"" + s.message() + "\"";
    EXPECT_EQ(s.code(), Code::InvalidArgument) << what;
    EXPECT_TRUE(s.message().starts_with(c.spec().name + ": " + arg + ": ")) << what;
    EXPECT_EQ(state.checksum(), before) << what;
    EXPECT_EQ(o.checksum(), untouched) << what;
  }
}

void Refuses(const Registry::Entry& e) {
  Sizes s = sizes(3, 2, 2, 4, 5);
  s.P = 8;
  const Case c = make_case(e.spec.name, s);
  const auto with = [&](const tools::Shape& shape, const std::vector<double>& x) {
    return c.with("state_indices", table(shape, x).view());
  };
  const auto refused = [&](const Case& bad, const char* arg, const char* why) { expect_refused(bad, arg, why); };
  refused(c, "state", "eight slots for three sequences without a table");
  refused(with({3}, {1, 2, 8}), "state_indices", "a slot behind the pool");
  refused(with({3}, {1, -2, 3}), "state_indices", "a slot below -1");
  refused(with({3}, {1, 2, 1}), "state_indices", "a slot twice");
  refused(with({2}, {1, 2}), "state_indices", "too few sequences");
  refused(with({3, 1}, {1, 2, 3}), "state_indices", "fewer columns than tokens");
  refused(with({3, 2}, {0, 1, 2, 3, 4, 1}), "state_indices", "a slot twice over columns");
  refused(with({3, 2}, {0, 1, 2, -1, 4, 5}), "state_indices", "padding in a later column");
  const Case by_token = with({3, 3}, {0, 1, 2, 3, 4, 5, 6, 7, 1});
  const auto accepted = [&](const Case& x, const std::vector<double>& a) {
    return x.with("num_accepted_tokens", table({3}, a).view());
  };
  refused(accepted(c, {1, 1, 1}), "num_accepted_tokens", "without a table");
  refused(accepted(with({3}, {1, 2, 3}), {1, 1, 1}), "num_accepted_tokens", "with one slot per sequence");
  refused(accepted(by_token, {1, 0, 1}), "num_accepted_tokens", "0");
  refused(accepted(by_token, {1, 4, 1}), "num_accepted_tokens", "more than columns");
  refused(accepted(by_token, {1, 1, 3}), "state_indices", "starting where another sequence writes");
  Buffer real(DType::F32, {3}, tools::Fill::Zero);
  refused(c.with("state_indices", real.view()), "state_indices", "a table of floats");
  // Slots far apart are told apart too.
  Sizes far = sizes(3, 1, 1, 1, 1);
  far.P = 200000;
  const Case wide = make_case(e.spec.name, far);
  refused(wide.with("state_indices", table({3}, {3, 199999, 199999}).view()), "state_indices", "a far slot twice");
  const Outcome fine = wide.with("state_indices", table({3}, {3, 32771, 199999}).view()).run(context("cpu"));
  expect_ok(fine, wide.text());
  // More tokens than a step function takes.
  const auto longer = Case::make(Registry::global(), e.spec.name, sizes(1, 9, 2, 4, 5));
  ASSERT_TRUE(longer.ok());
  const Outcome nine = longer->run(context("cpu"));
  EXPECT_EQ(nine.status.code(), Code::InvalidArgument);
  EXPECT_NE(nine.status.message().find("tokens T must be 1 to 8"), std::string::npos) << nine.status.message();
}

const bool registered =
    for_every_function("IsRecurrent", IsRecurrent, is_step) && for_every_function("Slots", Slots, is_step) &&
    for_every_function("StepStates", StepStates, is_step) && for_every_function("Drafts", Drafts, is_step) &&
    for_every_function("Rollback", Rollback, is_step) && for_every_function("RefusesSlots", Refuses, is_step);

// ---- memory of a typed call --------------------------------------------------------------------------------------

struct TypedStep {
  std::vector<float> x = std::vector<float>(64, 0.25F), state = std::vector<float>(3 * 2 * 4 * 4, 0.5F), o;
  GlaStepArgs args;
  TypedStep() : o(16) {
    args.q = args.k = {x.data(), {2, 1, 2, 4}};
    args.v = {x.data(), {2, 1, 2, 4}};
    args.state = {state.data(), {3, 2, 4, 4}};
    args.o = {o.data(), {2, 1, 2, 4}};
  }
};

TEST(GlaStep, PoolsThatPartlyShareMemoryAreRefused) {
  const Context ctx;
  TypedStep s;
  const std::vector<std::int64_t> slots = {2, 0};
  s.args.state_indices = {slots.data(), {2}};
  EXPECT_TRUE(gla_step(ctx, s.args).ok());
  s.args.state_out = s.args.state;
  EXPECT_TRUE(gla_step(ctx, s.args).ok());
  s.state.resize(s.state.size() + 4);
  s.args.state.data = s.state.data();
  s.args.state_out.data = s.state.data() + 4;
  Status bad = gla_step(ctx, s.args);
  EXPECT_NE(bad.message().find("gla_step: state_out: overlaps state"), std::string::npos) << bad.message();
  s.args.state_out = {};
  s.args.q.data = s.state.data() + 1;
  bad = gla_step(ctx, s.args);
  EXPECT_NE(bad.message().find("gla_step: state: overlaps q"), std::string::npos) << bad.message();
  s.args.q.data = s.x.data();
  s.args.state.stride[3] = 0;
  bad = gla_step(ctx, s.args);
  EXPECT_NE(bad.message().find("gla_step: state: an output whose elements overlap"), std::string::npos)
      << bad.message();
}

TEST(GlaStep, OnlyTheNamedSlotsOfThePoolChange) {
  const Context ctx;
  TypedStep s;
  const std::vector<std::int32_t> slots = {2, -1};
  s.args.state_indices = {slots.data(), {2}};
  const std::vector<float> before = s.state;
  ASSERT_TRUE(gla_step(ctx, s.args).ok());
  for (std::size_t i = 0; i < s.state.size(); ++i) EXPECT_EQ(s.state[i] == before[i], i < 64) << i;
  for (std::size_t i = 8; i < 16; ++i) EXPECT_EQ(s.o[i], 0.0F);
}

// ---- fused_recurrent_kda_fwd -------------------------------------------------------------------------------------

TEST(FusedRecurrentKdaFwd, WithoutATableIsFusedRecurrentKda) {
  for (const char* backend : {"cpu", kReference})
    for (const Sizes& s : {sizes(2, 20, 2, 12, 17), packed({0, 3, 3, 40}, 2, 32, 64)}) {
      const Context& ctx = context(backend);
      const Case c = make_case("fused_recurrent_kda", s).with("initial_state");
      const Case pool = c.as("fused_recurrent_kda_fwd");
      const Outcome expected = c.run(ctx), in_place = pool.run(ctx, {.state_in_place = true});
      const Outcome apart = pool.flag("inplace_final_state", false).run(ctx);
      expect_same_bits(expected, apart, c.text());
      if (!in_place.ok()) return expect_ok(in_place, c.text());
      EXPECT_TRUE(tools::same_bits(expected["out.o"], in_place["out.o"])) << c.text();
      EXPECT_TRUE(tools::same_bits(expected["out.final_state"], in_place["out.state_pool"])) << c.text();
    }
}

TEST(FusedRecurrentKdaFwd, NotInPlaceGivesTheStateAfterEveryToken) {
  for (const char* backend : {"cpu", kReference})
    for (const bool v_first : {false, true}) {
      const Context& ctx = context(backend);
      Sizes s = packed({0, 3, 5, 5, 6}, 2, 12, 17);
      s.P = 16;
      Case c = make_case("fused_recurrent_kda_fwd", s).flag("state_v_first", v_first);
      const std::vector<double> slots = {13, 7, 4, 2, 12, 0, 5, 5, 5, 14, 11, 9};
      c = c.with("ssm_state_indices", table({4, 3}, slots).view())
              .with("num_accepted_tokens", table({4}, {2, 1, 1, 3}).view());
      const Outcome pool = c.run(ctx), rows = c.flag("inplace_final_state", false).run(ctx);
      if (!pool.ok() || !rows.ok()) return expect_ok(pool, c.text()), expect_ok(rows, c.text());
      EXPECT_TRUE(tools::same_bits(pool["out.o"], rows["out.o"]));
      std::int64_t at = 0;
      for (const std::int64_t slot : {13, 7, 4, 2, 12, 14})
        expect_row(rows["out.final_state"], at++, pool["out.state_pool"], slot, c.text());
      for (const std::int64_t slot : {0, 1, 3, 5, 6, 8, 9, 10, 11, 15})
        expect_row(c.input("initial_state"), slot, pool["out.state_pool"], slot, c.text());
    }
}

TEST(FusedRecurrentKdaFwd, IsKdaStep) {
  Sizes s = sizes(3, 4, 2, 20, 33);
  s.P = 16;
  const Buffer slots = table({3, 4}, {13, 7, 4, 2, -1, -1, -1, -1, 0, 14, 11, 9});
  const Buffer accepted = table({3}, {2, 1, 4});
  const Case step =
      make_case("kda_step", s).with("state_indices", slots.view()).with("num_accepted_tokens", accepted.view());
  const Case fwd =
      step.as("fused_recurrent_kda_fwd", {{"state", "initial_state"}, {"state_indices", "ssm_state_indices"}});
  const Outcome a = step.run(context("cpu")), b = fwd.run(context("cpu"));
  if (!a.ok() || !b.ok()) return expect_ok(a, step.text()), expect_ok(b, fwd.text());
  EXPECT_TRUE(tools::same_bits(a["out.o"], b["out.o"]));
  EXPECT_TRUE(tools::same_bits(a["out.state_out"], b["out.state_pool"]));
}

TEST(FusedRecurrentKdaFwd, Refuses) {
  Sizes s = sizes(2, 3, 2, 4, 5);
  s.P = 8;
  const Case c = make_case("fused_recurrent_kda_fwd", s);
  expect_refused(c.with("ssm_state_indices", table({2}, {1, 2}).view()), "ssm_state_indices",
                 "one slot for several tokens");
  expect_refused(c.with("ssm_state_indices", table({2, 2}, {0, 1, 2, 3}).view()), "ssm_state_indices",
                 "fewer columns than tokens");
  expect_refused(c, "initial_state", "eight slots for two sequences without a table");
  Sizes p = packed({0, 1, 3}, 2, 4, 5);
  p.P = 8;
  expect_refused(make_case("fused_recurrent_kda_fwd", p).with("ssm_state_indices", table({2}, {1, 2}).view()),
                 "ssm_state_indices", "one slot for a packed sequence of several tokens");
}

}  // namespace
}  // namespace fla::gate
