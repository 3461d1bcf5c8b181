// Launches of the diagonal-decay engine and the kernel that joins segments.
#include <algorithm>
#include <initializer_list>
#include <string>

#include "fla/engine/diag/cuda/arena.h"
#include "fla/engine/diag/cuda/gradient.cuh"
#include "fla/engine/diag/cuda/launches.h"
#include "fla/engine/diag/cuda/warp_state.cuh"

namespace fla::cuda {

namespace {

// ---- segments

// Turns each segment's own contribution into the state that it starts from. A thread walks one state element.
constexpr int kJoinThreads = 256;

FLA_KERNEL(kJoinThreads, 1)
diag_join_kernel(const DiagParams p, DiagPlan::Kind kind) {
  const std::int64_t state = std::int64_t{p.K} * p.V, blocks = (state + kJoinThreads - 1) / kJoinThreads;
  const std::int64_t head = block_x() / blocks, at = block_x() % blocks * kJoinThreads + thread_id();
  if (at >= state) return;
  DiagTask a;
  a.n = head / p.H;
  a.h = head % p.H;
  a.s = 0;
  const int i = static_cast<int>(at / p.V), j = static_cast<int>(at % p.V);
  float x = load_state(p, a, i, j);
  const std::int64_t first = head * p.segments, each = kind == DiagPlan::Kind::Channel ? p.K
                                                       : kind == DiagPlan::Kind::Value ? p.V
                                                                                       : 1;
  const int channel = kind == DiagPlan::Kind::Channel ? i : kind == DiagPlan::Kind::Value ? j : 0;
  // Several segments are read together: a read must not wait for the store before it.
  constexpr int kAhead = 8;
  for (std::int64_t s = 0; s < p.segments; s += kAhead) {
    float own[kAhead], decay[kAhead];
    FLA_UNROLL
    for (int u = 0; u < kAhead; ++u) {
      const bool inner = s + u + 1 < p.segments;
      own[u] = inner ? p.start[(first + s + u) * state + at] : 0.0F;
      decay[u] = inner ? p.total[(first + s + u) * each + channel] : 0.0F;
    }
    FLA_UNROLL
    for (int u = 0; u < kAhead; ++u) {
      if (s + u >= p.segments) break;
      p.start[(first + s + u) * state + at] = x;
      x = exp2_approx(decay[u]) * x + own[u];
    }
  }
}

Status join_segments(const DiagParams& p, DiagPlan::Kind kind, Stream stream) {
  const std::int64_t blocks = (std::int64_t{p.K} * p.V + kJoinThreads - 1) / kJoinThreads;
  return launch<diag_join_kernel>({.name = "diag_join", .grid = {p.N * p.H * blocks}, .threads = kJoinThreads}, stream,
                                  p, kind);
}

// ---- host

Operand operand(const TensorView& t) { return {view(t), t.dtype}; }

Status run_chunks(const DiagParams& a, const DiagPlan& plan, Stream stream) {
  const bool half = a.q.type == DType::F16;
  if (plan.kind == DiagPlan::Kind::Channel) {
    return half ? launch_diag_channel<f16>(a, plan, stream) : launch_diag_channel<bf16>(a, plan, stream);
  }
  if (plan.kind == DiagPlan::Kind::Value) {
    return half ? launch_diag_value<f16>(a, plan, stream) : launch_diag_value<bf16>(a, plan, stream);
  }
  return half ? launch_diag_head<f16>(a, plan, stream) : launch_diag_head<bf16>(a, plan, stream);
}

std::size_t start_bytes(std::int64_t parts, std::int64_t K, std::int64_t V) {
  return static_cast<std::size_t>(parts * K * V) * sizeof(float);
}
std::size_t total_bytes(std::int64_t parts, std::int64_t K, std::int64_t V, DiagPlan::Kind kind) {
  using Kind = DiagPlan::Kind;
  const std::int64_t each = kind == Kind::Channel ? K : kind == Kind::Value || kind == Kind::States ? V : 1;
  return static_cast<std::size_t>(parts * each) * sizeof(float);
}

}  // namespace

DiagParams diag_parameters(const DiagProblem& p, const DiagPlan& plan) {
  DiagParams a;
  a.T = p.T;
  a.H = p.H;
  a.N = p.N;
  a.K = static_cast<int>(p.K);
  a.V = static_cast<int>(p.V);
  a.scale = static_cast<float>(p.scale);
  a.reverse = p.reverse;
  a.vector_qk = vectorizable(p.q) && vectorizable(p.k);
  a.vector_v = vectorizable(p.v);
  a.vector_o = vectorizable(p.o);
  a.vector_gate = vectorizable(p.gk) && vectorizable(p.gv);
  a.q = operand(p.q);
  a.k = operand(p.k);
  a.v = operand(p.v);
  a.g = operand(p.g);
  a.gk = operand(p.gk);
  a.gv = operand(p.gv);
  a.h0 = operand(p.h0);
  a.o = operand(p.o);
  a.ht = operand(p.ht);
  a.cu = operand(p.cu_seqlens);
  a.indices = operand(p.slots().indices);
  a.accepted = operand(p.slots().accepted);
  a.steps = operand(p.slots().steps);
  a.by_token = p.slots().by_token();
  a.head = p.head.kind;
  a.gamma = operand(p.head.gamma);
  a.slope = static_cast<float>(p.head.slope);
  a.v_blocks = plan.v_blocks;
  a.segments = plan.segments;
  return a;
}

std::size_t diag_run_bytes(const DiagProblem& p, const DiagPlan& f) {
  if (f.segments == 1 || empty(p)) return 0;
  const std::int64_t parts = p.N * p.H * f.segments;
  return aligned(start_bytes(parts, p.K, p.V)) + aligned(total_bytes(parts, p.K, p.V, f.kind)) + kAlignment;
}

Status diag_run_states(StateRuns runs, const DiagPlan& f, Stream stream, void* const (&workspace)[2]) {
  const auto pass = [&](DiagPass which) {
    for (DiagParams& a : runs.run) a.pass = which;
    return runs.run[0].k.type == DType::F16 ? launch_diag_states<f16>(runs, f, stream)
                                            : launch_diag_states<bf16>(runs, f, stream);
  };
  if (f.segments == 1) return pass(DiagPass::Whole);
  for (int i = 0; i < 2; ++i) {
    DiagParams& a = runs.run[i];
    Arena memory(workspace[i]);
    const std::int64_t parts = a.N * a.H * f.segments;
    a.start = static_cast<float*>(memory.take(start_bytes(parts, a.K, a.V)));
    a.total = static_cast<float*>(memory.take(total_bytes(parts, a.K, a.V, f.kind)));
  }
  if (Status s = pass(DiagPass::Local); !s) return s;
  for (DiagParams& a : runs.run) {
    a.pass = DiagPass::Whole;
    const DiagPlan::Kind kind = a.gv.present() ? DiagPlan::Kind::Value : DiagPlan::Kind::Head;
    if (Status s = join_segments(a, kind, stream); !s) return s;
  }
  return pass(DiagPass::Final);
}

Status diag_run(DiagParams a, const DiagPlan& f, Stream stream, void* workspace) {
  if (f.kind == DiagPlan::Kind::Step) return launch_diag_step(a, f, stream);
  if (f.kind == DiagPlan::Kind::Decode) return launch_diag_decode(a, f, stream);
  if (f.segments == 1) return run_chunks(a, f, stream);
  Arena memory(workspace);
  const std::int64_t parts = a.N * a.H * f.segments;
  a.start = static_cast<float*>(memory.take(start_bytes(parts, a.K, a.V)));
  a.total = static_cast<float*>(memory.take(total_bytes(parts, a.K, a.V, f.kind)));
  a.pass = DiagPass::Local;
  if (Status s = run_chunks(a, f, stream); !s) return s;
  a.pass = DiagPass::Whole;
  if (Status s = join_segments(a, f.kind, stream); !s) return s;
  a.pass = DiagPass::Final;
  return run_chunks(a, f, stream);
}

std::size_t diag_forward_workspace(const DiagProblem& p, const DeviceInfo& d) {
  return diag_forward_workspace(p, diag_forward_plan(p, d));
}

std::size_t diag_forward_workspace(const DiagProblem& p, const DiagPlan& f) { return diag_run_bytes(p, f); }

Status diag_forward(const DiagProblem& p, const DeviceInfo& d, Stream stream, std::span<std::byte> workspace) {
  return diag_forward(p, diag_forward_plan(p, d), stream, workspace);
}

Status diag_forward(const DiagProblem& p, const DiagPlan& f, Stream stream, std::span<std::byte> workspace) {
  if (empty(p)) return {};
  return diag_run(diag_parameters(p, f), f, stream, workspace.data());
}

}  // namespace fla::cuda
