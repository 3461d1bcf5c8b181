// Kernels that go token by token in fp32, for every gate and type.
#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/launches.h"
#include "fla/engine/diag/cuda/params.cuh"
#include "fla/engine/diag/cuda/warp_state.cuh"

namespace fla::cuda {

namespace {

FLA_DEVICE float load_operand(const Operand& x, std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
  if (!x.present()) return 0.0F;
  const auto& s = x.at.stride;
  return load_any(x.at.data, x.type, i0 * s[0] + i1 * s[1] + i2 * s[2] + i3 * s[3]);
}

// Replaces the sequence's number by that of its row in the pool of states; true for padding.
FLA_DEVICE bool resolve_index(const DiagParams& p, DiagTask& a) {
  if (!p.indices.present()) return false;
  const std::int64_t row = a.n * p.indices.at.stride[0];
  std::int64_t at = load_index(p.indices.at.data, p.indices.type, row);
  const bool padding = at < 0;
  if (!padding && p.accepted.present()) {
    const std::int64_t column = load_index(p.accepted.at.data, p.accepted.type, a.n * p.accepted.at.stride[0]) - 1;
    at = load_index(p.indices.at.data, p.indices.type, row + column * p.indices.at.stride[1]);
  }
  a.n = at < 0 ? 0 : at;
  return padding;
}

// Rows of KP keys, or of VP values from a.v0 on, of the tokens from t on: operands and decays as fp32.
template <int KP>
FLA_DEVICE void stage_keys(const DiagParams& p, const DiagTask& a, bool padding, std::int64_t t, int rows,
                           Shared<float> q, Shared<float> k, Shared<float> decay) {
  const float constant = head_gate(p, a.h);
  const int shift = p.shift ? 1 : 0;
  for (int i = thread_id(); i < rows * KP; i += block_threads()) {
    const int r = i / KP, c = i % KP;
    const bool inside = c < p.K && !padding && t + r >= 0;
    const std::int64_t token = a.token(p, t + r), gate_token = a.token(p, t + r - shift);
    q[i] = inside && p.o.present() ? p.scale * load_operand(p.q, a.row, token, a.h, c) : 0.0F;
    k[i] = inside ? p.update_scale * load_operand(p.k, a.row, token, a.h, c) : 0.0F;
    float gate = 0.0F;
    if (inside && t + r >= shift) {
      gate = constant;
      if (p.gk.present()) gate = base2_gate(load_operand(p.gk, a.row, gate_token, a.h, c));
      if (p.g.present()) gate = base2_gate(load_operand(p.g, a.row, gate_token, a.h, 0));
    }
    decay[i] = exp2_approx(gate);
  }
}
template <int VP>
FLA_DEVICE void stage_values(const DiagParams& p, const DiagTask& a, bool padding, std::int64_t t, int rows,
                             Shared<float> v, Shared<float> decay) {
  const int shift = p.shift ? 1 : 0;
  for (int i = thread_id(); i < rows * VP; i += block_threads()) {
    const int r = i / VP, c = a.v0 + i % VP;
    const bool inside = c < p.V && !padding && t + r >= 0;
    v[i] = inside ? load_operand(p.v, a.row, a.token(p, t + r), a.h, c) : 0.0F;
    const bool gated = p.gv.present() && inside && t + r >= shift;
    decay[i] = gated ? exp2_approx(base2_gate(load_operand(p.gv, a.row, a.token(p, t + r - shift), a.h, c))) : 1.0F;
  }
}

// ---- any number of tokens

constexpr int kStepTokens = 16;

template <int KP>
struct StepTiles {
  static constexpr int kLanes = KP / kStepRows;  // of a value column
  static constexpr int kValue = kStepThreads / kLanes;
  static constexpr int kQ = 0, kKey = kQ + kStepTokens * KP * 4, kDecay = kKey + kStepTokens * KP * 4,
                       kV = kDecay + kStepTokens * KP * 4, kValueDecay = kV + kStepTokens * kValue * 4,
                       kState = kValueDecay + kStepTokens * kValue * 4, kBytes = kState + kStepRows * kStepThreads * 4;
};

// A thread holds 32 keys of a value column: groups of 4 neighbours, dealt out to the column's lanes.
template <int KP>
FLA_KERNEL(kStepThreads, 3)
diag_step_kernel(const DiagParams p) {
  using Tiles = StepTiles<KP>;
  DiagTask a = diag_task(p, kStepTokens, Tiles::kValue);
  const int lane = thread_id() % Tiles::kLanes, column = thread_id() / Tiles::kLanes;
  const int j = a.v0 + column;
  const std::int64_t sequence = a.n;
  const bool padding = resolve_index(p, a);
  const Shared<float> q = shared<float>(Tiles::kQ, kStepTokens * KP), k = shared<float>(Tiles::kKey, kStepTokens * KP),
                      decay = shared<float>(Tiles::kDecay, kStepTokens * KP),
                      v = shared<float>(Tiles::kV, kStepTokens * Tiles::kValue),
                      value_decay = shared<float>(Tiles::kValueDecay, kStepTokens * Tiles::kValue);

  // A thread's elements on their way from and to memory: with unrolled loops the addresses of all of them are held.
  const Shared<float> state = shared<float>(Tiles::kState, kStepRows * kStepThreads);
  const auto key_of = [&](int i) { return 4 * (lane + Tiles::kLanes * (i / 4)) + i % 4; };
  constexpr int kTogether = 8;
  FLA_ROLL
  for (int first = 0; first < kStepRows; first += kTogether) {
    float x[kTogether];
    FLA_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const int r = key_of(first + i);
      x[i] = r < p.K && j < p.V && !padding ? load_state(p, a, r, j) : 0.0F;
    }
    FLA_UNROLL
    for (int i = 0; i < kTogether; ++i) state.store((first + i) * kStepThreads + thread_id(), x[i]);
  }
  float S[kStepRows];
  FLA_UNROLL
  for (int i = 0; i < kStepRows; ++i) S[i] = state.load(i * kStepThreads + thread_id());
  const auto put_state = [&] {
    FLA_UNROLL
    for (int i = 0; i < kStepRows; ++i) state.store(i * kStepThreads + thread_id(), S[i]);
  };

  // Kept states: four elements of a thread together.
  const auto kept = [&](std::int64_t b) {
    const std::int64_t slot = boundary_slot(p, a, b);
    return static_cast<float*>(p.kept) + slot * p.v_blocks * Tiles::kValue * KP + std::int64_t{a.v0} * KP +
           4 * thread_id();
  };

  const auto keep_at = [&](std::int64_t t) {
    if (p.boundary != Boundary::Keep || (t % p.align != 0 && t < a.length)) return;
    float* to = kept((t + p.align - 1) / p.align);
    FLA_UNROLL
    for (int i = 0; i < kStepRows; i += 4) {
      store_global<4>(to + i * kStepThreads, Vec<float, 4>{{S[i], S[i + 1], S[i + 2], S[i + 3]}});
    }
  };
  const auto sum_at = [&](std::int64_t t) {
    const std::int64_t left = a.length - t;
    if (p.boundary != Boundary::Sum || left % p.align != 0) return;
    const float* from = kept(left / p.align);
    float sum = 0.0F;
    FLA_UNROLL
    for (int i = 0; i < kStepRows; i += 4) {
      const Vec<float, 4> x = load_global<4>(from + i * kStepThreads);
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) sum += x.x[e] * S[i + e];
    }
    sum = warp_sum<Tiles::kLanes>(sum);
    if (lane == 0 && j < p.V) {
      p.sums[boundary_slot(p, a, left / p.align) * p.V + j] = sum * exp2_approx(gate_before(p, a, t > 0 ? t : 0, 0, j));
    }
  };

  // The state after token t of the sequence.
  const auto keep_between = [&](std::int64_t t) {
    const std::int64_t slot = p.by_token && !padding
                                  ? load_index(p.indices.at.data, p.indices.type,
                                               sequence * p.indices.at.stride[0] + t * p.indices.at.stride[1])
                                  : -1;
    put_state();
    FLA_ROLL
    for (int i = 0; i < kStepRows; ++i) {
      const int r = key_of(i);
      if (r >= p.K || j >= p.V) continue;
      const float x = state.load(i * kStepThreads + thread_id());
      if (p.steps.present()) {
        const auto& s = p.steps.at.stride;
        store_any(p.steps.at.data, p.steps.type, a.row * s[0] + t * s[1] + a.h * s[2] + r * s[3] + j * s[4], x);
      }
      if (slot >= 0 && p.ht.present()) {
        const auto& s = p.ht.at.stride;
        store_any(p.ht.at.data, p.ht.type, slot * s[0] + a.h * s[1] + r * s[2] + j * s[3], x);
      }
    }
  };

  keep_at(0);
  for (std::int64_t t = a.from; t < a.to; t += kStepTokens) {
    sum_at(t);
    const int rows = a.to - t < kStepTokens ? static_cast<int>(a.to - t) : kStepTokens;
    sync_threads();
    stage_keys<KP>(p, a, padding, t, rows, q, k, decay);
    stage_values<Tiles::kValue>(p, a, padding, t, rows, v, value_decay);
    sync_threads();
    for (int r = 0; r < rows; ++r) {
      const float value = v.load(r * Tiles::kValue + column), by = value_decay.load(r * Tiles::kValue + column);
      float o[4] = {};
      FLA_UNROLL
      for (int i = 0; i < kStepRows; i += 4) {
        const int at = r * KP + 4 * (lane + Tiles::kLanes * (i / 4));
        const Vec<float, 4> d = decay.load_vec<4>(at), key = k.load_vec<4>(at), query = q.load_vec<4>(at);
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          S[i + e] = d.x[e] * by * S[i + e] + key.x[e] * value;
          o[e] += query.x[e] * S[i + e];
        }
      }
      if (p.steps.present() || p.by_token) keep_between(t + r);
      if (!p.o.present()) continue;
      const float sum = warp_sum<Tiles::kLanes>((o[0] + o[1]) + (o[2] + o[3]));
      if (lane == 0 && j < p.V && t + r >= 0) {
        const auto& s = p.o.at.stride;
        store_any(p.o.at.data, p.o.type, a.row * s[0] + a.token(p, t + r) * s[1] + a.h * s[2] + j * s[3], sum);
      }
    }
    keep_at(t + kStepTokens);
  }
  sum_at(a.length);
  if (padding || p.by_token || j >= p.V || !keeps_state(p, a)) return;
  put_state();
  FLA_ROLL
  for (int i = 0; i < kStepRows; ++i) {
    if (key_of(i) < p.K) store_state(p, a, key_of(i), j, state.load(i * kStepThreads + thread_id()));
  }
}

// ---- a few tokens

// Moves a state once from memory to registers and back. A thread has 16 bytes of each of its keys; all of them are
// asked for before the first is used, and before the token's operands are.
constexpr int kDecodeWarps = kDecodeThreads / 32;

template <typename T, int KP>
struct DecodeShape {
  static constexpr int kEach = 16 / static_cast<int>(sizeof(T));  // values of a thread
  static constexpr int kLanes = kDecodeValue / kEach;             // threads of a key
  static constexpr int kRows = KP * kLanes / kDecodeThreads;      // keys of a thread
  static constexpr int kPiece = kRows < 4 ? kRows : 4;
  // Blocks of a multiprocessor that fit with all of a thread's state in registers.
  static constexpr int kBlocks = KP == 256 ? 2 : sizeof(T) == 2 ? 3 : 4;
  static constexpr std::size_t bytes(std::int64_t tokens) {
    return static_cast<std::size_t>(tokens) * (3 * KP + (2 + kDecodeWarps) * kDecodeValue) * sizeof(float);
  }
};

template <typename T, int KP>
FLA_KERNEL(kDecodeThreads, (DecodeShape<T, KP>::kBlocks))
diag_decode_kernel(const DiagParams p) {
  using Shape = DecodeShape<T, KP>;
  constexpr int kEach = Shape::kEach, kRows = Shape::kRows, kPiece = Shape::kPiece;
  DiagTask a = diag_task(p, kDecodeTokens, kDecodeValue);
  const bool padding = resolve_index(p, a);
  const int column = thread_id() % Shape::kLanes * kEach, first = thread_id() / Shape::kLanes * kRows;
  const bool inside = a.v0 + column < p.V && !padding;

  Vec<T, kEach> raw[kRows];
  const T* from = p.h0.present() ? p.h0.at.at<const T>(a.n, a.h, first, a.v0 + column) : nullptr;
  FLA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    raw[i] = {};
    if (inside && first + i < p.K && from != nullptr) raw[i] = load_global<kEach>(from + i * p.h0.at.stride[2]);
  }

  const int tokens = static_cast<int>(p.T), length = static_cast<int>(a.length);
  const int at_k = tokens * KP * 4, at_decay = 2 * at_k, at_v = 3 * at_k, at_by = at_v + tokens * kDecodeValue * 4,
            at_partial = at_by + tokens * kDecodeValue * 4;
  const Shared<float> q = shared<float>(0, tokens * KP), k = shared<float>(at_k, tokens * KP),
                      decay = shared<float>(at_decay, tokens * KP), v = shared<float>(at_v, tokens * kDecodeValue),
                      value_decay = shared<float>(at_by, tokens * kDecodeValue),
                      partial = shared<float>(at_partial, tokens * kDecodeWarps * kDecodeValue);
  stage_keys<KP>(p, a, padding, 0, length, q, k, decay);
  stage_values<kDecodeValue>(p, a, padding, 0, length, v, value_decay);
  sync_threads();

  float S[kRows][kEach];
  FLA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FLA_UNROLL
    for (int e = 0; e < kEach; ++e) S[i][e] = to_f32(raw[i].x[e]);
  }
  for (int t = 0; t < length; ++t) {
    float value[kEach], by[kEach], o[kEach];
    FLA_UNROLL
    for (int e = 0; e < kEach; e += 4) {
      const Vec<float, 4> x = v.load_vec<4>(t * kDecodeValue + column + e),
                          y = value_decay.load_vec<4>(t * kDecodeValue + column + e);
      FLA_UNROLL
      for (int u = 0; u < 4; ++u) {
        value[e + u] = x.x[u];
        by[e + u] = y.x[u];
        o[e + u] = 0.0F;
      }
    }
    FLA_UNROLL
    for (int i = 0; i < kRows; i += kPiece) {
      const int at = t * KP + first + i;
      const auto d = decay.load_vec<kPiece>(at), key = k.load_vec<kPiece>(at), query = q.load_vec<kPiece>(at);
      FLA_UNROLL
      for (int u = 0; u < kPiece; ++u) {
        FLA_UNROLL
        for (int e = 0; e < kEach; ++e) {
          float& x = S[i + u][e];
          x = d.x[u] * by[e] * x + key.x[u] * value[e];
          o[e] += query.x[u] * x;
        }
      }
    }
    FLA_UNROLL
    for (int e = 0; e < kEach; ++e) {
      FLA_UNROLL
      for (int other = Shape::kLanes; other < 32; other *= 2) o[e] += shuffle_xor(o[e], other);
    }
    if (lane_id() >= Shape::kLanes) continue;
    FLA_UNROLL
    for (int e = 0; e < kEach; e += 4) {
      partial.store_vec<4>((t * kDecodeWarps + warp_id()) * kDecodeValue + column + e,
                           Vec<float, 4>{{o[e], o[e + 1], o[e + 2], o[e + 3]}});
    }
  }

  if (inside && p.ht.present()) {
    T* to = p.ht.at.at<T>(a.n, a.h, first, a.v0 + column);
    FLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FLA_UNROLL
      for (int e = 0; e < kEach; ++e) raw[i].x[e] = from_f32<T>(S[i][e]);
      if (first + i < p.K) store_global<kEach>(to + i * p.ht.at.stride[2], raw[i]);
    }
  }
  if (!p.o.present()) return;
  sync_threads();
  for (int i = thread_id(); i < length * kDecodeValue; i += kDecodeThreads) {
    const int t = i / kDecodeValue, j = i % kDecodeValue;
    if (a.v0 + j >= p.V) continue;
    float sum = 0.0F;
    FLA_UNROLL
    for (int w = 0; w < kDecodeWarps; ++w) sum += partial.load((t * kDecodeWarps + w) * kDecodeValue + j);
    const auto& s = p.o.at.stride;
    store_any(p.o.at.data, p.o.type, a.row * s[0] + a.token(p, t) * s[1] + a.h * s[2] + (a.v0 + j) * s[3], sum);
  }
}

template <int KP>
Status launch_step(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  return launch<diag_step_kernel<KP>>({.name = plan.name(),
                                       .grid = {p.N * p.H * p.segments * p.v_blocks},
                                       .threads = kStepThreads,
                                       .shared_bytes = StepTiles<KP>::kBytes},
                                      stream, p);
}

template <typename T, int KP>
Status launch_decode(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  return launch<diag_decode_kernel<T, KP>>({.name = plan.name(),
                                            .grid = {p.N * p.H * p.v_blocks},
                                            .threads = kDecodeThreads,
                                            .shared_bytes = DecodeShape<T, KP>::bytes(p.T)},
                                           stream, p);
}

template <typename T>
Status launch_decode(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  switch (plan.key) {
    case 64: return launch_decode<T, 64>(p, plan, stream);
    case 128: return launch_decode<T, 128>(p, plan, stream);
    default: return launch_decode<T, 256>(p, plan, stream);
  }
}

}  // namespace

Status launch_diag_step(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  switch (plan.key) {
    case 64: return launch_step<64>(p, plan, stream);
    case 128: return launch_step<128>(p, plan, stream);
    default: return launch_step<256>(p, plan, stream);
  }
}

Status launch_diag_decode(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  switch (p.h0.present() ? p.h0.type : p.ht.type) {
    case DType::F16: return launch_decode<f16>(p, plan, stream);
    case DType::BF16: return launch_decode<bf16>(p, plan, stream);
    default: return launch_decode<float>(p, plan, stream);
  }
}

}  // namespace fla::cuda
