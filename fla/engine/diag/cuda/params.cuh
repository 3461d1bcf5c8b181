// What the kernels of the diagonal-decay engine share: parameters, the work of a block, gates, states.
//
// State in the tensor-core kernels: transposed, S^T (value x key). A warp owns WM tiles of 16 value rows and all keys
// as fp32 accumulators, which become the A operand of o^T = S^T q^T without leaving the registers. Gates: base 2, and
// not below kLeastGate, where a decay is 0 in fp32 already; sums over a chunk thus stay exact enough. Only exponents <=
// 0 are formed, but for the diagonal of the channel gate (diag_cuda_channel.cuh).
#pragma once

#include <cstdint>
#include <initializer_list>

#include "fla/engine/common/visitor.h"
#include "fla/engine/diag/cuda/entry.h"
#include "fla/kernels/cuda/sequences.cuh"
#include "fla/kernels/cuda/toolbox.cuh"

namespace fla::cuda {

// Backward: every gradient of q, k and v is the output of one of these kernels with the operands in other roles
// (diag_cuda_backward.cu). What such a run needs beyond a forward: gates that act one token later (shift), tiles that
// end with the sequence (align), and row sums of S o dS between two runs at every align-th token (Boundary).

inline constexpr float kLeastGate = -160.0F;

struct Operand {
  View at;
  DType type = DType::F32;
  FLA_HOST_DEVICE bool present() const { return at.present(); }
};

// What a launch computes. Whole: outputs and final state. Local: the state that a segment adds to zeros, and its decay.
// Final: like Whole, each segment from its start state.
enum class DiagPass : std::uint8_t { Whole, Local, Final };

// At boundary b of a sequence, after b * align tokens (0: its start, the last: its end), one run keeps its states S and
// the run of the opposite direction, which has no gate per key channel, sums S o dS over the keys.
enum class Boundary : std::uint8_t { None, Keep, Sum };

struct DiagParams {
  std::int64_t T = 0, H = 0, N = 0;
  int K = 0, V = 0;
  float scale = 1.0F;         // of what is read from the state
  float update_scale = 1.0F;  // of what a token adds to it
  bool reverse = false;
  bool shift = false;  // a token's gate acts on the next one, the last token's on the final state
  int align = 0;       // with shift: tiles end with the sequence, the boundaries are multiples of this
  bool vector_qk = false, vector_v = false, vector_o = false, vector_gate = false;  // 16-byte rows
  DiagPass pass = DiagPass::Whole;
  Operand q, k, v, g, gk, gv, h0, o, ht;
  Operand cu;
  // Of a pool of states: rows of the sequences, or of their tokens, and which of those a sequence starts from.
  Operand indices, accepted, steps;
  bool by_token = false;
  HeadDecay::Kind head = HeadDecay::Kind::None;
  Operand gamma;
  float slope = 0.0F;
  int v_blocks = 1, segments = 1;
  float* start = nullptr;  // [N, H, segments, K, V]
  float* total = nullptr;  // [N, H, segments, K], [.., V] or [N, H, segments]: base-2 log decay
  Boundary boundary = Boundary::None;
  void* kept = nullptr;   // [boundary, H] states in the order of the kernel's registers
  float* sums = nullptr;  // [boundary, H, V]
};

// The first of a sequence's boundaries among all.
FLA_DEVICE std::int64_t first_boundary(const DiagParams& p, std::int64_t n, std::int64_t begin) {
  return p.cu.present() ? begin / p.align + 2 * n : n * ((p.T + p.align - 1) / p.align + 1);
}

// The block's sequence, head, value columns and tokens.
struct DiagTask {
  std::int64_t n, h, s, row, begin, length;
  std::int64_t from, to;  // tokens in the order of the recurrence
  int v0;

  FLA_DEVICE std::int64_t token(const DiagParams& p, std::int64_t t) const {
    return begin + (p.reverse ? length - 1 - t : t);
  }
};

FLA_DEVICE DiagTask diag_task(const DiagParams& p, int chunk, int value, std::int64_t x = block_x()) {
  DiagTask a;
  a.v0 = static_cast<int>(x % p.v_blocks) * value;
  x /= p.v_blocks;
  a.s = x % p.segments;
  x /= p.segments;
  a.h = x % p.H;
  a.n = x / p.H;
  a.row = a.n;
  a.begin = 0;
  a.length = p.T;
  if (p.cu.present()) {
    a.row = 0;
    a.begin = boundary_at(p.cu.at, p.cu.type, a.n);
    a.length = boundary_at(p.cu.at, p.cu.type, a.n + 1) - a.begin;
  }
  // Negative tokens are padding.
  const std::int64_t ahead = p.shift && p.align > 0 ? (p.align - a.length % p.align) % p.align : 0;
  const std::int64_t chunks = (ahead + a.length + chunk - 1) / chunk;
  const std::int64_t part = (chunks + p.segments - 1) / p.segments * chunk;
  a.from = a.s * part - ahead < a.length ? a.s * part - ahead : a.length;
  a.to = a.from + part < a.length ? a.from + part : a.length;
  return a;
}

// The sequence of a slot, where `first(n, begin)` is the first slot of sequence n: the last that is not behind it.
template <typename F>
FLA_DEVICE DiagTask task_of_slot(const DiagParams& p, std::int64_t slot, std::int64_t h, F&& first) {
  DiagTask a;
  a.h = h;
  a.begin = 0;
  a.length = p.T;
  if (!p.cu.present()) {
    a.n = a.row = slot / first(1, 0);
    return a;
  }
  a.n = find_sequence(p.cu.at, p.cu.type, p.N, slot, first);
  a.row = 0;
  a.begin = boundary_at(p.cu.at, p.cu.type, a.n);
  a.length = boundary_at(p.cu.at, p.cu.type, a.n + 1) - a.begin;
  return a;
}

FLA_DEVICE float base2_gate(float x) {
  x *= kLog2e;
  return x > kLeastGate ? x : kLeastGate;
}

// A gate as it lies in memory, so that nothing waits for it before it is needed.
FLA_DEVICE std::uint32_t load_bits(const void* p, DType type, std::int64_t i) {
  return type == DType::F32 ? static_cast<const std::uint32_t*>(p)[i] : static_cast<const std::uint16_t*>(p)[i];
}
FLA_DEVICE float from_bits(DType type, std::uint32_t x) {
  if (type == DType::F32) return bits_to_float(x);
  const auto half = static_cast<std::uint16_t>(x);
  return type == DType::BF16 ? to_f32(bf16{half}) : to_f32(f16{half});
}

// The gate of a head that no token changes.
FLA_DEVICE float head_gate(const DiagParams& p, std::int64_t h) {
  switch (p.head) {
    case HeadDecay::Kind::None: return 0.0F;
    case HeadDecay::Kind::Tensor: return base2_gate(load_any(p.gamma.at.data, p.gamma.type, h * p.gamma.at.stride[0]));
    case HeadDecay::Kind::Retention: {
      // log1p(-x), x = 2^(-5 - h) <= 1 / 32, by its series
      const float x = exp2_approx(-5.0F - static_cast<float>(h));
      return base2_gate(-x * (1.0F + x * (1.0F / 2 + x * (1.0F / 3 + x * (1.0F / 4 + x * (1.0F / 5 + x / 6))))));
    }
    case HeadDecay::Kind::Lightning: return base2_gate(p.slope * static_cast<float>(h));
  }
  return 0.0F;
}

// Running sums of the gates of BT tokens by a warp, of one gate per head and token or none.
template <int BT>
struct HeadGates {
  const DiagParams& p;
  const DiagTask& a;
  float constant;
  std::uint32_t next[BT / 32] = {};  // as they lie in memory, or whether the constant acts

  FLA_DEVICE HeadGates(const DiagParams& params, const DiagTask& task)
      : p(params), a(task), constant(head_gate(params, task.h)) {}

  // Asks for those of the tokens from t on, so that nothing waits for them before they are taken.
  FLA_DEVICE void ask(std::int64_t t) {
    const std::int64_t end = a.to - (p.shift ? 1 : 0);
    FLA_UNROLL
    for (int i = 0; i < BT / 32; ++i) {
      const std::int64_t at = t + 32 * i + lane_id() - (p.shift ? 1 : 0);
      const auto& s = p.g.at.stride;
      if (at < 0 || at >= end) {
        next[i] = 0;
      } else if (p.g.present()) {
        next[i] = load_bits(p.g.at.data, p.g.type, a.row * s[0] + a.token(p, at) * s[1] + a.h * s[2]);
      } else {
        next[i] = 1;
      }
    }
  }
  // G[i]: at token 32 i + lane
  FLA_DEVICE void take(float (&G)[BT / 32], float& sum) const {
    sum = 0.0F;
    FLA_UNROLL
    for (int i = 0; i < BT / 32; ++i) {
      const float held = next[i] != 0 ? constant : 0.0F;
      G[i] = warp_prefix_sum(p.g.present() ? base2_gate(from_bits(p.g.type, next[i])) : held) + sum;
      sum = shuffle(G[i], 31);
    }
  }
};

// Which gate acts on state element (i, j) before token t of the recurrence's order, 0 <= t <= length: with shift that
// of the token before it.
FLA_DEVICE float gate_before(const DiagParams& p, const DiagTask& a, std::int64_t t, int i, int j) {
  const std::int64_t at = p.shift ? t - 1 : t;
  if (at < 0 || at >= a.length) return 0.0F;
  const std::int64_t token = a.token(p, at);
  const auto load = [&](const Operand& x, std::int64_t last) {
    const auto& s = x.at.stride;
    return base2_gate(load_any(x.at.data, x.type, a.row * s[0] + token * s[1] + a.h * s[2] + last * s[3]));
  };
  float gate = p.gk.present() ? load(p.gk, i) : p.g.present() ? load(p.g, 0) : head_gate(p, a.h);
  if (p.gv.present()) gate += load(p.gv, j);
  return gate;
}

// Element (i, j) of a state in memory: of the sequence, or of its segment's start.
FLA_DEVICE float load_state(const DiagParams& p, const DiagTask& a, int i, int j) {
  if (p.pass == DiagPass::Final) {
    return p.start[(((a.n * p.H + a.h) * p.segments + a.s) * p.K + i) * p.V + j];
  }
  if (p.pass == DiagPass::Local || !p.h0.present()) return 0.0F;
  const auto& s = p.h0.at.stride;
  return load_any(p.h0.at.data, p.h0.type, a.n * s[0] + a.h * s[1] + i * s[2] + j * s[3]);
}
FLA_DEVICE bool keeps_state(const DiagParams& p, const DiagTask& a) {
  return p.pass == DiagPass::Local || (p.ht.present() && a.s == p.segments - 1);
}
FLA_DEVICE void store_state(const DiagParams& p, const DiagTask& a, int i, int j, float x) {
  if (p.pass == DiagPass::Local) {
    p.start[(((a.n * p.H + a.h) * p.segments + a.s) * p.K + i) * p.V + j] = x;
    return;
  }
  if (p.shift) x *= exp2_approx(gate_before(p, a, a.length, i, j));
  const auto& s = p.ht.at.stride;
  store_any(p.ht.at.data, p.ht.type, a.n * s[0] + a.h * s[1] + i * s[2] + j * s[3], x);
}

// A tile of an operand of elements T; row r is token t + r - shift. Rows past the segment and before the sequence, and
// all rows of an absent operand, are zeros. By `count` threads, of which this one is `id`.
template <int ROWS, int COLS, typename T>
FLA_DEVICE void load_tokens(const DiagParams& p, const DiagTask& a, const View& x, bool vector, std::int64_t t,
                            int shift, int c0, int cols, Shared<T> dst, int ld, int id = thread_id(),
                            int count = block_threads()) {
  const std::int64_t left = a.to - t, first = t - shift;
  const int rows = left < ROWS ? static_cast<int>(left) : ROWS;
  if (first < 0 || !x.present()) {
    const std::int64_t lead = -first;
    for (int i = id; i < ROWS * COLS; i += count) {
      const int r = i / COLS, c = i % COLS;
      const bool inside = x.present() && r >= lead && r < rows && c < cols;
      dst.store(r * ld + c, inside ? *x.at<const T>(a.row, a.token(p, first + r), a.h, c0 + c) : from_f32<T>(0.0F));
    }
    return;
  }
  const std::int64_t step = p.reverse ? -x.stride[1] : x.stride[1];
  const T* src = x.at<const T>(a.row, a.token(p, first), a.h, c0);
  if (vector) {
    copy_tile<true, ROWS, COLS>(dst, ld, src, step, 1, rows, cols, id, count);
  } else {
    copy_tile<false, ROWS, COLS>(dst, ld, src, step, x.stride[3], rows, cols, id, count);
  }
}

// The same for a tile whose rows all exist, in pieces of 16 bytes.
template <int COLS, int COUNT, typename T>
struct RowPieces {
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(T)), kPieces = COLS / kPiece, kEach = COUNT / kPieces;
  static_assert(COUNT % kPieces == 0);
};
template <int ROWS, int COLS, int COUNT, typename T>
FLA_DEVICE void copy_rows(const DiagParams& p, const DiagTask& a, const View& x, std::int64_t t, int c0, Shared<T> dst,
                          int ld, int id) {
  using Pieces = RowPieces<COLS, COUNT, T>;
  constexpr int kEach = Pieces::kEach;
  static_assert(ROWS % kEach == 0);
  const int r = id / Pieces::kPieces, c = id % Pieces::kPieces * Pieces::kPiece;
  const std::int64_t step = p.reverse ? -x.stride[1] : x.stride[1];
  const T* src = x.at<const T>(a.row, a.token(p, t), a.h, c0) + (r * step + c);
  FLA_UNROLL
  for (int i = 0; i < ROWS; i += kEach, src += kEach * step) cp_async<16>(dst + ((r + i) * ld + c), src, 16);
}

// A thread's pieces of one tile after another from the segment's start on, so that no address is formed anew.
struct RowWalk {
  std::uintptr_t at;
  std::int64_t step;  // bytes between the thread's rows
  int to;             // element of the tile

  template <int COLS, int COUNT, typename T>
  FLA_DEVICE static RowWalk of(const DiagParams& p, const DiagTask& a, const View& x, int c0, int ld, int id) {
    using Pieces = RowPieces<COLS, COUNT, T>;
    const int r = id / Pieces::kPieces, c = id % Pieces::kPieces * Pieces::kPiece;
    const std::int64_t row = p.reverse ? -x.stride[1] : x.stride[1], size = sizeof(T);
    const std::int64_t first = a.row * x.stride[0] + a.token(p, a.from) * x.stride[1] + a.h * x.stride[2] + c0;
    return {reinterpret_cast<std::uintptr_t>(x.data) + static_cast<std::uintptr_t>((first + r * row + c) * size),
            Pieces::kEach * row * size, r * ld + c};
  }
  template <int ROWS, int COLS, int COUNT, typename T>
  FLA_DEVICE void copy(Shared<T> dst, int ld) {
    constexpr int kEach = RowPieces<COLS, COUNT, T>::kEach;
    static_assert(ROWS % kEach == 0);
    FLA_UNROLL
    for (int i = 0; i < ROWS; i += kEach, at += static_cast<std::uintptr_t>(step)) {
      cp_async<16>(dst + (to + i * ld), reinterpret_cast<const T*>(at), 16);
    }
  }
  // Leaves a tile out.
  template <int ROWS, int COLS, int COUNT, typename T>
  FLA_DEVICE void skip() {
    at += static_cast<std::uintptr_t>(step * (ROWS / RowPieces<COLS, COUNT, T>::kEach));
  }
};

// ---- gates per channel: a tile holds them as they come (16-byte rows) or as F32, with a row pitch of LD floats

template <int LD>
FLA_DEVICE float gate_at(const DiagParams& p, DType type, Shared<float> tile, int r, int c) {
  if (!p.vector_gate || type == DType::F32) return base2_gate(tile.load(r * LD + c));
  if (type == DType::BF16) return base2_gate(to_f32(tile.template as<bf16>().load(r * 2 * LD + c)));
  return base2_gate(to_f32(tile.template as<f16>().load(r * 2 * LD + c)));
}
template <int LD>
FLA_DEVICE Vec<float, 2> gate_pair(const DiagParams& p, DType type, Shared<float> tile, int r, int c) {
  Vec<float, 2> x;
  if (!p.vector_gate || type == DType::F32) {
    x = tile.template load_vec<2>(r * LD + c);
  } else if (type == DType::BF16) {
    const Vec<bf16, 2> w = tile.template as<bf16>().template load_vec<2>(r * 2 * LD + c);
    x = {{to_f32(w.x[0]), to_f32(w.x[1])}};
  } else {
    const Vec<f16, 2> w = tile.template as<f16>().template load_vec<2>(r * 2 * LD + c);
    x = {{to_f32(w.x[0]), to_f32(w.x[1])}};
  }
  return {{base2_gate(x.x[0]), base2_gate(x.x[1])}};
}
template <int ROWS, int COLS, int LD>
FLA_DEVICE void load_gates(const DiagParams& p, const DiagTask& a, const Operand& g, std::int64_t t, int c0, int cols,
                           Shared<float> dst, int id = thread_id(), int count = block_threads()) {
  const int shift = p.shift ? 1 : 0;
  if (p.vector_gate && g.type == DType::F32) {
    load_tokens<ROWS, COLS>(p, a, g.at, true, t, shift, c0, cols, dst, LD, id, count);
  } else if (p.vector_gate) {
    load_tokens<ROWS, COLS>(p, a, g.at, true, t, shift, c0, cols, dst.template as<bf16>(), 2 * LD, id, count);
  } else {
    const auto& s = g.at.stride;
    for (int i = id; i < ROWS * COLS; i += count) {
      const int r = i / COLS, c = i % COLS;
      const bool inside = t + r < a.to && t + r >= shift && c < cols;
      dst.store(r * LD + c,
                inside ? load_any(g.at.data, g.type,
                                  a.row * s[0] + a.token(p, t + r - shift) * s[1] + a.h * s[2] + (c0 + c) * s[3])
                       : 0.0F);
    }
  }
}

// What an operand that was scaled up may reach: the exponent where 16 bits keep its mantissa whole, and the largest
// value.
template <typename T>
struct RaisedRange;
template <>
struct RaisedRange<bf16> {
  static constexpr float kLeast = -100.0F, kMost = 1e38F;
};
template <>
struct RaisedRange<f16> {
  static constexpr float kLeast = -8.0F, kMost = 6e4F;
};

// ---- a warp's state

// Where a block's state is in memory: of the sequence, or of its segment.
struct StatePlane {
  void* data;
  DType type;
  std::int64_t row, col;  // strides
};
FLA_DEVICE StatePlane segment_plane(const DiagParams& p, const DiagTask& a) {
  const std::int64_t first = ((a.n * p.H + a.h) * p.segments + a.s) * p.K * p.V;
  return {p.start + first, DType::F32, p.V, 1};
}
FLA_DEVICE StatePlane sequence_plane(const Operand& x, const DiagTask& a) {
  const auto& s = x.at.stride;
  const std::int64_t size = x.type == DType::F32 ? 4 : 2, first = a.n * s[0] + a.h * s[1];
  return {static_cast<char*>(x.at.data) + first * size, x.type, s[2], s[3]};
}

// The element type is known before the loops: with a switch inside, their unrolled code outgrows the instruction cache.
template <DType TYPE, int KP, int WM>
FLA_DEVICE void load_elements(const DiagParams& p, const StatePlane& x, int row, FragC (&S)[WM][KP / 8]) {
  FLA_UNROLL
  for (int m = 0; m < WM; ++m) {
    FLA_UNROLL
    for (int n = 0; n < KP / 8; ++n) {
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int i = 8 * n + frag_col(e), j = row + 16 * m + frag_row(e);
        S[m][n].x[e] = i < p.K && j < p.V ? load_any(x.data, TYPE, i * x.row + j * x.col) : 0.0F;
      }
      if (n % 8 == 7) sync_warp();  // or the addresses of all loads are held at once
    }
  }
}
template <DType TYPE, int KP, int WM>
FLA_DEVICE void store_elements(const DiagParams& p, const StatePlane& x, int row, const FragC (&S)[WM][KP / 8]) {
  FLA_UNROLL
  for (int m = 0; m < WM; ++m) {
    FLA_UNROLL
    for (int n = 0; n < KP / 8; ++n) {
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int i = 8 * n + frag_col(e), j = row + 16 * m + frag_row(e);
        if (i < p.K && j < p.V) store_any(x.data, TYPE, i * x.row + j * x.col, S[m][n].x[e]);
      }
    }
  }
}

template <int KP, int WM>
FLA_DEVICE void load_warp_state(const DiagParams& p, const DiagTask& a, int row, FragC (&S)[WM][KP / 8]) {
  if (p.pass == DiagPass::Local || (p.pass == DiagPass::Whole && !p.h0.present())) {
    FLA_UNROLL
    for (int m = 0; m < WM; ++m) {
      FLA_UNROLL
      for (int n = 0; n < KP / 8; ++n) clear(S[m][n]);
    }
    return;
  }
  const StatePlane x = p.pass == DiagPass::Final ? segment_plane(p, a) : sequence_plane(p.h0, a);
  switch (x.type) {
    case DType::F32: load_elements<DType::F32, KP, WM>(p, x, row, S); break;
    case DType::F16: load_elements<DType::F16, KP, WM>(p, x, row, S); break;
    default: load_elements<DType::BF16, KP, WM>(p, x, row, S); break;
  }
}
template <int KP, int WM>
FLA_DEVICE void write_warp_state(const DiagParams& p, const DiagTask& a, int row, const FragC (&S)[WM][KP / 8]) {
  const StatePlane x = p.pass == DiagPass::Local ? segment_plane(p, a) : sequence_plane(p.ht, a);
  switch (x.type) {
    case DType::F32: store_elements<DType::F32, KP, WM>(p, x, row, S); break;
    case DType::F16: store_elements<DType::F16, KP, WM>(p, x, row, S); break;
    default: store_elements<DType::BF16, KP, WM>(p, x, row, S); break;
  }
}
// With shift the last token's gate acts here. No run with shift and gates per value channel has a final state.
template <int KP, int WM>
FLA_DEVICE void store_warp_state(const DiagParams& p, const DiagTask& a, int row, FragC (&S)[WM][KP / 8]) {
  const bool local = p.pass == DiagPass::Local;
  if (p.shift && !local) {
    float decay[KP / 32];  // of the keys lane_id() + 32 c
    FLA_UNROLL
    for (int c = 0; c < KP / 32; ++c) {
      const int i = lane_id() + 32 * c;
      decay[c] = i < p.K ? exp2_approx(gate_before(p, a, a.length, i, 0)) : 0.0F;
    }
    FLA_UNROLL
    for (int n = 0; n < KP / 8; ++n) {
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float by = shuffle(decay[n / 4], 8 * (n % 4) + frag_col(e));
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          S[m][n].x[e] *= by;
          S[m][n].x[e + 2] *= by;
        }
      }
    }
  }
  write_warp_state<KP, WM>(p, a, row, S);
}

// ---- boundaries: states are kept four elements of a lane together

FLA_DEVICE std::int64_t boundary_slot(const DiagParams& p, const DiagTask& a, std::int64_t b) {
  return (first_boundary(p, a.n, a.begin) + b) * p.H + a.h;
}
// The kept fragments of this warp at a slot; columns of a block.
template <int KP, int WM>
FLA_DEVICE float* kept_fragments(const DiagParams& p, const DiagTask& a, std::int64_t slot, int columns, int row) {
  const std::int64_t state = std::int64_t{p.v_blocks} * columns * KP;
  return static_cast<float*>(p.kept) + slot * state + std::int64_t{a.v0 + row} * KP + 4 * lane_id();
}
// After the tile that ends before token `t`, and before the first one.
template <int KP, int WM>
FLA_DEVICE void keep_at_boundary(const DiagParams& p, const DiagTask& a, std::int64_t t, int columns, int row,
                                 const FragC (&S)[WM][KP / 8]) {
  if (p.boundary != Boundary::Keep || p.pass == DiagPass::Local || (t % p.align != 0 && t < a.length)) return;
  float* to = kept_fragments<KP, WM>(p, a, boundary_slot(p, a, (t + p.align - 1) / p.align), columns, row);
  FLA_UNROLL
  for (int m = 0; m < WM; ++m) {
    FLA_UNROLL
    for (int n = 0; n < KP / 8; ++n) {
      store_global<4>(to + (m * (KP / 8) + n) * 128,
                      Vec<float, 4>{{S[m][n].x[0], S[m][n].x[1], S[m][n].x[2], S[m][n].x[3]}});
    }
  }
}
// Before the tile that starts with token `t` of a run of the opposite direction, and after the last one.
template <int KP, int WM>
FLA_DEVICE void sum_at_boundary(const DiagParams& p, const DiagTask& a, std::int64_t t, int columns, int row,
                                const FragC (&S)[WM][KP / 8]) {
  const std::int64_t left = a.length - t;
  if (p.boundary != Boundary::Sum || p.pass == DiagPass::Local || left % p.align != 0) return;
  const std::int64_t slot = boundary_slot(p, a, left / p.align);
  const float* from = kept_fragments<KP, WM>(p, a, slot, columns, row);
  FLA_UNROLL
  for (int m = 0; m < WM; ++m) {
    float sum[2] = {};
    FLA_UNROLL
    for (int n = 0; n < KP / 8; ++n) {
      const Vec<float, 4> x = load_global<4>(from + (m * (KP / 8) + n) * 128);
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) sum[e / 2] += x.x[e] * S[m][n].x[e];
    }
    FLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float all = warp_sum<4>(sum[half]);
      const int j = a.v0 + row + 16 * m + 8 * half + lane_id() / 4;
      if (lane_id() % 4 == 0 && j < p.V) {
        p.sums[slot * p.V + j] = all * exp2_approx(gate_before(p, a, t > 0 ? t : 0, 0, j));
      }
    }
  }
}

// Writes o^T (16 values from j0 on x 8 tokens from t on) as o.
template <typename T>
FLA_DEVICE void store_output(const DiagParams& p, const DiagTask& a, std::int64_t t, int j0, const FragC& o) {
  if (p.o.type == DType::F32) {
    FLA_UNROLL
    for (int e = 0; e < 4; ++e) {
      const std::int64_t at = t + frag_col(e);
      const int j = j0 + frag_row(e);
      if (at < 0 || at >= a.to || j >= p.V) continue;
      p.o.at.at<float>(a.row, a.token(p, at), a.h)[j * p.o.at.stride[3]] = o.x[e];
    }
    return;
  }
  const std::uint32_t word[2] = {transpose_8x8(pack2<T>(o.x[0], o.x[1])), transpose_8x8(pack2<T>(o.x[2], o.x[3]))};
  t += lane_id() / 4;
  if (t < 0 || t >= a.to) return;
  T* to = p.o.at.at<T>(a.row, a.token(p, t), a.h);
  FLA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int j = j0 + 8 * i + 2 * (lane_id() % 4);
    const Vec<T, 2> pair = {{T{static_cast<std::uint16_t>(word[i])}, T{static_cast<std::uint16_t>(word[i] >> 16U)}}};
    if (p.vector_o && j + 1 < p.V) {
      store_global<2>(to + j, pair);
    } else {
      if (j < p.V) to[j * p.o.at.stride[3]] = pair.x[0];
      if (j + 1 < p.V) to[(j + 1) * p.o.at.stride[3]] = pair.x[1];
    }
  }
}

// What a block's loops need now and then. It stays in shared memory, as the loops have no register to spare.
struct alignas(128) KeptTask {
  DiagTask task;
  char* o = nullptr;      // the block's first token and value
  std::int64_t step = 0;  // bytes between tokens
  int from = 0, to = 0;   // of the pieces that have all their tokens, where all values can be written

  // Where it lies behind `bytes` of shared memory.
  static constexpr int offset(int bytes) { return (bytes + 127) / 128 * 128; }
  // For pieces of so many tokens and so many values of a block.
  FLA_DEVICE static KeptTask of(const DiagParams& p, const DiagTask& a, int tokens, int values) {
    KeptTask k;
    k.task = a;
    if (!p.o.present() || !p.vector_o || a.v0 + values > p.V || a.from >= a.to) return k;
    k.from = a.from < 0 ? static_cast<int>((tokens - 1 - a.from) / tokens) : 0;
    k.to = static_cast<int>((a.to - a.from) / tokens);
    const int size = p.o.type == DType::F32 ? 4 : 2;
    const auto& s = p.o.at.stride;
    k.step = (p.reverse ? -s[1] : s[1]) * size;
    k.o = static_cast<char*>(p.o.at.data) + (a.row * s[0] + a.token(p, a.from) * s[1] + a.h * s[2] + a.v0) * size;
    return k;
  }
};

// Writes o, 16 R tokens x 16 WM values from the block's value `row` on at a time.
template <typename T, int R, int WM>
struct OutputRows {
  const DiagParams& p;
  Shared<KeptTask> kept;
  int row;

  // The piece-th 16 R tokens of the block's.
  FLA_DEVICE void store(int piece, const FragC (&o)[R][2 * WM]) const {
    const KeptTask k = kept.load(0);
    if (piece < k.from || piece >= k.to) {
      store_one_by_one(piece, o);
      return;
    }
    const int lane = lane_id(), size = p.o.type == DType::F32 ? 4 : 2;
    // Two lanes exchange words of 16 bits, so that each has four values beside each other.
    const int j = row + (p.o.type == DType::F32 ? frag_col(0) : lane % 2 * 8 + lane % 4 / 2 * 4);
    const std::int64_t step = k.step;
    char* at = k.o + (std::int64_t{piece} * (16 * R) + lane / 4) * step + j * size;
    if (p.o.type == DType::F32) {
      FLA_UNROLL
      for (int r = 0; r < 2 * R; ++r, at += 8 * step) {
        FLA_UNROLL
        for (int n = 0; n < 2 * WM; ++n) {
          const FragC& c = o[r / 2][n];
          store_global<2>(reinterpret_cast<float*>(at) + 8 * n, Vec<float, 2>{{c.x[r % 2 * 2], c.x[r % 2 * 2 + 1]}});
        }
      }
      return;
    }
    const bool odd = lane_id() % 2 != 0;
    FLA_UNROLL
    for (int r = 0; r < 2 * R; ++r, at += 8 * step) {
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        const FragC &l = o[r / 2][2 * m], &h = o[r / 2][2 * m + 1];
        const int e = r % 2 * 2;
        const std::uint32_t low = pack2<T>(l.x[e], l.x[e + 1]), high = pack2<T>(h.x[e], h.x[e + 1]);
        const std::uint32_t other = shuffle_xor(odd ? low : high, 1);
        store_global<2>(reinterpret_cast<std::uint32_t*>(at) + 8 * m,
                        Vec<std::uint32_t, 2>{{odd ? other : low, odd ? high : other}});
      }
    }
  }

  FLA_DEVICE void store_one_by_one(int piece, const FragC (&o)[R][2 * WM]) const {
    const DiagTask a = kept.load(0).task;
    const std::int64_t t = a.from + std::int64_t{piece} * (16 * R);
    const int j0 = a.v0 + row;
    const auto& s = p.o.at.stride;
    FLA_UNROLL
    for (int r = 0; r < 2 * R; ++r) {
      const std::int64_t at = t + 8 * r + lane_id() / 4;
      if (at < 0 || at >= a.to) continue;
      const std::int64_t token = a.row * s[0] + a.token(p, at) * s[1] + a.h * s[2];
      FLA_UNROLL
      for (int n = 0; n < 4 * WM; ++n) {
        const int j = j0 + 8 * (n / 2) + frag_col(n % 2);
        const float x = o[r / 2][n / 2].x[r % 2 * 2 + n % 2];
        if (j >= p.V) continue;
        if (p.o.type == DType::F32) {
          static_cast<float*>(p.o.at.data)[token + j * s[3]] = x;
        } else {
          static_cast<T*>(p.o.at.data)[token + j * s[3]] = from_f32<T>(x);
        }
      }
    }
  }
};

// N tiles of 8 rows of k, as columns of a product over WIDTH channels.
template <typename T, int N, int WIDTH>
FLA_DEVICE void load_key_rows(FragB<T> (&b)[WIDTH / 16][N], Shared<T> k, int ld) {
  if constexpr (N == 1) {
    static_assert(WIDTH == 32);
    std::uint32_t r[4];
    ldmatrix_x4<false>(r, k + (lane_id() % 8 * ld + lane_id() / 8 * 8));
    b[0][0] = {{r[0], r[1]}};
    b[1][0] = {{r[2], r[3]}};
  } else {
    FLA_UNROLL
    for (int kk = 0; kk < WIDTH / 16; ++kk) {
      FLA_UNROLL
      for (int n = 0; n < N; n += 2) load_b(b[kk][n], b[kk][n + 1], k + (8 * n * ld + 16 * kk), ld);
    }
  }
}

// Both elements of a word times their factors, rounded to T again.
template <typename T>
FLA_DEVICE std::uint32_t scale_pair(std::uint32_t w, float lo, float hi) {
  return pack2<T>(to_f32(T{static_cast<std::uint16_t>(w)}) * lo, to_f32(T{static_cast<std::uint16_t>(w >> 16U)}) * hi);
}

// What the word of T that is nearest to a pair leaves out, as a word.
template <typename T>
FLA_DEVICE std::uint32_t low_pair(std::uint32_t nearest, float lo, float hi) {
  return pack2<T>(lo - to_f32(T{static_cast<std::uint16_t>(nearest)}),
                  hi - to_f32(T{static_cast<std::uint16_t>(nearest >> 16U)}));
}

// What scale_pair rounds away.
template <typename T>
FLA_DEVICE std::uint32_t rest_of_pair(std::uint32_t w, float lo, float hi) {
  lo *= to_f32(T{static_cast<std::uint16_t>(w)});
  hi *= to_f32(T{static_cast<std::uint16_t>(w >> 16U)});
  return low_pair<T>(pack2<T>(lo, hi), lo, hi);
}

// What a state's 16-bit form leaves out, as a second operand: gradients of gates are differences of large numbers.
template <typename T>
FLA_DEVICE FragA<T> rest_of(const FragC& c0, const FragC& c1, const FragA<T>& a) {
  FragA<T> r;
  FLA_UNROLL
  for (int w = 0; w < 4; ++w) {
    const FragC& c = w < 2 ? c0 : c1;
    r.x[w] = low_pair<T>(a.x[w], c.x[2 * (w % 2)], c.x[2 * (w % 2) + 1]);
  }
  return r;
}

// ---- host

inline constexpr std::size_t kAlignment = 256;

inline std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Hands out parts of the workspace; with no memory it only counts.
class Arena {
 public:
  explicit Arena(void* base)
      : base_(reinterpret_cast<std::uintptr_t>(base)), at_(base == nullptr ? 0 : aligned(base_)) {}
  void* take(std::size_t bytes) {
    const std::uintptr_t here = at_;
    at_ += aligned(bytes);
    return reinterpret_cast<void*>(here);
  }
  // An upper bound of what was taken, wherever the memory starts.
  std::size_t bytes() const { return at_ == 0 ? 0 : at_ + kAlignment; }
  void* rest() const { return reinterpret_cast<void*>(at_); }

 private:
  std::uintptr_t base_, at_;
};

inline bool empty(const DiagProblem& p) { return p.N == 0 || p.H == 0; }

// Whether the operands that are present have the type of the first, one of 16 bits, and the results that or F32.
bool diag_one_half_type(std::initializer_list<const TensorView*> operands,
                        std::initializer_list<const TensorView*> results);
DiagPlan diag_step_plan(const DiagProblem& p);
DiagPlan diag_token_plan(const DiagProblem& p);  // Step or Decode
// The fastest. boundaries: of runs that keep or sum states at boundaries.
DiagPlan diag_chunk_plan(const DiagProblem& p, const DeviceInfo& d, bool boundaries);
DiagPlan diag_states_plan(const DiagProblem& p, const DeviceInfo& d);
// All of them, each with its milliseconds. always: time may be cut where that does not pay.
using DiagPlanVisitor = Visitor<const DiagPlan&, double>;
void diag_each_chunk_plan(const DiagProblem& p, const DeviceInfo& d, bool boundaries, bool always, DiagPlanVisitor fn);
void diag_each_states_plan(const DiagProblem& p, const DeviceInfo& d, bool always, DiagPlanVisitor fn);
// Whether the engine runs the problem on this device, forwards.
bool diag_serves(const DiagProblem& p, const DeviceInfo& d, const Why& why);

// Problems that together reach every kernel: shapes and types, no memory.
enum class DiagGate : std::uint8_t { None, Head, Channel, Value };
DiagBackwardProblem diag_sample(DType type, std::int64_t K, std::int64_t V, std::int64_t T, DiagGate gate);
template <typename Fn>
void diag_each_sample(Fn&& fn) {
  for (const DType type : {DType::BF16, DType::F16, DType::F32})
    for (const std::int64_t K : {64, 128, 256})
      for (const std::int64_t V : {64, 128, 256})
        for (const std::int64_t T : {1, 4096})
          for (const DiagGate gate : {DiagGate::None, DiagGate::Head, DiagGate::Channel, DiagGate::Value})
            fn(diag_sample(type, K, V, T, gate));
}
// Whether a block of the kernel that forms gradients from such states has room on this device.
bool diag_gradient_fits(const DiagProblem& p, const DiagPlan& states, const DeviceInfo& d);
DiagParams diag_parameters(const DiagProblem& p, const DiagPlan& plan);
// One pass over the problem, with segments three; workspace as diag_run_bytes.
std::size_t diag_run_bytes(const DiagProblem& p, const DiagPlan& f);
Status diag_run(DiagParams a, const DiagPlan& f, Stream stream, void* workspace);

// ---- launches, one file per kernel and element type

// Step: a block of 128 threads, each with 32 keys of a value column.
inline constexpr int kStepThreads = 128, kStepRows = 32;
// Decode: 64 values a block fill memory's bursts with 2 or 4 bytes each and leave blocks enough for a few sequences.
inline constexpr int kDecodeThreads = 256, kDecodeValue = 64, kDecodeTokens = 8;

Status launch_diag_step(const DiagParams& p, const DiagPlan& plan, Stream stream);
Status launch_diag_decode(const DiagParams& p, const DiagPlan& plan, Stream stream);
template <typename T>
Status launch_diag_head(const DiagParams& p, const DiagPlan& plan, Stream stream);
template <typename T>
Status launch_diag_value(const DiagParams& p, const DiagPlan& plan, Stream stream);
template <typename T>
Status launch_diag_channel(const DiagParams& p, const DiagPlan& plan, Stream stream);

}  // namespace fla::cuda
