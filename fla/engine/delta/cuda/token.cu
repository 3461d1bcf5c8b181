// delta_token_kernel: o and the state of one (sequence, value head, some value channels), token after token, in fp32.
//   e_t = beta_t (v_t - (e^{g_t} o S_{t-1})^T k_t),  S_t = e^{g_t} o S_{t-1} + k_t e_t^T,
//   o_t = scale S_t^T q_t = scale ((e^{g_t} o S_{t-1})^T q_t + (k_t^T q_t) e_t)
// (Plain: e_t reads S_{t-1} itself.) Serves every element type, stride and gate, and a pool of states: a state is read
// once, kept in registers over the sequence's tokens, and written where the table of slots says.
// grid     N * HV * parts in x; a thread keeps 16 key channels of 4 value channels; a warp has all K of 4096 / KP value
//          channels, so that sums over keys need no barrier; 1 to 4 warps
// shared   8 tokens: q, k, e^{g + gk} [8, KP] and v, beta, e^{gv} [8, columns], fp32
// offsets  int64
#include <algorithm>

#include "fla/engine/delta/cuda/token.cuh"

namespace fla::cuda {

namespace {

constexpr int kStaged = 8, kRows = 16, kMostWarps = 4;

template <int KP>
struct TokenShape {
  static constexpr int kGroups = KP / kRows, kLanes = 32 / kGroups;  // lanes that share a value channel, and a key
  static constexpr int kColumns = 4 * kLanes;                        // value channels of a warp
};

// How a state's elements may be accessed: one by one, or 4 neighbouring value or key channels together.
enum class StateAccess : std::uint8_t { Element, Values, Keys };

StateAccess state_access(const TensorView& t) {
  if (!t.present() || t.numel() == 0 || (t.dtype != DType::F32 && size_of(t.dtype) != 2)) return StateAccess::Element;
  if (reinterpret_cast<std::uintptr_t>(t.data) % (4 * size_of(t.dtype)) != 0) return StateAccess::Element;
  const auto along = [&](int axis) {
    if (t.stride[static_cast<std::size_t>(axis)] != 1 || t.dim(axis) % 4 != 0) return false;
    for (int i = 0; i < t.ndim; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (i != axis && t.shape[at] > 1 && t.stride[at] % 4 != 0) return false;
    }
    return true;
  };
  return along(t.ndim - 1) ? StateAccess::Values : along(t.ndim - 2) ? StateAccess::Keys : StateAccess::Element;
}

struct StatePlace {
  TypedView view;
  StateAccess access = StateAccess::Element;
};
StatePlace state_place(const TensorView& t) { return {typed(t), state_access(t)}; }

// Where the kernel's states come from and go to: strides of the last two axes are keys and values.
struct TokenStates {
  StatePlace h0, ht, h, steps, kept;
};

// A state's place in memory: `data` is its first element.
struct StateTarget {
  void* data;
  std::int64_t key_stride, value_stride;
  DType type;
  StateAccess access;
};
FLA_DEVICE StateTarget target(const StatePlace& to, std::int64_t offset, int axis) {
  const auto bytes = to.view.type == DType::F64 ? 8 : to.view.type == DType::F32 ? 4 : 2;
  return {static_cast<char*>(to.view.view.data) + offset * bytes, to.view.view.stride[axis],
          to.view.view.stride[axis + 1], to.view.type, to.access};
}

// A thread's part of a state: element 4 i + e belongs to key channel key + step(i) and value channel column + e.
// Addresses and bounds are one number and constants, or they would fill the registers.
template <int KP>
struct StateTile {
  using Shape = TokenShape<KP>;
  int group, key, column;
  static FLA_HOST_DEVICE constexpr int step(int i) { return 4 * Shape::kGroups * (i / 4) + i % 4; }
};

// As stored: words of fp32, or pairs of 16-bit elements in the first half. `from` is the state's first element.
template <int KP>
FLA_DEVICE void fetch_state(const StateTile<KP>& own, const DeltaArgs& p, const StateTarget& from,
                            float (&raw)[4 * kRows]) {
  using Tile = StateTile<KP>;
  FLA_UNROLL
  for (float& x : raw) x = 0.0F;
  const int keys = p.K - own.key, columns = p.V - own.column;
  const std::int64_t first = own.key * from.key_stride + own.column * from.value_stride;
  if (from.access == StateAccess::Element) {
    FLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (Tile::step(i) < keys && e < columns) {
          raw[4 * i + e] =
              load_any(from.data, from.type, first + Tile::step(i) * from.key_stride + e * from.value_stride);
        }
      }
    }
    return;
  }
  const auto fetch = [&](int j, int key, int column, auto&& put) {
    if (key >= keys || column >= columns) return;
    const std::int64_t at = first + key * from.key_stride + column * from.value_stride;
    if (from.type == DType::F32) {
      put(load_global<4>(static_cast<const float*>(from.data) + at));
    } else {
      const auto x = load_global<2>(static_cast<const float*>(from.data) + at / 2);
      raw[2 * j] = x.x[0];
      raw[2 * j + 1] = x.x[1];
    }
  };
  if (from.access == StateAccess::Values) {
    FLA_UNROLL
    for (int j = 0; j < kRows; ++j) {
      fetch(j, Tile::step(j), 0, [&](const Vec<float, 4>& x) {
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) raw[4 * j + e] = x.x[e];
      });
    }
  } else {
    FLA_UNROLL
    for (int j = 0; j < kRows; ++j) {
      fetch(j, Tile::step(j / 4 * 4), j % 4, [&](const Vec<float, 4>& x) {
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) raw[4 * (j / 4 * 4 + e) + j % 4] = x.x[e];
      });
    }
  }
}

template <typename T>
FLA_DEVICE void unpack_state(bool values, float (&S)[4 * kRows]) {
  std::uint32_t raw[2 * kRows];
  FLA_UNROLL
  for (int i = 0; i < 2 * kRows; ++i) raw[i] = float_to_bits(S[i]);
  FLA_UNROLL
  for (int j = 0; j < kRows; ++j) {
    FLA_UNROLL
    for (int e = 0; e < 4; ++e) {
      const std::uint32_t by_value = raw[2 * j + e / 2], by_key = raw[2 * (j / 4 * 4 + e) + j % 4 / 2];
      const float x = e % 2 == 0 ? low_half<T>(by_value) : high_half<T>(by_value),
                  y = j % 2 == 0 ? low_half<T>(by_key) : high_half<T>(by_key);
      S[4 * j + e] = values ? x : y;
    }
  }
}

// Apart from the loads, so that a block need not wait for them before it loads its tokens.
FLA_DEVICE void unpack_state(const StatePlace& from, float (&S)[4 * kRows]) {
  if (from.access == StateAccess::Element || from.view.type == DType::F32) return;
  const bool values = from.access == StateAccess::Values;
  if (from.view.type == DType::BF16) {
    unpack_state<bf16>(values, S);
  } else {
    unpack_state<f16>(values, S);
  }
}

template <int KP>
FLA_DEVICE void store_state(const StateTile<KP>& own, const DeltaArgs& p, const StateTarget& to,
                            const float (&S)[4 * kRows]) {
  using Tile = StateTile<KP>;
  const int keys = p.K - own.key, columns = p.V - own.column;
  const std::int64_t first = own.key * to.key_stride + own.column * to.value_stride;
  if (to.access == StateAccess::Element) {
    FLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (Tile::step(i) < keys && e < columns) {
          store_any(to.data, to.type, first + Tile::step(i) * to.key_stride + e * to.value_stride, S[4 * i + e]);
        }
      }
    }
    return;
  }
  const auto put = [&](int key, int column, float x0, float x1, float x2, float x3) {
    if (key >= keys || column >= columns) return;
    const std::int64_t at = first + key * to.key_stride + column * to.value_stride;
    if (to.type == DType::F32) {
      store_global<4>(static_cast<float*>(to.data) + at, Vec<float, 4>{{x0, x1, x2, x3}});
    } else {
      const bool bf = to.type == DType::BF16;
      store_global<2>(static_cast<std::uint32_t*>(to.data) + at / 2,
                      Vec<std::uint32_t, 2>{{bf ? pack2<bf16>(x0, x1) : pack2<f16>(x0, x1),
                                             bf ? pack2<bf16>(x2, x3) : pack2<f16>(x2, x3)}});
    }
  };
  if (to.access == StateAccess::Values) {
    FLA_UNROLL
    for (int j = 0; j < kRows; ++j) put(Tile::step(j), 0, S[4 * j], S[4 * j + 1], S[4 * j + 2], S[4 * j + 3]);
  } else {
    FLA_UNROLL
    for (int j = 0; j < kRows; ++j) {
      const int at = 16 * (j / 4) + j % 4;
      put(Tile::step(j / 4 * 4), j % 4, S[at], S[at + 4], S[at + 8], S[at + 12]);
    }
  }
}

template <int KP>
constexpr int token_shared_bytes(int columns) {
  return 4 * kStaged * (3 * KP + 3 * columns) + 8 * kMostWarps;
}

template <int KP>
FLA_KERNEL(32 * kMostWarps, 3)
delta_token_kernel(const DeltaArgs p, const TokenStates states, float* z) {
  using Shape = TokenShape<KP>;
  const int warps = block_threads() / 32, columns = warps * Shape::kColumns, parts = (p.V + columns - 1) / columns;
  const int part = block_x() % parts, hv = block_x() / parts % p.HV, hk = hv / (p.HV / p.H);
  const std::int64_t n = block_x() / parts / p.HV;
  const Sequence s = sequence(p, n);
  const StateTile<KP> own{lane_id() / Shape::kLanes, 4 * (lane_id() / Shape::kLanes),
                          part * columns + warp_id() * Shape::kColumns + 4 * (lane_id() % Shape::kLanes)};
  const int local = own.column - part * columns;

  const std::int64_t source = source_slot(p, n);
  if (source < 0) {  // padding
    for (std::int64_t t = 0; t < s.length; ++t) {
      for (int j = thread_id(); j < columns && part * columns + j < p.V; j += block_threads()) {
        if (p.o.present()) p.o.store(0.0F, s.row, s.begin + t, hv, part * columns + j);
        for (int c = 0; p.steps.present() && c < p.K; ++c) {
          p.steps.store(0.0F, s.row, s.begin + t, hv, c, part * columns + j);
        }
      }
    }
    return;
  }
  float S[4 * kRows] = {};
  if (p.h0.present()) {
    fetch_state(own, p, target(states.h0, p.h0.offset(source, hv, 0, 0), 2), S);
  }

  constexpr int kTile = 4 * kStaged * KP, kValues = 3 * kTile;
  const int value_tile = kStaged * columns;
  const Shared<float> sq = shared<float>(0, kStaged * KP), sk = shared<float>(kTile, kStaged * KP),
                      sd = shared<float>(2 * kTile, kStaged * KP), sv = shared<float>(kValues, value_tile),
                      sb = shared<float>(kValues + 4 * value_tile, value_tile),
                      sdv = shared<float>(kValues + 8 * value_tile, value_tile);
  const std::int64_t nt =
      p.h.present() ? first_state(p, n, shared<std::int64_t>(kValues + 12 * value_tile, kMostWarps)) : 0;
  const std::int64_t place = first_kept(p, s, n);
  const GateScale multiplier = gate_scale(p, hv);
  if (s.length == 0) unpack_state(states.h0, S);

  for (std::int64_t done = 0;; ++done) {
    if (done < s.length && done % kStaged == 0) {
      const int count = static_cast<int>(s.length - done < kStaged ? s.length - done : kStaged);
      sync_threads();
      for (int task = warp_id(); task < 4 * count; task += warps) {
        const int i = task / 4;
        const std::int64_t t = token_at(p, s, done + i);
        switch (task % 4) {
          case 0: stage_row<KP>(p.k, s.row, t, hk, p.K, p.normalize_k, sk + i * KP); break;
          case 1: stage_row<KP>(p.q, s.row, t, hk, p.K, p.normalize_q, sq + i * KP, p.scale); break;
          case 2: stage_decay<KP>(p, s.row, t, hv, multiplier, sd + i * KP); break;
          default:
            for (int j = lane_id(); j < columns; j += 32) {
              const int column = part * columns + j, to = i * columns + j;
              const bool inside = column < p.V;
              sv.store(to, inside ? p.v.load(s.row, t, hv, column) : 0.0F);
              sb.store(to, inside ? load_beta(p, s.row, t, hv, column) : 0.0F);
              sdv.store(to, inside && p.gv.present() ? expf(p.gv.load(s.row, t, hv, column)) : 1.0F);
            }
        }
      }
      sync_threads();
      if (done == 0) unpack_state(states.h0, S);
    }

    constexpr unsigned kPool = 1, kStep = 2, kEntering = 4, kForBackward = 8;
    unsigned places = 0;
    std::int64_t slot = n;
    if (p.ht.present() && (p.slots_by_token ? done > 0 : done == s.length)) {
      if (p.slot_indices.present()) slot = s.length > 0 ? slot_of(p, n, done - 1) : -1;
      if (slot >= 0) places |= kPool;
    }
    if (p.steps.present() && done > 0) places |= kStep;
    if (p.h.present() && done < s.length && done % p.h_chunk == 0) places |= kEntering;
    if (states.kept.view.present() && (done % kKeptTokens == 0 || done == s.length)) places |= kForBackward;
    for (; places != 0; places &= places - 1) {  // a loop, so that the code that stores a state exists once
      const unsigned which = places & (~places + 1);
      StateTarget to;
      if (which == kPool) {
        to = target(states.ht, p.ht.offset(slot, hv, 0, 0), 2);
      } else if (which == kStep) {
        to = target(states.steps, p.steps.offset(s.row, token_at(p, s, done - 1), hv, 0), 3);
      } else if (which == kEntering) {
        to = target(states.h, p.h.offset(s.row, nt + done / p.h_chunk, hv, 0), 3);
      } else {
        to = target(states.kept, states.kept.view.offset(place + (done + kKeptTokens - 1) / kKeptTokens, hv, 0, 0), 2);
      }
      store_state(own, p, to, S);
    }
    if (done == s.length) break;

    const int i = static_cast<int>(done % kStaged);
    const Vec<float, 4> dv = sdv.load_vec<4>(i * columns + local);
    float seen[4] = {}, out[4] = {}, qk = 0.0F;
    FLA_UNROLL
    for (int r = 0; r < kRows; r += 4) {
      const int at = i * KP + own.key + own.step(r);
      const Vec<float, 4> k = sk.load_vec<4>(at), d = sd.load_vec<4>(at), q = sq.load_vec<4>(at);
      FLA_UNROLL
      for (int u = 0; u < 4; ++u) {
        qk += q.x[u] * k.x[u];
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          float& x = S[4 * (r + u) + e];
          const float was = x;
          x *= d.x[u] * dv.x[e];
          seen[e] += k.x[u] * (p.decayed ? x : was);
          out[e] += q.x[u] * x;
        }
      }
    }
    FLA_UNROLL
    for (int by = Shape::kLanes; by < 32; by *= 2) {
      qk += shuffle_xor(qk, by);
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        seen[e] += shuffle_xor(seen[e], by);
        out[e] += shuffle_xor(out[e], by);
      }
    }
    const Vec<float, 4> v = sv.load_vec<4>(i * columns + local), beta = sb.load_vec<4>(i * columns + local);
    float error[4];
    FLA_UNROLL
    for (int e = 0; e < 4; ++e) {
      seen[e] = v.x[e] - seen[e];
      error[e] = beta.x[e] * seen[e];
      out[e] += qk * error[e];
    }
    FLA_UNROLL
    for (int r = 0; r < kRows; r += 4) {
      const Vec<float, 4> k = sk.load_vec<4>(i * KP + own.key + own.step(r));
      FLA_UNROLL
      for (int u = 0; u < 4; ++u) {
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) S[4 * (r + u) + e] += k.x[u] * error[e];
      }
    }
    if (own.group != 0) continue;
    const std::int64_t t = token_at(p, s, done);
    FLA_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int column = own.column + e;
      if (column >= p.V) continue;
      if (p.o.present()) p.o.store(out[e], s.row, t, hv, column);
      if (z != nullptr) z[((s.row * p.T + t) * p.HV + hv) * p.V + column] = seen[e];
    }
  }
}

template <int KP>
Status launch_token(const DeltaProblem& p, const TokenStates& states, float* z, Stream stream) {
  constexpr std::int64_t kColumns = TokenShape<KP>::kColumns;
  const std::int64_t warps = std::clamp<std::int64_t>((p.V + kColumns - 1) / kColumns, 1, kMostWarps);
  const std::int64_t columns = warps * kColumns;
  return launch<delta_token_kernel<KP>>(
      {.name = "delta_token_kernel",
       .grid = {p.N * p.HV * ((p.V + columns - 1) / columns)},
       .threads = static_cast<int>(32 * warps),
       .shared_bytes = static_cast<std::size_t>(token_shared_bytes<KP>(static_cast<int>(columns)))},
      stream, delta_args(p), states, z);
}

}  // namespace

Status launch_token_forward(const DeltaProblem& p, const TokenKept& kept, Stream stream) {
  TokenStates states{state_place(p.h0), state_place(p.ht), state_place(p.h), state_place(p.slots().steps), {}};
  if (kept.states != nullptr) {
    states.kept = state_place(TensorView(kept.states, {kept_places(p), p.HV, p.K, p.V}));
  }
  if (p.K <= 64) return launch_token<64>(p, states, kept.z, stream);
  if (p.K <= 128) return launch_token<128>(p, states, kept.z, stream);
  return launch_token<256>(p, states, kept.z, stream);
}

Status delta_token_forward(const DeltaProblem& p, Stream stream) { return launch_token_forward(p, {}, stream); }

}  // namespace fla::cuda
