// The host side of the CUDA delta engine: what it serves, and which kernel does.
#include "fla/engine/delta/cuda/entry.h"

#include <algorithm>
#include <initializer_list>
#include <set>
#include <utility>

#include "fla/engine/delta/cuda/launches.h"
#include "fla/engine/delta/cuda/params.cuh"
#include "fla/kernels/cuda/toolbox.cuh"

namespace fla::cuda {

namespace {

constexpr std::int64_t kMostWidth = 256, kDecodeTokens = 8;
// Of a sequence, which the chunk kernels count in 32 bits.
constexpr std::int64_t kMostTokens = (std::int64_t{1} << 31) - 1 - 4 * kDeltaBT;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Whether the chunk kernels serve the problem. The checks of alignment look at addresses and strides only.
bool chunk_serves(const DeltaProblem& p, const Why& why) {
  if (p.q.dtype != DType::BF16 && p.q.dtype != DType::F16) {
    return why("q: needs BF16 or F16, got ", name_of(p.q.dtype));
  }
  for (const auto& [name, t] : {std::pair{"k", &p.k}, {"v", &p.v}, {"o", &p.o}}) {
    if (t->present() && t->dtype != p.q.dtype) return why(name, ": needs the type of q");
  }
  for (const auto& [name, t] : {std::pair{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"o", &p.o}}) {
    if (!vectorizable(*t)) return why(name, ": needs rows that are contiguous and 16-byte aligned");
  }
  if (p.K % 8 != 0) return why("K: needs a multiple of 8, got ", p.K);
  if (p.V % 8 != 0) return why("V: needs a multiple of 8, got ", p.V);
  if (p.reverse) return why("reverse: needs tokens in their order");
  if (p.T > kMostTokens) return why("T: needs at most ", kMostTokens, ", got ", p.T);
  if (p.slots().indices || p.slots().steps) return why("slots: need the token kernel");
  if (!p.cu_seqlens && p.T <= kDecodeTokens) return why("T: needs more than 8 tokens, got ", p.T);
  if (p.gv) return why("gv: needs the token kernel");
  if (p.beta.ndim == 4) return why("beta: needs [B, T, HV]");
  if (p.g && p.gk) return why("gk: needs to be the only gate");
  if (p.gk && p.gk.dtype == DType::F64) return why("gk: needs F32, F16 or BF16, got F64");
  if (p.erase == Erase::Plain && (p.g || p.gk)) return why("g: needs an operator that reads the decayed state");
  if (p.chunk > 0 && p.chunk < kDeltaBT) return why("chunk_size: needs at least 32, got ", p.chunk);
  if (p.h && p.h_chunk % kDeltaBT != 0) {
    return why("h: needs states every multiple of 32 tokens, got ", p.h_chunk);
  }
  return true;
}

// Whether they form the gradients.
bool chunk_backward_serves(const DeltaBackwardProblem& p, const Why& why) {
  if (!chunk_serves(p, why)) return false;
  if (p.q.dtype != DType::BF16) return why("q: needs BF16, got ", name_of(p.q.dtype));
  if (!p.do_) return why("do: needs to be given");
  for (const auto& [name, t] : {std::pair{"do", &p.do_}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}}) {
    if (t->present() && t->dtype != p.q.dtype) return why(name, ": needs the type of q");
    if (!vectorizable(*t)) return why(name, ": needs rows that are contiguous and 16-byte aligned");
  }
  return true;
}

// delta_parameter_kernel: a block adds 32 entries of a head over all slots, a warp every eighth slot.
FLA_KERNEL(256, 1)
delta_parameter_kernel(const float* partials, std::int64_t slots, int HV, int entries, TypedView dA_log,
                       TypedView ddt_bias) {
  const Shared<float> sums = shared<float>(0, 256);
  const int groups = (entries + 31) / 32, entry = block_x() % groups * 32 + lane_id();
  const std::int64_t hv = block_x() / groups;
  float sum = 0.0F, lost = 0.0F;  // compensated: there are as many terms as chunks
  if (entry < entries) {
    for (std::int64_t i = warp_id(); i < slots; i += 8) {
      const float x = partials[(i * HV + hv) * entries + entry] - lost, next = sum + x;
      lost = (next - sum) - x;
      sum = next;
    }
  }
  sums.store(thread_id(), sum);
  sync_threads();
  if (warp_id() != 0 || entry >= entries) return;
  float all = 0.0F;
  for (int i = 0; i < 8; ++i) all += sums.load(32 * i + lane_id());
  if (entry == 0) {
    if (dA_log.present()) dA_log.store(all, hv);
  } else if (ddt_bias.present()) {
    ddt_bias.store(all, hv, entry - 1);
  }
}

}  // namespace

Status delta_parameter_gradients(const DeltaBackwardProblem& p, const float* partials, std::int64_t slots,
                                 Stream stream) {
  const std::int64_t entries = 1 + (p.g ? 1 : p.K);
  if (p.T == 0) slots = 0;  // kernels take gates without elements for absent ones, and leave no sums per channel
  return launch<delta_parameter_kernel>(
      {.name = "delta_parameter_kernel", .grid = {p.HV * ((entries + 31) / 32)}, .threads = 256, .shared_bytes = 1024},
      stream, partials, slots, static_cast<int>(p.HV), static_cast<int>(entries), typed(p.dA_log), typed(p.ddt_bias));
}

bool delta_serves(const DeltaProblem& p, const DeviceInfo& device, const Why& why) {
  if (device.sm < 80) {
    return why("device: needs compute capability 8.0, got ", device.sm / 10, ".", device.sm % 10);
  }
  if (p.erase != Erase::Plain && p.erase != Erase::Decayed) {
    return why(p.erase == Erase::Other     ? "p: not supported"
               : p.erase == Erase::Gated   ? "eb: not supported"
               : p.erase == Erase::General ? "a, b: not supported"
                                           : "erase: not supported");
  }
  if (p.q.dtype == DType::F64) return why("q: needs F32, F16 or BF16, got F64");
  if (p.R != 1) return why("k: needs one row per token, got ", p.R);
  if (p.w) return why("w: not supported");
  for (const auto& [name, t] : {std::pair{"initial_state", &p.h0}, {"final_state", &p.ht}}) {
    if (t->present() && t->dtype == DType::F64) return why(name, ": needs F32, F16 or BF16, got F64");
  }
  if (p.K > kMostWidth) return why("K: needs at most 256, got ", p.K);
  if (p.V > kMostWidth) return why("V: needs at most 256, got ", p.V);
  return true;
}

namespace {

bool has_room(std::int64_t bytes, const DeviceInfo& device) {
  return bytes <= static_cast<std::int64_t>(device.shared_per_block);
}
// Stages that leave room for so many blocks on a multiprocessor, each with `extra` bytes beside them.
int stages_for(std::int64_t blocks, std::int64_t stage, std::int64_t extra, const DeviceInfo& device) {
  const auto room = static_cast<std::int64_t>(device.shared_per_sm) / blocks -
                    static_cast<std::int64_t>(device.shared_reserved_block) - extra;
  const std::int64_t most = (static_cast<std::int64_t>(device.shared_per_block) - extra) / stage;
  return static_cast<int>(std::clamp<std::int64_t>(std::min(room / stage, most), 2, 4));
}

std::int64_t blocks_per_sm(std::int64_t blocks, const DeviceInfo& device) {
  return std::max<std::int64_t>(1, ceil_div(blocks, std::max(device.sm_count, 1)));
}

}  // namespace

namespace {

// The key channels that the token kernels are compiled for.
std::int64_t token_width(std::int64_t K) { return K <= 64 ? 64 : K <= 128 ? 128 : 256; }

DeltaPlan token_plan(const DeltaProblem& p) {
  DeltaPlan plan;
  plan.kernel = DeltaKernel::Token;
  plan.width = token_width(p.K);
  return plan;
}
DeltaPlan decode_plan(const DeltaProblem& p) {
  DeltaPlan plan = token_plan(p);
  plan.kernel = DeltaKernel::Decode;
  return plan;
}

// The chunk kernels with blocks of so many columns, time cut every so many chunks.
DeltaPlan chunk_plan(const DeltaProblem& p, const DeviceInfo& device, std::int64_t columns, std::int64_t chunks) {
  DeltaPlan plan;
  plan.kernel = DeltaKernel::Chunk;
  plan.width = p.K <= 64 && p.q.dtype == DType::BF16 ? 64 : p.K <= 128 ? 128 : 256;
  plan.columns = columns;
  plan.parts = ceil_div(p.V, columns);
  plan.segment = chunks;
  if (chunks > 0) plan.segments = std::max<std::int64_t>(1, ceil_div(p.T, chunks * kDeltaBT));
  const std::int64_t sequences = chunks > 0 ? delta_segment_slots(p, chunks) : p.N;
  const bool channel = p.gk.present();
  const auto stages_of = [&](std::int64_t parts) {
    const std::int64_t resident = delta_chunk_blocks(plan.width, columns, channel);
    return stages_for(std::min(blocks_per_sm(sequences * p.HV * parts, device), resident),
                      delta_chunk_stage_bytes(plan.width, columns, channel), delta_chunk_extra_bytes(columns), device);
  };
  plan.stages = stages_of(plan.parts);
  plan.transfer_stages = stages_of(plan.parts + plan.width / columns);
  return plan;
}

}  // namespace

DeltaPlan delta_chunk_plan(const DeltaProblem& p, const DeviceInfo& device, std::int64_t columns, std::int64_t chunks) {
  if (!chunk_serves(p, {})) return delta_decode_serves(p) ? decode_plan(p) : token_plan(p);
  const DeltaPlan plan = chunk_plan(p, device, columns, chunks);
  return has_room(delta_chunk_least_bytes(plan.width, columns, p.gk.present()), device) ? plan : token_plan(p);
}

namespace {

// Microseconds that a chunk takes a multiprocessor with 1, 2, .. blocks of a kernel on it, on an H200.
struct Pace {
  int resident;
  double us[3];
};
struct Paces {
  std::int64_t columns;
  Pace output, transfer;
};
constexpr Paces kPacesOfHeads[] = {{kDeltaColumns, {3, {1.15, 1.55, 2.25}}, {3, {0.8, 1.1, 1.6}}},
                                   {kDeltaWide, {2, {2.03, 2.93}}, {2, {1.4, 1.9}}}};
constexpr Paces kPacesOfChannels[] = {{kDeltaColumns, {2, {1.05, 2.2}}, {2, {0.8, 1.3}}},
                                      {kDeltaWide, {2, {1.7, 2.45}}, {2, {1.4, 1.9}}}};
constexpr double kJoin = 0.8, kMoreKernels = 12.0;  // of a segment; of a call
// Of the transfers' chunks, those that show at their segment's end where there is a gate per head.
constexpr double kReached = 0.5;

double us_of_chunk(const Pace& k, std::int64_t blocks, const DeviceInfo& device) {
  const std::int64_t each = ceil_div(blocks, std::max(device.sm_count, 1)), rest = each % k.resident;
  return static_cast<double>(each / k.resident) * k.us[k.resident - 1] + (rest > 0 ? k.us[rest - 1] : 0.0);
}

std::size_t chunk_workspace(const DeltaProblem& p, const DeltaPlan& plan) {
  return p.q.dtype == DType::BF16 ? delta_chunk_forward_workspace<bf16>(p, plan)
                                  : delta_chunk_forward_workspace<f16>(p, plan);
}

// fn(plan, microseconds) for every way in which the chunk kernels could run the problem on this device. Time is cut
// where too few heads keep the multiprocessors busy: the cut adds about as much work again as the whole. `always`: it may
// be cut wherever there are chunks to cut.
template <typename Fn>
void for_each_chunk_plan(const DeltaProblem& p, const DeviceInfo& device, bool always, Fn&& fn) {
  const std::int64_t most_segments = always ? 2 : 64;
  const std::int64_t least_chunks = always ? 1 : 8;  // of a segment
  const DeltaPlan whole = chunk_plan(p, device, kDeltaColumns, 0);
  const bool channel = p.gk.present(), nothing = p.N == 0 || p.HV == 0;
  const std::int64_t heads = p.N * p.HV, chunks = nothing ? 0 : ceil_div(p.cu_seqlens ? p.T / p.N : p.T, kDeltaBT);
  const std::int64_t most = whole.width > 128 || p.h ? 1 : std::min(most_segments, chunks / least_chunks);
  for (const Paces& paces : channel ? kPacesOfChannels : kPacesOfHeads) {
    if (paces.columns == kDeltaWide && (whole.width != kDeltaWideKeys || p.V <= kDeltaColumns || p.h)) continue;
    if (!has_room(delta_chunk_least_bytes(whole.width, paces.columns, channel), device)) continue;
    const std::int64_t parts = ceil_div(p.V, paces.columns);
    for (std::int64_t segments = 1; segments <= std::max<std::int64_t>(1, most); ++segments) {
      const std::int64_t length = ceil_div(chunks, segments);
      double us = static_cast<double>(length) * us_of_chunk(paces.output, heads * segments * parts, device);
      if (segments > 1) {
        const std::int64_t blocks = heads * (segments - 1) * (parts + whole.width / paces.columns);
        us += (p.g ? kReached : 1.0) * static_cast<double>(length) * us_of_chunk(paces.transfer, blocks, device) +
              static_cast<double>(segments) * kJoin + kMoreKernels;
      }
      fn(chunk_plan(p, device, paces.columns, segments == 1 ? 0 : length), us);
    }
  }
}

// Whether sequences go through the kernels in rounds. For a gate per channel the prologue leaves rows of q and k for
// every value head, more than half of what the call reads and writes: then sequences of one length are served round
// after round. `always`: where they could be.
DeltaPlan in_rounds(const DeltaProblem& p, DeltaPlan plan, bool always) {
  const std::int64_t least_round = always ? 1 : 8;
  if (plan.segments > 1 || !p.gk || p.cu_seqlens) return plan;
  std::size_t tensors = 0;
  for (const TensorView* t : {&p.q, &p.k, &p.v, &p.beta, &p.gk, &p.h0, &p.o, &p.ht}) {
    if (t->present()) tensors += static_cast<std::size_t>(t->numel()) * size_of(t->dtype);
  }
  const std::int64_t chunks = ceil_div(p.T, kDeltaBT);
  for (std::int64_t rounds = 2; chunks >= least_round * rounds; ++rounds) {
    if (always ? plan.round > 0 : 2 * chunk_workspace(p, plan) <= tensors) break;
    plan.round = ceil_div(chunks, rounds);
  }
  return plan;
}

// fn(plan, rank) for every way to run the problem; the least rank is chosen. Chunks come before decoding, that before
// token by token.
template <typename Fn>
void for_each_forward_plan(const DeltaProblem& p, const DeviceInfo& device, bool always, Fn&& fn) {
  constexpr double kDecodeRank = 1e30, kTokenRank = 1e31;
  fn(token_plan(p), kTokenRank);
  if (delta_decode_serves(p)) fn(decode_plan(p), kDecodeRank);
  if (chunk_serves(p, {})) for_each_chunk_plan(p, device, always, fn);
}

}  // namespace

KernelName delta_forward_kernel(const DeltaProblem& p, const DeltaPlan& plan) {
  switch (plan.kernel) {
    case DeltaKernel::Token: return KernelName("delta.token.k").add(plan.width).add(".forward");
    case DeltaKernel::Decode:
      return KernelName("delta.decode.")
          .add(short_name(p.h0 ? p.h0.dtype : p.ht.dtype))
          .add(".k")
          .add(plan.width)
          .add(p.T == 1 ? ".one" : ".several");
    case DeltaKernel::Chunk: break;
  }
  return KernelName("delta.chunk.")
      .add(short_name(p.q.dtype))
      .add(".k")
      .add(plan.width)
      .add(".v")
      .add(plan.columns)
      .add(p.gk ? ".channel" : ".head")
      .add(plan.segments > 1 ? ".cut"
           : plan.round > 0  ? ".rounds"
                             : "")
      .add(".forward");
}

bool delta_plan_forward(const DeltaProblem& p, const DeviceInfo& device, std::string_view wanted, DeltaPlan& plan,
                        std::string* text) {
  const Why why(text);
  if (!delta_serves(p, device, why)) return false;
  double least = -1.0;
  for_each_forward_plan(p, device, !wanted.empty(), [&](const DeltaPlan& one, double rank) {
    if (wanted.empty()) {
      if (least >= 0.0 && rank >= least) return;
      least = rank;
      plan = one;
      return;
    }
    for (const bool rounds : {false, true}) {
      const DeltaPlan as = rounds ? in_rounds(p, one, true) : one;
      if (least >= 0.0 || !delta_forward_kernel(p, as).has(wanted)) continue;
      least = rank;
      plan = as;
    }
  });
  if (least < 0.0) return why("no way to run this call with kernel ", wanted);
  if (wanted.empty() && plan.kernel == DeltaKernel::Chunk) plan = in_rounds(p, plan, false);
  return true;
}

DeltaPlan delta_forward_plan(const DeltaProblem& p, const DeviceInfo& device) {
  DeltaPlan plan;
  static_cast<void>(delta_plan_forward(p, device, {}, plan, nullptr));
  return plan;
}

std::string delta_forward_text(const DeltaProblem& p, const DeltaPlan& plan) {
  if (plan.kernel == DeltaKernel::Chunk) return plan.text();
  std::string reason;
  if (chunk_serves(p, Why(&reason))) reason = "a block of the chunk kernels finds no room in shared memory";
  return plan.text() + " (" + reason + ")";
}

std::string DeltaPlan::text() const {
  if (kernel != DeltaKernel::Chunk) return "K padded to " + std::to_string(width) + ", token by token";
  return "K padded to " + std::to_string(width) + ", " + std::to_string(parts) +
         (parts == 1 ? " block of " : " blocks of ") + std::to_string(columns) + " values, chunk " +
         std::to_string(kDeltaBT) + ", " + std::to_string(stages) + " stages" +
         (segments > 1 ? ", time cut every " + std::to_string(segment * kDeltaBT) + " tokens" : "") +
         (round > 0 ? ", in rounds of " + std::to_string(round * kDeltaBT) + " tokens" : "");
}

namespace {

// Kernels take their parts of the workspace at multiples of this; the caller's memory may start anywhere.
constexpr std::size_t kAlignment = 256;

std::size_t anywhere(std::size_t bytes) { return bytes == 0 ? 0 : bytes + kAlignment; }
std::span<std::byte> aligned(std::span<std::byte> workspace) {
  const std::size_t skip = -reinterpret_cast<std::uintptr_t>(workspace.data()) % kAlignment;
  return workspace.size() < skip ? std::span<std::byte>{} : workspace.subspan(skip);
}

}  // namespace

std::size_t delta_forward_workspace(const DeltaProblem& p, const DeltaPlan& plan) {
  return plan.kernel == DeltaKernel::Chunk ? anywhere(chunk_workspace(p, plan)) : 0;
}
std::size_t delta_forward_workspace(const DeltaProblem& p, const DeviceInfo& device) {
  return delta_forward_workspace(p, delta_forward_plan(p, device));
}

Status delta_forward(const DeltaProblem& p, const DeltaPlan& plan, Stream stream, std::span<std::byte> workspace) {
  if (p.N == 0 || p.HV == 0 || p.V == 0 || p.K == 0) return {};
  if (plan.kernel == DeltaKernel::Decode) return delta_decode_forward(p, stream);
  if (plan.kernel == DeltaKernel::Token) return delta_token_forward(p, stream);
  return p.q.dtype == DType::BF16 ? delta_chunk_forward<bf16>(p, plan, stream, aligned(workspace))
                                  : delta_chunk_forward<f16>(p, plan, stream, aligned(workspace));
}
Status delta_forward(const DeltaProblem& p, const DeviceInfo& device, Stream stream, std::span<std::byte> workspace) {
  DeltaPlan plan;
  std::string why;
  if (!delta_plan_forward(p, device, {}, plan, &why)) return {Code::Unsupported, "delta_forward: " + why};
  if (workspace.size() < delta_forward_workspace(p, plan)) {
    return {Code::OutOfMemory, "delta_forward: workspace too small"};
  }
  return delta_forward(p, plan, stream, workspace);
}

KernelName delta_backward_kernel(const DeltaBackwardProblem& p, const DeltaPlan& plan) {
  if (plan.kernel == DeltaKernel::Token) return KernelName("delta.token.k").add(plan.width).add(".backward");
  return KernelName("delta.chunk.")
      .add(short_name(p.q.dtype))
      .add(".k")
      .add(plan.width)
      .add(p.gk ? ".channel" : ".head")
      .add(".backward");
}

bool delta_plan_backward(const DeltaBackwardProblem& p, const DeviceInfo& device, std::string_view wanted,
                         DeltaPlan& plan, std::string* text) {
  const Why why(text);
  if (!delta_serves(p, device, why)) return false;
  if (p.slots().indices || p.slots().steps) return why("slots: have no gradient");
  if (p.gv) return why("gv: has no gradient");
  if (p.g && p.gk) return why("gk: has no gradient beside g");
  if (p.erase == Erase::Plain && (p.g || p.gk)) {
    return why("g: has a gradient only where the decayed state is read");
  }
  plan = token_plan(p);
  if (chunk_backward_serves(p, {})) {
    const DeltaPlan chunk = chunk_plan(p, device, kDeltaColumns, 0);
    const bool room = has_room(delta_chunk_least_bytes(chunk.width, kDeltaColumns, p.gk.present()), device) &&
                      has_room(delta_gradient_bytes<bf16>(p, chunk), device);
    if (room && (wanted.empty() || delta_backward_kernel(p, chunk).view() == wanted)) plan = chunk;
  }
  return wanted.empty() || delta_backward_kernel(p, plan).view() == wanted ||
         why("no way to run this call with kernel ", wanted);
}

DeltaPlan delta_backward_plan(const DeltaBackwardProblem& p, const DeviceInfo& device) {
  DeltaPlan plan;
  static_cast<void>(delta_plan_backward(p, device, {}, plan, nullptr));
  return plan;
}

std::string delta_backward_text(const DeltaBackwardProblem& p, const DeltaPlan& plan) {
  if (plan.kernel == DeltaKernel::Chunk) return plan.text();
  std::string reason;
  if (chunk_backward_serves(p, Why(&reason))) reason = "a block of the chunk kernels finds no room in shared memory";
  return plan.text() + " (" + reason + ")";
}

std::size_t delta_backward_workspace(const DeltaBackwardProblem& p, const DeltaPlan& plan) {
  return anywhere(plan.kernel == DeltaKernel::Token ? delta_token_backward_workspace(p)
                                                    : delta_chunk_backward_workspace<bf16>(p, plan));
}
std::size_t delta_backward_workspace(const DeltaBackwardProblem& p, const DeviceInfo& device) {
  return delta_backward_workspace(p, delta_backward_plan(p, device));
}

Status delta_backward(const DeltaBackwardProblem& p, const DeltaPlan& plan, Stream stream,
                      std::span<std::byte> workspace) {
  if (p.N == 0 || p.HV == 0 || p.V == 0 || p.K == 0) return {};
  if (plan.kernel == DeltaKernel::Token) return delta_token_backward(p, stream, aligned(workspace));
  return delta_chunk_backward<bf16>(p, plan, stream, aligned(workspace));
}
Status delta_backward(const DeltaBackwardProblem& p, const DeviceInfo& device, Stream stream,
                      std::span<std::byte> workspace) {
  DeltaPlan plan;
  std::string why;
  if (!delta_plan_backward(p, device, {}, plan, &why)) return {Code::Unsupported, "delta_backward: " + why};
  if (workspace.size() < delta_backward_workspace(p, plan)) {
    return {Code::OutOfMemory, "delta_backward: workspace too small"};
  }
  return delta_backward(p, plan, stream, workspace);
}

// ---- the list of kernels

namespace {

// A problem that decides which kernels there are: shapes and types, no memory.
DeltaBackwardProblem sample(DType type, std::int64_t K, std::int64_t V, std::int64_t T, bool channel, DType state) {
  DeltaBackwardProblem p;
  p.erase = Erase::Decayed;
  p.B = p.N = p.H = p.HV = 1;
  p.T = T;
  p.K = K;
  p.V = V;
  const auto tensor = [](DType t, std::initializer_list<std::int64_t> dims) {
    return TensorView(nullptr, t, {dims.begin(), dims.size()});
  };
  p.q = p.k = tensor(type, {1, T, 1, K});
  p.v = p.o = tensor(type, {1, T, 1, V});
  p.h0 = p.ht = tensor(state, {1, 1, K, V});
  p.do_ = p.dv = p.v;
  p.dq = p.dk = p.q;
  (channel ? p.gk : p.g) = tensor(DType::F32, channel ? std::initializer_list<std::int64_t>{1, T, 1, K}
                                                      : std::initializer_list<std::int64_t>{1, T, 1});
  return p;
}

// Every width, type and gate that kernels are compiled for.
template <typename Fn>
void for_each_sample(Fn&& fn) {
  for (const DType type : {DType::BF16, DType::F16, DType::F32})
    for (const std::int64_t K : {64, 128, 256})
      for (const std::int64_t T : {1, 2, 4096})
        for (const bool channel : {false, true}) fn(sample(type, K, 64, T, channel, type));
}

std::vector<std::string> sorted(std::set<std::string> names) { return {names.begin(), names.end()}; }

}  // namespace

std::vector<std::string> delta_forward_kernels(const DeviceInfo& device) {
  std::set<std::string> names;
  for_each_sample([&](const DeltaProblem& p) {
    for_each_forward_plan(p, device, true, [&](const DeltaPlan& plan, double) {
      names.insert(delta_forward_kernel(p, plan).c_str());
      if (plan.kernel == DeltaKernel::Chunk) names.insert(delta_forward_kernel(p, in_rounds(p, plan, true)).c_str());
    });
  });
  return sorted(std::move(names));
}

std::vector<std::string> delta_backward_kernels(const DeviceInfo& device) {
  std::set<std::string> names;
  for_each_sample([&](const DeltaBackwardProblem& p) {
    names.insert(delta_backward_kernel(p, token_plan(p)).c_str());
    names.insert(delta_backward_kernel(p, delta_backward_plan(p, device)).c_str());
  });
  return sorted(std::move(names));
}

}  // namespace fla::cuda
