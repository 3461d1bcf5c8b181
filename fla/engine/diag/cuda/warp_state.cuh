// A state between memory and the registers of a warp, and what is kept of it at boundaries.
#pragma once

#include <cstdint>

#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/params.cuh"

namespace fla::cuda {

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

}  // namespace fla::cuda
