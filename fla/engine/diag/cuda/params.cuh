// What the kernels of the diagonal-decay engine are told, and the work of a block.
//
// State in the tensor-core kernels: transposed, S^T (value x key). A warp owns WM tiles of 16 value rows and all keys
// as fp32 accumulators, which become the A operand of o^T = S^T q^T without leaving the registers. Gates: base 2, and
// not below kLeastGate, where a decay is 0 in fp32 already; sums over a chunk thus stay exact enough. Only exponents <=
// 0 are formed, but for the diagonal of the channel gate (channel.cuh).
#pragma once

#include <cstdint>

#include "fla/engine/diag/cuda/entry.h"
#include "fla/kernels/cuda/sequences.cuh"
#include "fla/kernels/cuda/toolbox.cuh"

namespace fla::cuda {

// Backward: every gradient of q, k and v is the output of one of these kernels with the operands in other roles
// (backward.cu). What such a run needs beyond a forward: gates that act one token later (shift), tiles that end with
// the sequence (align), and row sums of S o dS between two runs at every align-th token (Boundary).

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

}  // namespace fla::cuda
