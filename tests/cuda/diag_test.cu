// The diagonal-decay engine against the double reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "tests/cuda/diag_case.h"

namespace fla::cuda {
namespace {

using Gate = DiagCase::Gate;

// A device of few multiprocessors never splits V or time, one of many splits both.
DeviceInfo device_with(int multiprocessors) {
  DeviceInfo d = *device_info(0);
  d.sm_count = multiprocessors;
  return d;
}

double limit(const DiagCase& c) {
  return c.type == DType::F32 ? (c.state_type == DType::F32 ? 3e-6 : 3e-3) : c.type == DType::F16 ? 1.5e-3 : 5e-3;
}

void expect_forward(const DiagCase& c, int multiprocessors, double most) {
  for (int i = 0; i < kOrders; ++i) {
    use_order(i);
    DiagRun run(c);
    std::string error;
    const DeviceInfo d = device_with(multiprocessors);
    const double r = run.forward(d, error);
    EXPECT_TRUE(r >= 0 && r < most) << r << " " << error << " [" << diag_forward_plan(run.device, d).text() << "] T "
                                    << c.T << " K " << c.K << " V " << c.V << " gate " << static_cast<int>(c.gate)
                                    << " order " << i;
    if (!(r >= 0 && r < most)) break;
  }
  use_order(0);
}
void expect_forward(const DiagCase& c, int multiprocessors = 1) { expect_forward(c, multiprocessors, limit(c)); }

TEST(CudaDiag, HeadGate) {
  for (const Gate gate : {Gate::None, Gate::Head, Gate::Gamma, Gate::Retention, Gate::Lightning}) {
    expect_forward({.T = 150, .gate = gate});
  }
  expect_forward({.T = 100, .H = 1, .K = 128, .V = 128, .gate = Gate::Head});
  expect_forward({.T = 70, .H = 1, .K = 256, .V = 128, .type = DType::F16, .gate = Gate::Head});
}

TEST(CudaDiag, ChannelGate) {
  expect_forward({.T = 100, .gate = Gate::Channel});
  expect_forward({.T = 70, .H = 1, .K = 128, .V = 128, .gate_type = DType::BF16, .gate = Gate::Channel});
  expect_forward({.T = 40, .H = 1, .K = 256, .V = 64, .type = DType::F16, .gate = Gate::Channel});
}

// Most of an output comes from its own block of 16 tokens. What is rounded there may add little to the rounding of the
// output itself, 1.7e-3 of it in BF16 and 2.1e-4 in F16; with operands of 16 bits it doubles both.
TEST(CudaDiag, ChannelGateWithinBlock) {
  for (const std::int64_t K : {64, 128, 256}) {
    const DiagCase c = {.T = 150, .H = 1, .K = K, .gate = Gate::Channel, .least_gate = -2, .h0 = false};
    expect_forward(c, 1, 2e-3);
    DiagCase half = c;
    half.type = DType::F16;
    half.least_gate = -0.3;  // k'' stays in range; some of the outputs comes from before
    expect_forward(half, 1, 3.2e-4);
  }
}

TEST(CudaDiag, Steps) {
  for (const Gate gate :
       {Gate::None, Gate::Head, Gate::Gamma, Gate::Retention, Gate::Lightning, Gate::Channel, Gate::Value}) {
    expect_forward({.T = 37, .type = DType::F32, .gate = gate});
    expect_forward({.T = 5, .K = 100, .V = 72, .gate = gate});
  }
  expect_forward({.T = 20, .H = 1, .K = 256, .V = 40, .type = DType::F32, .gate = Gate::Channel});
}

TEST(CudaDiag, ExtremeGates) {
  for (const DType type : {DType::F32, DType::BF16, DType::F16}) {
    expect_forward({.T = 90, .type = type, .gate = Gate::Head, .extreme = true});
    expect_forward({.T = 90, .type = type, .gate = Gate::Channel, .extreme = true});
    expect_forward({.T = 90, .type = type, .gate = Gate::Channel, .least_gate = -8});
  }
}

TEST(CudaDiag, LayoutsAndSizes) {
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    for (const DType type : {DType::BF16, DType::F32}) {
      expect_forward({.T = 40, .type = type, .gate = gate, .heads_first = true});
      expect_forward({.T = 40, .type = type, .gate = gate, .odd_rows = true});
      expect_forward({.T = 40, .type = type, .gate = gate, .columns_apart = true});
      expect_forward({.T = 40, .K = 36, .V = 72, .type = type, .gate = gate, .value_first = true});
      expect_forward({.T = 40, .K = 7, .V = 5, .type = type, .gate = gate});
      expect_forward({.T = 33, .H = 1, .K = 130, .V = 65, .type = type, .gate_type = DType::F16, .gate = gate});
      expect_forward({.B = 2, .T = 70, .type = type, .gate = gate, .reverse = true});
      expect_forward({.T = 70, .type = type, .gate = gate, .inplace = true});
      expect_forward({.T = 70, .type = type, .gate = gate, .h0 = false, .ht = false});
      expect_forward({.T = 0, .type = type, .gate = gate});
      expect_forward({.T = 71, .type = type, .state_type = DType::BF16, .gate = gate});
    }
  }
}

TEST(CudaDiag, PackedSequences) {
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    for (const DType type : {DType::BF16, DType::F32}) {
      for (const bool reverse : {false, true}) {
        expect_forward({.T = 150, .type = type, .gate = gate, .reverse = reverse, .lengths = {1, 0, 64, 17, 68}});
      }
    }
  }
}

TEST(CudaDiag, FewTokens) {
  for (const Gate gate :
       {Gate::None, Gate::Head, Gate::Gamma, Gate::Retention, Gate::Lightning, Gate::Channel, Gate::Value}) {
    for (const DType state : {DType::F32, DType::BF16, DType::F16}) {
      expect_forward({.B = 2, .T = 1, .H = 1, .state_type = state, .gate = gate, .inplace = true});
      expect_forward({.T = 3, .H = 1, .K = 100, .V = 72, .type = DType::F32, .state_type = state, .gate = gate});
    }
  }
  expect_forward({.T = 8, .H = 1, .K = 128, .V = 128, .type = DType::F32, .gate = Gate::Channel, .reverse = true});
  expect_forward({.T = 2, .H = 1, .K = 256, .V = 80, .state_type = DType::BF16, .gate = Gate::Head});
  expect_forward({.T = 8, .H = 1, .gate = Gate::Channel, .lengths = {3, 0, 1, 4}});
  expect_forward({.T = 2, .H = 1, .gate = Gate::Head, .h0 = false});
  expect_forward({.T = 2, .H = 1, .gate = Gate::Head, .ht = false});
  expect_forward({.T = 2, .H = 1, .V = 66, .gate = Gate::Head});
  expect_forward({.T = 2, .H = 1, .gate = Gate::Head, .value_first = true});
}

// States are moved in pieces of 16 bytes where their rows consist of those.
TEST(CudaDiag, PlanOfFewTokens) {
  using Kind = DiagPlan::Kind;
  const auto kind = [](const DiagCase& c) { return diag_forward_plan(DiagRun(c).device, device_with(1)).kind; };
  EXPECT_EQ(kind({.T = 8}), Kind::Decode);
  EXPECT_EQ(kind({.T = 9}), Kind::Step);
  EXPECT_EQ(kind({.T = 2, .V = 66}), Kind::Step);
  EXPECT_EQ(kind({.T = 2, .V = 68}), Kind::Decode);
  EXPECT_EQ(kind({.T = 2, .V = 68, .state_type = DType::BF16}), Kind::Step);
  EXPECT_EQ(kind({.T = 2, .value_first = true}), Kind::Step);
}

// Each with what was expected and what came.
TEST(CudaDiag, Refusals) {
  const DiagBackwardProblem good = DiagRun({.T = 4, .gate = Gate::Head}).device;
  const DeviceInfo d = device_with(1);
  EXPECT_EQ(diag_refusal(good, d), "");
  EXPECT_EQ(diag_backward_refusal(good, d), "");
  const auto refusal = [&](auto&& change) {
    DiagProblem p = good;
    change(p);
    return diag_refusal(p, d);
  };
  EXPECT_EQ(refusal([](DiagProblem& p) { p.K = 300; }), "needs K of at most 256, got 300");
  EXPECT_EQ(refusal([](DiagProblem& p) { p.q.dtype = DType::F64; }), "needs F32, F16 or BF16");
  EXPECT_EQ(refusal([](DiagProblem& p) { p.attn = p.q; }),
            "output_attentions: expected false, as this backend gives no scores, got true");
  DeviceInfo old = d;
  old.sm = 75;
  EXPECT_EQ(diag_refusal(good, old), "needs compute capability 8.0 or newer, got 7.5");
  DiagBackwardProblem p = good;
  p.V = 300;
  EXPECT_EQ(diag_backward_refusal(p, d), "needs V of at most 256, got 300");
  p = good;
  p.gv = p.v;
  EXPECT_EQ(diag_backward_refusal(p, d), "has no gradients with gates per value channel");
}

// Sequence 0 uses row 1 of the pool, sequence 1 is padding; row 0 stays as it is.
TEST(CudaDiag, StatePool) {
  for (const std::int64_t T : {1, 12}) {
    const DiagCase c = {.B = 2, .T = T, .H = 1, .gate = Gate::Head, .inplace = true};
    DiagRun pooled(c), plain(c);
    const DeviceArray<std::int32_t> rows(std::vector<std::int32_t>{1, -1});
    const DeviceInfo d = device_with(1);
    const auto before = plain.output_values(plain.device.h0);
    SlotTable slots;
    slots.indices = TensorView(rows.data(), DType::I32, std::vector<std::int64_t>{2});
    pooled.device.pool = &slots;
    ASSERT_TRUE(diag_forward(pooled.device, d, {}, {}).ok());
    DiagProblem p = plain.device;
    p.N = p.B = p.h0.shape[0] = p.ht.shape[0] = 1;
    p.h0.data = p.ht.data = static_cast<float*>(p.h0.data) + p.h0.stride[0];
    ASSERT_TRUE(diag_forward(p, d, {}, {}).ok());
    ASSERT_TRUE(wait_for_device().ok());
    const auto states = pooled.output_values(pooled.device.h0);
    EXPECT_EQ(states, plain.output_values(plain.device.h0));
    const auto half = static_cast<std::ptrdiff_t>(states.size() / 2);
    EXPECT_TRUE(std::equal(states.begin(), states.begin() + half, before.begin()));
    EXPECT_FALSE(std::equal(states.begin() + half, states.end(), before.begin() + half));
    const auto o = pooled.output_values(pooled.device.o), expected = plain.output_values(plain.device.o);
    const auto row = static_cast<std::ptrdiff_t>(o.size() / 2);
    EXPECT_TRUE(std::equal(o.begin(), o.begin() + row, expected.begin()));
    EXPECT_TRUE(std::all_of(o.begin() + row, o.end(), [](double x) { return x == 0; }));
  }
}

// Every kernel, whatever the plan would choose, with and without segments.
TEST(CudaDiag, Kernels) {
  const DeviceInfo d = device_with(1);
  for (const Gate gate : {Gate::Head, Gate::Channel, Gate::Value}) {
    for (const int K : {64, 128, 256}) {
      const DiagCase c = {.T = 70, .H = 1, .K = K, .V = K == 64 ? 72 : 136, .gate = gate};
      DiagRun first(c);
      for (DiagPlan plan : diag_alternatives(first.device, diag_forward_plan(first.device, d))) {
        plan.segments = plan.warps == 4 ? 2 : 1;
        DiagRun run(c);
        std::string error;
        const double r = run.forward(plan, d, error);
        EXPECT_TRUE(r >= 0 && r < limit(c)) << r << " " << error << " [" << plan.text() << "]";
      }
    }
  }
}

// Value columns of a block, chunk, warps and segments that were the fastest on an H200.
TEST(CudaDiag, Plan) {
  const auto choice = [](Gate gate, std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t D) {
    std::byte memory[16];
    DiagProblem p;
    p.B = p.N = B;
    p.T = T;
    p.H = H;
    p.K = p.V = D;
    const TensorView tokens(memory, DType::BF16, std::vector<std::int64_t>{B, T, H, D});
    for (TensorView* x : {&p.q, &p.k, &p.v, &p.o}) *x = tokens;
    if (gate == Gate::Channel) p.gk = tokens;
    const DiagPlan f = diag_forward_plan(p, device_with(132));
    return std::array{f.value, f.chunk, f.warps, f.segments};
  };
  using Choice = std::array<int, 4>;
  EXPECT_EQ(choice(Gate::None, 1, 8192, 96, 128), (Choice{128, 64, 8, 1}));
  EXPECT_EQ(choice(Gate::None, 2, 16384, 16, 128), (Choice{128, 64, 8, 4}));
  EXPECT_EQ(choice(Gate::None, 4, 2048, 16, 128), (Choice{64, 64, 4, 1}));
  EXPECT_EQ(choice(Gate::None, 4, 4096, 64, 128), (Choice{128, 64, 8, 1}));
  EXPECT_EQ(choice(Gate::None, 8, 2048, 32, 256), (Choice{64, 32, 4, 1}));
  EXPECT_EQ(choice(Gate::None, 8, 1024, 8, 64), (Choice{64, 64, 4, 1}));
  EXPECT_EQ(choice(Gate::Channel, 1, 8192, 96, 128), (Choice{128, 32, 8, 1}));
  EXPECT_EQ(choice(Gate::Channel, 2, 16384, 16, 128), (Choice{128, 32, 8, 4}));
  EXPECT_EQ(choice(Gate::Channel, 4, 2048, 16, 128), (Choice{64, 32, 4, 1}));
  EXPECT_EQ(choice(Gate::Channel, 4, 4096, 64, 128), (Choice{128, 32, 8, 1}));
  EXPECT_EQ(choice(Gate::Channel, 8, 2048, 32, 256), (Choice{64, 16, 4, 1}));
  EXPECT_EQ(choice(Gate::Channel, 8, 1024, 8, 64), (Choice{32, 32, 2, 1}));
}

// Many multiprocessors: V in blocks, sequences in segments.
TEST(CudaDiag, Segments) {
  for (const Gate gate : {Gate::None, Gate::Head, Gate::Channel}) {
    for (const bool reverse : {false, true}) {
      expect_forward({.T = 1100, .H = 1, .gate = gate, .reverse = reverse}, 132);
    }
    expect_forward({.T = 1100, .H = 1, .gate = gate, .h0 = false, .lengths = {900, 0, 10, 190}}, 132);
  }
  DiagRun run({.T = 1100, .H = 1, .gate = Gate::Channel});
  EXPECT_GT(diag_forward_plan(run.device, device_with(132)).segments, 1);
  // Segments do not pay where other heads fill the device.
  EXPECT_EQ(diag_forward_plan(DiagRun({.T = 1100, .H = 3, .gate = Gate::Channel}).device, device_with(0)).segments, 1);
}

// By every plan that could run it.
void expect_backward(DiagCase c, int multiprocessors = 1) {
  c.backward = true;
  const DeviceInfo d = device_with(multiprocessors);
  const std::size_t plans = diag_backward_alternatives(DiagRun(c).device, d).size();
  for (std::size_t which = 0; which < plans; ++which) {
    for (int i = 0; i < kOrders; ++i) {
      use_order(i);
      DiagRun run(c);
      std::string error;
      const DiagBackwardPlan plan = diag_backward_alternatives(run.device, d)[which];
      const auto all = run.backward(plan, d, error);
      EXPECT_EQ(error, "");
      const double limit = c.type == DType::F32 ? 1e-5 : 1e-2;
      bool good = error.empty();
      for (const auto& [name, r] : all) {
        EXPECT_LT(r, limit) << name << " [" << plan.text() << "] T " << c.T << " K " << c.K << " V " << c.V << " gate "
                            << static_cast<int>(c.gate) << " order " << i;
        good = good && r < limit;
      }
      if (!good) break;
    }
  }
  use_order(0);
}

TEST(CudaDiag, Backward) {
  for (const Gate gate : {Gate::None, Gate::Retention, Gate::Head, Gate::Channel}) {
    expect_backward({.T = 150, .gate = gate});
    expect_backward({.T = 150, .H = 1, .K = 36, .V = 64, .type = DType::F32, .gate = gate});
  }
}

TEST(CudaDiag, BackwardCases) {
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    for (const DType type : {DType::BF16, DType::F32}) {
      expect_backward({.T = 70, .H = 1, .K = 72, .V = 40, .type = type, .gate = gate, .odd_rows = true});
      expect_backward({.T = 70, .H = 1, .type = type, .gate = gate, .extreme = true, .reverse = true});
      expect_backward({.T = 200, .H = 1, .type = type, .gate = gate, .lengths = {1, 0, 130, 17, 52}});
      expect_backward({.T = 40, .H = 1, .type = type, .gate = gate, .h0 = false, .ht = false, .value_first = true});
      expect_backward({.T = 40, .H = 1, .type = type, .gate = gate, .upstream = false});
      expect_backward({.T = 0, .type = type, .gate = gate});
    }
  }
  expect_backward({.T = 40, .H = 1, .K = 130, .V = 66, .type = DType::F16, .gate = Gate::Channel});
}

// Where gates of channels decay within a few tokens, the error of dq, dk and dv is that of their own rounding to BF16,
// 1.66e-3, and little else: what is nearest in time comes from operands of two parts. From operands of one part they
// had 2.1e-3, 2.1e-3 and 3.5e-3, and dg, F32 here, 3.5e-3.
TEST(CudaDiag, PreciseChannelGradients) {
  for (const std::int64_t D : {64, 128}) {
    DiagRun run({.T = 320,
                 .H = 1,
                 .K = D,
                 .V = D,
                 .gate_type = DType::BF16,
                 .gate = Gate::Channel,
                 .least_gate = -1.5,
                 .h0 = false,
                 .ht = false,
                 .backward = true});
    const DeviceInfo d = device_with(1);
    const DiagBackwardPlan plan = diag_backward_plan(run.device, d);
    ASSERT_TRUE(plan.by_chunk);
    std::string error;
    const auto all = run.backward(plan, d, error);
    EXPECT_EQ(error, "");
    EXPECT_EQ(all.size(), 4U);
    for (const auto& [name, r] : all) EXPECT_LT(r, name == "dgk" ? 5e-4 : 1.8e-3) << name << " K " << D;
  }
}

// A gate of -inf forgets all that was, as a mask does.
TEST(CudaDiag, MaskedGates) {
  constexpr double kMask = -std::numeric_limits<double>::infinity();
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    for (const DType type : {DType::BF16, DType::F32}) {
      for (const DType of_gates : {DType::F32, DType::BF16}) {
        const DiagCase c = {.T = 70,
                            .H = 1,
                            .K = 40,
                            .V = 24,
                            .type = type,
                            .gate_type = of_gates,
                            .gate = gate,
                            .extreme = true,
                            .strongest = kMask};
        expect_forward(c);
        expect_backward(c);
      }
    }
    expect_forward({.T = 6, .H = 1, .gate = gate, .extreme = true, .strongest = kMask});
  }
}

TEST(CudaDiag, BackwardPlan) {
  const auto by_chunk = [](const DiagCase& c) {
    DiagCase backward = c;
    backward.backward = true;
    return diag_backward_plan(DiagRun(backward).device, device_with(132)).by_chunk;
  };
  EXPECT_TRUE(by_chunk({.gate = Gate::Head}));
  EXPECT_TRUE(by_chunk({.K = 128, .V = 72, .gate = Gate::Channel}));
  EXPECT_FALSE(by_chunk({.K = 130, .gate = Gate::Head}));
  EXPECT_FALSE(by_chunk({.T = 16, .gate = Gate::Head}));
  EXPECT_FALSE(by_chunk({.type = DType::F32, .gate = Gate::Head}));
}

TEST(CudaDiag, BackwardSegments) {
  for (const Gate gate : {Gate::Head, Gate::Channel}) expect_backward({.T = 1100, .H = 1, .gate = gate}, 132);
}

// Devices with 99 KB of shared memory a block: what does not fit is left to the kernels that need little.
TEST(CudaDiag, LittleSharedMemory) {
  DeviceInfo d = device_with(8);
  d.shared_per_block = 101376;
  for (const Gate gate : {Gate::Head, Gate::Channel, Gate::Value}) {
    for (const std::int64_t K : {64, 128, 256}) {
      DiagCase c{.T = 70, .H = 1, .K = K, .V = 64, .gate = gate};
      DiagRun run(c);
      const DiagPlan plan = diag_forward_plan(run.device, d);
      const bool too_wide = gate == Gate::Head ? K == 128 : gate == Gate::Channel && K >= 128;
      EXPECT_EQ(plan.kind == DiagPlan::Kind::Step, too_wide) << plan.text();
      std::string error;
      const double r = run.forward(d, error);
      EXPECT_TRUE(r >= 0 && r < 5e-3) << r << " " << error << " [" << plan.text() << "]";
      if (gate == Gate::Value) continue;
      c.backward = true;
      for (const auto& [name, x] : DiagRun(c).backward(d, error)) EXPECT_LT(x, 1e-2) << name << " K " << K;
      EXPECT_EQ(error, "");
    }
  }
}

TEST(CudaDiag, ValueGate) {
  for (const DType type : {DType::BF16, DType::F16}) {
    expect_forward({.T = 90, .type = type, .gate = Gate::Value});
    expect_forward({.T = 90, .type = type, .gate = Gate::Value, .extreme = true});
    expect_forward({.T = 90, .type = type, .gate = Gate::Value, .least_gate = -8});
  }
  expect_forward({.T = 1100, .H = 1, .gate = Gate::Value}, 132);
}

TEST(CudaDiag, LaterTokensAndReruns) {
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    for (const int multiprocessors : {1, 132}) {
      const DiagCase c = {.T = 1040, .H = multiprocessors == 1 ? 3 : 1, .gate = gate};
      DiagRun run(c);
      const DeviceInfo d = device_with(multiprocessors);
      ASSERT_TRUE(run.run_forward(d).ok());
      ASSERT_TRUE(wait_for_device().ok());
      const auto first = run.output_values(run.device.o);
      ASSERT_TRUE(run.run_forward(d).ok());
      ASSERT_TRUE(wait_for_device().ok());
      EXPECT_EQ(run.output_values(run.device.o), first);
      constexpr std::int64_t kFrom = 603;
      run.disturb_after(kFrom);
      ASSERT_TRUE(run.run_forward(d).ok());
      ASSERT_TRUE(wait_for_device().ok());
      const auto second = run.output_values(run.device.o);
      const auto kept = static_cast<std::ptrdiff_t>(kFrom * c.H * c.V);
      EXPECT_TRUE(std::equal(first.begin(), first.begin() + kept, second.begin()));
      EXPECT_NE(first, second);
    }
  }
}

// What a token brings is not seen before it, not even as the NaN that a masked product of it would be: outputs of the
// tokens before it are the same bits.
TEST(CudaDiag, NotFiniteTokens) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
  struct Kernel {
    DiagCase c;
    int segments = 1;
  };
  std::vector<Kernel> kernels;
  for (const Gate gate : {Gate::None, Gate::Head, Gate::Channel, Gate::Value}) {
    for (const DType type : {DType::BF16, DType::F16}) {
      kernels.push_back({{.T = 76, .H = 1, .K = 64, .V = 40, .type = type, .gate = gate}});
    }
    if (gate == Gate::None) continue;
    kernels.push_back({{.T = 76, .H = 1, .K = 128, .V = 72, .gate = gate}});
    kernels.push_back({{.T = 76, .H = 1, .K = 256, .V = 24, .gate = gate}});
    kernels.push_back({{.T = 150, .H = 1, .K = 64, .V = 24, .gate = gate}, 2});
    kernels.push_back({{.T = 76, .H = 1, .K = 64, .V = 24, .gate = gate, .reverse = true}});
  }
  for (const auto& [c, segments] : kernels) {
    DiagRun run(c);
    const DeviceInfo d = device_with(1);
    DiagPlan plan = diag_forward_plan(run.device, d);
    ASSERT_GT(plan.chunk, 1);
    plan.segments = segments;
    ASSERT_TRUE(run.run_forward(plan, d).ok());
    ASSERT_TRUE(wait_for_device().ok());
    const auto clean = run.output_values(run.device.o);
    // Every place of a block of 16 with NaN in v; the other inputs and infinities at some of them.
    for (std::int64_t place = 0; place < 16; ++place) {
      for (std::size_t which = 0; which < run.inputs(); ++which) {
        for (const double value : {kNaN, kInf, -kInf}) {
          const bool v = which == 2;
          if (!v && place % 5 != 3) continue;
          if (v && !std::isnan(value) && place % 5 != 2) continue;
          if (which == 3 && value == kInf) continue;  // no gate
          const std::int64_t token = (segments > 1 ? 96 : 48) + place;
          const std::int64_t at = c.reverse ? c.T - 1 - token : token;
          const double before = run.plant(which, at, 5, value);
          ASSERT_TRUE(run.run_forward(plan, d).ok());
          ASSERT_TRUE(wait_for_device().ok());
          const auto got = run.output_values(run.device.o);
          run.plant(which, at, 5, before);
          const auto first = static_cast<std::ptrdiff_t>(c.reverse ? (at + 1) * c.V : 0),
                     last = static_cast<std::ptrdiff_t>(c.reverse ? c.T * c.V : at * c.V);
          const bool same = std::equal(got.begin() + first, got.begin() + last, clean.begin() + first);
          EXPECT_TRUE(same) << "gate " << static_cast<int>(c.gate) << " type " << static_cast<int>(c.type) << " K "
                            << c.K << " segments " << segments << " input " << which << " token " << token << " value "
                            << value << " [" << plan.text() << "]";
          EXPECT_NE(got, clean);
          if (!same) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fla::cuda
