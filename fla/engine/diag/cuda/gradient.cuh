// What the kernels of gradients by chunk share (states.cuh, head_gradient.cuh): parameters, and where the states of a
// chunk lie.
#pragma once

#include "fla/engine/diag/cuda/launches.h"
#include "fla/engine/diag/cuda/params.cuh"
#include "fla/engine/diag/cuda/token_rows.cuh"

namespace fla::cuda {

// Tokens of a chunk, and rows of a state that a block has.
inline constexpr int kStateChunk = 64, kStateRows = 64;

// A gate that lets nothing through that fp32 would show, base 2.
inline constexpr float kClosedGate = -25.0F;

// Calls f with an element of the gates' type: one branch for all that follows from it.
template <typename F>
FLA_DEVICE void with_gate_type(DType type, F&& f) {
  if (type == DType::F32) {
    f(0.0F);
  } else if (type == DType::BF16) {
    f(bf16{});
  } else {
    f(f16{});
  }
}

// Both runs of states: forwards, and of their adjoints backwards. Rows are key channels in both.
struct StateRuns {
  DiagParams run[2];
  // Per chunk and head D x D elements of 16 bits: tiles of 16 x 16 (rows, then values), each as the A fragment of a
  // warp. Before the chunk, and after it; the adjoint without the gate of the token that follows.
  std::uint32_t* kept[2] = {nullptr, nullptr};
};

struct GradientParams {
  DiagParams p;  // of the forward: shapes, sequences, gates, q, k, v
  Operand up, dq, dk, dv, dg, dgk;
  bool vector_up = false, vector_out = false, vector_gates = false;
  const std::uint32_t* before = nullptr;  // StateRuns::kept
  const std::uint32_t* after = nullptr;
};

FLA_HOST_DEVICE std::int64_t chunk_slots(std::int64_t T, std::int64_t N, bool packed) {
  return packed ? T / kStateChunk + N : N * ((T + kStateChunk - 1) / kStateChunk);
}
// The first of a sequence's chunks among all.
FLA_DEVICE std::int64_t first_chunk(const DiagParams& p, std::int64_t n, std::int64_t begin) {
  return p.cu.present() ? begin / kStateChunk + n : n * ((p.T + kStateChunk - 1) / kStateChunk);
}
template <int D, typename U>
FLA_DEVICE U* state_tiles(U* kept, const DiagParams& p, const DiagTask& a, std::int64_t chunk) {
  return kept + ((first_chunk(p, a.n, a.begin) + chunk) * p.H + a.h) * (D * D / 2);
}

// The chunk that the block is to work on; without tokens where there is none.
FLA_DEVICE DiagTask chunk_task(const DiagParams& p) {
  const std::int64_t slot = block_x() / p.H;
  DiagTask a = task_of_slot(p, slot, block_x() % p.H,
                            [&](std::int64_t n, std::int64_t begin) { return first_chunk(p, n, begin); });
  a.v0 = 0;
  a.s = 0;
  a.from = (slot - first_chunk(p, a.n, a.begin)) * kStateChunk;
  a.to = a.from + kStateChunk < a.length ? a.from + kStateChunk : a.length;
  return a;
}

// A chunk's operands as tiles of D channels with a row pitch ld; by all threads, which commit and wait.
template <typename T, int D>
FLA_DEVICE void load_chunk(const DiagParams& p, const DiagTask& a, const Operand& from, bool vector, int count,
                           Shared<T> to, int ld) {
  if (vector && count == D && from.present() && a.from + kStateChunk <= a.to) {
    copy_rows<kStateChunk, D, 2 * D>(p, a, from.at, a.from, 0, to, ld, thread_id());
  } else {
    load_tokens<kStateChunk, D>(p, a, from.at, vector, a.from, 0, 0, count, to, ld);
  }
}
template <typename T, int D>
FLA_DEVICE void load_chunk(const GradientParams& x, const DiagTask& a, Shared<T> q, Shared<T> k, Shared<T> v,
                           Shared<T> up, int ld) {
  const DiagParams& p = x.p;
  load_chunk<T, D>(p, a, p.q, p.vector_qk, p.K, q, ld);
  load_chunk<T, D>(p, a, p.k, p.vector_qk, p.K, k, ld);
  load_chunk<T, D>(p, a, p.v, p.vector_v, p.V, v, ld);
  load_chunk<T, D>(p, a, x.up, x.vector_up, p.V, up, ld);
}

// o += x S^T, x of a chunk in shared memory, S from memory as tiles (16 channels of o, 16 of x).
template <typename T, int D>
FLA_DEVICE void times_state(FragC (&o)[4][2], Shared<T> x, int ld, const Vec<std::uint32_t, 4> (&tiles)[D / 16]) {
  FLA_UNROLL
  for (int kk = 0; kk < D / 16; ++kk) {
    const auto& w = tiles[kk].x;
    FLA_UNROLL
    for (int m = 0; m < 4; ++m) {
      FragA<T> a;
      load_a(a, x + (16 * m * ld + 16 * kk), ld);
      mma(o[m][0], a, FragB<T>{{w[0], w[2]}});
      mma(o[m][1], a, FragB<T>{{w[1], w[3]}});
    }
  }
}

// o += P^T y, P of a chunk's tokens and lower triangular, y from the first of the warp's channels on.
template <typename T>
FLA_DEVICE void add_later(FragC (&o)[4][2], Shared<T> P, int ld_p, Shared<T> y, int ld) {
  FLA_UNROLL
  for (int i = 0; i < 4; ++i) {
    FragB<T> b0, b1;
    load_b_trans(b0, b1, y + 16 * i * ld, ld);
    FLA_UNROLL
    for (int m = 0; m <= i; ++m) {
      FragA<T> w;
      load_a_trans(w, P + (16 * i * ld_p + 16 * m), ld_p);
      mma(o[m][0], w, b0);
      mma(o[m][1], w, b1);
    }
  }
}

// The sum of the products of two pairs of 16-bit elements.
template <typename T>
FLA_DEVICE float word_product(std::uint32_t a, std::uint32_t b) {
  return to_f32(T{static_cast<std::uint16_t>(a)}) * to_f32(T{static_cast<std::uint16_t>(b)}) +
         to_f32(T{static_cast<std::uint16_t>(a >> 16U)}) * to_f32(T{static_cast<std::uint16_t>(b >> 16U)});
}

// Writes 16 tokens x 16 channels from c0 on: the block-th tokens of a chunk.
template <typename U>
FLA_DEVICE void store_pieces(U* at, std::int64_t step, int tokens, const FragC (&x)[2]) {
  // Two lanes exchange words of 16 bits, so that each has four channels beside each other.
  const int lane = lane_id();
  const bool odd = lane % 2 != 0;
  at += lane % 2 * 8 + lane % 4 / 2 * 4;
  FLA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int token = 8 * half + lane / 4;
    const std::uint32_t low = pack2<U>(x[0].x[2 * half], x[0].x[2 * half + 1]),
                        high = pack2<U>(x[1].x[2 * half], x[1].x[2 * half + 1]);
    const std::uint32_t other = shuffle_xor(odd ? low : high, 1);
    if (token >= tokens) continue;
    store_global<2>(reinterpret_cast<std::uint32_t*>(at + token * step),
                    Vec<std::uint32_t, 2>{{odd ? other : low, odd ? high : other}});
  }
}
FLA_DEVICE void store_block(const DiagParams& p, const DiagTask& a, const Operand& to, bool vector, int block, int c0,
                            int count, const FragC (&x)[2]) {
  if (!to.present()) return;
  const auto& s = to.at.stride;
  const std::int64_t step = p.reverse ? -s[1] : s[1],
                     first = a.row * s[0] + a.token(p, a.from) * s[1] + a.h * s[2] + 16 * block * step;
  const int tokens = static_cast<int>(a.to - a.from) - 16 * block;
  if (vector && c0 + 16 <= count && to.type == DType::BF16) {
    store_pieces(static_cast<bf16*>(to.at.data) + first + c0, step, tokens, x);
    return;
  }
  if (vector && c0 + 16 <= count && to.type == DType::F16) {
    store_pieces(static_cast<f16*>(to.at.data) + first + c0, step, tokens, x);
    return;
  }
  FLA_UNROLL
  for (int n = 0; n < 2; ++n) {
    FLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int token = 8 * half + lane_id() / 4, c = c0 + 8 * n + frag_col(0);
      if (token >= tokens) continue;
      const std::int64_t at = first + token * step;
      if (vector && c + 1 < count && to.type == DType::F32) {
        store_global<2>(static_cast<float*>(to.at.data) + at + c,
                        Vec<float, 2>{{x[n].x[2 * half], x[n].x[2 * half + 1]}});
        continue;
      }
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        if (c + e < count) store_any(to.at.data, to.type, at + (c + e) * s[3], x[n].x[2 * half + e]);
      }
    }
  }
}
FLA_DEVICE void store_gradient(const DiagParams& p, const DiagTask& a, const Operand& to, bool vector, int c0,
                               int count, const FragC (&x)[4][2]) {
  FLA_UNROLL
  for (int block = 0; block < 4; ++block) store_block(p, a, to, vector, block, c0, count, x[block]);
}

// A block for each chunk and head.
template <auto KERNEL, typename TILES>
Status launch_by_chunk(const char* name, const GradientParams& x, Stream stream) {
  return launch<KERNEL>({.name = name,
                         .grid = {chunk_slots(x.p.T, x.p.N, x.p.cu.present()) * x.p.H},
                         .threads = TILES::kThreads,
                         .shared_bytes = TILES::kBytes},
                        stream, x);
}

// Runs both, with segments in three passes; `workspace` of each as diag_run_bytes.
Status diag_run_states(StateRuns runs, const DiagPlan& plan, Stream stream, void* const (&workspace)[2]);

template <typename T>
Status launch_diag_states(const StateRuns& runs, const DiagPlan& plan, Stream stream);
template <typename T>
Status launch_diag_head_gradient(const GradientParams& x, const DiagPlan& plan, Stream stream);
template <typename T>
Status launch_diag_channel_gradient(const GradientParams& x, const DiagPlan& plan, Stream stream);

}  // namespace fla::cuda
