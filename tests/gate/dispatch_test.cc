// Dispatch by contract/system-dispatch.md, with a registry and backends of the test's own; then the library's registry.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <tuple>

#include "fla/ops/gla/gla.h"
#include "tests/gate/gate.h"
#include "tests/gate/records.h"

const char* gate_program = "";  // set by main

namespace fla::gate {
namespace {

struct ToyArgs {
  TensorView x, y;
};
struct ToyBackwardArgs : ToyArgs {
  TensorView dy, dx;
};
constexpr FunctionId<ToyArgs> kToy{"chunk_toy"}, kOtherToy{"fused_toy"};
constexpr FunctionId<ToyBackwardArgs> kToyBackward{"chunk_toy_backward"}, kOtherToyBackward{"fused_toy_backward"};

struct EnvGuard {
  std::string name;
  explicit EnvGuard(std::string n, const char* value) : name(std::move(n)) {
    if (value != nullptr)
      setenv(name.c_str(), value, 1);
    else
      unsetenv(name.c_str());
  }
  ~EnvGuard() { unsetenv(name.c_str()); }
  EnvGuard(const EnvGuard&) = delete;
  EnvGuard& operator=(const EnvGuard&) = delete;
};

// Backends write their mark into y (forward) or dx (backward).
class Dispatch : public ::testing::Test {
 protected:
  struct Log {
    LogLevel level;
    std::string operation, function, backend, message;
  };
  Registry registry;
  std::vector<Log> log;
  float x = 1, y = -1, dy = 1, dx = -1;

  Dispatch() { add_function(kToy, kToyBackward); }

  void add_function(FunctionId<ToyArgs> f, FunctionId<ToyBackwardArgs> b, bool with_reference = true) {
    OpSpec<ToyArgs, ToyBackwardArgs> s(f, b, "toys");
    s.in("x", &ToyArgs::x, "B D", &ToyBackwardArgs::dx).out("y", &ToyArgs::y, "B D", &ToyBackwardArgs::dy);
    registry.add(s);
    if (with_reference) kernel(f, b, kReference, 0);
  }
  void kernel(FunctionId<ToyArgs> f, FunctionId<ToyBackwardArgs> b, const char* backend, float mark) {
    registry.add(Kernel<ToyArgs>{.function = f,
                                 .backend = backend,
                                 .name = "toy",
                                 .verify = {},
                                 .workspace = {},
                                 .launch = [mark](const ToyArgs& a, const CallInfo&, const LaunchInfo&) {
                                   *a.y.as<float>() = mark;
                                   return Status();
                                 }});
    registry.add(
        Kernel<ToyBackwardArgs>{.function = b,
                                .backend = backend,
                                .name = "toy",
                                .verify = {},
                                .workspace = {},
                                .launch = [mark](const ToyBackwardArgs& a, const CallInfo&, const LaunchInfo&) {
                                  *a.dx.as<float>() = mark;
                                  return Status();
                                }});
  }
  void verifier(const char* backend, std::function<Verdict(const ToyArgs&, const CallInfo&)> fn, float mark = 99) {
    registry.add(Kernel<ToyArgs>{.function = kToy,
                                 .backend = backend,
                                 .name = "toy",
                                 .verify = std::move(fn),
                                 .workspace = {},
                                 .launch = [mark](const ToyArgs& a, const CallInfo&, const LaunchInfo&) {
                                   *a.y.as<float>() = mark;
                                   return Status();
                                 }});
  }
  void launcher(const char* backend, std::function<Status(const ToyArgs&, const CallInfo&, const LaunchInfo&)> fn) {
    registry.add(Kernel<ToyArgs>{
        .function = kToy, .backend = backend, .name = "toy", .verify = {}, .workspace = {}, .launch = std::move(fn)});
  }
  void backend(const char* name, int priority, float mark, const char* env = "", bool default_enable = true) {
    Backend b;
    b.name = name;
    b.priority = priority;
    b.env = env;
    b.default_enable = default_enable;
    registry.add_backend("toys", b);
    if (mark >= 0) kernel(kToy, kToyBackward, name, mark);
  }

  ContextOptions options(std::string force = "", bool strict = false) {
    return {.threads = 1,
            .log =
                [this](const LogRecord& r) {
                  log.push_back({r.level, std::string(r.operation), std::string(r.function), std::string(r.backend),
                                 std::string(r.message)});
                },
            .backend = std::move(force),
            .strict = strict,
            .registry = &registry};
  }
  Status run(const Context& ctx, FunctionId<ToyArgs> f = kToy) {
    y = -1;
    ToyArgs a;
    a.x = {&x, {1, 1}};
    a.y = {&y, {1, 1}};
    return Function<ToyArgs>(f)(ctx, a);
  }
  Status run_backward(const Context& ctx) {
    dx = -1;
    ToyBackwardArgs a;
    a.x = {&x, {1, 1}};
    a.dy = {&dy, {1, 1}};
    a.dx = {&dx, {1, 1}};
    return Function<ToyBackwardArgs>(kToyBackward)(ctx, a);
  }
  Route explain(const Context& ctx) {
    ToyArgs a;
    a.x = {&x, {1, 1}};
    a.y = {&y, {1, 1}};
    auto r = Function<ToyArgs>(kToy).explain(ctx, a);
    EXPECT_TRUE(r.ok()) << r.status().message();
    return r.ok() ? *r : Route{};
  }
  // The mark of whoever served.
  float served(const Context& ctx) {
    const Status s = run(ctx);
    EXPECT_TRUE(s.ok()) << s.message();
    return y;
  }
  std::size_t logged(const std::string& backend, const std::string& part) const {
    std::size_t n = 0;
    for (const Log& l : log) n += l.backend == backend && l.message.find(part) != std::string::npos ? 1U : 0U;
    return n;
  }
};

TEST_F(Dispatch, LowerPriorityIsTriedFirst) {
  backend("five", 5, 5);
  backend("three", 3, 3);
  backend("seven", 7, 7);
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 3);
  const Route r = explain(ctx);
  ASSERT_EQ(r.steps.size(), 4U);
  EXPECT_EQ(r.steps[0].backend, "three");
  EXPECT_EQ(r.steps[1].backend, "five");
  EXPECT_EQ(r.steps[2].backend, "seven");
  EXPECT_EQ(r.steps[3].backend, kReference);
  EXPECT_EQ(r.chosen, "three");
  EXPECT_FALSE(r.by_default);
}

TEST_F(Dispatch, EqualPrioritiesKeepTheOrderOfRegistration) {
  backend("zeta", 5, 1);
  backend("alpha", 5, 2);
  EXPECT_EQ(served(Context(options())), 1);
}

TEST_F(Dispatch, TheSameNameReplacesTheEarlierObject) {
  backend("a", 5, 1);
  backend("b", 4, 2);
  backend("a", 1, -1);
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 1);
  EXPECT_EQ(explain(ctx).steps.size(), 3U);  // two backends and the reference
}

TEST_F(Dispatch, ASecondKernelOfOneNameIsRefusedAndADefect) {
  backend("a", 5, 1);
  EXPECT_TRUE(registry.defects().empty());
  const Status second = registry.add_kernel({.function = kToy.name, .backend = "a", .name = "toy", .make = {}});
  EXPECT_EQ(second.code(), Code::InvalidArgument);
  EXPECT_NE(second.message().find("toy"), std::string::npos) << second.message();
  ASSERT_EQ(registry.defects().size(), 1U);
  EXPECT_EQ(served(Context(options())), 1) << "the first one stays";
}

TEST_F(Dispatch, SeveralKernelsOfOneBackendAreTriedInTheirOrder) {
  Backend b;
  b.name = "many";
  registry.add_backend("toys", b);
  for (const auto& [name, mark, accepts] :
       {std::tuple{"first", 1.0F, false}, {"second", 2.0F, true}, {"third", 3.0F, true}})
    registry.add(Kernel<ToyArgs>{.function = kToy,
                                 .backend = "many",
                                 .name = name,
                                 .verify =
                                     [accepts = accepts](const ToyArgs&, const CallInfo& c) {
                                       return accepts ? accept()
                                                      : reject(c, [] { return std::string("not this one"); });
                                     },
                                 .workspace = {},
                                 .launch =
                                     [mark = mark](const ToyArgs& a, const CallInfo&, const LaunchInfo&) {
                                       *a.y.as<float>() = mark;
                                       return Status();
                                     }});
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 2);
  EXPECT_STREQ(last_route().kernel, "second");
  const Route r = explain(ctx);
  ASSERT_EQ(r.steps.size(), 4U);
  EXPECT_EQ(r.steps[0].reason, "not this one");
  ContextOptions third = options();
  third.kernel = "third";
  EXPECT_EQ(served(Context(third)), 3) << "the one that the context asks for";
}

TEST_F(Dispatch, OnlyTheTextZeroDisables) {
  backend("gated", 1, 1, "FLA_GATE_TEST_TOY");
  backend("next", 2, 2);
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 1);
  for (const auto& [value, expected] : {std::pair{"0", 2.0F}, {"false", 1.0F}, {"", 1.0F}, {"00", 1.0F}, {"1", 1.0F}}) {
    const EnvGuard env("FLA_GATE_TEST_TOY", value);
    EXPECT_EQ(served(ctx), expected) << "'" << value << "'";  // read at every call
  }
  const EnvGuard env("FLA_GATE_TEST_TOY", "0");
  EXPECT_EQ(explain(ctx).steps[0].outcome, RouteStep::Outcome::Disabled);
  EXPECT_EQ(logged("gated", "refused"), 0U);  // skipped without a record
}

TEST_F(Dispatch, OptInIsOffUntilItsVariableIsSet) {
  backend("opt_in", 1, 1, "FLA_GATE_TEST_TOY", false);
  backend("next", 2, 2);
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 2);
  {
    const EnvGuard env("FLA_GATE_TEST_TOY", "1");
    EXPECT_EQ(served(ctx), 1);
  }
  const EnvGuard env("FLA_GATE_TEST_TOY", "0");
  EXPECT_EQ(served(ctx), 2);
}

TEST_F(Dispatch, UnavailableIsSkippedWithoutARecord) {
  Backend b;
  b.name = "absent";
  b.priority = 1;
  b.available = [] { return false; };
  registry.add_backend("toys", b);
  int verified = 0;
  verifier("absent", [&](const ToyArgs&, const CallInfo&) {
    ++verified;
    return accept();
  });
  backend("next", 2, 2);
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 2);
  EXPECT_EQ(verified, 0);
  EXPECT_EQ(logged("absent", ""), 0U);
  EXPECT_EQ(explain(ctx).steps[0].outcome, RouteStep::Outcome::Unavailable);
}

TEST_F(Dispatch, ARefusalSaysWhyAndTheNextIsTried) {
  backend("picky", 1, -1);
  verifier("picky", [](const ToyArgs&, const CallInfo&) { return reject("D: needs 64, got 1"); });
  backend("next", 2, 2);
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 2);
  EXPECT_EQ(logged("picky", "D: needs 64, got 1"), 1U);
  const Route r = explain(ctx);
  ASSERT_NE(r.reason("picky"), nullptr);
  EXPECT_EQ(*r.reason("picky"), "D: needs 64, got 1");
}

TEST_F(Dispatch, AThrowingVerifierIsARefusal) {
  backend("throws", 1, -1);
  verifier("throws", [](const ToyArgs&, const CallInfo&) -> Verdict { throw std::runtime_error("signature changed"); });
  backend("throws_int", 2, -1);
  verifier("throws_int", [](const ToyArgs&, const CallInfo&) -> Verdict { throw 7; });
  backend("next", 3, 3);
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 3);
  EXPECT_EQ(logged("throws", "signature changed"), 1U);
  EXPECT_EQ(logged("throws_int", "refused"), 1U);
}

TEST_F(Dispatch, HitAndRefusalAreLoggedOnceEach) {
  backend("picky", 1, -1);
  int calls = 0;
  verifier("picky", [&](const ToyArgs&, const CallInfo&) { return reject("reason " + std::to_string(++calls)); });
  backend("next", 2, 2);
  add_function(kOtherToy, kOtherToyBackward);
  kernel(kOtherToy, kOtherToyBackward, "next", 4);
  const Context ctx(options());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(served(ctx), 2);
  EXPECT_EQ(calls, 5);  // verified at every call
  EXPECT_EQ(logged("picky", "refused"), 1U);
  EXPECT_EQ(logged("picky", "reason 1"), 1U);  // the first reason is the one
  EXPECT_EQ(logged("next", "hit"), 1U);
  ASSERT_TRUE(run(ctx, kOtherToy).ok());
  EXPECT_EQ(logged("next", "hit"), 2U);  // another function is another triple
  ASSERT_FALSE(log.empty());
  EXPECT_EQ(log[0].operation, "toys");
  EXPECT_EQ(log[0].function, "chunk_toy");
  EXPECT_EQ(log[0].level, LogLevel::Info);
  const Context second(options());
  EXPECT_EQ(served(second), 2);
  EXPECT_EQ(logged("next", "hit"), 3U);  // and so is another context
}

TEST_F(Dispatch, AHitIsLoggedWhenTheImplementationHasReturned) {
  backend("works", 1, -1);
  std::size_t during = 99;
  launcher("works", [&](const ToyArgs& a, const CallInfo&, const LaunchInfo&) {
    during = logged("works", "hit");
    *a.y.as<float>() = 1;
    return Status();
  });
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 1);
  EXPECT_EQ(during, 0U);
  EXPECT_EQ(logged("works", "hit"), 1U);
}

TEST_F(Dispatch, AskingForAWorkspaceIsNoHit) {
  backend("works", 1, 1);
  const Context ctx(options());
  ToyArgs a;
  a.x = {&x, {1, 1}};
  a.y = {&y, {1, 1}};
  EXPECT_TRUE(Function<ToyArgs>(kToy).workspace_bytes(ctx, a).ok());
  (void)explain(ctx);
  EXPECT_TRUE(log.empty());
}

TEST_F(Dispatch, AcceptedButMissingIsAnErrorInStrictContexts) {
  backend("hollow", 1, -1);
  registry.add(Kernel<ToyArgs>{
      .function = kToy, .backend = "hollow", .name = "toy", .verify = {}, .workspace = {}, .launch = {}});
  backend("next", 2, 2);
  const Context lenient(options());
  EXPECT_EQ(served(lenient), 2);
  EXPECT_EQ(logged("hollow", ""), 0U);
  EXPECT_EQ(explain(lenient).steps[0].outcome, RouteStep::Outcome::Missing);
  const Context strict(options("", true));
  const Status s = run(strict);
  EXPECT_EQ(s.code(), Code::Internal);
  EXPECT_NE(s.message().find("hollow"), std::string::npos) << s.message();
  EXPECT_EQ(y, -1);
  bool listed = false;
  for (const auto& d : registry.defects()) listed |= d.find("hollow") != std::string::npos;
  EXPECT_TRUE(listed);
}

TEST_F(Dispatch, ABackendThatDoesNotServeTheFunctionIsSkipped) {
  backend("other_things", 1, -1);
  backend("next", 2, 2);
  const Context ctx(options("", true));
  EXPECT_EQ(served(ctx), 2);
  EXPECT_EQ(logged("other_things", ""), 0U);
}

TEST_F(Dispatch, MisspeltRegistrationsAreDefects) {
  EXPECT_TRUE(registry.defects().empty());
  backend("real", 1, 1);
  kernel(kToy, kToyBackward, "reel", 2);
  kernel({"chunk_tyo"}, {"chunk_tyo_backward"}, "real", 2);
  std::string all;
  for (const auto& d : registry.defects()) all += d + "\n";
  EXPECT_NE(all.find("reel"), std::string::npos) << all;
  EXPECT_NE(all.find("chunk_tyo"), std::string::npos) << all;
  EXPECT_EQ(served(Context(options())), 1);
}

TEST_F(Dispatch, WithoutATakerTheReferenceServesWithAWarning) {
  backend("picky", 1, -1);
  verifier("picky", [](const ToyArgs&, const CallInfo&) { return reject("not today"); });
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 0);
  EXPECT_EQ(served(ctx), 0);
  EXPECT_EQ(logged(kReference, ""), 1U);
  EXPECT_EQ(log.back().level, LogLevel::Warning);
  const Route r = explain(ctx);
  EXPECT_TRUE(r.by_default);
  EXPECT_EQ(r.chosen, kReference);
  EXPECT_STREQ(last_route().backend, kReference);
}

TEST_F(Dispatch, WithoutAReferenceEveryRefusalIsListed) {
  add_function(kOtherToy, kOtherToyBackward, false);
  for (const char* name : {"one", "two"}) {
    backend(name, 1, -1);
    registry.add(Kernel<ToyArgs>{
        .function = kOtherToy,
        .backend = name,
        .name = "toy",
        .verify = [name](const ToyArgs&, const CallInfo&) { return reject(std::string("no, says ") + name); },
        .workspace = {},
        .launch = [](const ToyArgs&, const CallInfo&, const LaunchInfo&) { return Status(); }});
  }
  const Status s = run(Context(options()), kOtherToy);
  EXPECT_EQ(s.code(), Code::Unsupported);
  EXPECT_NE(s.message().find("fused_toy"), std::string::npos) << s.message();
  EXPECT_NE(s.message().find("no, says one"), std::string::npos) << s.message();
  EXPECT_NE(s.message().find("no, says two"), std::string::npos) << s.message();
  EXPECT_EQ(y, -1);
}

TEST_F(Dispatch, AForcedBackendServesOrTheCallFails) {
  backend("first", 1, 1);
  backend("second", 2, 2);
  backend("picky", 3, -1);
  verifier("picky", [](const ToyArgs&, const CallInfo&) { return reject("not today"); });
  EXPECT_EQ(served(Context(options("second"))), 2);
  EXPECT_EQ(served(Context(options(kReference))), 0);
  EXPECT_EQ(logged(kReference, ""), 0U);  // asked for: no warning
  Status s = run(Context(options("picky")));
  EXPECT_EQ(s.code(), Code::Unsupported);
  EXPECT_NE(s.message().find("not today"), std::string::npos) << s.message();
  s = run(Context(options("thrid")));
  EXPECT_EQ(s.code(), Code::InvalidArgument);
  EXPECT_NE(s.message().find("thrid"), std::string::npos) << s.message();
  EXPECT_NE(s.message().find("second"), std::string::npos) << s.message();
  EXPECT_EQ(y, -1);
}

TEST_F(Dispatch, AnImplementationThatThrowsReachesTheCaller) {
  backend("throws", 1, -1);
  launcher("throws",
           [](const ToyArgs&, const CallInfo&, const LaunchInfo&) -> Status { throw std::runtime_error("kernel"); });
  backend("next", 2, 2);
  const Context ctx(options());
  EXPECT_THROW((void)run(ctx), std::runtime_error);
  EXPECT_EQ(y, -1);
}

TEST_F(Dispatch, AFailingImplementationIsNotReplaced) {
  backend("fails", 1, -1);
  launcher("fails", [](const ToyArgs&, const CallInfo&, const LaunchInfo&) {
    return Status(Code::DeviceError, "chunk_toy: fails: lost");
  });
  backend("next", 2, 2);
  const Status s = run(Context(options()));
  EXPECT_EQ(s.code(), Code::DeviceError);
  EXPECT_EQ(s.message(), "chunk_toy: fails: lost");
  EXPECT_EQ(y, -1);
}

TEST_F(Dispatch, AFunctionAndItsBackwardMayTakeDifferentRoutes) {
  backend("forward_only", 1, -1);
  verifier(
      "forward_only", [](const ToyArgs&, const CallInfo&) { return accept(); }, 1);
  backend("both", 2, 2);
  const Context ctx(options());
  EXPECT_EQ(served(ctx), 1);
  EXPECT_STREQ(last_route().backend, "forward_only");
  ASSERT_TRUE(run_backward(ctx).ok());
  EXPECT_EQ(dx, 2);
  EXPECT_STREQ(last_route().backend, "both");
}

TEST_F(Dispatch, ARegistryWithoutTheFunctionSaysSo) {
  const Status s = run(Context(options()), kOtherToy);
  EXPECT_EQ(s.code(), Code::Unsupported);
  EXPECT_NE(s.message().find("fused_toy"), std::string::npos);
}

TEST_F(Dispatch, WithoutACallbackNothingIsNeeded) {
  backend("first", 1, 1);
  ContextOptions quiet = options();
  quiet.log = {};
  EXPECT_EQ(served(Context(std::move(quiet))), 1);
}

// ---- the library's registry --------------------------------------------------------------------------------------

TEST(GlobalRegistry, HasNoDefects) {
  for (const auto& d : Registry::global().defects()) ADD_FAILURE() << d;
  EXPECT_FALSE(Registry::global().entries().empty());
}

void RouteIsCpu(const Registry::Entry& e) {
  const Context ctx({.threads = 1, .strict = true});
  for (const DType t : {DType::F32, DType::BF16, DType::F16}) {
    const Case c = make_case(e.spec.name, sizes(1, 5, 1, 4, 3), {.dtype = t});
    const Outcome o = c.run(ctx);
    expect_ok(o, c.text());
    EXPECT_EQ(o.backend, "cpu") << c.text();
    if (!e.spec.backward.empty()) {
      const Outcome b = c.run_backward(ctx);
      expect_ok(b, c.text());
      EXPECT_EQ(b.backend, "cpu") << c.text();
    }
    const auto call = c.call();
    ASSERT_TRUE(call.ok());
    const auto route = call->explain(ctx);
    ASSERT_TRUE(route.ok()) << route.status().message();
    EXPECT_EQ(route->chosen, o.backend);
    EXPECT_TRUE(KernelName(o.kernel).has(route->kernel)) << o.kernel << ", not " << route->kernel;
  }
}

// Double is the reference's: refused by cpu with a reason, served all the same, unless cpu is forced.
void DoubleFallsBack(const Registry::Entry& e) {
  std::vector<std::string> seen;
  const Context ctx({.threads = 1, .log = [&](const LogRecord& r) {
                       if (r.backend.empty()) return;  // a warning about a name, not about a route
                       seen.emplace_back(std::string(r.backend) + ": " + std::string(r.message));
                     }});
  const Case c = make_case(e.spec.name, sizes(1, 5, 1, 4, 3), {.dtype = DType::F64});
  for (const bool backward : passes(e.spec)) {
    seen.clear();
    const Outcome o = backward ? c.run_backward(ctx) : c.run(ctx);
    expect_ok(o, c.text());
    EXPECT_EQ(o.backend, kReference);
    EXPECT_EQ(seen.size(), 2U);
    EXPECT_TRUE(!seen.empty() && seen[0].starts_with("cpu: refused: ") && seen[0].find("F64") != std::string::npos)
        << (seen.empty() ? "" : seen[0]);
    const Outcome forced = backward ? c.run_backward(context("cpu")) : c.run(context("cpu"));
    EXPECT_EQ(forced.status.code(), Code::Unsupported);
    EXPECT_NE(forced.status.message().find("F64"), std::string::npos) << forced.status.message();
  }
}

void EnvironmentGate(const Registry::Entry& e) {
  const Context ctx({.threads = 1});
  const Case c = make_case(e.spec.name, sizes(1, 5, 1, 4, 3));
  {
    const EnvGuard env("FLA_CPP_BACKEND_CPU", "0");
    for (const bool backward : passes(e.spec))
      EXPECT_EQ(backward ? c.run_backward(ctx).backend : c.run(ctx).backend, kReference);
  }
  {
    const EnvGuard env("FLA_CPP_BACKEND_CPU", "false");
    EXPECT_EQ(c.run(ctx).backend, "cpu");
  }
  EXPECT_EQ(c.run(ctx).backend, "cpu");
}

const bool registered = for_every_function("RouteIsCpu", RouteIsCpu) &&
                        for_every_function("DoubleFallsBack", DoubleFallsBack) &&
                        for_every_function("EnvironmentGate", EnvironmentGate);

TEST(Dispatch_MasterSwitch, IsReadWhenTheLibraryIsLoaded) {
  note_exercise("chunk_gla");
  for (const auto& [value, expected] : {std::pair{"1", 10}, {"0", 11}, {"true", 11}, {"", 11}}) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      setenv("FLA_CPP_DISABLE_DISPATCH", value, 1);
      unsetenv("GTEST_TOTAL_SHARDS");
      execl(gate_program, gate_program, "--child=route", static_cast<char*>(nullptr));
      _exit(errno == ENOEXEC ? 126 : 127);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << status;
    if (WEXITSTATUS(status) == 126) GTEST_SKIP() << "this machine cannot run the test's own program again (emulated)";
    EXPECT_EQ(WEXITSTATUS(status), expected) << "FLA_CPP_DISABLE_DISPATCH=" << value;
  }
  // Changing it later changes nothing.
  const EnvGuard env("FLA_CPP_DISABLE_DISPATCH", "1");
  EXPECT_EQ(make_case("chunk_gla", sizes(1, 5, 1, 4, 3)).run(Context({.threads = 1})).backend, "cpu");
}

}  // namespace
}  // namespace fla::gate

// In the re-executed child: 10 where the reference served with dispatch disabled, 11 where cpu served.
int gate_child(std::string_view name) {
  if (name != "route") return 2;
  using namespace fla::gate;
  const fla::Context ctx({.threads = 1});
  const Case c = make_case("chunk_gla", sizes(1, 5, 1, 4, 3));
  const Outcome o = c.run(ctx), b = c.run_backward(ctx);
  if (!o.ok() || !b.ok()) return 3;
  const auto call = c.call();
  const auto route = call->explain(ctx);
  if (!route.ok()) return 4;
  if (o.backend == fla::kReference && b.backend == fla::kReference && route->dispatch_disabled &&
      route->chosen == fla::kReference)
    return 10;
  return o.backend == "cpu" && b.backend == "cpu" && !route->dispatch_disabled ? 11 : 5;
}
