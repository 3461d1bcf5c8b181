// Options of a context that cannot be: named by its status, returned by every call, nothing computed.
#include "fla/core/context.h"

#include <gtest/gtest.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <climits>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "fla/ops/gla/gla.h"
#include "fla/registry/dynamic.h"

namespace fla {
namespace {

std::string problem(ContextOptions o) {
  const Context ctx(std::move(o));
  EXPECT_EQ(ctx.status().code(), ctx.status().ok() ? Code::Ok : Code::InvalidArgument);
  return ctx.status().message();
}

TEST(ContextOptions, GoodOnes) {
  EXPECT_EQ(problem({}), "");
  EXPECT_EQ(problem({.threads = 1}), "");
  EXPECT_EQ(problem({.threads = ThreadPool::kMaxThreads}), "");
  for (const char* backend : {"", "cpu", "reference"}) EXPECT_EQ(problem({.backend = backend}), "");
}

TEST(ContextOptions, Threads) {
  for (const int n : {-1, ThreadPool::kMaxThreads + 1, INT_MAX, INT_MIN})
    EXPECT_EQ(problem({.threads = n}),
              "context: threads: expected 0 (one per processor) to 4096, got " + std::to_string(n));
}

TEST(ContextOptions, Backend) {
  EXPECT_EQ(problem({.backend = "fast"}), "context: backend: expected one of cpu, reference, got 'fast'");
  EXPECT_EQ(problem({.backend = "a\x1b[2J"}), "context: backend: expected one of cpu, reference, got 'a\\x1b[2J'");
  const Registry none;
  EXPECT_EQ(problem({.backend = "cpu", .registry = &none}), "context: backend: expected one of reference, got 'cpu'");
}

TEST(ContextOptions, AContextThatCannotBeComputesNothing) {
  const Context ctx({.threads = -7});
  ASSERT_FALSE(ctx.status());
  EXPECT_EQ(ctx.threads(), 1);
  float x[4] = {1, 2, 3, 4}, o[4] = {-1, -1, -1, -1};
  GlaArgs a;
  a.q = a.k = a.v = a.g = {static_cast<const float*>(x), {1, 2, 1, 2}};
  a.o = {o, {1, 2, 1, 2}};
  std::vector<std::byte> memory(1 << 20);
  const std::vector<Status> all = {chunk_gla(ctx, a), chunk_gla(ctx, a, memory),
                                   chunk_gla.workspace_bytes(ctx, a).status(), chunk_gla.explain(ctx, a).status()};
  for (const Status& s : all) EXPECT_EQ(s.message(), ctx.status().message());
  auto call = DynamicCall::make(ctx.registry(), "chunk_gla");
  ASSERT_TRUE(call.ok());
  for (const char* name : {"q", "k", "v", "g"}) ASSERT_TRUE(call->set(name, a.q).ok());
  EXPECT_EQ(call->outputs(ctx).status().message(), ctx.status().message());
  ASSERT_TRUE(call->bind("out.o", a.o).ok());
  EXPECT_EQ(call->run(ctx).message(), ctx.status().message());
  for (const float y : o) EXPECT_EQ(y, -1);
}

#if defined(__linux__)
TEST(ContextOptions, Affinity) {
  const auto bad = [](std::size_t at, int got) {
    return "context: affinity[" + std::to_string(at) + "]: expected a processor that this process may run on, got " +
           std::to_string(got);
  };
  cpu_set_t mine;
  ASSERT_EQ(sched_getaffinity(0, sizeof mine, &mine), 0);
  int first = 0;
  while (!CPU_ISSET(static_cast<unsigned>(first), &mine)) ++first;
  EXPECT_EQ(problem({.threads = 2, .affinity = {first}}), "");
  EXPECT_EQ(problem({.affinity = {first, -1}}), bad(1, -1));
  EXPECT_EQ(problem({.affinity = {first, first, 1 << 20}}), bad(2, 1 << 20));
  EXPECT_EQ(problem({.affinity = {CPU_SETSIZE - 1, first}}), bad(0, CPU_SETSIZE - 1));
  // Asking has not moved the thread that asked.
  cpu_set_t after;
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&mine, &after));
}
#endif

}  // namespace
}  // namespace fla
