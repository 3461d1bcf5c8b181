// Which kernel runs a problem, and how it is cut into blocks.
#include <algorithm>
#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "fla/engine/diag/cuda/channel.cuh"
#include "fla/engine/diag/cuda/channel_gradient.cuh"
#include "fla/engine/diag/cuda/head.cuh"
#include "fla/engine/diag/cuda/head_gradient.cuh"
#include "fla/engine/diag/cuda/launches.h"
#include "fla/engine/diag/cuda/states.cuh"
#include "fla/engine/diag/cuda/value.cuh"

namespace fla::cuda {

namespace {

bool carries_fp32(DType t) { return t == DType::F32 || t == DType::F16 || t == DType::BF16; }

int padded_key(std::int64_t K) { return K <= 64 ? 64 : K <= 128 ? 128 : 256; }

int blocks(std::int64_t size, int of) { return static_cast<int>((size + of - 1) / of); }

// A kernel that exists, and the nanoseconds that a token takes it on a multiprocessor with 1, 2, .. of its blocks, on
// an H200. A block waits most of its time, so a second one beside it costs little; wide blocks read q and k less often,
// and narrow ones are there for problems of few heads.
struct ChunkKernel {
  int key, value, chunk, warps;
  int shared;  // bytes of a block
  int resident;
  float ns[4];
};
constexpr ChunkKernel kHead[] = {
    {64, 32, 64, 2, HeadTiles<64, 64, 2, 1>::kBytes, 2, {48, 52}},
    {64, 64, 64, 4, HeadTiles<64, 64, 4, 1>::kBytes, 2, {28, 38}},
    {128, 64, 64, 4, HeadTiles<128, 64, 4, 1>::kBytes, 1, {42}},
    {128, 128, 64, 8, HeadTiles<128, 64, 8, 1>::kBytes, 1, {47}},
    {256, 64, 32, 4, HeadTiles<256, 32, 4, 1>::kBytes, 1, {80}},
};
constexpr ChunkKernel kChannel[] = {
    {64, 32, 32, 2, ChannelTiles<64, 32, 2, 1, 4>::kBytes, 2, {42, 52}},
    {64, 64, 32, 4, ChannelTiles<64, 32, 4, 1, 4>::kBytes, 2, {45, 56}},
    {128, 64, 32, 4, ChannelTiles<128, 32, 4, 1, 8>::kBytes, 1, {69}},
    {128, 128, 32, 8, ChannelTiles<128, 32, 8, 1, 8>::kBytes, 1, {86}},
    {256, 64, 16, 4, ChannelTiles<256, 16, 4, 1, 4>::kBytes, 1, {160}},
};
constexpr ChunkKernel kValue[] = {
    {64, 32, 32, 2, ValueTiles<64, 32, 2, 1>::kBytes, 4, {133, 140, 150, 160}},
    {64, 64, 32, 4, ValueTiles<64, 32, 4, 1>::kBytes, 3, {124, 133, 150}},
    {128, 64, 32, 4, ValueTiles<128, 32, 4, 1>::kBytes, 2, {143, 174}},
    {128, 128, 32, 8, ValueTiles<128, 32, 8, 1>::kBytes, 1, {161}},
    {256, 64, 16, 4, ValueTiles<256, 16, 4, 1>::kBytes, 2, {300, 340}},
};

// Those that keep or sum states at boundaries have twice the products.
constexpr ChunkKernel kHeadBoundaries[] = {{64, 64, 64, 4, HeadTiles<64, 64, 4, 1>::kBytes, 1, {60}},
                                           {128, 64, 32, 4, HeadTiles<128, 32, 4, 1>::kBytes, 1, {110}},
                                           {256, 64, 32, 4, HeadTiles<256, 32, 4, 1>::kBytes, 1, {160}}};

// Of states at chunks, whose blocks read and write most of what they may.
const ChunkKernel kStates[] = {{64, kStateRows, kStateChunk, 4, StateTiles<64, true>::bytes(false), 3, {16, 20, 26}},
                               {128, kStateRows, kStateChunk, 4, StateTiles<128, true>::bytes(false), 3, {20, 26, 34}}};

std::span<const ChunkKernel> kernels(DiagPlan::Kind kind, bool boundaries = false) {
  if (kind == DiagPlan::Kind::Head && boundaries) return kHeadBoundaries;
  if (kind == DiagPlan::Kind::Channel) return kChannel;
  if (kind == DiagPlan::Kind::Value) return kValue;
  if (kind == DiagPlan::Kind::States) return kStates;
  return kHead;
}

double block_ns(const ChunkKernel& k, std::int64_t blocks_of_multiprocessor) {
  const std::int64_t full = blocks_of_multiprocessor / k.resident, rest = blocks_of_multiprocessor % k.resident;
  return static_cast<double>(full) * static_cast<double>(k.ns[k.resident - 1]) +
         (rest > 0 ? static_cast<double>(k.ns[rest - 1]) : 0.0);
}

// What segments cost beside their tokens: a pass that forms their own states, which takes part of a whole one, two more
// launches, and the states' ways through memory, about 100 GB/s for all of them together.
double milliseconds(const ChunkKernel& k, const DiagProblem& p, int sm_count, int segments, bool both_ways) {
  constexpr double local = 0.6;
  const std::int64_t heads = p.N * p.H * (both_ways ? 2 : 1), mean = p.cu_seqlens ? p.T / p.N : p.T;
  const std::int64_t tokens = blocks(blocks(mean, k.chunk), segments) * k.chunk;
  const auto pass = [&](int parts) {
    const std::int64_t all = heads * blocks(p.V, k.value) * parts;
    return static_cast<double>(tokens) * block_ns(k, (all + sm_count - 1) / sm_count) * 1e-6;
  };
  if (segments == 1) return pass(1);
  return pass(segments) + local * pass(segments - 1) + 0.008 +
         static_cast<double>(heads * segments * p.K * p.V * 4) * 0.0095e-6;
}

DiagPlan with_kernel(const DiagProblem& p, DiagPlan f, const ChunkKernel& k) {
  f.key = k.key;
  f.value = k.value;
  f.chunk = k.chunk;
  f.warps = k.warps;
  f.v_blocks = blocks(p.V, k.value);
  return f;
}

// fn(plan, milliseconds) for every kernel that could run the problem as `f` says on this device, in so many segments of
// time. `always`: time may be cut wherever there are two tiles.
template <typename Fn>
void for_each_cut(const DiagProblem& p, const DeviceInfo& d, const DiagPlan& f, bool boundaries, bool always, Fn&& fn) {
  constexpr int kMostSegments = 64, kLeastTokens = 256;  // of a segment
  const int sm_count = std::max(d.sm_count, 1);
  const std::int64_t mean = p.N > 0 ? (p.cu_seqlens ? p.T / p.N : p.T) : 0;
  for (const ChunkKernel& k : kernels(f.kind, boundaries)) {
    if (k.key != f.key || static_cast<std::size_t>(k.shared) > d.shared_per_block) continue;
    const std::int64_t least = always ? k.chunk : kLeastTokens;
    const int most =
        empty(p) ? 1 : static_cast<int>(std::clamp<std::int64_t>(mean / least, 1, always ? 2 : kMostSegments));
    for (int s = 1; s <= most; ++s) {
      DiagPlan plan = with_kernel(p, f, k);
      plan.segments = s;
      plan.boundaries = boundaries;
      fn(plan, milliseconds(k, p, sm_count, s, f.kind == DiagPlan::Kind::States));
    }
  }
}

// Whether the states' rows can be moved in pieces of 16 bytes.
bool whole_rows(const DiagProblem& p) {
  if (p.h0 && p.ht && p.h0.dtype != p.ht.dtype) return false;
  for (const TensorView* x : {&p.h0, &p.ht}) {
    if (*x && (!vectorizable(*x) || p.V * static_cast<std::int64_t>(size_of(x->dtype)) % 16 != 0)) return false;
  }
  return true;
}

}  // namespace

DiagPlan diag_step_plan(const DiagProblem& p) {
  DiagPlan f;
  f.kind = DiagPlan::Kind::Step;
  f.key = padded_key(p.K);
  f.value = kStepThreads / (f.key / kStepRows);
  f.v_blocks = blocks(p.V, f.value);
  return f;
}

DiagPlan diag_token_plan(const DiagProblem& p) {
  DiagPlan f = diag_step_plan(p);
  // States between tokens, and results that must not change when tokens are appended, are Step's.
  const bool states = p.h0 || p.ht, between = p.pool != nullptr && (p.pool->by_token() || p.pool->steps);
  if (p.T < 1 || p.T > kDecodeTokens || !states || between || !whole_rows(p)) return f;
  f.kind = DiagPlan::Kind::Decode;
  f.value = kDecodeValue;
  f.warps = kDecodeThreads / 32;
  f.v_blocks = blocks(p.V, f.value);
  return f;
}

bool diag_one_half_type(std::initializer_list<const TensorView*> operands,
                        std::initializer_list<const TensorView*> results) {
  const DType first = (*operands.begin())->dtype;
  const auto half = [first](const TensorView* t) { return !*t || t->dtype == first; };
  return (first == DType::BF16 || first == DType::F16) && std::all_of(operands.begin(), operands.end(), half) &&
         std::all_of(results.begin(), results.end(),
                     [&](const TensorView* t) { return half(t) || t->dtype == DType::F32; });
}

namespace {

DiagPlan chunk_kind(const DiagProblem& p) {
  DiagPlan f;
  f.kind = p.gk ? DiagPlan::Kind::Channel : p.gv ? DiagPlan::Kind::Value : DiagPlan::Kind::Head;
  f.key = padded_key(p.K);
  return f;
}

// The fastest of `each(fn)`'s plans; value is 0 where there is none.
template <typename Each>
DiagPlan fastest(Each&& each) {
  DiagPlan best;
  best.value = 0;
  double least = -1;
  each([&](const DiagPlan& plan, double ms) {
    if (least >= 0 && ms >= least) return;
    least = ms;
    best = plan;
  });
  return best;
}

}  // namespace

void diag_each_chunk_plan(const DiagProblem& p, const DeviceInfo& d, bool boundaries, bool always, DiagPlanVisitor fn) {
  for_each_cut(p, d, chunk_kind(p), boundaries, always, fn);
}

void diag_each_states_plan(const DiagProblem& p, const DeviceInfo& d, bool always, DiagPlanVisitor fn) {
  DiagPlan f;
  f.kind = DiagPlan::Kind::States;
  f.key = padded_key(std::max(p.K, p.V));
  for_each_cut(p, d, f, false, always, [&](DiagPlan plan, double ms) {
    plan.v_blocks = plan.key / plan.value;  // rows beyond the last channel are kept, too
    fn(plan, ms);
  });
}

DiagPlan diag_chunk_plan(const DiagProblem& p, const DeviceInfo& d, bool boundaries) {
  const DiagPlan f = fastest([&](auto&& fn) { diag_each_chunk_plan(p, d, boundaries, false, fn); });
  return f.value > 0 ? f : diag_step_plan(p);
}

DiagPlan diag_states_plan(const DiagProblem& p, const DeviceInfo& d) {
  return fastest([&](auto&& fn) { diag_each_states_plan(p, d, false, fn); });
}

bool diag_gradient_fits(const DiagProblem& p, const DiagPlan& states, const DeviceInfo& d) {
  const bool narrow = states.key == 64;
  const int bytes = p.gk ? (narrow ? ChannelGradientTiles<64>::kBytes : ChannelGradientTiles<128>::kBytes)
                         : (narrow ? HeadGradientTiles<64>::kBytes : HeadGradientTiles<128>::kBytes);
  return states.value > 0 && static_cast<std::size_t>(bytes) <= d.shared_per_block;
}

std::vector<DiagPlan> diag_alternatives(const DiagProblem& p, const DiagPlan& chosen) {
  if (chosen.chunk == 1) return {chosen};
  std::vector<DiagPlan> all;
  DiagPlan f = chosen;
  f.segments = 1;
  for (const ChunkKernel& k : kernels(chosen.kind)) {
    if (k.key == chosen.key) all.push_back(with_kernel(p, f, k));
  }
  return all;
}

namespace {

// "diag_head": the kernel's name, behind what all of the engine's begin with.
constexpr std::size_t kPrefix = 5;

}  // namespace

const char* DiagPlan::name() const {
  switch (kind) {
    case Kind::Step: return "diag_step";
    case Kind::Head: return "diag_head";
    case Kind::Channel: return "diag_channel";
    case Kind::Value: return "diag_value";
    case Kind::States: return "diag_states";
    case Kind::Decode: return "diag_decode";
  }
  return "diag_";
}

KernelName DiagPlan::kernel(DType type) const {
  KernelName n("diag.");
  n.add(std::string_view(name()).substr(kPrefix));
  if (kind != Kind::Step) n.add(".").add(short_name(type));
  n.add(".k").add(key);
  if (kind != Kind::Step && kind != Kind::Decode) n.add(".v").add(value);
  if (boundaries) n.add(".gates");
  if (segments > 1) n.add(".cut");
  return n;
}

std::string DiagPlan::text() const {
  std::string s = std::string(name()) + ", K padded to " + std::to_string(key) + ", " + std::to_string(v_blocks) +
                  (v_blocks == 1 ? " block of " : " blocks of ") + std::to_string(value) + " values, " +
                  std::to_string(warps) + " warps";
  if (chunk > 1) s += ", chunk " + std::to_string(chunk);
  if (segments > 1) s += ", " + std::to_string(segments) + " segments of time";
  return s;
}

bool diag_serves(const DiagProblem& p, const DeviceInfo& d, const Why& why) {
  if (d.sm < 80) return why("needs compute capability 8.0 or newer, got ", d.sm / 10, ".", d.sm % 10);
  if (p.K > 256) return why("needs K of at most 256, got ", p.K);
  if (p.attn) return why("output_attentions: expected false, as this backend gives no scores, got true");
  for (const TensorView* t : {&p.q, &p.k, &p.v, &p.g, &p.gk, &p.gv, &p.h0, &p.o, &p.ht, &p.slots().steps}) {
    if (*t && !carries_fp32(t->dtype)) return why("needs F32, F16 or BF16");
  }
  return true;
}

namespace {

// Whether chunks on tensor cores can run the forward, and why not.
bool chunks_serve(const DiagProblem& p, const Why& why) {
  const bool alone = !p.gv || (!p.gk && !p.g && p.head.kind == HeadDecay::Kind::None);
  if (!alone) return why("gv: needs to be the only gate");
  if (p.slots().indices) return why("slots: need the step kernel");
  if (p.T <= 16) return why("T: needs more than 16 tokens, got ", p.T);
  return diag_one_half_type({&p.q, &p.k, &p.v}, {&p.o}) || why("q, k, v: need one type of 16 bits");
}

// fn(plan, rank) for every way to run the forward; the least rank is chosen.
template <typename Fn>
void for_each_forward_plan(const DiagProblem& p, const DeviceInfo& d, bool always, Fn&& fn) {
  constexpr double kDecodeRank = 1e30, kStepRank = 1e31;
  fn(diag_step_plan(p), kStepRank);
  if (const DiagPlan f = diag_token_plan(p); f.kind == DiagPlan::Kind::Decode) fn(f, kDecodeRank);
  if (chunks_serve(p, {})) for_each_cut(p, d, chunk_kind(p), false, always, fn);
}

}  // namespace

KernelName diag_forward_kernel(const DiagProblem& p, const DiagPlan& f) {
  const bool decode = f.kind == DiagPlan::Kind::Decode;
  return f.kernel(decode ? (p.h0 ? p.h0.dtype : p.ht.dtype) : p.q.dtype).add(".forward");
}

bool diag_plan_forward(const DiagProblem& p, const DeviceInfo& d, std::string_view wanted, DiagPlan& plan,
                       std::string* text) {
  const Why why(text);
  if (!diag_serves(p, d, why)) return false;
  double least = -1;
  for_each_forward_plan(p, d, !wanted.empty(), [&](const DiagPlan& f, double rank) {
    if (least >= 0 && rank >= least) return;
    if (!wanted.empty() && diag_forward_kernel(p, f).view() != wanted) return;
    least = rank;
    plan = f;
  });
  return least >= 0 || why("no way to run this call with kernel ", wanted);
}

DiagPlan diag_forward_plan(const DiagProblem& p, const DeviceInfo& d) {
  DiagPlan plan;
  static_cast<void>(diag_plan_forward(p, d, {}, plan, nullptr));
  return plan;
}

std::string diag_forward_text(const DiagProblem& p, const DiagPlan& f) {
  std::string reason;
  if (f.chunk > 1) return f.text();
  if (chunks_serve(p, Why(&reason))) reason = "a block of the chunk kernels finds no room in shared memory";
  return f.text() + " (" + reason + ")";
}

DiagBackwardProblem diag_sample(DType type, std::int64_t K, std::int64_t V, std::int64_t T, DiagGate gate) {
  DiagBackwardProblem p;
  p.B = p.N = p.H = 1;
  p.T = T;
  p.K = K;
  p.V = V;
  const auto tensor = [](DType t, std::initializer_list<std::int64_t> dims) {
    return TensorView(nullptr, t, {dims.begin(), dims.size()});
  };
  p.q = p.k = tensor(type, {1, T, 1, K});
  p.v = p.o = tensor(type, {1, T, 1, V});
  p.h0 = p.ht = tensor(type, {1, 1, K, V});
  p.do_ = p.dv = p.v;
  p.dq = p.dk = p.q;
  p.dh0 = p.dht = p.h0;
  if (gate == DiagGate::Head) p.g = p.dg = tensor(DType::F32, {1, T, 1});
  if (gate == DiagGate::Channel) p.gk = p.dgk = tensor(DType::F32, {1, T, 1, K});
  if (gate == DiagGate::Value) p.gv = tensor(DType::F32, {1, T, 1, V});
  return p;
}

std::vector<std::string> diag_forward_kernels(const DeviceInfo& d) { return diag_forward_kernels(d, true); }
std::vector<std::string> diag_forward_kernels(const DeviceInfo& d, bool gates) {
  std::set<std::string> names;
  diag_each_sample(gates, [&](const DiagProblem& p) {
    for_each_forward_plan(p, d, true,
                          [&](const DiagPlan& f, double) { names.insert(diag_forward_kernel(p, f).c_str()); });
  });
  return {names.begin(), names.end()};
}

}  // namespace fla::cuda
