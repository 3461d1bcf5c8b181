// What is measured of the machine, on the machine: a time below it is work left out, and honest work is never below it.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "fla/core/context.h"
#include "gtest/gtest.h"
#include "tools/bench_runner.h"
#include "tools/command.h"
#include "tools/common/buffer.h"
#include "tools/common/cases.h"
#include "tools/common/machine.h"
#include "tools/compare/paired_stats.h"

namespace fla::tools {
namespace {

template <typename Work>
double best_ms(const Work& work) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 9; ++i) {
    const auto t0 = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t0).count());
  }
  return best;
}

std::vector<std::string> flags(double base, double candidate, double floor) {
  return blocking_flags({.base_ms = base, .new_ms = candidate, .floor_ms = floor, .err_base = 1e-7, .err_new = 1e-7});
}

TEST(Roof, SparesHonestWorkAndSeesASkip) {
  const Context ctx({.threads = 1});
  Roof roof = measure_roof(ctx.pool());
  for (const char* function : {"chunk_gla", "chunk_gdn", "chunk_kda"}) {
    Sizes s;
    s.T = 1024;
    s.H = 2;
    s.K = s.V = 128;
    const Case c = make_case(function, s);
    DynamicCall call = check(c.call());
    std::vector<Buffer> outputs;
    double bytes = 0.0;
    for (const auto& name : c.input_names()) bytes += static_cast<double>(c.input(name).numel() * 4);
    for (const auto& x : check(call.outputs(ctx))) {
      outputs.emplace_back(x.dtype, x.shape);
      check(call.bind(x.name, outputs.back().view()));
      bytes += static_cast<double>(outputs.back().numel() * 4);
    }
    const double flops = flops_of(call, c.sizes());
    ASSERT_GT(flops, 0.0);
    const double honest = best_ms([&] { check(call.run(ctx)); });
    const double skipped = best_ms([&] {
      for (const Buffer& b : outputs) std::memset(b.view().data, 0, static_cast<std::size_t>(b.numel()) * 4);
    });
    roof.include(measure_roof(ctx.pool()));
    const double floor = floor_ms(roof, flops, bytes);
    EXPECT_TRUE(flags(honest, honest, floor).empty()) << function << ": " << honest << " ms, floor " << floor;
    EXPECT_EQ(flags(honest, skipped, floor), std::vector<std::string>{"skip suspect"})
        << function << ": " << skipped << " ms, floor " << floor;
    EXPECT_EQ(beyond_roof(roof, honest, flops, bytes), "") << function;
    EXPECT_NE(beyond_roof(roof, skipped, flops, bytes), "") << function;
  }
}

TEST(Roof, AShareAboveOneIsABrokenMeasurement) {
  Roof roof;
  roof.gflops = 100.0;
  roof.levels = {{1e5, 50.0}, {1e9, 10.0}};
  EXPECT_EQ(beyond_roof(roof, 1.0, 1e8, 1e6), "");
  const std::string text = beyond_roof(roof, 0.99, 1e8, 1e6);
  EXPECT_NE(text.find("broken measurement: 0.99 ms"), std::string::npos) << text;
  EXPECT_EQ(beyond_roof(roof, 0.0, 1e8, 1e6), "") << "nothing was timed";
}

TEST(Roof, TheBetterOfTwoMeasurementsCounts) {
  Roof a, b;
  a.gflops = a.gflops_thread = 40.0;
  a.levels = {{1e5, 20.0}, {1e6, 12.0}, {1e9, 2.0}};
  b.gflops = b.gflops_thread = 110.0;
  b.levels = {{1e5, 15.0}, {1e6, 30.0}, {1e9, 11.0}};
  a.include(b);
  EXPECT_EQ(a.gflops, 110.0);
  EXPECT_EQ(a.levels[2].gbytes, 11.0);
  EXPECT_EQ(a.levels[0].gbytes, 30.0) << "a smaller set is no slower to read";
}

}  // namespace
}  // namespace fla::tools
