// The host side of the CUDA delta engine: what it serves, and which kernel does.
#include "fla/engine/delta/cuda/entry.h"

#include <algorithm>

#include "fla/engine/delta/cuda/launches.h"
#include "fla/engine/delta/cuda/params.cuh"
#include "fla/kernels/cuda/toolbox.cuh"

namespace fla::cuda {

namespace {

constexpr std::int64_t kMostWidth = 256, kDecodeTokens = 8;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Why the chunk kernels cannot serve the problem. The checks of alignment look at addresses and strides only.
std::string chunk_refusal(const DeltaProblem& p) {
  if (p.q.dtype != DType::BF16 && p.q.dtype != DType::F16) {
    return std::string("q: needs BF16 or F16, got ") + name_of(p.q.dtype);
  }
  for (const auto& [name, t] : {std::pair{"k", &p.k}, {"v", &p.v}, {"o", &p.o}}) {
    if (t->present() && t->dtype != p.q.dtype) return std::string(name) + ": needs the type of q";
  }
  for (const auto& [name, t] : {std::pair{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"o", &p.o}}) {
    if (!vectorizable(*t)) return std::string(name) + ": needs rows that are contiguous and 16-byte aligned";
  }
  if (p.K % 8 != 0) return "K: needs a multiple of 8, got " + std::to_string(p.K);
  if (p.V % 8 != 0) return "V: needs a multiple of 8, got " + std::to_string(p.V);
  if (p.reverse) return "reverse: needs tokens in their order";
  if (p.slots().indices || p.slots().steps) return "slots: need the token kernel";
  if (!p.cu_seqlens && p.T <= kDecodeTokens) return "T: needs more than 8 tokens, got " + std::to_string(p.T);
  if (p.gv) return "gv: needs the token kernel";
  if (p.beta.ndim == 4) return "beta: needs [B, T, HV]";
  if (p.g && p.gk) return "gk: needs to be the only gate";
  if (p.gk && p.gk.dtype == DType::F64) return "gk: needs F32, F16 or BF16, got F64";
  if (p.erase == Erase::Plain && (p.g || p.gk)) return "g: needs an operator that reads the decayed state";
  if (p.chunk > 0 && p.chunk < kDeltaBT) {
    return "chunk_size: needs at least 32, got " + std::to_string(p.chunk);
  }
  if (p.h && p.h_chunk % kDeltaBT != 0) {
    return "h: needs states every multiple of 32 tokens, got " + std::to_string(p.h_chunk);
  }
  return {};
}

// Why the chunk kernels cannot form the gradients.
std::string chunk_backward_refusal(const DeltaBackwardProblem& p) {
  if (std::string why = chunk_refusal(p); !why.empty()) return why;
  if (p.q.dtype != DType::BF16) return std::string("q: needs BF16, got ") + name_of(p.q.dtype);
  if (!p.do_) return "do: needs to be given";
  for (const auto& [name, t] : {std::pair{"do", &p.do_}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}}) {
    if (t->present() && t->dtype != p.q.dtype) return std::string(name) + ": needs the type of q";
    if (!vectorizable(*t)) return std::string(name) + ": needs rows that are contiguous and 16-byte aligned";
  }
  return {};
}

// delta_parameter_kernel: a block adds 32 entries of a head over all slots, a warp every eighth slot.
FLA_KERNEL(256, 1)
delta_parameter_kernel(const float* partials, std::int64_t slots, int HV, int entries, TypedView dA_log,
                       TypedView ddt_bias) {
  const Shared<float> sums = shared<float>(0, 256);
  const int groups = (entries + 31) / 32, hv = block_x() / groups, entry = block_x() % groups * 32 + lane_id();
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

std::string delta_refusal(const DeltaProblem& p, const DeviceInfo& device) {
  if (device.sm < 80)
    return "device: needs compute capability 8.0, got " + std::to_string(device.sm / 10) + "." +
           std::to_string(device.sm % 10);
  if (p.erase != Erase::Plain && p.erase != Erase::Decayed) {
    return p.erase == Erase::Other     ? "p: not supported"
           : p.erase == Erase::Gated   ? "eb: not supported"
           : p.erase == Erase::General ? "a, b: not supported"
                                       : "erase: not supported";
  }
  if (p.q.dtype == DType::F64) return "q: needs F32, F16 or BF16, got F64";
  if (p.R != 1) return "k: needs one row per token, got " + std::to_string(p.R);
  if (p.w) return "w: not supported";
  for (const auto& [name, t] : {std::pair{"initial_state", &p.h0}, {"final_state", &p.ht}}) {
    if (t->present() && t->dtype == DType::F64) return std::string(name) + ": needs F32, F16 or BF16, got F64";
  }
  if (p.K > kMostWidth) return "K: needs at most 256, got " + std::to_string(p.K);
  if (p.V > kMostWidth) return "V: needs at most 256, got " + std::to_string(p.V);
  return {};
}

std::string DeltaPlan::text() const {
  if (kernel != DeltaKernel::Chunk) return std::string(name) + " (" + why_token + ")";
  return std::string(name) + ", K padded to " + std::to_string(width) + ", " + std::to_string(parts) +
         (parts == 1 ? " block of " : " blocks of ") + std::to_string(columns) + " values, chunk " +
         std::to_string(kDeltaBT) + ", " + std::to_string(stages) + " stages" +
         (segments > 1 ? ", time cut every " + std::to_string(segment * kDeltaBT) + " tokens" : "") +
         (round > 0 ? ", in rounds of " + std::to_string(round * kDeltaBT) + " tokens" : "");
}

namespace {

bool has_room(std::int64_t bytes, const DeviceInfo& device) {
  return bytes <= static_cast<std::int64_t>(device.shared_per_block);
}
std::string too_wide(std::int64_t bytes, const DeviceInfo& device) {
  return "device: needs " + std::to_string(bytes) + " bytes of shared memory a block, has " +
         std::to_string(device.shared_per_block);
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

DeltaPlan delta_chunk_plan(const DeltaProblem& p, const DeviceInfo& device, std::int64_t columns, std::int64_t chunks) {
  DeltaPlan plan;
  plan.why_token = chunk_refusal(p);
  if (!plan.why_token.empty()) {
    const bool decode = delta_decode_serves(p);
    plan.kernel = decode ? DeltaKernel::Decode : DeltaKernel::Token;
    plan.name = decode ? "delta_decode" : "delta_token";
    return plan;
  }
  plan.kernel = DeltaKernel::Chunk;
  plan.name = p.gk ? "delta_chunk_channel" : "delta_chunk_head";
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
  if (const std::int64_t least = delta_chunk_least_bytes(plan.width, columns, channel); !has_room(least, device)) {
    plan.kernel = DeltaKernel::Token;
    plan.name = "delta_token";
    plan.why_token = too_wide(least, device);
  }
  return plan;
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

// Cuts time where too few heads keep the multiprocessors busy: as long as that pays for the work that it adds, about as
// much again as the whole.
DeltaPlan fastest_plan(const DeltaProblem& p, const DeviceInfo& device) {
  constexpr std::int64_t kMostSegments = 64, kLeastChunks = 8;
  const DeltaPlan whole = delta_chunk_plan(p, device, kDeltaColumns, 0);
  if (whole.kernel != DeltaKernel::Chunk || p.N == 0 || p.HV == 0) return whole;
  const std::int64_t heads = p.N * p.HV, chunks = ceil_div(p.cu_seqlens ? p.T / p.N : p.T, kDeltaBT);
  const std::int64_t most = whole.width > 128 || p.h ? 1 : std::min(kMostSegments, chunks / kLeastChunks);
  double least = 0.0;
  std::int64_t best_columns = kDeltaColumns, best_length = 0;
  for (const Paces& paces : p.gk ? kPacesOfChannels : kPacesOfHeads) {
    if (paces.columns == kDeltaWide && (whole.width != kDeltaWideKeys || p.V <= kDeltaColumns || p.h)) continue;
    if (!has_room(delta_chunk_least_bytes(whole.width, paces.columns, p.gk.present()), device)) continue;
    const std::int64_t parts = ceil_div(p.V, paces.columns);
    for (std::int64_t segments = 1; segments <= std::max<std::int64_t>(1, most); ++segments) {
      const std::int64_t length = ceil_div(chunks, segments);
      double us = static_cast<double>(length) * us_of_chunk(paces.output, heads * segments * parts, device);
      if (segments > 1) {
        const std::int64_t blocks = heads * (segments - 1) * (parts + whole.width / paces.columns);
        us += (p.g ? kReached : 1.0) * static_cast<double>(length) * us_of_chunk(paces.transfer, blocks, device) +
              static_cast<double>(segments) * kJoin + kMoreKernels;
      }
      if (least > 0.0 && us >= least) continue;
      least = us;
      best_columns = paces.columns;
      best_length = segments == 1 ? 0 : length;
    }
  }
  return best_columns == kDeltaColumns && best_length == 0 ? whole
                                                           : delta_chunk_plan(p, device, best_columns, best_length);
}

std::size_t chunk_workspace(const DeltaProblem& p, const DeltaPlan& plan) {
  return p.q.dtype == DType::BF16 ? delta_chunk_forward_workspace<bf16>(p, plan)
                                  : delta_chunk_forward_workspace<f16>(p, plan);
}

}  // namespace

// For a gate per channel the prologue leaves rows of q and k for every value head, more than half of what the call
// reads and writes: so sequences of one length are served round after round.
DeltaPlan delta_forward_plan(const DeltaProblem& p, const DeviceInfo& device) {
  constexpr std::int64_t kLeastRound = 8;
  DeltaPlan plan = fastest_plan(p, device);
  if (plan.kernel != DeltaKernel::Chunk || plan.segments > 1 || !p.gk || p.cu_seqlens) return plan;
  std::size_t tensors = 0;
  for (const TensorView* t : {&p.q, &p.k, &p.v, &p.beta, &p.gk, &p.h0, &p.o, &p.ht}) {
    if (t->present()) tensors += static_cast<std::size_t>(t->numel()) * size_of(t->dtype);
  }
  const std::int64_t chunks = ceil_div(p.T, kDeltaBT);
  for (std::int64_t rounds = 2; 2 * chunk_workspace(p, plan) > tensors && chunks >= kLeastRound * rounds; ++rounds) {
    plan.round = ceil_div(chunks, rounds);
  }
  return plan;
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

std::size_t delta_forward_workspace(const DeltaProblem& p, const DeviceInfo& device) {
  const DeltaPlan plan = delta_forward_plan(p, device);
  if (plan.kernel != DeltaKernel::Chunk) return 0;
  return anywhere(chunk_workspace(p, plan));
}

Status delta_forward(const DeltaProblem& p, const DeviceInfo& device, Stream stream, std::span<std::byte> workspace) {
  if (std::string why = delta_refusal(p, device); !why.empty()) return {Code::Unsupported, "delta_forward: " + why};
  if (workspace.size() < delta_forward_workspace(p, device)) {
    return {Code::OutOfMemory, "delta_forward: workspace too small"};
  }
  if (p.N == 0 || p.HV == 0 || p.V == 0 || p.K == 0) return {};
  const DeltaPlan plan = delta_forward_plan(p, device);
  if (plan.kernel == DeltaKernel::Decode) return delta_decode_forward(p, stream);
  if (plan.kernel == DeltaKernel::Token) return delta_token_forward(p, stream);
  return p.q.dtype == DType::BF16 ? delta_chunk_forward<bf16>(p, plan, stream, aligned(workspace))
                                  : delta_chunk_forward<f16>(p, plan, stream, aligned(workspace));
}

std::string delta_backward_refusal(const DeltaBackwardProblem& p, const DeviceInfo& device) {
  if (std::string why = delta_refusal(p, device); !why.empty()) return why;
  if (p.slots().indices || p.slots().steps) return "slots: have no gradient";
  if (p.gv) return "gv: has no gradient";
  if (p.g && p.gk) return "gk: has no gradient beside g";
  if (p.erase == Erase::Plain && (p.g || p.gk)) return "g: has a gradient only where the decayed state is read";
  return {};
}

DeltaPlan delta_backward_plan(const DeltaBackwardProblem& p, const DeviceInfo& device) {
  DeltaPlan plan = delta_chunk_plan(p, device, kDeltaColumns, 0);
  if (std::string why = chunk_backward_refusal(p); !why.empty()) plan.why_token = std::move(why);
  const std::int64_t bytes = plan.why_token.empty() ? delta_gradient_bytes<bf16>(p, plan) : 0;
  if (!has_room(bytes, device)) plan.why_token = too_wide(bytes, device);
  if (!plan.why_token.empty()) plan.kernel = DeltaKernel::Token;
  plan.name = plan.kernel == DeltaKernel::Token ? "delta_token" : p.gk ? "delta_chunk_channel" : "delta_chunk_head";
  return plan;
}

std::size_t delta_backward_workspace(const DeltaBackwardProblem& p, const DeviceInfo& device) {
  const DeltaPlan plan = delta_backward_plan(p, device);
  return anywhere(plan.kernel == DeltaKernel::Token ? delta_token_backward_workspace(p)
                                                    : delta_chunk_backward_workspace<bf16>(p, plan));
}

Status delta_backward(const DeltaBackwardProblem& p, const DeviceInfo& device, Stream stream,
                      std::span<std::byte> workspace) {
  if (std::string why = delta_backward_refusal(p, device); !why.empty()) {
    return {Code::Unsupported, "delta_backward: " + why};
  }
  if (workspace.size() < delta_backward_workspace(p, device)) {
    return {Code::OutOfMemory, "delta_backward: workspace too small"};
  }
  if (p.N == 0 || p.HV == 0 || p.V == 0 || p.K == 0) return {};
  const DeltaPlan plan = delta_backward_plan(p, device);
  if (plan.kernel == DeltaKernel::Token) return delta_token_backward(p, stream, aligned(workspace));
  return delta_chunk_backward<bf16>(p, plan, stream, aligned(workspace));
}

}  // namespace fla::cuda
