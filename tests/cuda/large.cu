// fla_cuda_large: each engine on this GPU with tensors, states and a workspace of more than 2^31 elements and 2^32 bytes,
// forward and backward, dense and packed. The first, middle and last sequences have the bits that they have alone. Takes
// up to 125 GB of device memory. Exit status 1 if something differs.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "fla/engine/delta/cuda/entry.h"
#include "fla/engine/diag/cuda/entry.h"
#include "fla/kernels/cuda/toolbox.cuh"
#include "fla/ops/linear_attn/linear_attn_cuda.h"

namespace fla::cuda {
namespace {

// 131200 heads of sequences: 2^31 elements of states pass at 131072, of rows of 128 as well where each has 128 tokens.
constexpr std::int64_t kN = 32800, kH = 4, kD = 128, kAlone = 2;

FLA_KERNEL(256, 1)
fill_kernel(void* p, DType type, std::int64_t n, float least, float most, unsigned seed) {
  for (std::int64_t i = block_x() * 256 + thread_id(); i < n; i += grid_x() * 256) {
    auto x = static_cast<std::uint32_t>(i) * 2654435761U + static_cast<std::uint32_t>(i >> 32) * 40503U + seed;
    x = (x ^ (x >> 16U)) * 2246822519U;
    x = (x ^ (x >> 13U)) * 3266489917U;
    x ^= x >> 16U;
    store_any(p, type, i, least + (most - least) * static_cast<float>(x >> 8U) * 0x1p-24F);
  }
}

void check(cudaError_t e) {
  if (e == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(e));
  std::exit(1);
}
void check(const Status& s) {
  if (s.ok()) return;
  std::printf("%s\n", s.message().c_str());
  std::exit(1);
}

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (void* p : all_) cudaFree(p);
  }
  void* bytes(std::size_t n) {
    void* p = nullptr;
    check(cudaMalloc(&p, n + 256));
    check(cudaMemset(p, 0xff, n + 256));  // NaN
    all_.push_back(p);
    total_ += n;
    return p;
  }
  TensorView make(DType type, std::vector<std::int64_t> shape) {
    TensorView t(nullptr, type, shape);
    t.data = bytes(static_cast<std::size_t>(t.numel()) * size_of(type));
    return t;
  }
  TensorView random(DType type, std::vector<std::int64_t> shape, float least, float most) {
    const TensorView t = make(type, std::move(shape));
    check(launch<fill_kernel>({.name = "fill", .grid = {8192}, .threads = 256}, {}, t.data, type, t.numel(), least,
                              most, static_cast<unsigned>(all_.size())));
    return t;
  }
  TensorView boundaries(std::int64_t sequences, std::int64_t tokens) {
    std::vector<std::int64_t> cu;
    for (std::int64_t n = 0; n <= sequences; ++n) cu.push_back(n * tokens);
    const TensorView t = make(DType::I64, {sequences + 1});
    check(cudaMemcpy(t.data, cu.data(), cu.size() * sizeof(std::int64_t), cudaMemcpyHostToDevice));
    return t;
  }
  double gigabytes() const { return static_cast<double>(total_) * 1e-9; }

 private:
  std::vector<void*> all_;
  std::size_t total_ = 0;
};

std::vector<std::byte> contents(const TensorView& t) {
  std::vector<std::byte> all(static_cast<std::size_t>(t.numel()) * size_of(t.dtype));
  check(cudaMemcpy(all.data(), t.data, all.size(), cudaMemcpyDeviceToHost));
  return all;
}

// `count` entries of the first axis, or of the second, from one on.
TensorView part(TensorView t, std::size_t axis, std::int64_t from, std::int64_t count) {
  if (!t.present()) return t;
  t.data = static_cast<std::byte*>(t.data) + from * t.stride[axis] * static_cast<std::int64_t>(size_of(t.dtype));
  t.shape[axis] = count;
  return t;
}

bool all_good = true;

// A problem's tensors with a row for each token and for each sequence, and which of them a call writes.
template <typename P>
struct Members {
  std::vector<TensorView P::*> tokens, states, outputs;
};

template <typename P>
void compare(const char* name, const P& whole, std::int64_t T, const Members<P>& m, Memory& memory,
             const std::function<std::size_t(const P&)>& bytes_of,
             const std::function<Status(const P&, std::span<std::byte>)>& call) {
  const auto run = [&](const P& p, Memory& own) {
    const std::size_t bytes = bytes_of(p);
    check(call(p, {static_cast<std::byte*>(own.bytes(bytes)), bytes}));
    check(cudaDeviceSynchronize());
    return bytes;
  };
  const bool packed = whole.cu_seqlens.present();
  const std::size_t workspace = run(whole, memory);
  bool good = true;
  for (const std::int64_t first : {std::int64_t{0}, kN / 2 + 1, kN - kAlone}) {
    Memory own;
    P p = whole;
    p.N = kAlone;
    if (packed) {
      p.T = kAlone * T;
      p.cu_seqlens = own.boundaries(kAlone, T);
    } else {
      p.B = kAlone;
    }
    for (const auto& x : m.tokens) {
      p.*x = packed ? part(p.*x, 1, first * T, kAlone * T) : part(p.*x, 0, first, kAlone);
    }
    for (const auto& x : m.states) p.*x = part(p.*x, 0, first, kAlone);
    std::vector<std::vector<std::byte>> want;
    for (const auto& x : m.outputs) {
      if (!(p.*x).present()) continue;
      want.push_back(contents(p.*x));
      p.*x = own.make((p.*x).dtype, {(p.*x).dims().begin(), (p.*x).dims().end()});
    }
    run(p, own);
    std::size_t i = 0;
    for (const auto& x : m.outputs) {
      if (!(p.*x).present()) continue;
      const auto got = contents(p.*x);
      const std::vector<std::byte> unwritten(64, std::byte{0xff});
      const bool written = !std::equal(unwritten.begin(), unwritten.end(), got.begin());
      if (got != want[i++] || !written) {
        std::printf("%s: output %zu differs in sequences from %lld on\n", name, i, static_cast<long long>(first));
        good = false;
      }
    }
  }
  std::printf("%s %-34s %s, workspace %.1f GB, all %.1f GB\n", good ? "ok  " : "FAIL", name,
              packed ? "packed" : "dense ", static_cast<double>(workspace) * 1e-9, memory.gigabytes());
  std::fflush(stdout);
  all_good = all_good && good;
}

// Shapes of a problem of either engine.
template <typename P>
void shape(P& p, Memory& m, std::int64_t T, bool packed) {
  p.N = kN;
  p.B = packed ? 1 : kN;
  p.T = packed ? kN * T : T;
  p.H = kH;
  p.K = p.V = kD;
  p.scale = 0.088;
  if (packed) p.cu_seqlens = m.boundaries(kN, T);
}

enum class Gate : std::uint8_t { None, Head, Channel };
constexpr const char* kGates[] = {"no gate", "gate per head", "gate per channel"};

template <typename P>
void inputs(P& p, Memory& m, DType type, Gate gate, bool backward) {
  const std::vector<std::int64_t> rows = {p.B, p.T, kH, kD}, heads = {p.B, p.T, kH}, state = {kN, kH, kD, kD};
  for (TensorView P::*x : {&P::q, &P::k, &P::v}) p.*x = m.random(type, rows, -1.0F, 1.0F);
  if (gate == Gate::Head) p.g = m.random(DType::F32, heads, -0.2F, 0.0F);
  if (gate == Gate::Channel) p.gk = m.random(DType::BF16, rows, -0.2F, 0.0F);
  p.h0 = m.random(DType::F32, state, -1.0F, 1.0F);
  if (!backward) {
    p.o = m.make(type, rows);
    p.ht = m.make(DType::F32, state);
    return;
  }
  p.do_ = m.random(type, rows, -1.0F, 1.0F);
  for (TensorView P::*x : {&P::dq, &P::dk, &P::dv}) p.*x = m.make(type, rows);
  if (gate == Gate::Head) p.dg = m.make(DType::F32, heads);
  if (gate == Gate::Channel) p.dgk = m.make(DType::BF16, rows);
  p.dh0 = m.make(DType::F32, state);
}

const Members<DiagBackwardProblem> kDiag = {
    {&DiagBackwardProblem::q, &DiagBackwardProblem::k, &DiagBackwardProblem::v, &DiagBackwardProblem::g,
     &DiagBackwardProblem::gk, &DiagBackwardProblem::do_, &DiagBackwardProblem::o, &DiagBackwardProblem::dq,
     &DiagBackwardProblem::dk, &DiagBackwardProblem::dv, &DiagBackwardProblem::dg, &DiagBackwardProblem::dgk},
    {&DiagBackwardProblem::h0, &DiagBackwardProblem::dht, &DiagBackwardProblem::ht, &DiagBackwardProblem::dh0},
    {&DiagBackwardProblem::o, &DiagBackwardProblem::ht, &DiagBackwardProblem::dq, &DiagBackwardProblem::dk,
     &DiagBackwardProblem::dv, &DiagBackwardProblem::dg, &DiagBackwardProblem::dgk, &DiagBackwardProblem::dh0}};
const Members<DeltaBackwardProblem> kDelta = {
    {&DeltaBackwardProblem::q, &DeltaBackwardProblem::k, &DeltaBackwardProblem::v, &DeltaBackwardProblem::beta,
     &DeltaBackwardProblem::g, &DeltaBackwardProblem::gk, &DeltaBackwardProblem::do_, &DeltaBackwardProblem::o,
     &DeltaBackwardProblem::dq, &DeltaBackwardProblem::dk, &DeltaBackwardProblem::dv, &DeltaBackwardProblem::dbeta,
     &DeltaBackwardProblem::dg, &DeltaBackwardProblem::dgk},
    {&DeltaBackwardProblem::h0, &DeltaBackwardProblem::dht, &DeltaBackwardProblem::ht, &DeltaBackwardProblem::dh0},
    {&DeltaBackwardProblem::o, &DeltaBackwardProblem::ht, &DeltaBackwardProblem::dq, &DeltaBackwardProblem::dk,
     &DeltaBackwardProblem::dv, &DeltaBackwardProblem::dbeta, &DeltaBackwardProblem::dg, &DeltaBackwardProblem::dgk,
     &DeltaBackwardProblem::dh0}};

void diag(const DeviceInfo& d, Gate gate, DType type, std::int64_t T, bool packed, bool backward) {
  Memory m;
  DiagBackwardProblem p;
  shape(p, m, T, packed);
  inputs(p, m, type, gate, backward);
  const std::string name = std::string("diag, ") + kGates[static_cast<int>(gate)] + ", " + name_of(type) +
                           (backward ? ", backward"
                            : T == 1 ? ", 1 token"
                                     : ", forward");
  if (backward) {
    const DiagBackwardPlan plan = diag_backward_plan(p, d);
    compare<DiagBackwardProblem>(
        name.c_str(), p, T, kDiag, m, [&](const DiagBackwardProblem& x) { return diag_backward_workspace(x, plan); },
        [&](const DiagBackwardProblem& x, std::span<std::byte> w) { return diag_backward(x, plan, {}, w); });
    return;
  }
  const DiagPlan plan = diag_forward_plan(p, d);
  compare<DiagBackwardProblem>(
      name.c_str(), p, T, kDiag, m, [&](const DiagBackwardProblem& x) { return diag_forward_workspace(x, plan); },
      [&](const DiagBackwardProblem& x, std::span<std::byte> w) { return diag_forward(x, plan, {}, w); });
}

void delta(const DeviceInfo& d, Gate gate, DType type, std::int64_t T, bool packed, bool backward) {
  Memory m;
  DeltaBackwardProblem p;
  shape(p, m, T, packed);
  p.HV = kH;
  p.normalize_q = p.normalize_k = true;
  p.erase = gate == Gate::None ? Erase::Plain : Erase::Decayed;
  inputs(p, m, type, gate, backward);
  p.beta = m.random(DType::F32, {p.B, p.T, kH}, 0.0F, 1.0F);
  if (backward) p.dbeta = m.make(DType::F32, {p.B, p.T, kH});
  const std::string name = std::string("delta rule, ") + kGates[static_cast<int>(gate)] + ", " + name_of(type) +
                           (backward ? ", backward"
                            : T == 1 ? ", 1 token"
                                     : ", forward");
  compare<DeltaBackwardProblem>(
      name.c_str(), p, T, kDelta, m,
      [&](const DeltaBackwardProblem& x) {
        return backward ? delta_backward_workspace(x, d) : delta_forward_workspace(x, d);
      },
      [&](const DeltaBackwardProblem& x, std::span<std::byte> w) {
        return backward ? delta_backward(x, d, {}, w) : delta_forward(x, d, {}, w);
      });
}

void normaliser(const DeviceInfo& d, bool packed, bool backward) {
  Memory m;
  DiagBackwardProblem p;
  shape(p, m, 128, packed);
  inputs(p, m, DType::BF16, Gate::None, backward);
  p.q = m.random(DType::BF16, {p.B, p.T, kH, kD}, 0.1F, 1.0F);
  p.k = m.random(DType::BF16, {p.B, p.T, kH, kD}, 0.1F, 1.0F);
  const auto args = [](const DiagBackwardProblem& x) {
    LinearAttnBackwardArgs a;
    a.q = x.q;
    a.k = x.k;
    a.v = x.v;
    a.initial_state = x.h0;
    a.cu_seqlens = x.cu_seqlens;
    a.o = x.o;
    a.final_state = x.ht;
    a.do_ = x.do_;
    a.dq = x.dq;
    a.dk = x.dk;
    a.dv = x.dv;
    a.dh0 = x.dh0;
    return a;
  };
  NormalisedPlan plan;
  const LinearAttnBackwardArgs whole = args(p);
  std::string why;
  if (!(backward ? normalised_plan(whole, d, {}, plan, &why)
                 : normalised_plan(static_cast<const LinearAttnArgs&>(whole), d, {}, plan, &why))) {
    check(Status(Code::Unsupported, why));
  }
  compare<DiagBackwardProblem>(
      backward ? "normaliser, backward" : "normaliser, forward", p, 128, kDiag, m,
      [&](const DiagBackwardProblem& x) {
        const LinearAttnBackwardArgs a = args(x);
        return backward ? normalised_workspace(a, plan)
                        : normalised_workspace(static_cast<const LinearAttnArgs&>(a), plan);
      },
      [&](const DiagBackwardProblem& x, std::span<std::byte> w) {
        const LinearAttnBackwardArgs a = args(x);
        return backward ? normalised(a, plan, {}, w) : normalised(static_cast<const LinearAttnArgs&>(a), plan, {}, w);
      });
}

int run() {
  const auto info = device_info(0);
  if (!info) {
    std::printf("%s\n", info.status().message().c_str());
    return 2;
  }
  DeviceInfo d = *info;
  d.sm_count = 1;  // so that few sequences are served as many are
  for (const bool packed : {false, true}) {
    for (const Gate gate : {Gate::None, Gate::Head, Gate::Channel}) {
      for (const bool backward : {false, true}) {
        diag(d, gate, DType::BF16, 128, packed, backward);
        delta(d, gate, DType::BF16, 128, packed, backward);
      }
    }
    for (const bool backward : {false, true}) normaliser(d, packed, backward);
    diag(d, Gate::Head, DType::F32, 128, packed, false);
    delta(d, Gate::Head, DType::F32, 128, packed, false);
  }
  for (const Gate gate : {Gate::Head, Gate::Channel}) {
    diag(d, gate, DType::BF16, 1, false, false);
    delta(d, gate, DType::BF16, 1, false, false);
  }
  return all_good ? 0 : 1;
}

}  // namespace
}  // namespace fla::cuda

int main() { return fla::cuda::run(); }
