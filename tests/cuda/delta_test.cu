// The CUDA engine of the delta rule against the double-precision recurrence.
#include <gtest/gtest.h>

#include "fla/engine/delta/cuda/entry.h"
#include "fla/engine/delta/cuda/launches.h"
#include "fla/kernels/cuda/launch.h"
#include "tests/cuda/delta_case.h"

namespace fla::cuda {
namespace {

using Gate = DeltaCase::Gate;

DeviceInfo device() {
  const auto info = device_info(0);
  return info ? *info : DeviceInfo{};
}

void run_delta(const DeltaProblem& p, const DeviceInfo& info) {
  const std::size_t bytes = delta_forward_workspace(p, info);
  const DeviceMemory ws(bytes);
  const Status s = delta_forward(p, info, {}, {static_cast<std::byte*>(ws.data()), bytes});
  ASSERT_TRUE(s.ok()) << s.message();
  const Status done = wait_for_device();
  ASSERT_TRUE(done.ok()) << done.message();
}

// Runs the case in every order of threads and expects the kernel, results within `limit`, and equal bits.
void check(const DeltaCase& c, DeltaKernel kernel, double limit, int multiprocessors = 132) {
  DeltaData d(c);
  DeviceInfo info = device();
  info.sm_count = multiprocessors;
  const DeltaPlan plan = delta_forward_plan(d.device, info);
  EXPECT_EQ(plan.kernel, kernel) << delta_forward_text(d.device, plan);
  ASSERT_TRUE(run_delta_reference(d.host).ok());
  std::vector<std::byte> first;
  for (int order = 0; order < kOrders; ++order) {
    use_order(order);
    run_delta(d.device, info);
    if (::testing::Test::HasFatalFailure()) return;
    const auto bytes = d.o.device_bytes();
    if (order == 0) {
      first = bytes;
      const double o = relative_rms(d.o.device_values(), d.o_ref.host_values());
      const double ht = relative_rms(d.ht.device_values(), d.ht_ref.host_values());
      EXPECT_LE(o, limit);
      EXPECT_LE(ht, limit);
      if (c.states) {
        EXPECT_LE(relative_rms(d.h.device_values(), d.h_ref.host_values()), limit);
      }
    } else {
      EXPECT_TRUE(bytes == first) << "order " << order;
    }
  }
}

constexpr double kExact = 2e-6, kSixteen = 4e-3;

TEST(CudaDeltaToken, PlainRuleWithoutGate) {
  check({.B = 2,
         .T = 37,
         .H = 2,
         .HV = 2,
         .K = 40,
         .V = 33,
         .type = DType::F32,
         .gate = Gate::None,
         .normalize = false,
         .erase = Erase::Plain},
        DeltaKernel::Token, kExact);
}
TEST(CudaDeltaToken, GateOfHeadInOperator) {
  check({.T = 50,
         .H = 1,
         .HV = 2,
         .K = 128,
         .V = 20,
         .type = DType::F32,
         .activation = GateActivation::Kind::Softplus,
         .beta_sigmoid = 2.0,
         .state_v_first = true},
        DeltaKernel::Token, kExact);
}
TEST(CudaDeltaToken, GateOfChannelsPacked) {
  check({.T = 45,
         .H = 1,
         .HV = 2,
         .K = 20,
         .V = 24,
         .type = DType::F32,
         .cu = {0, 0, 17, 18, 45},
         .gate = Gate::Channel,
         .strong_share = 0.3F,
         .activation = GateActivation::Kind::None,
         .states = true,
         .h_chunk = 16},
        DeltaKernel::Token, kExact);
}
TEST(CudaDeltaToken, Reverse) {
  check({.T = 35, .K = 16, .V = 8, .type = DType::F32, .reverse = true}, DeltaKernel::Token, kExact);
}
TEST(CudaDeltaToken, StridesThatNoVectorAccessServes) {
  check({.T = 20, .K = 64, .V = 32, .strided = true}, DeltaKernel::Token, kSixteen);
}

TEST(CudaDeltaChunk, NoGate) {
  check({.B = 2, .T = 70, .H = 1, .HV = 1, .gate = Gate::None, .normalize = false, .erase = Erase::Plain},
        DeltaKernel::Chunk, kSixteen);
}
TEST(CudaDeltaChunk, GateOfHead) {
  check({.T = 101, .H = 1, .HV = 2, .K = 128, .V = 64}, DeltaKernel::Chunk, kSixteen);
}
TEST(CudaDeltaChunk, ManyBlocks) {
  check({.B = 2, .T = 101, .H = 1, .HV = 2, .K = 64, .V = 32}, DeltaKernel::Chunk, kSixteen, 1);
}
TEST(CudaDeltaChunk, GateOfHeadHalf) {
  check({.T = 65, .H = 1, .HV = 1, .K = 128, .V = 32, .type = DType::F16}, DeltaKernel::Chunk, 1e-3);
}
TEST(CudaDeltaChunk, StrongGateOfHead) {
  check({.T = 100, .H = 1, .HV = 1, .strong_share = 0.3F, .zero_share = 0.3F}, DeltaKernel::Chunk, kSixteen);
}
TEST(CudaDeltaChunk, GateOfHeadInOperator) {
  check({.T = 40,
         .H = 1,
         .HV = 2,
         .K = 64,
         .V = 48,
         .activation = GateActivation::Kind::Softplus,
         .beta_sigmoid = 2.0,
         .state_v_first = true},
        DeltaKernel::Chunk, kSixteen);
}
TEST(CudaDeltaChunk, PackedWithEmptySequences) {
  check({.T = 150, .H = 1, .HV = 1, .cu = {0, 0, 1, 33, 33, 97, 150, 150}, .states = true}, DeltaKernel::Chunk,
        kSixteen);
}
TEST(CudaDeltaChunk, WideKey) { check({.T = 64, .H = 1, .HV = 1, .K = 256, .V = 32}, DeltaKernel::Chunk, kSixteen); }
TEST(CudaDeltaChunk, NarrowKey) { check({.T = 64, .H = 1, .HV = 1, .K = 40, .V = 24}, DeltaKernel::Chunk, kSixteen); }
// A pool of states after a call and the state after every token, within `limit` of the reference.
void check_pool(const DeltaCase& c, double limit, double state_limit, DeltaKernel kernel = DeltaKernel::Token) {
  DeltaData first(c);
  ASSERT_TRUE(run_delta_reference(first.host).ok());
  std::vector<std::byte> o, pool;
  for (int order = 0; order < kOrders; ++order) {
    use_order(order);
    DeltaData d(c);
    EXPECT_EQ(delta_forward_plan(d.device, device()).kernel, kernel);
    run_delta(d.device, device());
    if (::testing::Test::HasFatalFailure()) return;
    if (order == 0) {
      o = d.o.device_bytes();
      pool = d.h0.device_bytes();
      EXPECT_LE(relative_rms(d.o.device_values(), first.o_ref.host_values()), limit);
      EXPECT_LE(relative_rms(d.h0.device_values(), first.ht_ref.host_values()), state_limit);
      if (c.steps) {
        EXPECT_LE(relative_rms(d.steps.device_values(), first.steps_ref.host_values()), state_limit);
      }
    }
    EXPECT_TRUE(d.o.device_bytes() == o) << "order " << order;
    EXPECT_TRUE(d.h0.device_bytes() == pool) << "order " << order;
  }
}
TEST(CudaDeltaPool, OneTokenWithPadding) {
  check_pool({.B = 4, .T = 1, .H = 1, .HV = 2, .K = 128, .V = 128, .pool = 6, .indices = {4, -1, 0, 5}}, kSixteen,
             kExact, DeltaKernel::Decode);
}
TEST(CudaDeltaPool, SixteenBitStates) {
  for (const DType type : {DType::BF16, DType::F16}) {
    for (const bool v_first : {false, true}) {
      check_pool({.B = 3,
                  .T = 2,
                  .H = 1,
                  .HV = 2,
                  .K = 64,
                  .V = 40,
                  .gate = Gate::Channel,
                  .state_v_first = v_first,
                  .state_type = type,
                  .pool = 5,
                  .indices = {2, 0, 4}},
                 kSixteen, kSixteen, v_first ? DeltaKernel::Token : DeltaKernel::Decode);
    }
  }
}
TEST(CudaDeltaPool, ASlotForEveryToken) {
  check_pool({.B = 3,
              .T = 3,
              .H = 1,
              .HV = 1,
              .K = 256,
              .V = 24,
              .type = DType::F32,
              .gate = Gate::Channel,
              .activation = GateActivation::Kind::Bounded,
              .beta_sigmoid = 1.0,
              .state_v_first = true,
              .pool = 12,
              .columns = 4,
              .indices = {3, 1, 2, 0, -1, -1, -1, -1, 11, 10, 9, 8},
              .accepted = {4, 1, 2},
              .steps = true},
             kExact, kExact);
}
TEST(CudaDeltaPool, ASlotForEveryTokenOfWholeRows) {
  for (const DType type : {DType::F32, DType::F16}) {
    check_pool({.B = 3,
                .T = 3,
                .H = 1,
                .HV = 2,
                .K = 200,
                .V = 72,
                .type = DType::F32,
                .gate = Gate::Channel,
                .activation = GateActivation::Kind::Softplus,
                .beta_sigmoid = 2.0,
                .state_type = type,
                .pool = 12,
                .columns = 4,
                .indices = {3, 1, 2, 0, -1, -1, -1, -1, 11, 10, 9, 8},
                .accepted = {4, 1, 2},
                .steps = true},
               kExact, type == DType::F32 ? kExact : kSixteen, DeltaKernel::Decode);
  }
}
TEST(CudaDeltaPool, PlainRuleWithoutTable) {
  check_pool({.B = 2,
              .T = 8,
              .H = 1,
              .HV = 1,
              .K = 37,
              .V = 16,
              .type = DType::F32,
              .gate = Gate::None,
              .normalize = false,
              .pool = 2,
              .erase = Erase::Plain},
             kExact, kExact, DeltaKernel::Decode);
}
TEST(CudaDeltaToken, GatesInDouble) {
  check({.T = 40, .H = 1, .HV = 1, .K = 64, .V = 32, .gate = Gate::Channel, .gate_type = DType::F64},
        DeltaKernel::Token, kSixteen);
}
TEST(CudaDeltaPool, NarrowStatesWithoutTable) {
  check_pool({.B = 2, .T = 8, .H = 1, .HV = 1, .K = 37, .V = 19, .type = DType::F32, .pool = 2, .steps = true}, kExact,
             kExact);
}
TEST(CudaDeltaPool, PackedSequencesOfAnyLength) {
  check_pool({.T = 21,
              .H = 1,
              .HV = 1,
              .K = 32,
              .V = 16,
              .type = DType::F32,
              .cu = {0, 0, 17, 18, 21},
              .pool = 7,
              .indices = {6, 2, 5, -1}},
             kExact, kExact);
}

TEST(CudaDeltaToken, NoTokens) { check({.T = 0, .H = 1, .HV = 1}, DeltaKernel::Token, 0.0); }
TEST(CudaDeltaChunk, NoTokens) { check({.T = 0, .H = 1, .HV = 1, .cu = {0, 0, 0}}, DeltaKernel::Chunk, 0.0); }

TEST(CudaDeltaChunk, GateOfChannels) {
  check({.T = 101, .H = 1, .HV = 2, .K = 128, .V = 64, .gate = Gate::Channel}, DeltaKernel::Chunk, kSixteen);
}
TEST(CudaDeltaChunk, StrongGateOfChannels) {
  check({.T = 100, .H = 1, .HV = 1, .gate = Gate::Channel, .strong_share = 0.3F, .zero_share = 0.3F},
        DeltaKernel::Chunk, kSixteen);
}
TEST(CudaDeltaChunk, GateOfChannelsInOperator) {
  check({.T = 40,
         .H = 1,
         .HV = 2,
         .K = 40,
         .V = 48,
         .gate = Gate::Channel,
         .gate_type = DType::BF16,
         .activation = GateActivation::Kind::Bounded,
         .beta_sigmoid = 1.0},
        DeltaKernel::Chunk, kSixteen);
}
TEST(CudaDeltaChunk, GateOfChannelsPacked) {
  check({.T = 150,
         .H = 1,
         .HV = 1,
         .K = 256,
         .V = 32,
         .cu = {0, 0, 1, 33, 33, 97, 150, 150},
         .gate = Gate::Channel,
         .states = true},
        DeltaKernel::Chunk, kSixteen);
}

void run_plan(const DeltaProblem& p, const DeltaPlan& plan) {
  ASSERT_EQ(plan.kernel, DeltaKernel::Chunk) << delta_forward_text(p, plan);
  const bool bf = p.q.dtype == DType::BF16;
  const std::size_t bytes =
      bf ? delta_chunk_forward_workspace<bf16>(p, plan) : delta_chunk_forward_workspace<f16>(p, plan);
  const DeviceMemory ws(bytes);
  const std::span<std::byte> space{static_cast<std::byte*>(ws.data()), bytes};
  const Status s = bf ? delta_chunk_forward<bf16>(p, plan, {}, space) : delta_chunk_forward<f16>(p, plan, {}, space);
  ASSERT_TRUE(s.ok()) << s.message();
  const Status done = wait_for_device();
  ASSERT_TRUE(done.ok()) << done.message();
}
// With blocks of `columns` value channels and time cut every `chunks` chunks of 32 tokens.
void run_segments(const DeltaProblem& p, std::int64_t chunks, std::int64_t columns = kDeltaColumns) {
  run_plan(p, delta_chunk_plan(p, device(), columns, chunks));
}
void check_segments(const DeltaCase& c, std::int64_t chunks, double limit = kSixteen,
                    std::int64_t columns = kDeltaColumns) {
  DeltaData d(c);
  ASSERT_TRUE(run_delta_reference(d.host).ok());
  std::vector<std::byte> o, ht;
  for (int order = 0; order < kOrders; ++order) {
    use_order(order);
    run_segments(d.device, chunks, columns);
    if (::testing::Test::HasFatalFailure()) return;
    if (order == 0) {
      o = d.o.device_bytes();
      ht = d.ht.device_bytes();
      EXPECT_LE(relative_rms(d.o.device_values(), d.o_ref.host_values()), limit);
      EXPECT_LE(relative_rms(d.ht.device_values(), d.ht_ref.host_values()), limit);
    } else {
      EXPECT_TRUE(d.o.device_bytes() == o && d.ht.device_bytes() == ht) << "order " << order;
    }
  }
}

TEST(CudaDeltaSegments, NoGate) {
  check_segments({.B = 2, .T = 300, .H = 1, .HV = 1, .K = 64, .V = 40, .gate = Gate::None, .erase = Erase::Plain}, 2);
}
TEST(CudaDeltaSegments, GateOfHead) {
  check_segments({.T = 201, .H = 1, .HV = 2, .K = 128, .V = 136, .gate_divisor = 16.0F}, 2);
}
TEST(CudaDeltaSegments, WideBlocks) {
  for (const Gate gate : {Gate::None, Gate::Head, Gate::Channel}) {
    for (const std::int64_t chunks : {0, 2}) {
      check_segments({.T = 170,
                      .H = 1,
                      .HV = 2,
                      .K = 128,
                      .V = 104,
                      .cu = {0, 0, 1, 140, 170},
                      .gate = gate,
                      .gate_divisor = 16.0F,
                      .erase = gate == Gate::None ? Erase::Plain : Erase::Decayed},
                     chunks, kSixteen, kDeltaWide);
    }
  }
}
TEST(CudaDeltaSegments, GateOfHeadHalf) {
  check_segments({.T = 160, .H = 1, .HV = 1, .K = 128, .V = 64, .type = DType::F16, .gate_divisor = 16.0F}, 1, 1e-3);
}
TEST(CudaDeltaSegments, GateOfChannels) {
  for (const std::int64_t K : {64, 104}) {
    check_segments({.T = 201, .H = 1, .HV = 2, .K = K, .V = 72, .gate = Gate::Channel, .gate_divisor = 16.0F}, 2);
  }
}
TEST(CudaDeltaSegments, StrongGates) {
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    check_segments({.T = 170, .H = 1, .HV = 1, .gate = gate, .strong_share = 0.02F, .zero_share = 0.6F}, 1);
  }
}
TEST(CudaDeltaSegments, PackedWithEmptySequences) {
  check_segments({.T = 517,
                  .H = 1,
                  .HV = 2,
                  .cu = {0, 0, 1, 65, 65, 129, 192, 321, 321, 517, 517},
                  .gate_divisor = 16.0F,
                  .state_v_first = true},
                 2);
}
// Of the segments some forget the state that enters them, from the first on, in a row, and with others between.
TEST(CudaDeltaSegments, GatesThatForget) {
  for (const float share : {0.04F, 0.3F}) {
    check_segments({.T = 1000, .H = 1, .HV = 3, .strong_share = share, .strong = -60.0F, .zero_share = 0.6F}, 2);
  }
  check_segments({.T = 700, .H = 1, .HV = 1, .gate_divisor = 0.5F, .normalize = false}, 20);
}
// A gate that would forget beside a step that makes the state as much larger: e^g |1 - beta |k|^2| = 1.
TEST(CudaDeltaSegments, GatesThatAStepUndoes) {
  const DeltaCase c{.T = 200, .H = 1, .HV = 1, .K = 64, .V = 32, .normalize = false};
  DeltaData d(c);
  const auto fill = [](Twin& t, float x) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(t.view.numel()); ++i) t.set(i, x);
    t.device->upload(t.host.data());
  };
  fill(d.k, 0.125F);
  fill(d.beta, 17.0F);
  fill(d.g, -std::log(16.0F));
  ASSERT_TRUE(run_delta_reference(d.host).ok());
  run_segments(d.device, 2);
  // Nothing falls, so roundings add up.
  EXPECT_LE(relative_rms(d.o.device_values(), d.o_ref.host_values()), 2.0 * kSixteen);
  EXPECT_LE(relative_rms(d.ht.device_values(), d.ht_ref.host_values()), 2.0 * kSixteen);
}
TEST(CudaDeltaSegments, NoTokens) { check_segments({.T = 0, .H = 1, .HV = 1, .cu = {0, 0, 0}}, 2, 0.0); }
TEST(CudaDeltaSegments, NoStates) {
  DeltaData d({.T = 130, .H = 1, .HV = 1, .gate_divisor = 16.0F, .initial = false});
  ASSERT_TRUE(run_delta_reference(d.host).ok());
  DeltaProblem p = d.device;
  p.ht = {};
  run_segments(p, 1);
  EXPECT_LE(relative_rms(d.o.device_values(), d.o_ref.host_values()), kSixteen);
}
TEST(CudaDeltaSegments, CutWhereHeadsAreFewAndSequencesLong) {
  DeltaData d({.T = 64, .H = 1, .HV = 1});
  DeviceInfo info = device();
  info.sm_count = 132;
  DeltaProblem p = d.device;
  p.T = 32768;
  p.HV = 8;
  p.K = p.V = 128;
  const DeltaPlan plan = delta_forward_plan(p, info);
  EXPECT_GT(plan.segments, 1);
  EXPECT_GE(plan.segment * plan.segments * 32, p.T);
  EXPECT_LT(plan.segment * (plan.segments - 1) * 32, p.T);
  EXPECT_NE(plan.text().find("time cut every "), std::string::npos) << plan.text();
  EXPECT_GT(delta_forward_workspace(p, info),
            delta_chunk_forward_workspace<bf16>(p, delta_chunk_plan(p, info, kDeltaColumns, 0)));
  // Half of the transfers are expected to be forgotten where a head has a gate.
  p.HV = 32;
  EXPECT_EQ(delta_forward_plan(p, info).segments, 2);
  p.g = {};
  EXPECT_EQ(delta_forward_plan(p, info).segments, 1);
  p.g = d.device.g;
  p.HV = 8;
  p.h = p.h0;
  EXPECT_EQ(delta_forward_plan(p, info).segment, 0);
  p.h = {};
  p.HV = 64;
  EXPECT_EQ(delta_forward_plan(p, info).segment, 0);
  p.HV = 8;
  p.T = 512;
  EXPECT_EQ(delta_forward_plan(p, info).segment, 0);
}
TEST(CudaDeltaSegments, RowsDoNotDependOnLaterOnes) {
  constexpr std::int64_t kChanged = 100;
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    const DeltaCase c{.T = 200, .H = 1, .HV = 1, .gate = gate, .gate_divisor = 16.0F};
    DeltaCase other = c;
    other.seed = 2;
    DeltaData a(c), b(other);
    run_segments(a.device, 1);
    const auto rows_of = [&](const Twin& t) {
      const auto bytes = t.device_bytes();
      return std::vector<std::byte>(
          bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(bytes.size() / static_cast<std::size_t>(c.T) *
                                                                     static_cast<std::size_t>(kChanged)));
    };
    const auto before = rows_of(a.o);
    for (auto x : {&DeltaData::q, &DeltaData::k, &DeltaData::v, &DeltaData::g, &DeltaData::beta}) {
      const std::vector<std::byte>& from = (b.*x).host;
      std::vector<std::byte> mixed = (a.*x).host;
      const auto at =
          static_cast<std::ptrdiff_t>(from.size() / static_cast<std::size_t>(c.T) * static_cast<std::size_t>(kChanged));
      std::copy(from.begin() + at, from.end(), mixed.begin() + at);
      (a.*x).device->upload(mixed.data());
    }
    run_segments(a.device, 1);
    EXPECT_TRUE(rows_of(a.o) == before);
  }
}

// As CudaDiag.NotFiniteTokens.
void check_not_finite(const DeltaCase& c, std::int64_t chunks = 0, std::int64_t columns = kDeltaColumns) {
  DeltaData d(c);
  const DeltaPlan plan = delta_chunk_plan(d.device, device(), columns, chunks);
  run_plan(d.device, plan);
  if (::testing::Test::HasFatalFailure()) return;
  const auto clean = d.o.device_bytes();
  const std::size_t row = clean.size() / static_cast<std::size_t>(c.T);
  for (std::size_t place = 0; place < 16; ++place) {
    for (auto input : {&DeltaData::v, &DeltaData::q, &DeltaData::k, &DeltaData::g, &DeltaData::beta}) {
      for (const float value : {NAN, INFINITY, -INFINITY}) {
        const bool v = input == &DeltaData::v;
        if (!v && place % 5 != 3) continue;
        if (v && !std::isnan(value) && place % 5 != 2) continue;
        if (input == &DeltaData::g && value > 0.0F) continue;  // no gate
        Twin& t = d.*input;
        if (!t.view) continue;
        const std::size_t token = 32 + 16 * (place % 2) + place, width = static_cast<std::size_t>(t.view.numel() / c.T);
        const auto before = t.host;
        t.set(token * width + width / 3, value);
        t.device->upload(t.host.data());
        t.host = before;
        run_plan(d.device, plan);
        if (::testing::Test::HasFatalFailure()) return;
        t.device->upload(t.host.data());
        const auto got = d.o.device_bytes();
        const bool same =
            std::equal(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(token * row), clean.begin());
        EXPECT_TRUE(same) << plan.text() << ", token " << token << ", value " << value << ", input of width " << width;
        EXPECT_NE(got, clean);
        if (!same) return;
      }
    }
  }
}
TEST(CudaDeltaChunk, NotFiniteTokens) {
  for (const Gate gate : {Gate::None, Gate::Head, Gate::Channel}) {
    const bool none = gate == Gate::None;
    const Erase erase = none ? Erase::Plain : Erase::Decayed;
    check_not_finite({.T = 70, .K = 64, .V = 40, .gate = gate, .normalize = !none, .erase = erase});
    check_not_finite({.T = 70, .K = 128, .V = 64, .type = DType::F16, .gate = gate, .erase = erase}, 0, kDeltaWide);
  }
  check_not_finite({.T = 70, .K = 256, .V = 24});
  check_not_finite({.T = 70, .K = 256, .V = 24, .gate = Gate::Channel});
  check_not_finite({.T = 170, .K = 64, .V = 24, .gate_divisor = 64.0F}, 1);
}
// A correction of a row that leaves F16's range is not seen before it either.
TEST(CudaDeltaChunk, RowsThatOverflow) {
  const DeltaCase c{.T = 64, .K = 64, .V = 16, .type = DType::F16, .gate_divisor = 64.0F};
  DeltaData d(c);
  const DeltaPlan plan = delta_chunk_plan(d.device, device(), kDeltaColumns, 0);
  run_plan(d.device, plan);
  const auto clean = d.o.device_bytes();
  constexpr std::size_t kToken = 41;
  // The row before says -60000 along the same key, so that this one's correction is about 120000.
  for (std::size_t j = 0; j < 16; ++j) {
    d.v.set((kToken - 1) * 16 + j, -60000.0F);
    d.v.set(kToken * 16 + j, 60000.0F);
  }
  for (std::size_t j = 0; j < 64; ++j) {
    d.k.set((kToken - 1) * 64 + j, 1.0F);
    d.k.set(kToken * 64 + j, 1.0F);
  }
  d.beta.set(kToken - 1, 1.0F);
  d.beta.set(kToken, 1.0F);
  for (Twin* t : {&d.v, &d.k, &d.beta}) t->device->upload(t->host.data());
  run_plan(d.device, plan);
  const auto got = d.o.device_bytes();
  const auto before = static_cast<std::ptrdiff_t>((kToken - 1) * 16 * 2);
  EXPECT_TRUE(std::equal(got.begin(), got.begin() + before, clean.begin()));
  const auto values = d.o.device_values();
  EXPECT_TRUE(std::isfinite(values[(kToken - 1) * 16]));
  EXPECT_FALSE(std::isfinite(values[kToken * 16]));
}

// Rounds carry the state exactly.
TEST(CudaDeltaRounds, ChangeNoBit) {
  for (const DeltaCase& c : {DeltaCase{.B = 2,
                            .T = 203,
                            .H = 1,
                            .HV = 2,
                            .K = 64,
                            .V = 40,
                            .gate = Gate::Channel,
                            .state_v_first = true,
                            .states = true},
                             DeltaCase{.T = 161,
                             .H = 1,
                             .HV = 1,
                             .K = 128,
                             .V = 104,
                             .type = DType::F16,
                             .gate = Gate::Channel,
                             .gate_divisor = 16.0F,
                             .initial = false},
                             DeltaCase{.T = 130, .H = 1, .HV = 1, .K = 256, .V = 32, .gate = Gate::Channel}}) {
    DeltaData d(c);
    DeltaPlan plan = delta_chunk_plan(d.device, device(), kDeltaColumns, 0);
    std::vector<std::byte> first;
    for (const std::int64_t round : {0, 2, 3, 7}) {
      plan.round = round;
      run_plan(d.device, plan);
      if (::testing::Test::HasFatalFailure()) return;
      auto got = d.o.device_bytes();
      for (const Twin* t : {&d.ht, &d.h}) {
        if (!t->view) continue;
        const auto more = t->device_bytes();
        got.insert(got.end(), more.begin(), more.end());
      }
      if (round == 0) first = got;
      EXPECT_TRUE(got == first) << "round " << round;
    }
  }
}
TEST(CudaDeltaRounds, WhereRowsForEveryHeadAreMoreThanHalfOfTheTensors) {
  DeltaData d({.T = 64, .H = 1, .HV = 1, .K = 128, .V = 128, .gate = Gate::Channel});
  DeviceInfo info = device();
  info.sm_count = 132;
  DeltaProblem p = d.device;
  const auto sized = [](TensorView t, std::int64_t T, std::int64_t H) {
    t.shape[1] = T;
    t.shape[2] = H;
    return t;
  };
  p.T = 8192;
  p.H = p.HV = 96;
  for (TensorView* t : {&p.q, &p.k, &p.v, &p.gk, &p.o, &p.beta}) *t = sized(*t, p.T, p.HV);
  const std::size_t tensors =
      static_cast<std::size_t>(p.q.numel()) * 8 + static_cast<std::size_t>(p.gk.numel() + p.beta.numel()) * 4;
  const DeltaPlan plan = delta_forward_plan(p, info);
  EXPECT_EQ(plan.round, 128);
  EXPECT_NE(plan.text().find(", in rounds of 4096 tokens"), std::string::npos) << plan.text();
  EXPECT_LE(2 * delta_forward_workspace(p, info), tensors);
  p.T = 300;
  EXPECT_EQ(delta_forward_plan(p, info).round, 0);
  p.T = 8192;
  p.cu_seqlens = p.beta;
  EXPECT_EQ(delta_forward_plan(p, info).round, 0);
}

// All gradients in every order of threads, within `limit` of the reference and of equal bits.
void check_backward(const DeltaCase& c, double limit, double gate_limit, DeltaKernel kernel = DeltaKernel::Chunk) {
  DeltaData d(c);
  ASSERT_EQ(delta_backward_refusal(d.device, device()), "");
  EXPECT_EQ(delta_backward_plan(d.device, device()).kernel, kernel);
  ASSERT_TRUE(run_delta_backward_reference(d.host).ok());
  std::vector<std::vector<std::byte>> first;
  for (int order = 0; order < kOrders; ++order) {
    use_order(order);
    const std::size_t bytes = delta_backward_workspace(d.device, device());
    const DeviceMemory ws(bytes);
    const Status s = delta_backward(d.device, device(), {}, {static_cast<std::byte*>(ws.data()), bytes});
    ASSERT_TRUE(s.ok()) << s.message();
    ASSERT_TRUE(wait_for_device().ok());
    for (std::size_t i = 0; i < d.gradients.size(); ++i) {
      const DeltaData::Gradient& x = d.gradients[i];
      if (!x.got.view) continue;
      const auto got = x.got.device_bytes();
      if (order == 0) {
        first.push_back(got);
        EXPECT_LE(relative_rms(x.got.device_values(), x.want.host_values()), i >= 3 && i != 4 ? gate_limit : limit)
            << x.name;
      } else {
        EXPECT_TRUE(got == first[static_cast<std::size_t>(
                               std::count_if(d.gradients.begin(), d.gradients.begin() + static_cast<std::ptrdiff_t>(i),
                                             [](const auto& y) { return static_cast<bool>(y.got.view); }))])
            << x.name << ", order " << order;
      }
    }
  }
}

TEST(CudaDeltaBackward, NoGate) {
  check_backward({.B = 2, .T = 70, .H = 1, .HV = 1, .gate = Gate::None, .normalize = false, .erase = Erase::Plain},
                 8e-3, 1e-2);
}
TEST(CudaDeltaBackward, GateOfHead) { check_backward({.T = 70, .H = 1, .HV = 2, .K = 128, .V = 64}, 8e-3, 1e-2); }
TEST(CudaDeltaBackward, GateOfHeadHalf) {
  check_backward({.T = 65, .H = 1, .HV = 1, .K = 64, .V = 32, .type = DType::F16}, 2e-3, 2e-3, DeltaKernel::Token);
}
TEST(CudaDeltaBackward, GateOfHeadInOperator) {
  check_backward({.T = 40,
                  .H = 1,
                  .HV = 2,
                  .K = 64,
                  .V = 48,
                  .activation = GateActivation::Kind::Softplus,
                  .beta_sigmoid = 2.0,
                  .state_v_first = true},
                 8e-3, 1e-2);
}
TEST(CudaDeltaBackward, StrongGateOfHead) {
  check_backward({.T = 100, .H = 1, .HV = 1, .strong_share = 0.3F, .zero_share = 0.3F}, 8e-3, 1e-2);
}
TEST(CudaDeltaBackward, PackedWithEmptySequences) {
  check_backward({.T = 150, .H = 1, .HV = 1, .cu = {0, 0, 1, 33, 33, 97, 150, 150}}, 8e-3, 1e-2);
}
TEST(CudaDeltaBackward, GateOfChannels) {
  check_backward({.T = 70, .H = 1, .HV = 2, .K = 128, .V = 64, .gate = Gate::Channel}, 8e-3, 1e-2);
}
// The two sides of a pair of tokens cancel in the gates' gradient only where both have the same rounded factors.
TEST(CudaDeltaBackward, GateOfChannelsOfPairs) {
  check_backward(
      {.T = 128, .H = 1, .HV = 1, .K = 128, .V = 128, .gate = Gate::Channel, .initial = false, .state_gradient = false},
      4e-3, 4e-3);
}
TEST(CudaDeltaBackward, StrongGateOfChannels) {
  check_backward({.T = 100, .H = 1, .HV = 1, .gate = Gate::Channel, .strong_share = 0.3F, .zero_share = 0.3F}, 8e-3,
                 8e-3);
}
TEST(CudaDeltaBackward, GateOfChannelsInOperator) {
  check_backward({.T = 40,
                  .H = 1,
                  .HV = 2,
                  .K = 40,
                  .V = 24,
                  .gate = Gate::Channel,
                  .gate_type = DType::BF16,
                  .activation = GateActivation::Kind::Bounded,
                  .beta_sigmoid = 1.0},
                 8e-3, 1e-2);
}
TEST(CudaDeltaBackward, WideKeyGateOfChannels) {
  check_backward({.T = 50,
                  .H = 1,
                  .HV = 1,
                  .K = 256,
                  .V = 32,
                  .cu = {0, 0, 1, 34, 50},
                  .gate = Gate::Channel,
                  .activation = GateActivation::Kind::Softplus},
                 8e-3, 1e-2);
}
TEST(CudaDeltaBackward, WideKeyAndValues) {
  check_backward({.T = 40, .H = 1, .HV = 2, .K = 256, .V = 256, .gate_divisor = 16.0F}, 8e-3, 1e-2);
  check_backward({.T = 33, .H = 1, .HV = 1, .K = 136, .V = 200, .gate = Gate::Channel, .gate_divisor = 16.0F}, 8e-3,
                 1e-2);
}

// A raw gate at an end of its range has a log gate and finite gradients.
TEST(CudaDeltaBackward, EndsOfRawGates) {
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    for (const auto activation : {GateActivation::Kind::Softplus, GateActivation::Kind::Bounded}) {
      for (const float end : {-INFINITY, 1e30F, INFINITY}) {
        SCOPED_TRACE(::testing::Message() << "gate " << static_cast<int>(gate) << ", activation "
                                          << static_cast<int>(activation) << ", " << end);
        DeltaCase c{.T = 34,
                    .H = 1,
                    .HV = 2,
                    .K = 32,
                    .V = 16,
                    .gate = gate,
                    .strong_share = 0.2F,
                    .strong = end,
                    .activation = activation};
        check(c, DeltaKernel::Chunk, kSixteen);
        check_backward(c, 8e-3, 2e-2);
        c.type = DType::F32;
        check(c, DeltaKernel::Token, kExact);
        check_backward(c, 2e-5, 1e-4, DeltaKernel::Token);
      }
    }
  }
}

TEST(CudaDeltaBackward, TokenPlainRule) {
  check_backward({.B = 2,
                  .T = 70,
                  .H = 1,
                  .HV = 2,
                  .K = 40,
                  .V = 33,
                  .type = DType::F32,
                  .gate = Gate::None,
                  .normalize = false,
                  .erase = Erase::Plain},
                 2e-5, 2e-5, DeltaKernel::Token);
}
TEST(CudaDeltaBackward, TokenGateOfHeadInOperator) {
  check_backward({.T = 131,
                  .H = 1,
                  .HV = 2,
                  .K = 72,
                  .V = 20,
                  .type = DType::F32,
                  .strong_share = 0.1F,
                  .activation = GateActivation::Kind::Softplus,
                  .beta_sigmoid = 2.0,
                  .state_v_first = true},
                 2e-5, 2e-5, DeltaKernel::Token);
}
TEST(CudaDeltaBackward, TokenGateOfChannelsPacked) {
  check_backward({.T = 145,
                  .H = 1,
                  .HV = 1,
                  .K = 20,
                  .V = 40,
                  .type = DType::F32,
                  .cu = {0, 0, 17, 18, 83, 145, 145},
                  .gate = Gate::Channel,
                  .strong_share = 0.2F},
                 2e-5, 2e-5, DeltaKernel::Token);
}
TEST(CudaDeltaBackward, TokenReverse) {
  check_backward({.T = 70,
                  .K = 16,
                  .V = 8,
                  .type = DType::F32,
                  .gate = Gate::Channel,
                  .activation = GateActivation::Kind::Bounded,
                  .reverse = true},
                 2e-5, 2e-5, DeltaKernel::Token);
}

// Sums over no tokens are zeros.
TEST(CudaDeltaBackward, ParametersWithoutTokens) {
  for (const DType type : {DType::F32, DType::BF16}) {
    for (const Gate gate : {Gate::Head, Gate::Channel}) {
      for (const std::vector<std::int64_t>& cu : {std::vector<std::int64_t>{}, {0, 0}}) {
        const DeltaKernel kernel = type == DType::F32 || cu.empty() ? DeltaKernel::Token : DeltaKernel::Chunk;
        check_backward({.T = 0,
                        .H = 1,
                        .HV = 2,
                        .K = 8,
                        .V = 8,
                        .type = type,
                        .cu = cu,
                        .gate = gate,
                        .activation = GateActivation::Kind::Softplus},
                       0.0, 0.0, kernel);
      }
    }
  }
}

// Devices with 99 KB of shared memory a block: what does not fit is left to the kernels that need little.
TEST(CudaDelta, LittleSharedMemory) {
  DeviceInfo small = device();
  small.shared_per_block = 101376;
  small.shared_per_sm = 102400;
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    for (const std::int64_t D : {64, 128, 256}) {
      DeltaData d({.T = 40, .H = 1, .HV = 2, .K = D, .V = D, .gate = gate});
      const DeltaPlan plan = delta_forward_plan(d.device, small);
      EXPECT_EQ(plan.kernel, gate == Gate::Channel && D == 256 ? DeltaKernel::Token : DeltaKernel::Chunk) << D;
      EXPECT_EQ(delta_forward_text(d.device, plan).find("finds no room in shared memory") != std::string::npos,
                plan.kernel == DeltaKernel::Token);
      const DeltaPlan backward = delta_backward_plan(d.device, small);
      EXPECT_EQ(backward.kernel, D == 64 ? DeltaKernel::Chunk : DeltaKernel::Token) << D;
      ASSERT_TRUE(run_delta_reference(d.host).ok());
      ASSERT_TRUE(run_delta_backward_reference(d.host).ok());
      const std::size_t bytes =
          std::max(delta_forward_workspace(d.device, small), delta_backward_workspace(d.device, small));
      const DeviceMemory ws(bytes);
      const std::span<std::byte> space{static_cast<std::byte*>(ws.data()), bytes};
      ASSERT_TRUE(delta_forward(d.device, small, {}, space).ok());
      ASSERT_TRUE(delta_backward(d.device, small, {}, space).ok());
      ASSERT_TRUE(wait_for_device().ok());
      EXPECT_LE(relative_rms(d.o.device_values(), d.o_ref.host_values()), kSixteen);
      for (const DeltaData::Gradient& x : d.gradients) {
        if (!x.got.view) continue;
        EXPECT_LE(relative_rms(x.got.device_values(), x.want.host_values()), 1e-2) << x.name;
      }
    }
  }
}

TEST(CudaDelta, Refusals) {
  DeltaData d({.T = 4});
  DeltaBackwardProblem p = d.device;
  p.erase = Erase::Other;
  EXPECT_EQ(delta_refusal(p, device()), "p: not supported");
  p.erase = Erase::Gated;
  EXPECT_EQ(delta_refusal(p, device()), "eb: not supported");
  p.erase = Erase::General;
  EXPECT_EQ(delta_refusal(p, device()), "a, b: not supported");
  p = d.device;
  p.R = 2;
  EXPECT_EQ(delta_refusal(p, device()), "k: needs one row per token, got 2");
  p = d.device;
  SlotTable slots;
  slots.steps = p.h0;
  p.pool = &slots;
  EXPECT_EQ(delta_backward_refusal(p, device()), "slots: have no gradient");
  p = d.device;
  p.h0.dtype = DType::F64;
  EXPECT_EQ(delta_refusal(p, device()), "initial_state: needs F32, F16 or BF16, got F64");
  p = d.device;
  p.K = 257;
  EXPECT_EQ(delta_refusal(p, device()), "K: needs at most 256, got 257");
  DeviceInfo old = device();
  old.sm = 75;
  EXPECT_EQ(delta_refusal(d.device, old), "device: needs compute capability 8.0, got 7.5");
}

}  // namespace
}  // namespace fla::cuda
