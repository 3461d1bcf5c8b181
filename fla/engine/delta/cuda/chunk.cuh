// What the tensor-core kernels of the delta rule share: chunks, their place in the workspace, their tiles in shared
// memory. The equations are in chunk_forward.cuh.
#pragma once

#include <type_traits>

#include "fla/engine/delta/cuda/launches.h"
#include "fla/engine/delta/cuda/params.cuh"

namespace fla::cuda {

inline constexpr int kBT = static_cast<int>(kDeltaBT);
inline constexpr float kStrongestGate = -160.0F;
inline constexpr int kLdL = kBT + 4;  // of fp32 squares in shared memory

// Few instances keep the build short.
template <int KP>
inline constexpr bool kHasWideBlocks = KP == kDeltaWideKeys;
template <typename T>
inline constexpr bool kHasBackward = std::is_same_v<T, bf16>;

// What the prologue leaves for the main kernel, one item per (slot, value head).
template <typename T>
struct DeltaChunkSpace {
  T* squares;      // [BT, 2 BT] (I + L)^{-1} - I and beside it P, whose block above the diagonal is not written
  T *q, *a, *k;    // [BT, KP] scale q 2^G, beta k 2^G, k 2^{G_C - G}; gate per channel
  float* scalars;  // [5, BT]  beta r 2^G, beta, scale r 2^G, r 2^{G_C - G}, G: r normalises the row
                   // gate per channel: [BT + KP]  beta, 2^{G_C}
  // Kept for a backward, nullptr in a forward:
  T *states, *adjoints;  // entering states and gradients of final ones, as operand tiles: store_state_tile
  T *e, *dvbar;          // [BT, 16 value_tiles]
  float* partials;       // [1 + K], or [2] with a gate per head: sums over the chunk for A_log and dt_bias
  int value_tiles;       // of 16 value channels that the blocks of a head cover
  // Where time is cut, an item per (segment, value head): segment.cuh
  std::uint32_t* transfers;  // M^T as operand tiles, upper and lower halves in pairs of bf16
  float* ends;               // N, then the state at the segment's end, as accumulators: [value_tiles, KP / 8]
  std::int32_t* passes;      // 0 where the segment forgets the state that enters it, and its M is not written
  float* falls;              // gate per head, an item per (slot, value head): log2 of what a chunk leaves of a state
  std::int64_t segment;      // chunks
  // Where the workspace holds `round` chunks of each sequence at a time, from chunk `first` on, and `ends` the state
  // before them; 0: all.
  std::int64_t first, round;
};

template <int KP, bool CHANNEL>
inline constexpr int kScalars = CHANNEL ? kBT + KP : 5 * kBT;

struct Chunk {
  Sequence s;
  std::int64_t t0;  // first token in the sequence
  int rows;         // may be 0
};

// Number of a sequence's first piece of `tokens` tokens, and the sequence that a piece belongs to.
FLA_DEVICE std::int64_t first_slot(const DeltaArgs& p, const Sequence& s, std::int64_t n, std::int64_t tokens = kBT) {
  return p.cu_seqlens.present() ? s.begin / tokens + n : n * ((p.T + tokens - 1) / tokens);
}
FLA_DEVICE std::int64_t sequence_of(const DeltaArgs& p, std::int64_t slot, std::int64_t tokens) {
  if (!p.cu_seqlens.present()) return slot / ((p.T + tokens - 1) / tokens);
  return find_sequence(p.cu_seqlens.view, p.cu_seqlens.type, p.N, slot,
                       [tokens](std::int64_t n, std::int64_t begin) { return begin / tokens + n; });
}

template <typename T>
FLA_DEVICE Chunk find_chunk(const DeltaArgs& p, const DeltaChunkSpace<T>& w, std::int64_t slot) {
  const std::int64_t n = w.round > 0 ? slot / w.round : sequence_of(p, slot, kBT);
  const Sequence s = sequence(p, n);
  const std::int64_t t0 = (w.round > 0 ? w.first + slot % w.round : slot - first_slot(p, s, n)) * kBT,
                     left = s.length - t0;
  return {s, t0, left <= 0 ? 0 : left < kBT ? static_cast<int>(left) : kBT};
}

FLA_DEVICE float log2_gate(float log_gate) {
  const float g = log_gate * kLog2e;
  return g < kStrongestGate ? kStrongestGate : g;
}
FLA_DEVICE float log2_gate(const DeltaArgs& p, float raw, float bias, GateScale multiplier) {
  return log2_gate(activate(p, raw, bias, multiplier));
}

template <typename G, int N>
FLA_DEVICE void load_gate_column(const View& gk, std::int64_t row, std::int64_t first, int hv, int channel, int rows,
                                 float (&x)[N]) {
  const G* p = gk.at<G>(row, first, hv, channel);
  const std::int64_t stride = gk.stride[1];
  FLA_UNROLL
  for (int i = 0; i < N; ++i) {
    x[i] = i < rows ? to_f32(*p) : 0.0F;
    p += stride;
  }
}

template <int N>
FLA_DEVICE void load_gate_column(const TypedView& gk, std::int64_t row, std::int64_t first, int hv, int channel,
                                 int rows, float (&x)[N]) {
  switch (gk.type) {
    case DType::F32: load_gate_column<float>(gk.view, row, first, hv, channel, rows, x); break;
    case DType::BF16: load_gate_column<bf16>(gk.view, row, first, hv, channel, rows, x); break;
    case DType::F16: load_gate_column<f16>(gk.view, row, first, hv, channel, rows, x); break;
    default: break;
  }
}

struct Segment {
  std::int64_t n, row, begin;  // sequence; row of the batch and first token
  std::int64_t before, slot;   // chunks of the sequence before it; the first chunk's place in the workspace
  int tokens, chunks;
  bool real, last;  // whether there is such a segment; whether it ends its sequence
};

// Segment `number` where time is cut, else a whole sequence, or what of it belongs to the round.
template <typename T>
FLA_DEVICE Segment find_segment(const DeltaArgs& p, const DeltaChunkSpace<T>& w, std::int64_t number) {
  Segment g;
  if (w.round > 0) {
    const std::int64_t left = p.T - w.first * kBT, most = w.round * kBT;
    g.n = g.row = number;
    g.begin = w.first * kBT;
    g.before = w.first;
    g.slot = number * w.round;
    g.real = true;
    g.last = left <= most;
    g.tokens = static_cast<int>(g.last ? left : most);
    g.chunks = (g.tokens + kBT - 1) / kBT;
    return g;
  }
  if (w.segment == 0) {
    const Sequence s = sequence(p, number);
    return {number,
            s.row,
            s.begin,
            0,
            first_slot(p, s, number),
            static_cast<int>(s.length),
            static_cast<int>((s.length + kBT - 1) / kBT),
            true,
            true};
  }
  const std::int64_t tokens = w.segment * kBT;
  g.n = sequence_of(p, number, tokens);
  const Sequence s = sequence(p, g.n);
  g.before = (number - first_slot(p, s, g.n, tokens)) * w.segment;
  const std::int64_t left = s.length - g.before * kBT;
  g.row = s.row;
  g.begin = s.begin + g.before * kBT;
  g.slot = first_slot(p, s, g.n) + g.before;
  g.real = g.before == 0 || left > 0;
  g.last = left <= tokens;
  g.tokens = static_cast<int>(g.last ? left : tokens);
  g.chunks = (g.tokens + kBT - 1) / kBT;
  return g;
}

// Place of a 16 x 8 tile of 128 words in an array of [item, rows of tiles, KP / 8] of them; this lane's four.
template <int KP>
FLA_DEVICE std::int64_t tile_at(std::int64_t item, int rows, int row, int j) {
  return ((item * rows + row) * (KP / 8) + j) * 128 + 4 * lane_id();
}

// Two warps share TILES tiles of 16 value channels of a state, each with half of the key channels; a block has two such
// pairs. One more warp copies, where its registers can be spared.
template <int KP, int TILES, bool CHANNEL>
struct ChunkLayout {
  static constexpr bool kLoader = TILES == 1;
  static constexpr int kColumns = 32 * TILES, kWarps = 4, kThreads = 32 * (kWarps + (kLoader ? 1 : 0)), kKeys = KP / 2;
  static constexpr int kBlocks = delta_chunk_blocks(KP, kColumns, CHANNEL);
  static constexpr int kCopiers = 32 * (kLoader ? 1 : kWarps);  // threads
  static constexpr int kLdK = KP + 8, kLdM = 2 * kBT + 8, kLdV = kColumns + 8, kLdO = 16 * TILES + 8;
  static constexpr int kKey = 2 * kBT * kLdK, kSquare = 2 * kBT * kLdM, kValue = 2 * kBT * kLdV;  // bytes
  static constexpr int kK = 0, kQ = kKey, kA = CHANNEL ? 2 * kKey : kK, kM = (CHANNEL ? 3 : 2) * kKey;
  static constexpr int kV = kM + kSquare, kS = kV + kValue;
  static constexpr int kStage = kS + 4 * kScalars<KP, CHANNEL>;
  // After the stages: what a warp hands to the other of its pair, and its rows of the output.
  static constexpr int kHanded = 4 * 6 * 128 * TILES, kRows = 2 * 16 * kLdO, kOwn = kHanded + kRows;
  static constexpr int bytes(int stages) { return stages * kStage + kWarps * kOwn; }
  static_assert(kStage % 16 == 0 && kStage == delta_chunk_stage_bytes(KP, kColumns, CHANNEL));
  static_assert(kWarps * kOwn == delta_chunk_extra_bytes(kColumns));
};

// Starts the copy of a whole [ROWS, COLS] tile by COUNT threads of which this one is `id`.
template <int ROWS, int COLS, int COUNT, typename T>
FLA_DEVICE void copy_whole(Shared<T> to, int ld, const T* from, std::int64_t stride, int id) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T)), kPieces = COLS / kPiece, kStep = COUNT / kPieces;
  constexpr int kUnroll = ROWS / kStep < 4 ? ROWS / kStep : 4;
  static_assert(COUNT % kPieces == 0 && ROWS % (kUnroll * kStep) == 0);
  const int r = id / kPieces, c = id % kPieces * kPiece;
  Shared<T> dst = to + (r * ld + c);
  from += r * stride + c;
  FLA_ROLL  // else the offsets of all rows wait in registers
      for (int i = 0; i < ROWS; i += kUnroll * kStep) {
    FLA_UNROLL
    for (int e = 0; e < kUnroll; ++e) cp_async<16>(dst + e * kStep * ld, from + e * kStep * stride, 16);
    dst = dst + kUnroll * kStep * ld;
    from += kUnroll * kStep * stride;
  }
}

// Starts the copies of a chunk, which has place `at` in the workspace, to a stage by L::kCopiers threads; `values` is
// v, or in the backward dO. Without QUERIES q and P stay behind, and the values where v_count is 0.
template <typename T, int KP, int TILES, bool CHANNEL, bool QUERIES>
FLA_DEVICE void fetch_chunk(const DeltaArgs& p, const DeltaChunkSpace<T>& w, const View& values, std::int64_t row,
                            std::int64_t first, int rows, std::int64_t at, int hv, int v_begin, int v_count,
                            int stage) {
  using L = ChunkLayout<KP, TILES, CHANNEL>;
  constexpr int kNumbers = kScalars<KP, CHANNEL>;
  const int hk = hv / (p.HV / p.H), base = stage * L::kStage;
  constexpr int kCount = L::kCopiers;
  const int id = thread_id() % kCount;
  const Shared<T> sK = shared<T>(base + L::kK, L::kKey / 2), sQ = shared<T>(base + L::kQ, L::kKey / 2),
                  sV = shared<T>(base + L::kV, L::kValue / 2);
  const bool whole = rows == kBT && p.K == KP;
  if constexpr (CHANNEL) {
    const std::int64_t from = at * (kBT * KP);
    copy_whole<kBT, KP, kCount>(sK, L::kLdK, w.k + from, KP, id);
    copy_whole<kBT, KP, kCount>(shared<T>(base + L::kA, L::kKey / 2), L::kLdK, w.a + from, KP, id);
    if constexpr (QUERIES) copy_whole<kBT, KP, kCount>(sQ, L::kLdK, w.q + from, KP, id);
  } else {
    const View &q = p.q.view, &k = p.k.view;
    if (whole) {
      copy_whole<kBT, KP, kCount>(sK, L::kLdK, k.at<T>(row, first, hk), k.stride[1], id);
      if constexpr (QUERIES) copy_whole<kBT, KP, kCount>(sQ, L::kLdK, q.at<T>(row, first, hk), q.stride[1], id);
    } else {
      copy_tile<true, kBT, KP>(sK, L::kLdK, k.at<T>(row, first, hk), k.stride[1], 1, rows, p.K, id, kCount);
      if constexpr (QUERIES) {
        copy_tile<true, kBT, KP>(sQ, L::kLdK, q.at<T>(row, first, hk), q.stride[1], 1, rows, p.K, id, kCount);
      }
    }
  }
  if (v_count > 0) {
    const T* v = values.at<T>(row, first, hv, v_begin);
    if (rows == kBT && v_count == L::kColumns) {
      copy_whole<kBT, L::kColumns, kCount>(sV, L::kLdV, v, values.stride[1], id);
    } else {
      copy_tile<true, kBT, L::kColumns>(sV, L::kLdV, v, values.stride[1], 1, rows, v_count, id, kCount);
    }
  }
  copy_whole<kBT, (QUERIES ? 2 : 1) * kBT, kCount>(shared<T>(base + L::kM, L::kSquare / 2), L::kLdM,
                                                   w.squares + at * (2 * kBT * kBT), 2 * kBT, id);
  copy_tile<true, 1, kNumbers>(shared<float>(base + L::kS, kNumbers), kNumbers, w.scalars + at * kNumbers, 0, 1, 1,
                               kNumbers, id, kCount);
}

// Until the oldest of the stages under way has arrived.
FLA_DEVICE void wait_for_stage(int stages) {
  if (stages == 2) {
    cp_async_wait<0>();
  } else if (stages == 3) {
    cp_async_wait<1>();
  } else {
    cp_async_wait<2>();
  }
}

// The tiles of a stage.
template <typename T, int KP, int TILES, bool CHANNEL>
struct ChunkTiles {
  using L = ChunkLayout<KP, TILES, CHANNEL>;
  Shared<T> k, q, a, m, v;
  Shared<float> scalars;

  FLA_DEVICE explicit ChunkTiles(int stage) {
    const auto tile = [&](int offset, int bytes) { return shared<T>(stage * L::kStage + offset, bytes / 2); };
    k = tile(L::kK, L::kKey);
    q = tile(L::kQ, L::kKey);
    a = tile(L::kA, L::kKey);
    m = tile(L::kM, L::kSquare);
    v = tile(L::kV, L::kValue);
    scalars = shared<float>(stage * L::kStage + L::kS, kScalars<KP, CHANNEL>);
  }

  // By which the chunk lets the state fall: this thread's two of the 8 key channels from c on.
  FLA_DEVICE Vec<float, 2> decay(int c) const {
    if constexpr (CHANNEL) {
      return scalars.template load_vec<2>(kBT + c + frag_col(0));
    } else {
      const float fall = exp2_approx(scalars.load(5 * kBT - 1));
      return {fall, fall};
    }
  }
};

// Where this lane's ldmatrix reads for load_b and load_b_trans at s. Tiles at constant distances from there cost no
// instruction for their address.
template <bool TRANS, typename T>
FLA_DEVICE Shared<T> lane_of_b(Shared<T> s, int ld) {
  const int l = lane_id();
  return TRANS ? s + ((l % 16) * ld + (l / 16) * 8) : s + ((l % 8 + (l / 16) * 8) * ld + (l / 8 % 2) * 8);
}
template <bool TRANS, typename T>
FLA_DEVICE void load_b_at(FragB<T>& b0, FragB<T>& b1, Shared<T> lane) {
  std::uint32_t r[4];
  ldmatrix_x4<TRANS>(r, lane);
  b0 = {{r[0], r[1]}};
  b1 = {{r[2], r[3]}};
}

// Sums of two warps: each hands N tiles to the other and, after a barrier, adds what it got.
template <int N>
FLA_DEVICE void hand_over(Shared<float> to, const FragC (&x)[N]) {
  FLA_UNROLL
  for (int i = 0; i < N; ++i) {
    to.store_vec<4>(128 * i + 4 * lane_id(), Vec<float, 4>{{x[i].x[0], x[i].x[1], x[i].x[2], x[i].x[3]}});
  }
}
template <int N>
FLA_DEVICE void add_handed(FragC (&x)[N], Shared<float> from) {
  FLA_UNROLL
  for (int i = 0; i < N; ++i) {
    const Vec<float, 4> y = from.load_vec<4>(128 * i + 4 * lane_id());
    FLA_UNROLL
    for (int e = 0; e < 4; ++e) x[i].x[e] += y.x[e];
  }
}

// A warp's [16, 8 N] tile, transposed, as rows of 16 at s.
template <typename T, int N>
FLA_DEVICE void put_transposed(const FragC (&c)[N], Shared<T> s, int ld) {
  FLA_UNROLL
  for (int i = 0; i < N; ++i) {
    FLA_UNROLL
    for (int e = 0; e < 2; ++e) {
      const std::uint32_t word = transpose_8x8(pack2<T>(c[i].x[2 * e], c[i].x[2 * e + 1]));
      s.template store_vec<2>(
          (8 * i + lane_id() / 4) * ld + 8 * e + frag_col(0),
          Vec<T, 2>{{T{static_cast<std::uint16_t>(word)}, T{static_cast<std::uint16_t>(word >> 16)}}});
    }
  }
}

// [BT, width] from global to shared memory at once, zeros past rows and columns; both widths are multiples of 8.
template <typename T>
FLA_DEVICE void copy_rows(Shared<T> to, int ld, const T* from, std::int64_t stride, int width, int rows, int columns,
                          int id, int count) {
  for (int i = id; i < kBT * width / 8; i += count) {
    const int r = i / (width / 8), col = i % (width / 8) * 8;
    Vec<T, 8> x = {};
    if (r < rows && col < columns) x = load_global<8>(from + (r * stride + col));
    to.template store_vec<8>(r * ld + col, x);
  }
}

// A warp's operand tile (16 value channels i_v, 16 key channels j) of a chunk's state: four 8 x 8 matrices of 8 value
// channels with 8 keys beside each other, keys fastest between them. A key tile's value tiles follow each other.
template <typename T>
FLA_DEVICE void store_state_tile(T* states, std::int64_t item, int value_tiles, int i_v, int key_tiles, int j,
                                 const FragA<T>& a) {
  auto* to = reinterpret_cast<std::uint32_t*>(states + ((item * key_tiles + j) * value_tiles + i_v) * 256) + lane_id();
  FLA_UNROLL
  for (int i = 0; i < 4; ++i) to[32 * i] = a.x[i];
}

// ---- host

template <typename T>
std::size_t carve_chunk_space(const DeltaProblem& p, const DeltaPlan& plan, const DeltaBackwardProblem* backward,
                              std::byte* base, DeltaChunkSpace<T>& w) {
  const auto items = static_cast<std::size_t>(delta_chunk_places(p, plan) * p.HV);
  const auto width = static_cast<std::size_t>(plan.width), values = static_cast<std::size_t>(plan.parts * plan.columns);
  std::size_t bytes = 0;
  const auto take = [&]<typename X>(X*& to, std::size_t n) {
    to = n == 0 ? nullptr : reinterpret_cast<X*>(base + bytes);
    bytes += (n * sizeof(X) + 255) / 256 * 256;
  };
  take(w.squares, items * 2 * kBT * kBT);
  take(w.scalars, items * (p.gk ? kBT + width : 5 * kBT));
  const std::size_t key = p.gk ? items * kBT * width : 0;
  take(w.q, key);
  take(w.a, key);
  take(w.k, key);
  const std::size_t kept = backward != nullptr ? items : 0;
  take(w.states, kept * values * width);
  take(w.adjoints, kept * values * width);
  take(w.e, kept * kBT * values);
  take(w.dvbar, kept * kBT * values);
  const bool parameters = backward != nullptr && (backward->dA_log || backward->ddt_bias);
  take(w.partials, parameters ? kept * static_cast<std::size_t>(1 + (p.gk ? p.K : 1)) : 0);
  w.value_tiles = static_cast<int>(values / 16);
  const auto segments = plan.segments > 1 ? static_cast<std::size_t>(delta_segment_slots(p, plan.segment) * p.HV) : 0;
  take(w.transfers, segments * width * width);
  take(w.ends, (plan.round > 0 ? static_cast<std::size_t>(p.N * p.HV) : segments) * values * width);
  take(w.passes, segments);
  take(w.falls, segments > 0 && p.g ? items : 0);
  w.segment = plan.segment;
  w.first = 0;
  w.round = plan.round;
  return bytes;
}

}  // namespace fla::cuda
