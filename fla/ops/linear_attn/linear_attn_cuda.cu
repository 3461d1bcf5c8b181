// The running sums z of normalised linear attention, over tiles of 64 tokens: each tile's sum, then a tile's start as
// the sum of those before it, then the tokens of a tile, 16 of each warp.
#include "fla/ops/linear_attn/linear_attn_cuda.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "fla/engine/diag/cuda/arena.h"
#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/launches.h"
#include "fla/engine/diag/cuda/params.cuh"
#include "fla/ops/linear_attn/linear_attn_problem.h"

namespace fla::cuda {
namespace {

constexpr int kTile = 64, kThreads = 128, kWarps = kThreads / 32, kRun = kTile / kWarps;
constexpr int kWidth = 256;  // most channels
constexpr int kAhead = 8;    // tiles that are asked for together: memory answers late
constexpr int kGroup = 4;    // and tokens

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

FLA_DEVICE std::int64_t boundary(const ScanParams& p, std::int64_t n) { return boundary_at(p.cu.at, p.cu.type, n); }
// The first of a sequence's tiles among all.
FLA_DEVICE std::int64_t first_tile(const ScanParams& p, std::int64_t n, std::int64_t begin) {
  return p.cu.present() ? begin / kTile + n : n * ((p.T + kTile - 1) / kTile);
}

// False for a slot that no tile has.
FLA_DEVICE bool find_tile(const ScanParams& p, std::int64_t slot, Tile& a) {
  a.begin = 0;
  a.length = p.T;
  if (p.cu.present()) {
    a.n = find_sequence(p.cu.at, p.cu.type, p.N, slot,
                        [&](std::int64_t n, std::int64_t begin) { return first_tile(p, n, begin); });
    a.row = 0;
    a.begin = boundary(p, a.n);
    a.length = boundary(p, a.n + 1) - a.begin;
  } else {
    a.n = a.row = slot / ((p.T + kTile - 1) / kTile);
  }
  a.first = (slot - first_tile(p, a.n, a.begin)) * kTile;
  if (a.first < 0 || a.first >= a.length) return false;
  a.tokens = a.length - a.first < kTile ? static_cast<int>(a.length - a.first) : kTile;
  return true;
}

FLA_DEVICE std::int64_t offset(const Operand& x, std::int64_t row, std::int64_t token, std::int64_t h) {
  const auto& s = x.at.stride;
  return row * s[0] + token * s[1] + h * s[2];
}
FLA_DEVICE float load(const Operand& x, std::int64_t row, std::int64_t token, std::int64_t h, std::int64_t c) {
  return load_any(x.at.data, x.type, offset(x, row, token, h) + c * x.at.stride[3]);
}
FLA_DEVICE float weight_of(const ScanParams& p, const Tile& a, std::int64_t token) {
  return p.weight != nullptr ? p.weight[(a.row * p.H + a.h) * p.T + token] : 1.0F;
}

// EACH neighbouring elements of a row as they lie in memory, so that nothing waits for them before they are needed. T:
// of 16 bits, in rows that can be moved in pieces of EACH; void: of any type, in any layout.
template <typename T, int EACH>
struct Piece {
  static constexpr bool kAny = std::is_void_v<T>;
  std::uint32_t word[kAny ? EACH : EACH / 2];

  FLA_DEVICE void ask(const Operand& x, std::int64_t at, int c0, int columns) {
    FLA_UNROLL
    for (std::uint32_t& w : word) w = 0;
    if constexpr (!kAny) {
      if (c0 >= columns || !x.present()) return;
      const auto v = load_global<EACH / 2>(static_cast<const std::uint32_t*>(x.at.data) + (at + c0) / 2);
      FLA_UNROLL
      for (int i = 0; i < EACH / 2; ++i) word[i] = v.x[i];
    } else {
      if (!x.present()) return;
      FLA_UNROLL
      for (int i = 0; i < EACH; ++i) {
        if (c0 + i < columns) word[i] = load_bits(x.at.data, x.type, at + (c0 + i) * x.at.stride[3]);
      }
    }
  }
  FLA_DEVICE float operator()(const Operand& x, int i) const {
    if constexpr (kAny) {
      return from_bits(x.type, word[i]);
    } else {
      return to_f32(T{static_cast<std::uint16_t>(word[i / 2] >> (i % 2 * 16))});
    }
  }
};
// F32 rows that are there, in the same pieces.
template <typename T, int EACH>
FLA_DEVICE void load_floats(const Operand& x, std::int64_t at, int c0, int columns, float (&to)[EACH]) {
  FLA_UNROLL
  for (int i = 0; i < EACH; ++i) to[i] = 0.0F;
  if constexpr (!std::is_void_v<T>) {
    if (c0 >= columns) return;
    FLA_UNROLL
    for (int i = 0; i < EACH; i += 4) {
      const Vec<float, 4> v = load_global<4>(static_cast<const float*>(x.at.data) + at + c0 + i);
      FLA_UNROLL
      for (int w = 0; w < 4; ++w) to[i + w] = v.x[w];
    }
  } else {
    FLA_UNROLL
    for (int i = 0; i < EACH; ++i) {
      if (c0 + i < columns) to[i] = static_cast<const float*>(x.at.data)[at + (c0 + i) * x.at.stride[3]];
    }
  }
}
// Of T or F32; with void of any type.
template <typename T, int EACH>
FLA_DEVICE void store_piece(const Operand& x, std::int64_t at, int c0, int columns, const float (&value)[EACH]) {
  if constexpr (std::is_void_v<T>) {
    FLA_UNROLL
    for (int i = 0; i < EACH; ++i) {
      if (c0 + i < columns) store_any(x.at.data, x.type, at + (c0 + i) * x.at.stride[3], value[i]);
    }
  } else {
    if (c0 >= columns) return;
    if (x.type == DType::F32) {
      FLA_UNROLL
      for (int i = 0; i < EACH; i += 4) {
        store_global<4>(static_cast<float*>(x.at.data) + at + c0 + i,
                        Vec<float, 4>{{value[i], value[i + 1], value[i + 2], value[i + 3]}});
      }
      return;
    }
    Vec<std::uint32_t, EACH / 2> v;
    FLA_UNROLL
    for (int i = 0; i < EACH / 2; ++i) v.x[i] = pack2<T>(value[2 * i], value[2 * i + 1]);
    store_global<EACH / 2>(static_cast<std::uint32_t*>(x.at.data) + (at + c0) / 2, v);
  }
}

// The tokens of a warp, kRun of the tile's, and the EACH channels of a lane.
template <typename T, int EACH>
struct Run {
  const ScanParams& p;
  const Tile& a;
  int first, rows, c0;

  FLA_DEVICE Run(const ScanParams& params, const Tile& tile)
      : p(params), a(tile), first(warp_id() * kRun), rows(a.tokens - first), c0(EACH * lane_id()) {
    rows = rows < kRun ? rows : kRun;
  }
  FLA_DEVICE std::int64_t token(int r) const { return a.token(p, a.first + first + (r < rows ? r : 0)); }
  template <int WIDTH>
  FLA_DEVICE void ask(int r, const Operand& x, int from, int columns, Piece<T, WIDTH> (&to)[kGroup]) const {
    FLA_UNROLL
    for (int u = 0; u < kGroup; ++u) {
      to[u].ask(x, offset(x, a.row, token(r + u), a.h), from, r + u < rows ? columns : 0);
    }
  }
  FLA_DEVICE void weights(int r, float (&to)[kGroup]) const {
    FLA_UNROLL
    for (int u = 0; u < kGroup; ++u) to[u] = r + u < rows ? weight_of(p, a, token(r + u)) : 0.0F;
  }
  FLA_DEVICE void sum(float (&z)[EACH]) const {
    FLA_UNROLL
    for (int i = 0; i < EACH; ++i) z[i] = 0.0F;
    for (int r = 0; r < rows; r += kGroup) {
      Piece<T, EACH> x[kGroup];
      float weight[kGroup];
      ask(r, p.x, c0, p.K, x);
      weights(r, weight);
      FLA_UNROLL
      for (int u = 0; u < kGroup; ++u) {
        FLA_UNROLL
        for (int i = 0; i < EACH; ++i) z[i] += weight[u] * x[u](p.x, i);
      }
    }
  }
};

template <typename T, int EACH>
FLA_KERNEL(kThreads, (EACH == 8 ? 4 : 8))
linear_tile_sums(const ScanParams p) {
  const std::int64_t slot = block_x() / p.H;
  Tile a;
  a.h = block_x() % p.H;
  if (!find_tile(p, slot, a)) return;
  const Run<T, EACH> run(p, a);
  const Shared<float> runs = shared<float>(0, kWarps * 32 * EACH);
  float z[EACH];
  run.sum(z);
  FLA_UNROLL
  for (int i = 0; i < EACH; ++i) runs.store(warp_id() * 32 * EACH + run.c0 + i, z[i]);
  sync_threads();
  for (int c = thread_id(); c < p.K; c += kThreads) {
    float sum = 0.0F;
    for (int w = 0; w < kWarps; ++w) sum += runs.load(w * 32 * EACH + c);
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
    if (p.end.present()) store_any(p.end.at.data, p.end.type, offset(p.end, n, 0, h) + c * p.end.at.stride[3], z);
  }
}

// EACH: channels of a lane.
template <Use USE, typename T, int EACH>
FLA_KERNEL(kThreads, (EACH == 8 ? 2 : 5))
linear_tokens(const ScanParams p) {
  constexpr bool kDivides = USE == Use::Divide || USE == Use::Upstream;
  constexpr int kValues = 4;  // of a lane
  const std::int64_t slot = block_x() / p.H;
  Tile a;
  a.h = block_x() % p.H;
  if (!find_tile(p, slot, a)) return;
  const Run<T, EACH> run(p, a);
  const int c0 = run.c0, rows = run.rows;

  // Where the warp's run starts: the tile's start and the sums of the runs before.
  const Shared<float> runs = shared<float>(0, kWarps * 32 * EACH);
  float z[EACH];
  run.sum(z);
  FLA_UNROLL
  for (int i = 0; i < EACH; ++i) runs.store(warp_id() * 32 * EACH + c0 + i, z[i]);
  sync_threads();
  FLA_UNROLL
  for (int i = 0; i < EACH; ++i) {
    z[i] = c0 + i < p.K ? p.tiles[(slot * p.H + a.h) * p.K + c0 + i] : 0.0F;
    for (int w = 0; w < warp_id(); ++w) z[i] += runs.load(w * 32 * EACH + c0 + i);
  }

  const bool reads_y = USE == Use::Divide || p.gradient_of_d;
  for (int r = 0; r < rows; r += kGroup) {
    Piece<T, EACH> x[kGroup], q[kGroup];
    Piece<T, kValues> y[kGroup], up[kGroup];
    float from[kGroup][EACH], weight[kGroup];
    run.ask(r, p.x, c0, p.K, x);
    const auto ask_values = [&](int j) {
      run.ask(r, p.y, j, reads_y ? p.V : 0, y);
      if constexpr (USE == Use::Upstream) run.ask(r, p.up, j, p.V, up);
    };
    if constexpr (kDivides) {
      run.ask(r, p.q, c0, p.K, q);
      ask_values(kValues * lane_id());
    } else {
      FLA_UNROLL
      for (int u = 0; u < kGroup; ++u) {
        load_floats<T, EACH>(p.from, offset(p.from, a.row, run.token(r + u), a.h), c0, r + u < rows ? p.K : 0, from[u]);
      }
    }
    run.weights(r, weight);
    float d[kGroup];
    FLA_UNROLL
    for (int u = 0; u < kGroup; ++u) {
      const std::int64_t token = run.token(r + u);
      float by = 1.0F;
      d[u] = 0.0F;
      if (USE == Use::AddQuery) by = p.dd != nullptr ? p.dd[(a.row * p.H + a.h) * p.T + token] : 0.0F;
      FLA_UNROLL
      for (int i = 0; i < EACH; ++i) {
        z[i] += weight[u] * x[u](p.x, i);
        if constexpr (kDivides) {
          d[u] += z[i] * q[u](p.q, i);
        } else {
          from[u][i] += by * z[i];
        }
      }
      if constexpr (!kDivides) {
        store_piece<T, EACH>(p.to, offset(p.to, a.row, token, a.h), c0, r + u < rows ? p.K : 0, from[u]);
      }
    }
    if constexpr (kDivides) {
      float along[kGroup] = {};
      FLA_UNROLL
      for (int u = 0; u < kGroup; ++u) {
        d[u] = p.scale * warp_sum(d[u]) + static_cast<float>(kLinearAttnEpsilon);
      }
      for (int j = kValues * lane_id(); j < p.V; j += 32 * kValues) {
        if (j >= 32 * kValues) ask_values(j);
        FLA_UNROLL
        for (int u = 0; u < kGroup; ++u) {
          float value[kValues];
          const float part = 1.0F / d[u];
          FLA_UNROLL
          for (int i = 0; i < kValues; ++i) {
            const float before = y[u](p.y, i);
            value[i] = USE == Use::Divide ? before : up[u](p.up, i);
            along[u] += value[i] * before;
            value[i] *= part;
          }
          store_piece<T, kValues>(p.y, offset(p.y, a.row, run.token(r + u), a.h), j, r + u < rows ? p.V : 0, value);
        }
      }
      if (USE == Use::Upstream && p.gradient_of_d) {
        FLA_UNROLL
        for (int u = 0; u < kGroup; ++u) {
          along[u] = warp_sum(along[u]);
          if (lane_id() == 0 && r + u < rows) {
            p.dd[(a.row * p.H + a.h) * p.T + run.token(r + u)] = -along[u] / d[u] / d[u] * p.scale;
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

// Whether the kernels of one element type take these: inputs of the first's, results of that or F32, rows in pieces of
// 8 elements.
bool in_pieces(std::initializer_list<const TensorView*> inputs, std::initializer_list<const TensorView*> results) {
  const auto pieces = [](const TensorView* t) { return !*t || (vectorizable(*t) && t->dim(t->ndim - 1) % 8 == 0); };
  return diag_one_half_type(inputs, results) && std::all_of(inputs.begin(), inputs.end(), pieces) &&
         std::all_of(results.begin(), results.end(), pieces);
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

// f(T, channels of a lane): T is void unless all operands have the type of q and come in pieces.
template <typename F>
Status typed(const DiagProblem& p, bool pieces, F&& f) {
  using Four = std::integral_constant<int, 4>;
  using Eight = std::integral_constant<int, 8>;
  if (!pieces) return f(std::type_identity<void>(), Eight());
  if (p.q.dtype == DType::BF16) {
    return p.K <= 128 ? f(std::type_identity<bf16>(), Four()) : f(std::type_identity<bf16>(), Eight());
  }
  return p.K <= 128 ? f(std::type_identity<f16>(), Four()) : f(std::type_identity<f16>(), Eight());
}

constexpr std::size_t shared_bytes(int each) { return static_cast<std::size_t>(kWarps * 32 * each) * sizeof(float); }

Status run_starts(const DiagProblem& p, const ScanParams& s, bool pieces, Stream stream) {
  if (p.T > 0) {
    const auto sums = [&](auto type, auto each) {
      using T = typename decltype(type)::type;
      return launch<linear_tile_sums<T, each.value>>({.name = "linear_tile_sums",
                                                      .grid = {tile_slots(p) * p.H},
                                                      .threads = kThreads,
                                                      .shared_bytes = shared_bytes(each.value)},
                                                     stream, s);
    };
    if (Status e = typed(p, pieces, sums); !e) return e;
  }
  return launch<linear_tile_starts>({.name = "linear_tile_starts", .grid = {p.N * p.H}, .threads = kThreads}, stream,
                                    s);
}

template <Use USE>
Status run_tokens(const DiagProblem& p, const ScanParams& s, bool pieces, Stream stream) {
  if (p.T == 0) return {};
  return typed(p, pieces, [&](auto type, auto each) {
    using T = typename decltype(type)::type;
    return launch<linear_tokens<USE, T, each.value>>({.name = "linear_tokens",
                                                      .grid = {tile_slots(p) * p.H},
                                                      .threads = kThreads,
                                                      .shared_bytes = shared_bytes(each.value)},
                                                     stream, s);
  });
}

// What lies where; without memory it counts.
struct NormaliseMemory {
  DiagProblem forward;
  DiagBackwardProblem backward;
  float *tiles = nullptr, *dd = nullptr;
  void* engine = nullptr;
  std::size_t engine_bytes = 0;

  float* floats(Arena& memory, std::int64_t n) {
    return static_cast<float*>(memory.take(static_cast<std::size_t>(n) * sizeof(float)));
  }
  static TensorView like(Arena& memory, const TensorView& of, DType type) {
    return {memory.take(static_cast<std::size_t>(of.numel()) * size_of(type)), type, of.dims(), of.device};
  }

  NormaliseMemory(Arena& memory, const LinearAttnArgs& a, const NormalisedPlan& f) : forward(to_problem(a)) {
    tiles = floats(memory, tile_slots(forward) * forward.H * forward.K);
    engine_bytes = forward.o || forward.ht ? diag_forward_workspace(forward, f.forward) : 0;
    engine = memory.take(engine_bytes);
  }
  // The engine's problems are known before its plans are, and the workspace after that.
  NormaliseMemory(Arena& memory, const LinearAttnBackwardArgs& a, const NormalisedPlan* f)
      : forward(to_problem(static_cast<const LinearAttnArgs&>(a))), backward(to_problem(a)) {
    tiles = floats(memory, tile_slots(forward) * forward.H * forward.K);
    forward.ht = {};
    forward.o = {};
    if (a.do_) {
      forward.o = backward.do_ = like(memory, a.v, a.v.dtype);
      dd = floats(memory, forward.B * forward.H * forward.T);
    }
    // (7) is added before the one rounding.
    if (a.dq && a.dq.dtype != DType::F32) backward.dq = like(memory, a.dq, DType::F32);
    if (a.dk && a.dk.dtype != DType::F32) backward.dk = like(memory, a.dk, DType::F32);
    if (f == nullptr) return;
    if (a.do_) engine_bytes = diag_forward_workspace(forward, f->forward);
    engine_bytes = std::max(engine_bytes, diag_backward_workspace(backward, f->backward));
    engine = memory.take(engine_bytes);
  }
  std::span<std::byte> engine_memory() const { return {static_cast<std::byte*>(engine), engine_bytes}; }
};

bool serves_sums(const DiagProblem& p, const TensorView& a, const TensorView& b, const Why& why) {
  for (const TensorView* t : {&a, &b})
    if (*t && t->dtype == DType::F64) return why("needs F32, F16 or BF16, got F64");
  return p.K <= kWidth || why("needs K of at most 256, got ", p.K);
}

// The engine's kernel is wanted by its name without what stands before it here.
constexpr std::string_view kPrefix = "linear.";
std::string_view engine_part(std::string_view wanted) {
  return wanted.starts_with(kPrefix) ? wanted.substr(kPrefix.size()) : wanted;
}
std::vector<std::string> prefixed(std::vector<std::string> names) {
  for (std::string& n : names) n.insert(0, kPrefix);
  return names;
}
// Each of the names that the engine's joins gets the prefix.
KernelName prefixed(const KernelName& engine) {
  KernelName n;
  engine.for_each([&](std::string_view name) { n.add(n.view().empty() ? "" : "+").add(kPrefix).add(name); });
  return n;
}

}  // namespace

bool normalised_plan(const LinearAttnArgs& a, const DeviceInfo& d, std::string_view wanted, NormalisedPlan& plan,
                     std::string* why) {
  const DiagProblem p = to_problem(a);
  return diag_plan_forward(p, d, engine_part(wanted), plan.forward, why) &&
         serves_sums(p, a.initial_z, a.final_z, Why(why));
}
KernelName normalised_kernel(const LinearAttnArgs& a, const NormalisedPlan& plan) {
  return prefixed(diag_forward_kernel(to_problem(a), plan.forward));
}
std::string normalised_text(const LinearAttnArgs& /*a*/, const NormalisedPlan& plan) {
  return plan.forward.text() + "; then divided by the running sums, tiles of 64 tokens";
}
std::size_t normalised_workspace(const LinearAttnArgs& a, const NormalisedPlan& plan) {
  if (empty(to_problem(a))) return 0;
  Arena count(nullptr);
  const NormaliseMemory m(count, a, plan);
  return count.bytes();
}
std::vector<std::string> normalised_forward_kernels(const DeviceInfo& d) {
  return prefixed(diag_forward_kernels(d, false));
}

Status normalised(const LinearAttnArgs& a, const NormalisedPlan& plan, Stream stream, std::span<std::byte> workspace) {
  const DiagProblem p = to_problem(a);
  if (empty(p)) return {};
  Arena arena(workspace.data());
  const NormaliseMemory m(arena, a, plan);
  if (a.o || a.final_state) {
    if (Status s = diag_forward(m.forward, plan.forward, stream, m.engine_memory()); !s) return s;
  }
  if (!a.o && !a.final_z) return {};
  ScanParams s = scan(p, p.k, a.initial_z, a.final_z, m.tiles);
  const bool pieces = in_pieces({&p.q, &p.k, &p.o}, {});
  if (Status e = run_starts(p, s, pieces, stream); !e || !a.o) return e;
  s.q = operand(p.q);
  s.y = operand(p.o);
  return run_tokens<Use::Divide>(p, s, pieces, stream);
}

bool normalised_plan(const LinearAttnBackwardArgs& a, const DeviceInfo& d, std::string_view wanted,
                     NormalisedPlan& plan, std::string* text) {
  const Why why(text);
  const DiagBackwardProblem p = to_problem(a);
  if (!diag_plan_backward(p, d, {}, plan.backward, text) || !serves_sums(p, a.initial_z, a.dzt, why) ||
      !serves_sums(p, a.dz0, {}, why)) {
    return false;
  }
  Arena count(nullptr);
  const NormaliseMemory m(count, a, nullptr);
  return (!a.do_ || diag_plan_forward(m.forward, d, {}, plan.forward, text)) &&
         diag_plan_backward(m.backward, d, engine_part(wanted), plan.backward, text);
}
KernelName normalised_kernel(const LinearAttnBackwardArgs& a, const NormalisedPlan& plan) {
  return prefixed(diag_backward_kernel(to_problem(a), plan.backward));
}
std::string normalised_text(const LinearAttnBackwardArgs& /*a*/, const NormalisedPlan& plan) {
  return plan.backward.text() + "; sums of keys and of queries, tiles of 64 tokens";
}
std::size_t normalised_workspace(const LinearAttnBackwardArgs& a, const NormalisedPlan& plan) {
  if (empty(to_problem(a))) return 0;
  Arena count(nullptr);
  const NormaliseMemory m(count, a, &plan);
  return count.bytes();
}
std::vector<std::string> normalised_backward_kernels(const DeviceInfo& d) {
  return prefixed(diag_backward_kernels(d, false));
}

Status normalised(const LinearAttnBackwardArgs& a, const NormalisedPlan& plan, Stream stream,
                  std::span<std::byte> workspace) {
  const DiagProblem p = to_problem(a);
  if (empty(p)) return {};
  Arena arena(workspace.data());
  const NormaliseMemory m(arena, a, &plan);
  const bool gradient_of_d = a.do_ && (a.dq || a.dk || a.dz0);
  if (gradient_of_d) {
    if (Status s = diag_forward(m.forward, plan.forward, stream, m.engine_memory()); !s) return s;
  }
  const bool pieces = in_pieces({&p.q, &p.k, &m.forward.o, &a.do_}, {&m.backward.dq, &m.backward.dk, &a.dq, &a.dk});
  ScanParams keys = scan(p, p.k, a.initial_z, {}, m.tiles);
  if (a.do_ || a.dq) {
    if (Status s = run_starts(p, keys, pieces, stream); !s) return s;
  }
  if (a.do_) {
    keys.q = operand(p.q);
    keys.y = operand(m.forward.o);
    keys.up = operand(a.do_);
    keys.dd = m.dd;
    keys.gradient_of_d = gradient_of_d;
    if (Status s = run_tokens<Use::Upstream>(p, keys, pieces, stream); !s) return s;
  }
  if (a.dq || a.dk || a.dv || a.dh0) {
    if (Status s = diag_backward(m.backward, plan.backward, stream, m.engine_memory()); !s) return s;
  }
  if (a.dq) {
    keys.from = operand(m.backward.dq);
    keys.to = operand(a.dq);
    keys.dd = m.dd;
    if (Status s = run_tokens<Use::AddQuery>(p, keys, pieces, stream); !s) return s;
  }
  if (!a.dk && !a.dz0) return {};
  ScanParams queries = scan(p, a.do_ ? p.q : TensorView(), a.dzt, a.dz0, m.tiles);
  queries.reverse = !p.reverse;
  queries.weight = m.dd;
  if (Status s = run_starts(p, queries, pieces, stream); !s || !a.dk) return s;
  queries.from = operand(m.backward.dk);
  queries.to = operand(a.dk);
  return run_tokens<Use::AddKey>(p, queries, pieces, stream);
}

}  // namespace fla::cuda
