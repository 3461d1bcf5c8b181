// Promises to the bit: the past never depends on the future, reruns, thread counts, addresses, concurrent calls and
// forked children change nothing, and neither does which of the outputs were asked for.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

Case with_state(const Case& c) { return with_states(c); }

std::vector<Case> cases(const FunctionSpec& spec) {
  std::vector<Case> list = {with_state(make_case(spec.name, sizes(2, 70, 2, 20, 33))),
                            with_state(make_case(spec.name, sizes(1, 150, 1, 33, at_most(spec, "V", 130))))};
  if (takes(spec, "cu_seqlens"))
    list.push_back(with_state(make_case(spec.name, packed({0, 1, 1, 64, 65, 130}, 2, 12, 17))));
  if (spec.find_flag("normalize") != nullptr) {
    list.push_back(list[0].flag("normalize", false));
    list.push_back(list[0].flag("normalize", true));
  }
  return list;
}

int time_axis(const Case& c, const ArgSpec& a) {
  for (std::size_t i = 0; i < a.dims.size(); ++i)
    if (c.rows_of(a, i, "T") > 0) return static_cast<int>(i);
  return -1;
}

// Every timed input from token t on (before t in reverse) becomes something else.
Case change(const Case& c, std::int64_t begin, std::int64_t end, double with) {
  Case changed = c;
  for (const auto& name : c.input_names()) {
    const ArgSpec& a = *c.spec().find_arg(name);
    const int axis = time_axis(c, a);
    if (axis < 0 || a.types == Types::Index) continue;
    const std::int64_t rows = c.rows_of(a, static_cast<std::size_t>(axis), "T");
    const Buffer b = tools::clone(c.input(name));
    tools::fill(tools::slice(b.view(), axis, rows * begin, rows * (end - begin)),
                a.gen.log_gate() || name == "gv" ? -std::abs(with) : with);
    changed = changed.with(name, b.view());
  }
  return changed;
}

void Causal(const Registry::Entry& e) {
  const std::int64_t T = make_case(e.spec.name, sizes(1, 150, 2, 20, 33)).sizes().T;
  const RunOptions only_o = {.only = {"out.o"}};
  for (const auto& backend : backends(e)) {
    const Context& ctx = context(backend);
    for (const GateRegime regime : {GateRegime::Plain, GateRegime::Extreme, GateRegime::Mild}) {
      std::vector<Case> list = {with_state(make_case(e.spec.name, sizes(1, T, 2, 20, 33), {.regime = regime}))};
      if (list[0].has_flag("reverse")) list.push_back(list[0].flag("reverse", true));
      if (list[0].has_flag("chunk_size")) list.push_back(chunked(list[0], 32));
      if (list[0].has_flag("normalize")) list.push_back(list[0].flag("normalize", true));
      if (list[0].takes("gv")) list.push_back(list[0].with("gv"));
      for (const Case& c : list) {
        bool reverse = false;
        if (c.has_flag("reverse")) reverse = c.call()->flag_on("reverse");
        const Outcome whole = c.run(ctx, only_o);
        expect_ok(whole, c.text());
        if (refused(whole)) continue;
        if (!whole.ok()) return;
        for (const std::int64_t t : {1, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 128, 149}) {
          if (t >= T) break;
          // [from, from + length) is the past.
          const std::int64_t from = reverse ? T - t : 0;
          const auto past = [&](const TensorView& o) { return tools::slice(o, 1, from, t); };
          const std::int64_t future = reverse ? 0 : t;
          for (const double x : {0.0, 3.0, 1e4, std::numeric_limits<double>::infinity()}) {
            const Outcome other = change(c, future, future + T - t, x).run(ctx, only_o);
            if (!other.ok()) return expect_ok(other, c.text());
            EXPECT_TRUE(tools::same_bits(past(whole["out.o"]), past(other["out.o"])))
                << c.text() << ": the future from token " << t << " on, set to " << x << ", changes the past";
          }
          const Outcome prefix = c.tokens(from, from + t).run(ctx, only_o);
          if (refused(prefix)) continue;
          if (!prefix.ok()) return expect_ok(prefix, c.text());
          EXPECT_TRUE(tools::same_bits(past(whole["out.o"]), prefix["out.o"]))
              << c.text() << ": appending " << T - t << " tokens to " << t << " changes them";
        }
      }
    }
  }
}

// Later tokens that nothing is asked of change no gradient of earlier ones, not in the last bit: those of a call that ends
// before them are the same numbers.
void CutGradients(const Registry::Entry& e) {
  const std::int64_t T = make_case(e.spec.name, sizes(1, 100, 2, 20, 33)).sizes().T;
  for (const auto& backend : backends(e))
    for (const GateRegime regime : {GateRegime::Plain, GateRegime::Strong}) {
      Case c = with_state(make_case(e.spec.name, sizes(1, T, 2, 20, 33), {.regime = regime})).prepared();
      for (const auto& output : c.upstream_names())
        if (time_axis(c, *e.spec.find_arg(output)) < 0) c = c.without_upstream(output);
      for (const std::int64_t t : {1, 2, 3, 4, 7, 11, 15, 16, 17, 31, 35, 39, 63, 64, 67, 95, 99}) {
        if (t >= T) break;
        Case whole = c;
        for (const auto& output : c.upstream_names()) {
          const int axis = time_axis(c, *e.spec.find_arg(output));
          const Buffer b = tools::clone(c.upstream(output));
          tools::fill(tools::slice(b.view(), axis, t, T - t), 0.0);
          whole = whole.with_upstream(output, b.view());
        }
        const Outcome all = whole.run_backward(context(backend));
        const Outcome cut = whole.tokens(0, t).run_backward(context(backend));
        if (!all.ok() || !cut.ok()) return expect_ok(all, c.text()), expect_ok(cut, c.text());
        for (const auto& [name, b] : cut.tensors) {
          const ArgSpec& a = *e.spec.find_arg(name.substr(5, name.find('.', 5) - 5));
          const int axis = time_axis(c, a);
          const std::int64_t rows = axis < 0 ? 0 : c.rows_of(a, static_cast<std::size_t>(axis), "T");
          TensorView past = axis < 0 ? all[name] : tools::slice(all[name], axis, 0, rows * t);
          // Rows that stand for several tokens each: those of the shorter call come first.
          for (int i = 0; axis < 0 && i < past.ndim; ++i)
            if (e.spec.derived.contains(a.dims[static_cast<std::size_t>(i)]))
              past = tools::slice(past, i, 0, b.view().dim(i));
          // A zero may have either sign: a sum of nothing and one of zeros differ in it.
          EXPECT_TRUE(tools::values(past) == tools::values(b.view()))
              << c.text() << ": " << name << " of the first " << t << " tokens depends on where the call ends";
        }
      }
    }
}

void Reruns(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const Case& c : cases(e.spec))
      for (const bool backward : passes(e.spec)) {
        const Outcome first = run_pass(c, context(backend), backward);
        expect_same_bits(first, run_pass(c, context(backend), backward), c.text() + " again");
        for (const std::size_t offset : {1U, 2U, 4U, 33U})
          expect_same_bits(first, run_pass(c, context(backend), backward, {.workspace_offset = offset}),
                           c.text() + " with its workspace " + std::to_string(offset) + " bytes off");
        expect_same_bits(first, run_pass(c, context(backend), backward, {.outputs = {.row_pad = 3, .last_stride = 2}}),
                         c.text() + " into strided outputs");
      }
}

void Threads(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const Case& c : cases(e.spec))
      for (const bool backward : passes(e.spec)) {
        const Outcome one = run_pass(c, context(backend, 1), backward);
        for (const int n : {2, 3, 4})
          expect_same_bits(one, run_pass(c, context(backend, n), backward),
                           c.text() + " on " + std::to_string(n) + " threads");
      }
}

// One output alone, and each left out.
void Subsets(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const Case& c : cases(e.spec))
      for (const bool backward : passes(e.spec)) {
        const Outcome all = run_pass(c, context(backend), backward);
        expect_ok(all, c.text());
        if (refused(all)) continue;
        if (!all.ok()) return;
        for (const auto& [name, b] : all.tensors) {
          RunOptions without;
          for (const auto& [other, x] : all.tensors)
            if (other != name) without.only.push_back(other);
          std::vector<RunOptions> subsets = {{.only = {name}}};
          if (!without.only.empty()) subsets.push_back(without);
          for (const RunOptions& o : subsets) {
            const Outcome some = run_pass(c, context(backend), backward, o);
            if (refused(some)) continue;
            if (!some.ok()) return expect_ok(some, c.text() + ": a subset of outputs around " + name);
            EXPECT_EQ(some.tensors.size(), o.only.size());
            for (const auto& [n, x] : some.tensors)
              EXPECT_TRUE(tools::same_bits(all[n], x.view()))
                  << c.text() << ": " << n << " depends on which outputs are asked for";
          }
        }
      }
}

// The final state may take the initial state's own memory.
void StateInPlace(const Registry::Entry& e) {
  std::vector<std::string> who = backends(e);
  who.emplace_back(kReference);
  for (const auto& backend : who)
    for (const Case& one : cases(e.spec)) {
      if (one.has_flag("normalize") && one.call()->flag_on("normalize")) continue;  // its state is a pair
      const bool pair = !one.has_flag("normalize") && one.takes("initial_state.1");
      const Case c = pair ? one.with("initial_state.1") : one;
      const Context& ctx = context(backend);
      const Outcome apart = c.run(ctx);
      expect_ok(apart, c.text());
      if (refused(apart)) continue;
      if (!apart.ok()) return;
      if (apart[pair ? "out.final_state.0" : "out.final_state"].dtype != c.input("initial_state").dtype) continue;
      expect_same_bits(apart, c.run(ctx, {.state_in_place = true}), c.text() + " with its state in place");
    }
}

void Concurrent(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Context& ctx = context(backend, 2);
    struct Call {
      Case c;
      bool backward;
      Outcome expected;
    };
    std::vector<Call> calls;
    for (const Case& c : cases(e.spec))
      for (const bool backward : passes(e.spec)) {
        Outcome o = run_pass(c, ctx, backward);
        expect_ok(o, c.text());
        if (refused(o)) continue;
        if (!o.ok()) return;
        calls.push_back({c, backward, std::move(o)});
      }
    std::atomic<int> wrong{0};
    const auto work = [&](std::size_t first) {
      for (std::size_t round = 0; round < 4; ++round)
        for (std::size_t i = 0; i < calls.size(); ++i) {
          const Call& call = calls[(i + first) % calls.size()];
          const Outcome o = run_pass(call.c, ctx, call.backward);
          bool same = o.ok() && o.tensors.size() == call.expected.tensors.size();
          for (const auto& [name, t] : o.tensors) same = same && tools::same_bits(call.expected[name], t.view());
          if (!same) ++wrong;
        }
    };
    std::thread other(work, 1);
    work(0);
    other.join();
    EXPECT_EQ(wrong.load(), 0) << e.spec.name
                               << ": results of two threads that share a context differ from serial ones";
  }
}

bool has_tokens(const FunctionSpec& s) {
  const ArgSpec* o = s.find_arg("o");
  return o != nullptr && std::ranges::count(o->dims, "T") + std::ranges::count(o->dims, "TQ") > 0;
}

bool has_gradients(const FunctionSpec& s) { return has_tokens(s) && !s.backward.empty(); }

const bool registered = for_every_function("CutGradients", CutGradients, has_gradients) &&
                        for_every_backend("Causal", Causal, has_tokens) && for_every_backend("Reruns", Reruns) &&
                        for_every_backend("Threads", Threads) && for_every_backend("Subsets", Subsets) &&
                        for_every_backend("Concurrent", Concurrent) &&
                        for_every_backend("StateInPlace", StateInPlace, has_state);

// Gradients of 64 MB and more in all are stored past the caches: another way to the same bits.
TEST(Bits, LargeGradientsAreThoseThatAreAskedForAlone) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "takes a minute under the address sanitizer";
#endif
  for (const char* function : {"chunk_gla", "chunk_kda"}) {
    const Case c = make_case(function, sizes(1, 2048, 16, 128, 128)).prepared();
    const Outcome all = c.run_backward(context("cpu"));
    if (!all.ok()) return expect_ok(all, c.text());
    for (const std::string name : {"grad.q", "grad.k"}) {
      const Outcome alone = c.run_backward(context("cpu"), {.only = {name}});
      if (!alone.ok()) return expect_ok(alone, c.text());
      EXPECT_TRUE(tools::same_bits(all[name], alone[name])) << c.text() << ": " << name;
    }
  }
}

TEST(Bits, AContextWorksInAForkedChild) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer does not support threads after fork";
#endif
  const Context ctx({.threads = 3, .backend = "cpu", .poison = true, .strict = true});
  const Case c = make_case("chunk_gla", sizes(2, 130, 3, 20, 33)).with("initial_state");
  const Outcome before = c.run(ctx), gradients = c.run_backward(ctx);
  ASSERT_TRUE(before.ok() && gradients.ok());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    bool same = true;
    for (int i = 0; i < 3; ++i)
      for (const bool backward : {false, true}) {
        const Outcome o = run_pass(c, ctx, backward);
        same = same && o.ok();
        if (same)
          for (const auto& [name, b] : o.tensors)
            same = same && tools::same_bits((backward ? gradients : before)[name], b.view());
      }
    _exit(same ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  expect_same_bits(before, c.run(ctx), "the parent after the fork");
}

TEST(Bits, ACallFromInsideAPoolTaskIsTheSame) {
  const Context& ctx = context("cpu", 3);
  const Case c = make_case("chunk_gla", sizes(1, 70, 2, 20, 33));
  const Outcome expected = c.run(ctx);
  std::vector<Outcome> inside(4);
  ctx.pool().run(4, [&](std::int64_t task, int) { inside[static_cast<std::size_t>(task)] = c.run(ctx); });
  for (const Outcome& o : inside) expect_same_bits(expected, o, "called from a task of the context's own pool");
}

}  // namespace
}  // namespace fla::gate
