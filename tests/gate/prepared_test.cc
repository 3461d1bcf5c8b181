// Prepared calls: the same bits as calls, nothing allocated, and a refusal by name for memory that is not the same call's.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>

#include "fla/ops/gla/gla.h"
#include "fla/ops/retention/retention.h"
#include "tests/gate/gate.h"

namespace {
// Allocations of this thread while it counts.
thread_local bool counting = false;
thread_local long allocations = 0;

}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {
void* counted(std::size_t n) {
  if (counting) ++allocations;
  void* p = std::malloc(n == 0 ? 1 : n);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
}  // namespace
void* operator new(std::size_t n) { return counted(n); }
void* operator new[](std::size_t n) { return counted(n); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
constexpr bool kCounts = true;
#else
constexpr bool kCounts = false;  // the sanitizer has allocation functions of its own
#endif

namespace fla::gate {
namespace {

template <typename Fn>
long allocations_of(Fn&& fn) {
  allocations = 0;
  counting = true;
  fn();
  counting = false;
  return allocations;
}

// A call with all its outputs bound to memory of its own.
struct Bound {
  DynamicCall call;
  std::vector<Buffer> outputs;
  Buffer workspace;

  Bound(const Case& c, const Context& ctx, bool backward) {
    Result<DynamicCall> made = backward ? c.backward_call() : c.call();
    if (!made) throw std::runtime_error(made.status().message());
    call = std::move(*made);
    const auto list = call.outputs(ctx);
    if (!list) throw std::runtime_error(list.status().message());
    for (const auto& o : *list) {
      outputs.emplace_back(o.dtype, o.shape, tools::Fill::Poison);
      if (o.contents) tools::assign(outputs.back().view(), tools::values(o.contents));
      if (Status s = call.bind(o.name, outputs.back().view()); !s) throw std::runtime_error(s.message());
    }
    const Result<std::size_t> need = call.workspace_bytes(ctx);
    if (!need) throw std::runtime_error(need.status().message());
    workspace = Buffer::bytes(*need);
  }
  std::vector<std::vector<double>> values() const {
    std::vector<std::vector<double>> all;
    for (const Buffer& b : outputs) all.push_back(tools::values(b.view()));
    return all;
  }
};

std::vector<Case> small_cases(const FunctionSpec& spec) {
  std::vector<Case> list = {with_states(make_case(spec.name, sizes(1, 1, 1, 4, 4))),
                            with_states(make_case(spec.name, sizes(2, 21, 2, 12, 17)))};
  if (takes(spec, "cu_seqlens")) list.push_back(with_states(make_case(spec.name, packed({0, 1, 1, 20}, 2, 12, 17))));
  return list;
}

void Prepared(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Context& ctx = context(backend, 1);
    for (const Case& plain : small_cases(e.spec)) {
      const Case c = plain.prepared();
      for (const bool backward : passes(e.spec)) {
        Bound call(c, ctx, backward), other(c, ctx, backward);
        ASSERT_TRUE(call.call.run(ctx, call.workspace.span())) << c.text();
        const Result<PreparedCall> p = other.call.prepare(ctx);
        ASSERT_TRUE(p) << c.text() << ": " << p.status().message();
        EXPECT_EQ(p->workspace_bytes(), other.workspace.span().size()) << c.text();
        EXPECT_STREQ(p->backend(), backend.c_str());
        const fla::RunOptions run{.workspace = other.workspace.span()};
        Status s = p->run(run);
        EXPECT_TRUE(s) << c.text() << ": " << s.message();
        EXPECT_EQ(call.values(), other.values()) << c.text() << " prepared";

        // The same call on other memory.
        Bound moved(c, ctx, backward);
        s = p->run(moved.call.args(), run);
        EXPECT_TRUE(s) << c.text() << " on other memory: " << s.message();
        EXPECT_EQ(call.values(), moved.values()) << c.text() << " prepared, on other memory";

        if (!kCounts) continue;
        EXPECT_EQ(allocations_of([&] { s = call.call.run(ctx, call.workspace.span()); }), 0)
            << c.text() << ": a call with its workspace allocates";
        EXPECT_EQ(allocations_of([&] { s = p->run(run); }), 0) << c.text() << ": a prepared call allocates";
        EXPECT_EQ(allocations_of([&] { s = p->run(other.call.args(), run); }), 0)
            << c.text() << ": a prepared call on other memory allocates";
      }
    }
  }
}

// A kernel's name is on its implementation's list, and a context can ask for it.
void KernelNames(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Context& ctx = context(backend, 1);
    for (const bool backward : passes(e.spec)) {
      const Case c = small_cases(e.spec)[1].prepared();
      const Bound call(c, ctx, backward);
      const Result<Route> route = call.call.explain(ctx);
      ASSERT_TRUE(route) << route.status().message();
      bool listed = false;
      for (const auto& candidate : call.call.entry().candidates)
        if (candidate.backend->name == backend && candidate.kernel != nullptr)
          for (const std::string& name : candidate.kernel->kernel_names(nullptr))
            listed |= KernelName(route->kernel).has(name);
      EXPECT_TRUE(listed) << route->kernel << " is not on the list of its backend's kernels";
      KernelName(route->kernel).for_each([&](std::string_view name) {
        const Context forced({.threads = 1, .backend = backend, .kernel = std::string(name)});
        EXPECT_TRUE(call.call.run(forced, call.workspace.span())) << name;
      });
      const Context none({.threads = 1, .backend = backend, .kernel = "no.such.kernel"});
      const Status s = call.call.run(none, call.workspace.span());
      EXPECT_EQ(s.code(), Code::Unsupported);
      EXPECT_NE(s.message().find("no.such.kernel"), std::string::npos) << s.message();
    }
  }
}

struct GlaMemory {
  std::vector<float> q, k, v, g, o, s, workspace;
  GlaArgs a;
  explicit GlaMemory(std::int64_t T = 5, std::int64_t K = 8)
      : q(static_cast<std::size_t>(T * K), 0.5F),
        k(q),
        v(q),
        g(q.size(), -0.1F),
        o(q.size()),
        s(static_cast<std::size_t>(K * K)),
        workspace(1 << 16) {
    a.q = {q.data(), {1, T, 1, K}}, a.k = {k.data(), {1, T, 1, K}}, a.v = {v.data(), {1, T, 1, K}};
    a.g = {g.data(), {1, T, 1, K}}, a.o = {o.data(), {1, T, 1, K}}, a.final_state = {s.data(), {1, 1, K, K}};
  }
  std::span<std::byte> memory() { return std::as_writable_bytes(std::span(workspace)); }
};

void expect_refused(const Status& s, const char* text) {
  EXPECT_EQ(s.code(), Code::InvalidArgument) << s.message();
  EXPECT_NE(s.message().find(text), std::string::npos) << s.message();
}

TEST(PreparedCall, RefusesAnotherCallByNameAndLeavesOutputsAlone) {
  const Context ctx({.threads = 1});
  GlaMemory m;
  const auto p = chunk_gla.prepare(ctx, m.a);
  ASSERT_TRUE(p) << p.status().message();
  ASSERT_TRUE(p->run(m.memory()));
  const std::vector<float> before = m.o;

  GlaMemory longer(6);
  expect_refused(p->run(longer.a, longer.memory()), "q: the call was prepared for shape [1,5,1,8], got [1,6,1,8]");
  GlaArgs a = m.a;
  a.k.stride[1] = 0;
  expect_refused(p->run(a, m.memory()), "k: the call was prepared for strides");
  a = m.a;
  a.v.dtype = DType::BF16;
  expect_refused(p->run(a, m.memory()), "v: the call was prepared for dtype F32, got BF16");
  a = m.a;
  a.g.device = {DeviceType::Cuda, 0};
  expect_refused(p->run(a, m.memory()), "g: the call was prepared for memory on cpu:0, got cuda:0");
  a = m.a;
  a.q.data = reinterpret_cast<std::byte*>(m.q.data()) + 2;
  expect_refused(p->run(a, m.memory()), "q: the call was prepared for memory at a multiple of 4 bytes");
  a = m.a;
  a.final_state = {};
  expect_refused(p->run(a, m.memory()), "final_state: the call was prepared for a tensor, got none");
  a = m.a;
  a.scale = 2.0;
  expect_refused(p->run(a, m.memory()), "scale: the call was prepared for none, got 2");
  a = m.a;
  a.o.data = m.q.data();
  expect_refused(p->run(a, m.memory()), "o: overlaps q");
  a = m.a;
  a.k.data = nullptr;
  expect_refused(p->run(a, m.memory()), "k: data pointer is null");
  EXPECT_EQ(before, m.o);
  const Status little = p->PreparedCall::run(fla::RunOptions{.workspace = m.memory().first(8)});
  EXPECT_EQ(little.code(), Code::OutOfMemory);
  EXPECT_NE(little.message().find("workspace: needs"), std::string::npos) << little.message();
  expect_refused(PreparedCall().run(fla::RunOptions{}), "empty");
}

TEST(PreparedCall, RefusesOtherBoundaries) {
  const Context ctx({.threads = 1});
  GlaMemory m(8);
  std::int64_t cu[] = {0, 3, 8};
  std::vector<float> states(2 * 64);
  m.a.cu_seqlens = {cu, {3}};
  m.a.final_state = {states.data(), {2, 1, 8, 8}};
  const auto p = chunk_gla.prepare(ctx, m.a);
  ASSERT_TRUE(p) << p.status().message();
  ASSERT_TRUE(p->run(m.memory()));
  cu[1] = 4;
  expect_refused(p->run(m.memory()), "cu_seqlens: the call was prepared for boundaries whose entry 1 is 3, got 4");
}

TEST(PreparedCall, OutlivesItsContextOnlyToSaySo) {
  GlaMemory m;
  Result<fla::Prepared<GlaArgs>> p(Status(Code::Internal, ""));
  {
    const Context ctx({.threads = 1});
    p = chunk_gla.prepare(ctx, m.a);
    ASSERT_TRUE(p) << p.status().message();
    ASSERT_TRUE(p->run(m.memory()));
  }
  expect_refused(p->run(m.memory()), "the context that the call was prepared on is gone");
}

TEST(PreparedCall, OneThreadAtATime) {
  const Context ctx({.threads = 1});
  GlaMemory m(4000, 64);
  m.workspace.resize(1 << 22);
  const auto p = chunk_gla.prepare(ctx, m.a);
  ASSERT_TRUE(p) << p.status().message();
  std::atomic<bool> stop{false};
  std::atomic<long> good{0};
  std::thread other([&] {
    while (!stop) good += p->run(m.memory()).ok() ? 1 : 0;
  });
  bool seen = false;
  GlaMemory mine(4000, 64);
  mine.workspace.resize(1 << 22);
  for (int i = 0; i < 100000 && !seen; ++i) {
    const Status s = p->run(mine.a, mine.memory());
    if (s.ok()) continue;
    expect_refused(s, "is running in another thread");
    seen = true;
  }
  stop = true;
  other.join();
  EXPECT_TRUE(seen);
}

TEST(PreparedCall, AContextWaitsForRunsBeforeItGoes) {
  GlaMemory m(4000, 64);
  m.workspace.resize(1 << 22);
  for (int round = 0; round < 5; ++round) {
    auto ctx = std::make_unique<Context>(ContextOptions{.threads = 2});
    const auto p = chunk_gla.prepare(*ctx, m.a);
    ASSERT_TRUE(p) << p.status().message();
    std::atomic<bool> ran{false};
    std::thread other([&] {
      for (Status s = p->run(m.memory()); s.ok(); s = p->run(m.memory())) ran = true;
    });
    while (!ran) std::this_thread::yield();
    ctx.reset();
    other.join();
  }
}

// What serving does: one call, prepared once, whose state and tokens move.
TEST(PreparedCall, DecodesWithOneCall) {
  const Context ctx({.threads = 1});
  constexpr std::int64_t T = 9, K = 8;
  GlaMemory whole(T), step(1);
  for (std::size_t i = 0; i < whole.q.size(); ++i) {
    whole.q[i] = static_cast<float>(i % 7) * 0.1F;
    whole.k[i] = static_cast<float>(i % 5) * 0.2F;
    whole.v[i] = static_cast<float>(i % 3) * 0.3F;
  }
  ASSERT_TRUE(fused_recurrent_gla(ctx, whole.a, whole.memory()));
  std::vector<float> state(K * K), o(static_cast<std::size_t>(T * K));
  GlaArgs a = step.a;
  a.initial_state = a.final_state = {state.data(), {1, 1, K, K}};
  const auto at = [&](std::vector<float>& x, std::int64_t t) { return x.data() + t * K; };
  const auto p = fused_recurrent_gla.prepare(ctx, a);
  ASSERT_TRUE(p) << p.status().message();
  for (std::int64_t t = 0; t < T; ++t) {
    a.q.data = at(whole.q, t), a.k.data = at(whole.k, t), a.v.data = at(whole.v, t), a.g.data = at(whole.g, t);
    a.o.data = at(o, t);
    const Status s = p->run(a, step.memory());
    ASSERT_TRUE(s) << s.message();
  }
  EXPECT_EQ(o, whole.o);
  EXPECT_EQ(state, whole.s);
}

const bool registered = for_every_function("Prepared", Prepared) && for_every_function("KernelNames", KernelNames);

}  // namespace
}  // namespace fla::gate
