// The running sums z of normalised linear attention, over tiles of 64 tokens: each tile's sum, then a tile's start as
// the sum of those before it, then the tokens of a tile, 16 of each warp.
#include "fla/ops/linear_attn/linear_attn_cuda.h"

#include <algorithm>

#include "fla/ops/common/diag_cuda.cuh"
#include "fla/ops/linear_attn/linear_attn_problem.h"

namespace fla::cuda {
namespace {

constexpr int kTile = 64, kThreads = 128, kWarps = kThreads / 32, kRun = kTile / kWarps;
constexpr int kWidth = 256;  // most channels
constexpr int kAhead = 8;    // rows that are asked for together: memory answers late

struct ScanParams {
  std::int64_t T = 0, H = 0, N = 0;
  int K = 0, V = 0;
  float scale = 1.0F;
  bool reverse = false;
  Operand cu;
  Operand x;                      // [B, T, H, K] rows that are summed up; absent: zeros
  const float* weight = nullptr;  // [B, H, T] of the rows; absent: 1
  Operand start, end;             // [N, 1, H, K]: what the sums start from, and where they are left
  float* tiles = nullptr;         // [tile, H, K]
  // of the tokens
  Operand q, y, up, from, to;
  float* dd = nullptr;  // [B, H, T]: scale times the gradient of the denominator
  bool gradient_of_d = false;
};

enum class Use : std::uint8_t {
  Divide,    // y /= d
  Upstream,  // y = up / d, and dd from the old y
  AddQuery,  // to = from + dd z
  AddKey,    // to = from + z
};

struct Tile {
  std::int64_t n, h, row, begin, length, first;
  int tokens;
  FLA_DEVICE std::int64_t token(const ScanParams& p, std::int64_t t) const {
    return begin + (p.reverse ? length - 1 - t : t);
  }
};

FLA_DEVICE std::int64_t boundary(const ScanParams& p, std::int64_t n) {
  return load_index(p.cu.at.data, p.cu.type, n * p.cu.at.stride[0]);
}
// The first of a sequence's tiles among all.
FLA_DEVICE std::int64_t first_tile(const ScanParams& p, std::int64_t n, std::int64_t begin) {
  return p.cu.present() ? begin / kTile + n : n * ((p.T + kTile - 1) / kTile);
}

// False for a slot that no tile has.
FLA_DEVICE bool find_tile(const ScanParams& p, std::int64_t slot, Tile& a) {
  a.begin = 0;
  a.length = p.T;
  if (p.cu.present()) {
    std::int64_t low = 0, high = p.N - 1;
    while (low < high) {
      const std::int64_t middle = (low + high + 1) / 2;
      if (first_tile(p, middle, boundary(p, middle)) <= slot) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    a.n = low;
    a.row = 0;
    a.begin = boundary(p, low);
    a.length = boundary(p, low + 1) - a.begin;
  } else {
    a.n = a.row = slot / ((p.T + kTile - 1) / kTile);
  }
  a.first = (slot - first_tile(p, a.n, a.begin)) * kTile;
  if (a.first < 0 || a.first >= a.length) return false;
  a.tokens = a.length - a.first < kTile ? static_cast<int>(a.length - a.first) : kTile;
  return true;
}

FLA_DEVICE float load(const Operand& x, std::int64_t row, std::int64_t token, std::int64_t h, std::int64_t c) {
  const auto& s = x.at.stride;
  return load_any(x.at.data, x.type, row * s[0] + token * s[1] + h * s[2] + c * s[3]);
}
FLA_DEVICE void store(const Operand& x, std::int64_t row, std::int64_t token, std::int64_t h, std::int64_t c, float v) {
  const auto& s = x.at.stride;
  store_any(x.at.data, x.type, row * s[0] + token * s[1] + h * s[2] + c * s[3], v);
}
FLA_DEVICE float weight_of(const ScanParams& p, const Tile& a, std::int64_t token) {
  return p.weight != nullptr ? p.weight[(a.row * p.H + a.h) * p.T + token] : 1.0F;
}

FLA_KERNEL(kThreads, 4)
linear_tile_sums(const ScanParams p) {
  const std::int64_t slot = block_x() / p.H;
  Tile a;
  a.h = block_x() % p.H;
  if (!find_tile(p, slot, a)) return;
  for (int c = thread_id(); c < p.K; c += kThreads) {
    float sum = 0.0F;
    for (int r = 0; p.x.present() && r < a.tokens; r += kAhead) {
      float x[kAhead];
      FLA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const std::int64_t token = a.token(p, a.first + (r + u < a.tokens ? r + u : r));
        x[u] = r + u < a.tokens ? weight_of(p, a, token) * load(p.x, a.row, token, a.h, c) : 0.0F;
      }
      FLA_UNROLL
      for (int u = 0; u < kAhead; ++u) sum += x[u];
    }
    p.tiles[(slot * p.H + a.h) * p.K + c] = sum;
  }
}

FLA_KERNEL(kThreads, 4)
linear_tile_starts(const ScanParams p) {
  const std::int64_t n = block_x() / p.H, h = block_x() % p.H;
  const std::int64_t begin = p.cu.present() ? boundary(p, n) : 0,
                     length = p.cu.present() ? boundary(p, n + 1) - begin : p.T;
  const std::int64_t tiles = (length + kTile - 1) / kTile, first = first_tile(p, n, begin);
  for (int c = thread_id(); c < p.K; c += kThreads) {
    float z = p.start.present() ? load(p.start, n, 0, h, c) : 0.0F;
    // A read must not wait for the store before it.
    for (std::int64_t t = 0; t < tiles; t += kAhead) {
      float own[kAhead];
      FLA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        own[u] = t + u < tiles ? p.tiles[((first + t + u) * p.H + h) * p.K + c] : 0.0F;
      }
      FLA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        if (t + u >= tiles) break;
        p.tiles[((first + t + u) * p.H + h) * p.K + c] = z;
        z += own[u];
      }
    }
    if (p.end.present()) store(p.end, n, 0, h, c, z);
  }
}

// EACH: channels of a lane.
template <Use USE, int EACH>
FLA_KERNEL(kThreads, (EACH == 8 ? 2 : 5))
linear_tokens(const ScanParams p) {
  constexpr int kGroup = 4;  // tokens whose memory is asked for together
  constexpr bool kDivides = USE == Use::Divide || USE == Use::Upstream;
  const std::int64_t slot = block_x() / p.H;
  Tile a;
  a.h = block_x() % p.H;
  if (!find_tile(p, slot, a)) return;
  const int first = warp_id() * kRun, rows = a.tokens - first < kRun ? a.tokens - first : kRun;
  const auto channel = [&](const Operand& x, std::int64_t token, int i) {
    const int c = lane_id() + 32 * i;
    return x.present() && c < p.K ? load(x, a.row, token, a.h, c) : 0.0F;
  };
  const auto token_of = [&](int r) { return a.token(p, a.first + first + (r < rows ? r : 0)); };
  const auto group = [&](int r, const Operand& x, float(&to)[kGroup][EACH]) {
    FLA_UNROLL
    for (int u = 0; u < kGroup; ++u) {
      FLA_UNROLL
      for (int i = 0; i < EACH; ++i) to[u][i] = r + u < rows ? channel(x, token_of(r + u), i) : 0.0F;
    }
  };
  const auto weigh = [&](int r, float(&x)[kGroup][EACH]) {
    FLA_UNROLL
    for (int u = 0; u < kGroup; ++u) {
      const float by = r + u < rows ? weight_of(p, a, token_of(r + u)) : 0.0F;
      FLA_UNROLL
      for (int i = 0; i < EACH; ++i) x[u][i] *= by;
    }
  };

  // Where the warp's run starts: the tile's start and the sums of the runs before.
  const Shared<float> runs = shared<float>(0, kWarps * 32 * EACH);
  float z[EACH], x[kGroup][EACH];
  FLA_UNROLL
  for (int i = 0; i < EACH; ++i) z[i] = 0.0F;
  for (int r = 0; r < rows; r += kGroup) {
    group(r, p.x, x);
    weigh(r, x);
    FLA_UNROLL
    for (int u = 0; u < kGroup; ++u) {
      FLA_UNROLL
      for (int i = 0; i < EACH; ++i) z[i] += x[u][i];
    }
  }
  FLA_UNROLL
  for (int i = 0; i < EACH; ++i) runs.store((warp_id() * EACH + i) * 32 + lane_id(), z[i]);
  sync_threads();
  FLA_UNROLL
  for (int i = 0; i < EACH; ++i) {
    const int c = lane_id() + 32 * i;
    z[i] = c < p.K ? p.tiles[(slot * p.H + a.h) * p.K + c] : 0.0F;
    for (int w = 0; w < warp_id(); ++w) z[i] += runs.load((w * EACH + i) * 32 + lane_id());
  }

  for (int r = 0; r < rows; r += kGroup) {
    float other[kGroup][EACH];
    group(r, p.x, x);
    group(r, kDivides ? p.q : p.from, other);
    weigh(r, x);
    float d[kGroup];
    FLA_UNROLL
    for (int u = 0; u < kGroup; ++u) {
      d[u] = 0.0F;
      FLA_UNROLL
      for (int i = 0; i < EACH; ++i) {
        z[i] += x[u][i];
        if (kDivides) {
          d[u] += z[i] * other[u][i];
        } else {
          const int c = lane_id() + 32 * i;
          const std::int64_t token = token_of(r + u);
          float by = 1.0F;
          if (USE == Use::AddQuery) by = p.dd != nullptr ? p.dd[(a.row * p.H + a.h) * p.T + token] : 0.0F;
          if (r + u < rows && c < p.K) store(p.to, a.row, token, a.h, c, other[u][i] + by * z[i]);
        }
      }
    }
    if constexpr (kDivides) {
      float along[kGroup] = {};
      FLA_UNROLL
      for (int u = 0; u < kGroup; ++u) {
        d[u] = p.scale * warp_sum(d[u]) + static_cast<float>(kLinearAttnEpsilon);
      }
      for (int c = lane_id(); c < p.V; c += 32) {
        float y[kGroup], up[kGroup];
        FLA_UNROLL
        for (int u = 0; u < kGroup; ++u) {
          const bool read = USE == Use::Divide || p.gradient_of_d;
          y[u] = read ? load(p.y, a.row, token_of(r + u), a.h, c) : 0.0F;
          up[u] = USE == Use::Divide ? y[u] : load(p.up, a.row, token_of(r + u), a.h, c);
        }
        FLA_UNROLL
        for (int u = 0; u < kGroup; ++u) {
          along[u] += up[u] * y[u];
          if (r + u < rows) store(p.y, a.row, token_of(r + u), a.h, c, up[u] / d[u]);
        }
      }
      if (USE == Use::Upstream && p.gradient_of_d) {
        FLA_UNROLL
        for (int u = 0; u < kGroup; ++u) {
          along[u] = warp_sum(along[u]);
          if (lane_id() == 0 && r + u < rows) {
            p.dd[(a.row * p.H + a.h) * p.T + token_of(r + u)] = -along[u] / d[u] / d[u] * p.scale;
          }
        }
      }
    }
  }
}

// ---- host

Operand operand(const TensorView& t) { return {view(t), t.dtype}; }

std::int64_t tile_slots(const DiagProblem& p) {
  return p.cu_seqlens ? p.T / kTile + p.N : p.N * ((p.T + kTile - 1) / kTile);
}

ScanParams scan(const DiagProblem& p, const TensorView& x, const TensorView& start, const TensorView& end,
                float* tiles) {
  ScanParams s;
  s.T = p.T;
  s.H = p.H;
  s.N = p.N;
  s.K = static_cast<int>(p.K);
  s.V = static_cast<int>(p.V);
  s.scale = static_cast<float>(p.scale);
  s.reverse = p.reverse;
  s.cu = operand(p.cu_seqlens);
  s.x = operand(x);
  s.start = operand(start);
  s.end = operand(end);
  s.tiles = tiles;
  return s;
}

Status run_starts(const DiagProblem& p, const ScanParams& s, Stream stream) {
  if (p.T > 0) {
    if (Status e = launch<linear_tile_sums>(
            {.name = "linear_tile_sums", .grid = {tile_slots(p) * p.H}, .threads = kThreads}, stream, s);
        !e)
      return e;
  }
  return launch<linear_tile_starts>({.name = "linear_tile_starts", .grid = {p.N * p.H}, .threads = kThreads}, stream,
                                    s);
}

template <Use USE, int EACH>
Status launch_tokens(const DiagProblem& p, const ScanParams& s, Stream stream) {
  return launch<linear_tokens<USE, EACH>>({.name = "linear_tokens",
                                           .grid = {tile_slots(p) * p.H},
                                           .threads = kThreads,
                                           .shared_bytes = kWarps * 32 * EACH * sizeof(float)},
                                          stream, s);
}

template <Use USE>
Status run_tokens(const DiagProblem& p, const ScanParams& s, Stream stream) {
  if (p.T == 0) return {};
  if (p.K <= 64) return launch_tokens<USE, 2>(p, s, stream);
  return p.K <= 128 ? launch_tokens<USE, 4>(p, s, stream) : launch_tokens<USE, 8>(p, s, stream);
}

// What lies where; without memory it counts.
struct NormaliseMemory {
  DiagProblem forward, backward;
  float *tiles = nullptr, *dd = nullptr;
  void* engine = nullptr;
  std::size_t engine_bytes = 0;

  float* floats(Arena& memory, std::int64_t n) {
    return static_cast<float*>(memory.take(static_cast<std::size_t>(n) * sizeof(float)));
  }
  static TensorView like(Arena& memory, const TensorView& of, DType type) {
    return {memory.take(static_cast<std::size_t>(of.numel()) * size_of(type)), type, of.dims(), of.device};
  }

  NormaliseMemory(Arena& memory, const LinearAttnArgs& a, const DeviceInfo& d) : forward(to_problem(a)) {
    tiles = floats(memory, tile_slots(forward) * forward.H * forward.K);
    engine_bytes = forward.o || forward.ht ? diag_forward_workspace(forward, d) : 0;
    engine = memory.take(engine_bytes);
  }
  NormaliseMemory(Arena& memory, const LinearAttnBackwardArgs& a, const DeviceInfo& d)
      : forward(to_problem(static_cast<const LinearAttnArgs&>(a))), backward(to_problem(a)) {
    tiles = floats(memory, tile_slots(forward) * forward.H * forward.K);
    forward.ht = {};
    forward.o = {};
    if (a.do_) {
      forward.o = backward.do_ = like(memory, a.v, a.v.dtype);
      dd = floats(memory, forward.B * forward.H * forward.T);
      engine_bytes = diag_forward_workspace(forward, d);
    }
    // (7) is added before the one rounding.
    if (a.dq && a.dq.dtype != DType::F32) backward.dq = like(memory, a.dq, DType::F32);
    if (a.dk && a.dk.dtype != DType::F32) backward.dk = like(memory, a.dk, DType::F32);
    engine_bytes = std::max(engine_bytes, diag_backward_workspace(backward, d));
    engine = memory.take(engine_bytes);
  }
  std::span<std::byte> engine_memory() const { return {static_cast<std::byte*>(engine), engine_bytes}; }
};

template <typename A>
std::size_t bytes_of(const A& a, const DeviceInfo& d) {
  if (empty(to_problem(a))) return 0;
  Arena count(nullptr);
  const NormaliseMemory m(count, a, d);
  return count.bytes();
}

std::string sums_refusal(const DiagProblem& p, const TensorView& a, const TensorView& b) {
  for (const TensorView* t : {&a, &b})
    if (*t && t->dtype == DType::F64) return "needs F32, F16 or BF16, got F64";
  return p.K > kWidth ? "needs K of at most 256, got " + std::to_string(p.K) : "";
}

}  // namespace

std::string normalised_refusal(const LinearAttnArgs& a, const DeviceInfo& d) {
  std::string reason = diag_refusal(to_problem(a), d);
  return reason.empty() ? sums_refusal(to_problem(a), a.initial_z, a.final_z) : reason;
}
std::string normalised_plan(const LinearAttnArgs& a, const DeviceInfo& d) {
  return diag_forward_plan(to_problem(a), d).text() + "; then divided by the running sums, tiles of 64 tokens";
}
std::size_t normalised_workspace(const LinearAttnArgs& a, const DeviceInfo& d) { return bytes_of(a, d); }

Status normalised(const LinearAttnArgs& a, const DeviceInfo& d, Stream stream, std::span<std::byte> workspace) {
  const DiagProblem p = to_problem(a);
  if (empty(p)) return {};
  Arena arena(workspace.data());
  const NormaliseMemory m(arena, a, d);
  if (a.o || a.final_state) {
    if (Status s = diag_forward(m.forward, d, stream, m.engine_memory()); !s) return s;
  }
  if (!a.o && !a.final_z) return {};
  ScanParams s = scan(p, p.k, a.initial_z, a.final_z, m.tiles);
  if (Status e = run_starts(p, s, stream); !e || !a.o) return e;
  s.q = operand(p.q);
  s.y = operand(p.o);
  return run_tokens<Use::Divide>(p, s, stream);
}

std::string normalised_refusal(const LinearAttnBackwardArgs& a, const DeviceInfo& d) {
  std::string reason = diag_backward_refusal(to_problem(a), d);
  if (reason.empty()) reason = sums_refusal(to_problem(a), a.initial_z, a.dzt);
  return reason.empty() ? sums_refusal(to_problem(a), a.dz0, {}) : reason;
}
std::string normalised_plan(const LinearAttnBackwardArgs& a, const DeviceInfo& d) {
  Arena count(nullptr);
  const NormaliseMemory m(count, a, d);
  return diag_backward_plan(m.backward, d).text() + "; sums of keys and of queries, tiles of 64 tokens";
}
std::size_t normalised_workspace(const LinearAttnBackwardArgs& a, const DeviceInfo& d) { return bytes_of(a, d); }

Status normalised(const LinearAttnBackwardArgs& a, const DeviceInfo& d, Stream stream, std::span<std::byte> workspace) {
  const DiagProblem p = to_problem(a);
  if (empty(p)) return {};
  Arena arena(workspace.data());
  const NormaliseMemory m(arena, a, d);
  const bool gradient_of_d = a.do_ && (a.dq || a.dk || a.dz0);
  if (gradient_of_d) {
    if (Status s = diag_forward(m.forward, d, stream, m.engine_memory()); !s) return s;
  }
  ScanParams keys = scan(p, p.k, a.initial_z, {}, m.tiles);
  if (a.do_ || a.dq) {
    if (Status s = run_starts(p, keys, stream); !s) return s;
  }
  if (a.do_) {
    keys.q = operand(p.q);
    keys.y = operand(m.forward.o);
    keys.up = operand(a.do_);
    keys.dd = m.dd;
    keys.gradient_of_d = gradient_of_d;
    if (Status s = run_tokens<Use::Upstream>(p, keys, stream); !s) return s;
  }
  if (a.dq || a.dk || a.dv || a.dh0) {
    if (Status s = diag_backward(m.backward, d, stream, m.engine_memory()); !s) return s;
  }
  if (a.dq) {
    keys.from = operand(m.backward.dq);
    keys.to = operand(a.dq);
    keys.dd = m.dd;
    if (Status s = run_tokens<Use::AddQuery>(p, keys, stream); !s) return s;
  }
  if (!a.dk && !a.dz0) return {};
  ScanParams queries = scan(p, a.do_ ? p.q : TensorView(), a.dzt, a.dz0, m.tiles);
  queries.reverse = !p.reverse;
  queries.weight = m.dd;
  if (Status s = run_starts(p, queries, stream); !s || !a.dk) return s;
  queries.from = operand(m.backward.dk);
  queries.to = operand(a.dk);
  return run_tokens<Use::AddKey>(p, queries, stream);
}

}  // namespace fla::cuda
