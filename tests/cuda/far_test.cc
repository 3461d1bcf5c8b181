// Every kernel behind so many other sequences that its offsets pass 2^32 elements and bytes: of tensors, of states, of the
// workspace. A case runs alone first, then as the last sequence of a batch, or of packed ones, whose other tensors are
// addresses only (emulator::Tail). Results are the same bits, or an offset was formed in fewer than 64 of them.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

#include "fla/engine/delta/cuda/launches.h"
#include "fla/kernels/cuda/toolbox.cuh"
#include "fla/ops/linear_attn/linear_attn_cuda.h"
#include "tests/cuda/delta_case.h"
#include "tests/cuda/diag_case.h"

namespace fla::cuda {
namespace {

// What lies before the case: sequences of a batch, or tokens of a packed one. Multiples of every chunk.
constexpr std::int64_t kBatch = std::int64_t{1} << 22, kTokens = std::int64_t{1} << 26;
constexpr std::int64_t kApart =
    (std::int64_t{1} << 32) + (std::int64_t{1} << 20);  // elements, from the first to the case

// t as the last part of a tensor with `before` more along an axis.
void push(TensorView& t, int axis, std::int64_t before) {
  if (!t.present()) return;
  const auto at = static_cast<std::size_t>(axis);
  std::int64_t& stride = t.stride[at];
  const std::int64_t least = (kApart + before - 1) / before + 63;
  if (t.shape[at] == 1) stride = std::max(stride, least / 64 * 64);
  t.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(t.data) -
                                   static_cast<std::uintptr_t>(before * stride) * size_of(t.dtype));
  t.shape[at] += before;
}

// Runs `call` on the problem alone and far away: `call` gets a function that makes the workspace.
template <typename P>
void expect_same(const P& here, const P& far, const std::vector<std::pair<const DeviceMemory*, std::size_t>>& memory,
                 const std::function<std::size_t(const P&)>& bytes_of,
                 const std::function<Status(const P&, std::span<std::byte>)>& call) {
  emulator::Tail& tail = emulator::tail();
  tail = {};
  tail.parts = [](const char* kernel) { return std::string_view(kernel) == "diag_states" ? 2 : 1; };
  const auto contents = [&] {
    std::vector<std::vector<std::byte>> all;
    for (const auto& [m, bytes] : memory) {
      all.emplace_back(bytes);
      m->download(all.back().data());
    }
    return all;
  };
  const auto before = contents();
  std::vector<std::vector<std::byte>> first;
  for (const bool away : {false, true}) {
    const P& p = away ? far : here;
    const std::size_t bytes = bytes_of(p);
    const DeviceMemory workspace(bytes, away);
    tail.mode = away ? emulator::Tail::Mode::Cut : emulator::Tail::Mode::Note;
    const Status s = call(p, {static_cast<std::byte*>(workspace.data()), bytes});
    tail.mode = emulator::Tail::Mode::Off;
    ASSERT_TRUE(s.ok()) << (away ? "far: " : "alone: ") << s.message();
    if (!away) {
      first = contents();
      ASSERT_NE(first, before);
      for (std::size_t i = 0; i < memory.size(); ++i) {
        const_cast<DeviceMemory*>(memory[i].first)->upload(before[i].data());
      }
    }
  }
  EXPECT_EQ(tail.next, tail.blocks.size());
  EXPECT_TRUE(contents() == first);
}

// ---- diagonal decay

DiagBackwardProblem pushed(DiagBackwardProblem p, const TensorView& cu) {
  const bool packed = p.cu_seqlens.present();
  for (TensorView* t : {&p.q, &p.k, &p.v, &p.g, &p.gk, &p.gv, &p.o, &p.do_, &p.dq, &p.dk, &p.dv, &p.dg, &p.dgk}) {
    push(*t, packed ? 1 : 0, packed ? kTokens : kBatch);
  }
  for (TensorView* t : {&p.h0, &p.ht, &p.dht, &p.dh0}) push(*t, 0, packed ? 1 : kBatch);
  if (packed) {
    p.T += kTokens;
    p.N += 1;
    p.cu_seqlens = cu;
  } else {
    p.B += kBatch;
    p.N += kBatch;
  }
  return p;
}
std::vector<std::int64_t> boundaries_of(std::int64_t T) { return {0, kTokens, kTokens + T}; }

void far_diag(DiagCase c, const std::function<void(DiagPlan&)>& change = {}, std::size_t backward = 0) {
  for (const bool packed : {false, true}) {
    if (packed) c.lengths = {c.T};
    DiagRun run(c);
    const DeviceArray<std::int64_t> cu(boundaries_of(c.T));
    const DiagBackwardProblem far = pushed(run.device, TensorView(cu.data(), {3}));
    DeviceInfo d = *device_info(0);
    d.sm_count = 1;
    SCOPED_TRACE(::testing::Message() << "gate " << static_cast<int>(c.gate) << ", packed " << packed << ", K " << c.K);
    if (c.backward) {
      const auto plans = diag_backward_alternatives(run.device, d);
      if (backward >= plans.size()) return;
      DiagBackwardPlan plan = plans[backward];
      if (change) {
        for (DiagPlan* f : {&plan.states, &plan.by_key, &plan.by_value}) change(*f);
      }
      expect_same<DiagBackwardProblem>(
          run.device, far, run.memory(), [&](const DiagBackwardProblem& p) { return diag_backward_workspace(p, plan); },
          [&](const DiagBackwardProblem& p, std::span<std::byte> w) { return diag_backward(p, plan, {}, w); });
      continue;
    }
    DiagPlan plan = diag_forward_plan(run.device, d);
    if (packed && plan.kind == DiagPlan::Kind::Decode) return;
    if (change) change(plan);
    expect_same<DiagBackwardProblem>(
        run.device, far, run.memory(), [&](const DiagBackwardProblem& p) { return diag_forward_workspace(p, plan); },
        [&](const DiagBackwardProblem& p, std::span<std::byte> w) { return diag_forward(p, plan, {}, w); });
  }
}

TEST(CudaFar, Diag) {
  using Gate = DiagCase::Gate;
  for (const Gate gate : {Gate::Head, Gate::Channel, Gate::Value}) {
    far_diag({.T = 70, .gate = gate});
    far_diag({.T = 40, .H = 1, .K = 128, .V = 72, .gate = gate});
    far_diag({.T = 150, .H = 1, .gate = gate}, [](DiagPlan& f) { f.segments = 2; });
    far_diag({.T = 20, .type = DType::F32, .gate = gate});  // step
    if (gate == Gate::Value) continue;
    for (const std::size_t which : {0, 1}) {
      far_diag({.T = 70, .gate = gate, .backward = true}, {}, which);
      far_diag(
          {.T = 150, .H = 1, .gate = gate, .backward = true}, [](DiagPlan& f) { f.segments = 2; }, which);
    }
    far_diag({.T = 70, .type = DType::F32, .gate = gate, .backward = true});
  }
  far_diag({.T = 3, .gate = Gate::Head});  // decode, where sequences are not packed
}

// ---- delta rule

// `table` is where the problem's slots go.
DeltaBackwardProblem pushed(DeltaBackwardProblem p, const TensorView& cu, SlotTable& table) {
  const bool packed = p.cu_seqlens.present();
  table = p.slots();
  p.pool = &table;
  for (TensorView* t : {&p.q, &p.k, &p.v, &p.beta, &p.g, &p.gk, &p.o, &p.do_, &p.dq, &p.dk, &p.dv, &p.dbeta, &p.dg,
                        &p.dgk, &table.steps}) {
    push(*t, packed ? 1 : 0, packed ? kTokens : kBatch);
  }
  for (TensorView* t : {&p.h0, &p.ht, &p.dht, &p.dh0}) push(*t, 0, packed ? 1 : kBatch);
  push(p.h, packed ? 1 : 0, packed ? kTokens / p.h_chunk : kBatch);
  if (packed) {
    p.T += kTokens;
    p.N += 1;
    p.cu_seqlens = cu;
  } else {
    p.B += kBatch;
    p.N += kBatch;
  }
  return p;
}

void far_delta(DeltaCase c, const std::function<void(DeltaPlan&)>& change = {}, bool backward = false) {
  for (const bool packed : {false, true}) {
    if (packed) {
      c.cu = {0, c.T};
      c.reverse = false;
    }
    const DeltaData data(c);
    std::vector<std::pair<const DeviceMemory*, std::size_t>> memory;
    const auto add = [&](const Twin& t) {
      if (t.view) memory.emplace_back(t.device.get(), t.host.size());
    };
    add(data.h0);
    if (backward) {
      for (const DeltaData::Gradient& x : data.gradients) add(x.got);
    } else {
      for (const Twin* t : {&data.o, &data.ht, &data.h, &data.steps}) add(*t);
    }
    const DeviceArray<std::int64_t> cu(boundaries_of(c.T));
    SlotTable table;
    const DeltaBackwardProblem far = pushed(data.device, TensorView(cu.data(), {3}), table);
    DeviceInfo d = *device_info(0);
    d.sm_count = 1;
    DeltaPlan plan = backward ? delta_backward_plan(data.device, d) : delta_forward_plan(data.device, d);
    if (packed && plan.kernel == DeltaKernel::Decode) plan.kernel = DeltaKernel::Token;
    if (change && plan.kernel == DeltaKernel::Chunk) change(plan);
    if (packed && plan.round > 0) return;
    SCOPED_TRACE(::testing::Message() << plan.text() << ", packed " << packed << ", backward " << backward);
    expect_same<DeltaBackwardProblem>(
        data.device, far, memory,
        [&](const DeltaBackwardProblem& p) -> std::size_t {
          if (plan.kernel == DeltaKernel::Decode) return 0;
          if (plan.kernel == DeltaKernel::Token) return backward ? delta_token_backward_workspace(p) : 0;
          if (backward) return delta_chunk_backward_workspace<bf16>(p, plan);
          return delta_chunk_forward_workspace<bf16>(p, plan);
        },
        [&](const DeltaBackwardProblem& p, std::span<std::byte> w) -> Status {
          if (plan.kernel == DeltaKernel::Decode) return delta_decode_forward(p, {});
          if (plan.kernel == DeltaKernel::Token) {
            return backward ? delta_token_backward(p, {}, w) : delta_token_forward(p, {});
          }
          if (backward) return delta_chunk_backward<bf16>(p, plan, {}, w);
          return delta_chunk_forward<bf16>(p, plan, {}, w);
        });
  }
}

TEST(CudaFar, Delta) {
  using Gate = DeltaCase::Gate;
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    far_delta({.T = 70, .HV = 2, .gate = gate, .states = true});
    far_delta({.T = 40, .HV = 1, .K = 256, .V = 40, .gate = gate});
    far_delta({.T = 200, .gate = gate, .gate_divisor = 64.0F}, [](DeltaPlan& f) {
      f.segment = 2;
      f.segments = 4;
    });
    far_delta({.T = 1, .HV = 2, .gate = gate, .steps = true});  // decode
    far_delta({.T = 6, .HV = 2, .gate = gate});
    far_delta({.T = 70, .HV = 2, .type = DType::F32, .gate = gate, .states = true});  // token
    far_delta({.T = 70, .HV = 2, .gate = gate}, {}, true);
    far_delta({.T = 70, .HV = 2, .type = DType::F32, .gate = gate}, {}, true);
  }
  far_delta({.T = 70, .HV = 2, .gate = Gate::Channel}, [](DeltaPlan& f) { f.round = 2; });
}

// ---- the normaliser of linear attention

TEST(CudaFar, LinearAttnNormaliser) {
  for (const bool packed : {false, true}) {
    DiagCase c{.T = 70};
    if (packed) c.lengths = {c.T};
    DiagRun forward(c);
    c.backward = true;
    DiagRun backward(c);
    const DeviceArray<std::int64_t> cu(boundaries_of(c.T));
    const auto args = [](const DiagBackwardProblem& p) {
      LinearAttnBackwardArgs a;
      a.q = p.q;
      a.k = p.k;
      a.v = p.v;
      a.initial_state = p.h0;
      a.cu_seqlens = p.cu_seqlens;
      a.o = p.o;
      a.final_state = p.ht;
      a.do_ = p.do_;
      a.dht = p.dht;
      a.dq = p.dq;
      a.dk = p.dk;
      a.dv = p.dv;
      a.dh0 = p.dh0;
      return a;
    };
    DeviceInfo d = *device_info(0);
    d.sm_count = 1;
    for (DiagRun* run : {&forward, &backward}) {
      SCOPED_TRACE(::testing::Message() << "packed " << packed << ", backward " << (run == &backward));
      const bool gradients = run == &backward;
      NormalisedPlan plan;
      const LinearAttnBackwardArgs alone = args(run->device);
      std::string why;
      ASSERT_TRUE(gradients ? normalised_plan(alone, d, {}, plan, &why)
                            : normalised_plan(static_cast<const LinearAttnArgs&>(alone), d, {}, plan, &why))
          << why;
      expect_same<DiagBackwardProblem>(
          run->device, pushed(run->device, TensorView(cu.data(), {3})), run->memory(),
          [&](const DiagBackwardProblem& p) {
            const LinearAttnBackwardArgs a = args(p);
            return gradients ? normalised_workspace(a, plan)
                             : normalised_workspace(static_cast<const LinearAttnArgs&>(a), plan);
          },
          [&](const DiagBackwardProblem& p, std::span<std::byte> w) {
            const LinearAttnBackwardArgs a = args(p);
            return gradients ? normalised(a, plan, {}, w)
                             : normalised(static_cast<const LinearAttnArgs&>(a), plan, {}, w);
          });
    }
  }
}

// ---- that a fault is found

FLA_KERNEL(32, 1) narrow_offset_kernel(float* to) {
  const auto at = static_cast<std::int32_t>(static_cast<std::uint32_t>(block_x() * 1024));
  to[at + thread_id()] = 1.0F;
}
FLA_KERNEL(32, 1) wide_offset_kernel(float* to) { to[block_x() * 1024 + thread_id()] = 1.0F; }

TEST(CudaFar, FindsAnOffsetOf32Bits) {
  struct Problem {
    float* to;
    std::int64_t blocks;
  };
  const DeviceMemory memory(4096);
  const auto start = reinterpret_cast<std::uintptr_t>(memory.data());
  const Problem here{static_cast<float*>(memory.data()), 1},
      far{reinterpret_cast<float*>(start - static_cast<std::uintptr_t>(kBatch) * 4096), kBatch + 1};
  emulator::Tail& tail = emulator::tail();
  for (const bool narrow : {false, true}) {
    tail = {};
    for (const Problem& p : {here, far}) {
      tail.mode = p.blocks == 1 ? emulator::Tail::Mode::Note : emulator::Tail::Mode::Cut;
      const Launch l{.name = "offset_kernel", .grid = {p.blocks}, .threads = 32};
      const Status s = narrow ? launch<narrow_offset_kernel>(l, {}, p.to) : launch<wide_offset_kernel>(l, {}, p.to);
      EXPECT_EQ(s.ok(), !narrow || p.blocks == 1) << s.message();
      if (!s) {
        EXPECT_NE(s.message().find("global memory access out of bounds"), std::string::npos) << s.message();
      }
    }
  }
  tail = {};
}

}  // namespace
}  // namespace fla::cuda
