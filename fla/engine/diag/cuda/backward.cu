// The backward. With P_ij the decay from token j to a later token i,
//   dq_i = scale sum_{j <= i} P_ij <do_i, v_j> k_j + scale P_i0 S_0 do_i           the forward of (do, v, k), state V x
//   K dk_j = scale sum_{i >= j} P_ij <v_j, do_i> q_i + P_Nj dS_N v_j                 backwards in time, of (v, do, q)
//   dv_j = scale sum_{i >= j} P_ij <k_j, q_i> do_i + P_Nj dS_N^T k_j               backwards in time, of (k, q, do)
// where a token's gate acts on the token before it. The gate's gradient is F = rowsum(S o dS) before the token, and
//   F(t) = F(t + 1) + q_t o dq_t - k_t o dk_t
// Where K and V are at most 128 and the operands have 16 bits, both runs' states are kept at chunks of 64 tokens, and a
// kernel forms a chunk's gradients from them, every chunk beside the others. Else each gradient is a run, and F is
// formed from the states at boundaries, every kAlign tokens, and by this sum between them, from both sides: what the
// sum misses at the other boundary is spread evenly over the tokens between.
#include <algorithm>
#include <set>
#include <string>

#include "fla/engine/diag/cuda/arena.h"
#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/gradient.cuh"
#include "fla/engine/diag/cuda/launches.h"

namespace fla::cuda {

namespace {

constexpr int kAlign = 64;

// ---- gradients of gates

struct GateParams {
  DiagParams p;  // shapes, sequences, direction, boundaries of the forward
  Operand q, k, dq, dk, dg, dgk;
  Operand rounded_dq, rounded_dk;  // where the caller wants dq and dk in 16 bits
};

constexpr int kGateThreads = 128, kGateChannels = 2;

// A block: the tokens between two boundaries of one head, from the last to the first. A thread has its own channels. T:
// of q and k; dq and dk are F32. Types that are known let the loads of several tokens be under way together.
template <typename T>
FLA_KERNEL(kGateThreads, 4)
diag_gate_kernel(const GateParams x) {
  const DiagParams& p = x.p;
  const std::int64_t slot = block_x() / p.H;
  const DiagTask a = task_of_slot(p, slot, block_x() % p.H,
                                  [&](std::int64_t n, std::int64_t begin) { return first_boundary(p, n, begin); });
  const std::int64_t first = (slot - first_boundary(p, a.n, a.begin)) * p.align;
  if (first >= a.length) return;
  const int tokens = a.length - first < p.align ? static_cast<int>(a.length - first) : p.align;

  constexpr int kWarps = kGateThreads / 32;
  const Shared<float> partial = shared<float>(0, kAlign * kWarps),
                      change = shared<float>(kAlign * kWarps * 4, kAlign * p.K);
  const auto load = [&](const Operand& t, std::int64_t token, int c) {
    const auto& s = t.at.stride;
    return load_any(t.at.data, t.type, a.row * s[0] + token * s[1] + a.h * s[2] + c * s[3]);
  };
  const auto round_to = [&](const Operand& t, std::int64_t token, int c, float value) {
    if (!t.present()) return;
    const auto& s = t.at.stride;
    store_any(t.at.data, t.type, a.row * s[0] + token * s[1] + a.h * s[2] + c * s[3], value);
  };
  // From the last token to the first, in runs that end where F is known: at the boundary, and at a token whose gate
  // lets nothing through that fp32 would show. There the sums start anew.
  FLA_UNROLL
  for (int i = 0; i < kGateChannels; ++i) {
    const int c = thread_id() + i * kGateThreads;
    if (c >= p.K) continue;
    const float left = p.sums[(slot * p.H + a.h) * p.K + c];
    float right = p.sums[(slot * p.H + p.H + a.h) * p.K + c], all = 0.0F;
    int end = tokens;  // of the run
    // Several tokens are asked for together: memory answers late.
    constexpr int kAhead = 8;
    for (int last = tokens - 1; last >= 0; last -= kAhead) {
      float ahead[kAhead][5];
      FLA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const std::int64_t token = a.token(p, first + (last > u ? last - u : 0));
        ahead[u][0] = to_f32(*x.q.at.template at<const T>(a.row, token, a.h, c));
        ahead[u][1] = *x.dq.at.template at<const float>(a.row, token, a.h, c);
        ahead[u][2] = to_f32(*x.k.at.template at<const T>(a.row, token, a.h, c));
        ahead[u][3] = *x.dk.at.template at<const float>(a.row, token, a.h, c);
        ahead[u][4] = p.gk.present() ? load(p.gk, token, c) : p.g.present() ? load(p.g, token, 0) : 0.0F;
      }
      FLA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const int r = last - u;
        if (r < 0) break;
        const std::int64_t token = a.token(p, first + r);
        round_to(x.rounded_dq, token, c, ahead[u][1]);
        round_to(x.rounded_dk, token, c, ahead[u][3]);
        const float d = ahead[u][0] * ahead[u][1] - ahead[u][2] * ahead[u][3];
        change[r * p.K + c] = d;
        all += d;
        const bool closed = base2_gate(ahead[u][4]) < kClosedGate;
        if (!closed && r > 0) continue;
        const float to = closed ? 0.0F : left, step = (to - all - right) / static_cast<float>(end - r);
        float sum = right;
        for (int t = end - 1; t >= r; --t) {
          sum += change.load(t * p.K + c) + step;
          change[t * p.K + c] = closed && t == r ? 0.0F : sum;
        }
        right = to;
        all = 0.0F;
        end = r;
      }
    }
  }
  for (int r = tokens - 1; r >= 0; --r) {
    float all = 0.0F;
    FLA_UNROLL
    for (int i = 0; i < kGateChannels; ++i) {
      const int c = thread_id() + i * kGateThreads;
      if (c >= p.K) continue;
      const float sum = change.load(r * p.K + c);
      all += sum;
      if (x.dgk.present()) {
        const auto& s = x.dgk.at.stride;
        store_any(x.dgk.at.data, x.dgk.type, a.row * s[0] + a.token(p, first + r) * s[1] + a.h * s[2] + c * s[3], sum);
      }
    }
    if (!x.dg.present()) continue;
    all = warp_sum(all);
    if (lane_id() == 0) partial[r * kWarps + warp_id()] = all;
  }
  if (!x.dg.present()) return;
  sync_threads();
  for (int t = thread_id(); t < tokens; t += kGateThreads) {
    float all = 0.0F;
    FLA_UNROLL
    for (int w = 0; w < kWarps; ++w) all += partial.load(t * kWarps + w);
    const auto& s = x.dg.at.stride;
    store_any(x.dg.at.data, x.dg.type, a.row * s[0] + a.token(p, first + t) * s[1] + a.h * s[2], all);
  }
}

// ---- host

bool wants_gates(const DiagBackwardProblem& p) { return p.dg || p.dgk; }
bool wants_key_run(const DiagBackwardProblem& p) { return p.dv || p.dh0; }

std::int64_t boundaries(const DiagProblem& p) {
  return p.cu_seqlens ? p.T / kAlign + 2 * p.N : p.N * ((p.T + kAlign - 1) / kAlign + 1);
}

// The problem of a run: shapes, gates and sequences of the backward's, operands of the caller's.
DiagProblem role(const DiagProblem& p, const TensorView& q, const TensorView& k, const TensorView& v) {
  DiagProblem r;
  r.B = p.B;
  r.T = p.T;
  r.H = p.H;
  r.N = p.N;
  r.K = p.K;
  r.V = p.V;
  r.cu_seqlens = p.cu_seqlens;
  r.reverse = p.reverse;
  r.scale = p.scale;
  r.g = p.g;
  r.head = p.head;
  r.q = q;
  r.k = k;
  r.v = v;
  return r;
}
DiagProblem query_role(const DiagBackwardProblem& p) {
  DiagProblem r = role(p, p.do_, p.v, p.k);
  std::swap(r.K, r.V);
  r.gv = p.gk;
  r.h0 = swap_state_axes(p.h0);
  r.o = p.dq;
  return r;
}
DiagProblem key_role(const DiagBackwardProblem& p) {
  DiagProblem r = role(p, p.v, p.do_, p.q);
  std::swap(r.K, r.V);
  r.gv = p.gk;
  r.reverse = !p.reverse;
  r.h0 = swap_state_axes(p.dht);
  r.o = p.dk;
  return r;
}
DiagProblem value_role(const DiagBackwardProblem& p) {
  DiagProblem r = role(p, p.k, p.q, p.do_);
  r.gk = p.gk;
  r.reverse = !p.reverse;
  r.h0 = p.dht;
  r.ht = p.dh0;
  r.o = p.dv;
  return r;
}

DiagParams backwards_in_time(const DiagProblem& r, const DiagPlan& plan) {
  DiagParams a = diag_parameters(r, plan);
  a.update_scale = a.scale;
  a.scale = 1.0F;
  a.shift = true;
  a.align = kAlign;
  return a;
}

// dq and dk as the gates need them: in F32, as their rounding is what the gates' gradients would consist of.
TensorView gradient(Arena& memory, const TensorView& asked, const TensorView& of) {
  if (asked && asked.dtype == DType::F32) return asked;
  return {memory.take(static_cast<std::size_t>(of.numel()) * sizeof(float)), DType::F32, of.dims(), of.device};
}

// What both runs of states are: forwards, and of the adjoints backwards.
DiagProblem adjoint_role(const DiagBackwardProblem& p) {
  DiagProblem r = key_role(p);
  r.o = {};
  r.ht = swap_state_axes(p.dh0);
  return r;
}
DiagProblem state_role(const DiagBackwardProblem& p) {
  DiagProblem r = query_role(p);
  r.o = {};
  return r;
}

struct ChunkMemory {
  StateRuns runs;
  void* run[2];

  ChunkMemory(Arena& memory, const DiagBackwardProblem& p, const DiagPlan& f) {
    const std::int64_t words = chunk_slots(p.T, p.N, p.cu_seqlens.present()) * p.H * f.key * f.key / 2;
    for (std::uint32_t*& kept : runs.kept) {
      kept = static_cast<std::uint32_t*>(memory.take(static_cast<std::size_t>(words) * sizeof(std::uint32_t)));
    }
    run[0] = memory.take(diag_run_bytes(state_role(p), f));
    run[1] = memory.take(diag_run_bytes(adjoint_role(p), f));
  }
};

struct BackwardMemory {
  TensorView dq, dk;
  void* kept = nullptr;
  void* sums = nullptr;
  void* run = nullptr;

  BackwardMemory(Arena& memory, const DiagBackwardProblem& p, const DiagBackwardPlan& f) : dq(p.dq), dk(p.dk) {
    if (wants_gates(p)) {
      dq = gradient(memory, p.dq, p.q);
      dk = gradient(memory, p.dk, p.k);
      const std::int64_t slots = boundaries(p) * p.H;
      const std::int64_t state = std::int64_t{f.by_value.key} * f.by_value.value * f.by_value.v_blocks;
      kept = memory.take(static_cast<std::size_t>(slots * state) * sizeof(float));
      sums = memory.take(static_cast<std::size_t>(slots * p.K) * sizeof(float));
    }
    run = memory.take(std::max(diag_run_bytes(query_role(p), f.by_value), diag_run_bytes(value_role(p), f.by_key)));
  }
};

Operand operand(const TensorView& t) { return {view(t), t.dtype}; }

Status backward_by_chunk(const DiagBackwardProblem& p, const DiagPlan& f, Stream stream, Arena& arena) {
  ChunkMemory m(arena, p, f);
  m.runs.run[0] = diag_parameters(state_role(p), f);
  m.runs.run[1] = backwards_in_time(adjoint_role(p), f);
  if (Status s = diag_run_states(m.runs, f, stream, m.run); !s) return s;
  GradientParams x;
  x.p = diag_parameters(p, f);
  x.p.v_blocks = x.p.segments = 1;
  x.up = operand(p.do_);
  x.dq = operand(p.dq);
  x.dk = operand(p.dk);
  x.dv = operand(p.dv);
  x.dg = operand(p.dg);
  x.dgk = operand(p.dgk);
  x.vector_up = vectorizable(p.do_);
  x.vector_out = vectorizable(p.dq) && vectorizable(p.dk) && vectorizable(p.dv);
  x.vector_gates = vectorizable(p.dgk);
  x.before = m.runs.kept[0];
  x.after = m.runs.kept[1];
  const bool half = p.q.dtype == DType::F16;
  if (p.gk) {
    return half ? launch_diag_channel_gradient<f16>(x, f, stream) : launch_diag_channel_gradient<bf16>(x, f, stream);
  }
  return half ? launch_diag_head_gradient<f16>(x, f, stream) : launch_diag_head_gradient<bf16>(x, f, stream);
}

// Whether runs, and gradients by chunk, can go on tensor cores, and why not.
bool chunks_serve(const DiagBackwardProblem& p, const Why& why) {
  if (p.T <= 16) return why("T: needs more than 16 tokens, got ", p.T);
  return diag_one_half_type({&p.q, &p.k, &p.v, &p.do_}, {&p.dq, &p.dk, &p.dv}) ||
         why("q, k, v, do and their gradients: need one type of 16 bits");
}
bool can_go_by_chunk(const DiagBackwardProblem& p) { return chunks_serve(p, {}) && p.K <= 128 && p.V <= 128; }

DiagBackwardPlan diag_backward_runs(const DiagBackwardProblem& p, const DeviceInfo& d) {
  const bool chunks = chunks_serve(p, {});
  const DiagProblem values = query_role(p), keys = value_role(p);
  DiagBackwardPlan f;
  f.by_key = chunks ? diag_chunk_plan(keys, d, false) : diag_step_plan(keys);
  f.by_value = chunks ? diag_chunk_plan(values, d, wants_gates(p)) : diag_step_plan(values);
  return f;
}

// fn(plan) for every way to run the backward, whatever is fastest.
template <typename Fn>
void for_each_backward_plan(const DiagBackwardProblem& p, const DeviceInfo& d, Fn&& fn) {
  const DiagProblem values = query_role(p), keys = value_role(p);
  DiagBackwardPlan f;
  f.by_key = diag_step_plan(keys);
  f.by_value = diag_step_plan(values);
  fn(f);
  if (!chunks_serve(p, {})) return;
  diag_each_chunk_plan(values, d, wants_gates(p), true, [&](const DiagPlan& by_value, double) {
    diag_each_chunk_plan(keys, d, false, true, [&](const DiagPlan& by_key, double) {
      f.by_value = by_value;
      f.by_key = by_key;
      fn(f);
    });
  });
  if (!can_go_by_chunk(p)) return;
  f.by_chunk = true;
  diag_each_states_plan(state_role(p), d, true, [&](const DiagPlan& states, double) {
    if (!diag_gradient_fits(p, states, d)) return;
    f.states = states;
    fn(f);
  });
}

}  // namespace

std::string DiagBackwardPlan::text() const {
  if (by_chunk) return states.text() + ", forwards and backwards; then gradients by chunk";
  return "dq, dk: " + by_value.text() + "; dv, dh0: " + by_key.text();
}

KernelName diag_backward_kernel(const DiagBackwardProblem& p, const DiagBackwardPlan& f) {
  if (f.by_chunk) return f.states.kernel(p.q.dtype).add(p.gk ? ".channel" : ".head").add(".backward");
  KernelName n;
  if (p.dq || p.dk || wants_gates(p)) n.add(f.by_value.kernel(p.q.dtype).view()).add(".dq");
  if (wants_key_run(p)) n.add(n.view().empty() ? "" : "+").add(f.by_key.kernel(p.q.dtype).view()).add(".dv");
  return n;
}

std::string diag_backward_text(const DiagBackwardProblem& p, const DiagBackwardPlan& f) {
  std::string reason;
  if (f.by_chunk || f.by_value.chunk > 1) return f.text();
  if (chunks_serve(p, Why(&reason))) reason = "a block of the chunk kernels finds no room in shared memory";
  return f.text() + " (" + reason + ")";
}

bool diag_plan_backward(const DiagBackwardProblem& p, const DeviceInfo& d, std::string_view wanted,
                        DiagBackwardPlan& plan, std::string* text) {
  const Why why(text);
  if (p.V > 256) return why("needs V of at most 256, got ", p.V);
  if (p.gv) return why("has no gradients with gates per value channel");
  for (const TensorView* t : {&p.do_, &p.dht, &p.dq, &p.dk, &p.dv, &p.dg, &p.dgk, &p.dh0}) {
    if (*t && t->dtype == DType::F64) return why("needs F32, F16 or BF16, got F64");
  }
  if (!diag_serves(p, d, why)) return false;
  if (!wanted.empty()) {
    bool found = false;
    for_each_backward_plan(p, d, [&](const DiagBackwardPlan& f) {
      if (found || !diag_backward_kernel(p, f).has(wanted)) return;
      found = true;
      plan = f;
    });
    return found || why("no way to run this call with kernel ", wanted);
  }
  plan = diag_backward_runs(p, d);
  if (!can_go_by_chunk(p)) return true;
  plan.states = diag_states_plan(state_role(p), d);
  if (!diag_gradient_fits(p, plan.states, d)) return true;
  // Without gradients of gates it needs more memory and is faster only where runs leave multiprocessors idle.
  plan.by_chunk = wants_gates(p) || 2 * p.N * p.H * plan.states.v_blocks <= d.sm_count;
  return true;
}

DiagBackwardPlan diag_backward_plan(const DiagBackwardProblem& p, const DeviceInfo& d) {
  DiagBackwardPlan plan;
  static_cast<void>(diag_plan_backward(p, d, {}, plan, nullptr));
  return plan;
}

std::vector<std::string> diag_backward_kernels(const DeviceInfo& d) { return diag_backward_kernels(d, true); }
std::vector<std::string> diag_backward_kernels(const DeviceInfo& d, bool gates) {
  std::set<std::string> names;
  const auto add = [&](const DiagBackwardProblem& p) {
    for_each_backward_plan(p, d, [&](const DiagBackwardPlan& f) {
      diag_backward_kernel(p, f).for_each([&](std::string_view name) { names.emplace(name); });
    });
  };
  diag_each_sample(gates, [&](DiagBackwardProblem p) {
    if (p.gv) return;  // has no gradients
    add(p);
    p.dg = p.dgk = {};
    add(p);
  });
  return {names.begin(), names.end()};
}

std::vector<DiagBackwardPlan> diag_backward_alternatives(const DiagBackwardProblem& p, const DeviceInfo& d) {
  std::vector<DiagBackwardPlan> all{diag_backward_runs(p, d)};
  if (can_go_by_chunk(p) && diag_gradient_fits(p, diag_states_plan(state_role(p), d), d)) {
    all.push_back(all.front());
    all.back().by_chunk = true;
    all.back().states = diag_states_plan(state_role(p), d);
  }
  return all;
}

std::size_t diag_backward_workspace(const DiagBackwardProblem& p, const DeviceInfo& d) {
  return diag_backward_workspace(p, diag_backward_plan(p, d));
}
std::size_t diag_backward_workspace(const DiagBackwardProblem& p, const DiagBackwardPlan& f) {
  if (empty(p)) return 0;
  Arena count(nullptr);
  if (f.by_chunk) {
    const ChunkMemory memory(count, p, f.states);
  } else {
    const BackwardMemory memory(count, p, f);
  }
  return count.bytes();
}

Status diag_backward(const DiagBackwardProblem& p, const DeviceInfo& d, Stream stream, std::span<std::byte> workspace) {
  return diag_backward(p, diag_backward_plan(p, d), stream, workspace);
}
Status diag_backward(const DiagBackwardProblem& p, const DiagBackwardPlan& f, Stream stream,
                     std::span<std::byte> workspace) {
  if (empty(p)) return {};
  Arena arena(workspace.data());
  if (f.by_chunk) return backward_by_chunk(p, f.states, stream, arena);
  const BackwardMemory m(arena, p, f);
  DiagProblem q = query_role(p), k = key_role(p);
  q.o = m.dq;
  k.o = m.dk;
  const auto boundary = [&](DiagParams a, Boundary what) {
    if (!wants_gates(p)) return a;
    a.boundary = what;
    a.align = kAlign;
    a.kept = m.kept;
    a.sums = static_cast<float*>(m.sums);
    return a;
  };
  if (q.o) {
    const DiagParams a = boundary(diag_parameters(q, f.by_value), Boundary::Keep);
    if (Status s = diag_run(a, f.by_value, stream, m.run); !s) return s;
  }
  if (k.o) {
    const DiagParams a = boundary(backwards_in_time(k, f.by_value), Boundary::Sum);
    if (Status s = diag_run(a, f.by_value, stream, m.run); !s) return s;
  }
  if (wants_key_run(p)) {
    const DiagProblem v = value_role(p);
    if (Status s = diag_run(backwards_in_time(v, f.by_key), f.by_key, stream, m.run); !s) return s;
  }
  if (!wants_gates(p) || p.T == 0) return {};
  GateParams x;
  x.p = boundary(diag_parameters(p, f.by_key), Boundary::None);
  x.q = operand(p.q);
  x.k = operand(p.k);
  x.dq = operand(m.dq);
  x.dk = operand(m.dk);
  if (p.dq && p.dq.dtype != DType::F32) x.rounded_dq = operand(p.dq);
  if (p.dk && p.dk.dtype != DType::F32) x.rounded_dk = operand(p.dk);
  x.dg = operand(p.dg);
  x.dgk = operand(p.dgk);
  const Launch l = {.name = "diag_gate",
                    .grid = {boundaries(p) * p.H},
                    .threads = kGateThreads,
                    .shared_bytes = static_cast<std::size_t>(kAlign * (kGateThreads / 32 + p.K)) * sizeof(float)};
  switch (p.q.dtype) {
    case DType::BF16: return launch<diag_gate_kernel<bf16>>(l, stream, x);
    case DType::F16: return launch<diag_gate_kernel<f16>>(l, stream, x);
    default: return launch<diag_gate_kernel<float>>(l, stream, x);
  }
}

}  // namespace fla::cuda
