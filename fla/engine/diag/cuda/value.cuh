// Tiles of BT tokens in blocks of 16, one gate per value channel. Within a block, L is the running sum of the gates and
// L_15 its last:
//   P = tril(scale q k^T)    o^T = 2^L o (scale S^T q^T + (v o 2^-L)^T P^T)    S^T = 2^L_15 o S^T + (v o 2^(L_15 -
//   L))^T k
// A warp owns whole channels, so the gates are its own affair: every factor is applied to fragments in registers. One
// barrier a tile. v 2^-L has a positive exponent; from the first token on where it leaves the range of T, a token's sum
// over keys is formed from exponents of differences.
#pragma once

#include <cmath>

#include "fla/engine/diag/cuda/gates.cuh"
#include "fla/engine/diag/cuda/launches.h"
#include "fla/engine/diag/cuda/output.cuh"
#include "fla/engine/diag/cuda/pairs.cuh"
#include "fla/engine/diag/cuda/params.cuh"
#include "fla/engine/diag/cuda/token_rows.cuh"
#include "fla/engine/diag/cuda/warp_state.cuh"

namespace fla::cuda {

template <int KP, int BT, int NW, int WM>
struct ValueTiles {
  static constexpr int kThreads = 32 * NW, kValue = 16 * NW * WM, kBlocks = BT / 16;
  static constexpr int kLdK = KP + 8, kLdV = kValue + 8, kLdG = kValue + 4;
  static constexpr int kQ = 0, kKey = kQ + BT * kLdK * 2, kV = kKey + BT * kLdK * 2, kG = kV + BT * kLdV * 2,
                       kStage = kG + BT * kLdG * 4, kBytes = 2 * kStage;
};

// The gates of 16 tokens x 16 channels where this lane's elements of an A fragment (channel, token) are: [half of the
// channels][half of the tokens][token parity].
struct GateSums {
  float L[2][2][2];
  float last[2];
};

template <int LD>
FLA_DEVICE GateSums gate_sums(const DiagParams& p, Shared<float> tile, int token, int channel) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  GateSums s;
  FLA_UNROLL
  for (int m = 0; m < 2; ++m) {
    float before = 0.0F;
    FLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int r = token + 8 * half + 2 * t, c = channel + 8 * m + g;
      const float first = gate_at<LD>(p, p.gv.type, tile, r, c), second = gate_at<LD>(p, p.gv.type, tile, r + 1, c);
      float sum = first + second;
      FLA_UNROLL
      for (int by = 1; by < 4; by *= 2) {
        const float x = shuffle_up(sum, by);
        if (t >= by) sum += x;
      }
      const float left = shuffle_up(sum, 1);
      const float base = before + (t > 0 ? left : 0.0F);
      s.L[m][half][0] = base + first;
      s.L[m][half][1] = base + first + second;
      before = shuffle(s.L[m][half][1], lane_id() | 3);
    }
    s.last[m] = before;
  }
  return s;
}

// o(channel, query) += 2^(L_query - L_key) P(query, key) v(channel, key) of queries from `first` on, one key after the
// other.
template <typename T>
FLA_DEVICE void exact_values(const GateSums& s, const FragA<T>& v, const FragC (&P)[2], int first, FragC (&o)[2]) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  FLA_UNROLL
  for (int j = 0; j < 16; ++j) {
    const int half = j / 8, odd = j % 2, from = j % 8 / 2;
    float key[2], L[2];
    FLA_UNROLL
    for (int m = 0; m < 2; ++m) {
      const std::uint32_t w = shuffle(v.x[2 * half + m], 4 * g + from);
      key[m] = to_f32(T{static_cast<std::uint16_t>(odd != 0 ? w >> 16U : w)});
      L[m] = shuffle(s.L[m][half][odd], 4 * g + from);
    }
    FLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int i = 8 * n + 2 * t + e;
        const float product = shuffle(P[half].x[2 * n + odd], 4 * ((2 * t + e) % 8) + from);
        FLA_UNROLL
        for (int m = 0; m < 2; ++m) {
          if (j <= i && i >= first) o[n].x[2 * m + e] += product * key[m] * exp2_approx(s.L[m][n][e] - L[m]);
        }
      }
    }
  }
}

template <typename T, int KP, int BT, int NW, int WM, int BLOCKS>
FLA_KERNEL(32 * NW, BLOCKS)
diag_value_kernel(const DiagParams p) {
  using Tiles = ValueTiles<KP, BT, NW, WM>;
  constexpr int kLdK = Tiles::kLdK, kLdV = Tiles::kLdV, kLdG = Tiles::kLdG;
  const DiagTask a = diag_task(p, BT, Tiles::kValue);
  if (p.pass == DiagPass::Local && a.s == p.segments - 1) return;
  const bool want_o = p.pass != DiagPass::Local && p.o.present();
  const int row = 16 * WM * warp_id();  // of the block's value columns
  const int columns = p.V - a.v0 < Tiles::kValue ? p.V - a.v0 : Tiles::kValue;

  const auto q_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kQ, BT * kLdK); };
  const auto k_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kKey, BT * kLdK); };
  const auto v_tile = [&](int stage) { return shared<T>(stage * Tiles::kStage + Tiles::kV, BT * kLdV); };
  const auto g_tile = [&](int stage) { return shared<float>(stage * Tiles::kStage + Tiles::kG, BT * kLdG); };
  const auto fetch = [&](std::int64_t t, int stage) {
    if (t < a.to) {
      if (want_o) load_tokens<BT, KP>(p, a, p.q.at, p.vector_qk, t, 0, 0, p.K, q_tile(stage), kLdK);
      load_tokens<BT, KP>(p, a, p.k.at, p.vector_qk, t, 0, 0, p.K, k_tile(stage), kLdK);
      load_tokens<BT, Tiles::kValue>(p, a, p.v.at, p.vector_v, t, 0, a.v0, columns, v_tile(stage), kLdV);
      load_gates<BT, Tiles::kValue, kLdG>(p, a, p.gv, t, a.v0, columns, g_tile(stage));
    }
    cp_async_commit();
  };

  fetch(a.from, 0);
  FragC S[WM][KP / 8];
  load_warp_state<KP, WM>(p, a, a.v0 + row, S);
  if (a.s == 0) keep_at_boundary<KP, WM>(p, a, 0, Tiles::kValue, row, S);
  float total[WM][2] = {};

  int stage = 0;
  for (std::int64_t t = a.from; t < a.to; t += BT, stage ^= 1) {
    cp_async_wait<0>();
    sync_threads();
    fetch(t + BT, stage ^ 1);
    const Shared<T> q = q_tile(stage), k = k_tile(stage), v = v_tile(stage);
    const Shared<float> g = g_tile(stage);
    sum_at_boundary<KP, WM>(p, a, t, Tiles::kValue, row, S);

    for (int b = 0; b < Tiles::kBlocks && t + 16 * b < a.to; ++b) {
      FragA<T> values[WM];
      GateSums sums[WM];
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        load_a_trans(values[m], v + (16 * b * kLdV + row + 16 * m), kLdV);
        sums[m] = gate_sums<kLdG>(p, g, 16 * b, row + 16 * m);
        total[m][0] += sums[m].last[0];
        total[m][1] += sums[m].last[1];
      }
      if (want_o) {
        FragC o[WM][2], P[2];
        clear(P[0]);
        clear(P[1]);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          clear(o[m][0]);
          clear(o[m][1]);
        }
        FLA_UNROLL
        for (int kk = 0; kk < KP / 16; ++kk) {
          FragA<T> x;
          load_a(x, q + (16 * b * kLdK + 16 * kk), kLdK);
          FragB<T> b0, b1;
          load_b(b0, b1, k + (16 * b * kLdK + 16 * kk), kLdK);
          mma(P[0], x, b0);
          mma(P[1], x, b1);
          // The words of q as A are those of q^T as B.
          b0 = {{x.x[0], x.x[2]}};
          b1 = {{x.x[1], x.x[3]}};
          FLA_UNROLL
          for (int m = 0; m < WM; ++m) {
            const FragA<T> state = to_a<T>(S[m][2 * kk], S[m][2 * kk + 1]);
            mma(o[m][0], state, b0);
            mma(o[m][1], state, b1);
            if (p.boundary == Boundary::None) continue;
            const FragA<T> rest = rest_of<T>(S[m][2 * kk], S[m][2 * kk + 1], state);
            mma(o[m][0], rest, b0);
            mma(o[m][1], rest, b1);
          }
        }
        const float scale = p.scale * p.update_scale;
        FLA_UNROLL
        for (int e = 0; e < 4; ++e) {
          P[0].x[e] = frag_col(e) <= frag_row(e) ? P[0].x[e] * scale : 0.0F;
          P[1].x[e] = 8 + frag_col(e) <= frag_row(e) ? P[1].x[e] * scale : 0.0F;
        }
        // A token's own term has no decay and is mostly the largest: it stays out of the 16 bits of the others. own: of
        // the tokens that this lane's elements of o are of.
        float own[2][2];
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) {
          FLA_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int i = 2 * (lane_id() % 4) + e;
            own[n][e] = shuffle(P[n].x[2 * n + e], 4 * i + i / 2);
            if (frag_row(2 * n + e) == 8 * n + frag_col(2 * n + e)) P[n].x[2 * n + e] = 0.0F;
          }
        }
        FragB<T> b0, b1;
        to_b_transposed(b0, b1, P[0], P[1]);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          const GateSums& s = sums[m];
          bool in_range = s.last[0] >= RaisedRange<T>::kLeast && s.last[1] >= RaisedRange<T>::kLeast;
          FragA<T> raised;
          FLA_UNROLL
          for (int w = 0; w < 4; ++w) {
            const float(&L)[2] = s.L[w % 2][w / 2];
            const float lo = to_f32(T{static_cast<std::uint16_t>(values[m].x[w])}) * exp2_approx(-L[0]),
                        hi = to_f32(T{static_cast<std::uint16_t>(values[m].x[w] >> 16U)}) * exp2_approx(-L[1]);
            const float most = RaisedRange<T>::kMost;
            in_range = in_range && lo <= most && lo >= -most && hi <= most && hi >= -most;
            raised.x[w] = pack2<T>(lo, hi);
          }
          const bool exact = ballot(!in_range) != 0;
          int first = 16;  // token that is out of range
          if (exact) {
            FLA_UNROLL
            for (int w = 3; w >= 0; --w) {
              FLA_UNROLL
              for (int e = 1; e >= 0; --e) {
                const float L = s.L[w % 2][w / 2][e],
                            x = to_f32(T{static_cast<std::uint16_t>(values[m].x[w] >> (16 * e))}) * exp2_approx(-L);
                const int token = 8 * (w / 2) + 2 * (lane_id() % 4) + e;
                if (!(L >= RaisedRange<T>::kLeast && std::fabs(x) <= RaisedRange<T>::kMost) && token < first) {
                  first = token;
                }
              }
            }
            FLA_UNROLL
            for (int by = 16; by > 0; by /= 2) {
              const int other = shuffle_xor(first, by);
              first = other < first ? other : first;
            }
            const FragA<T> whole = raised;
            keep_k(raised.x, whole.x, 0, first);
          }
          FLA_UNROLL
          for (int n = 0; n < 2; ++n) {
            FLA_UNROLL
            for (int e = 0; e < 4; ++e) o[m][n].x[e] *= p.scale;
          }
          FragC with[2] = {o[m][0], o[m][1]};
          mma(with[0], raised, b0);
          mma(with[1], raised, b1);
          FLA_UNROLL
          for (int n = 0; n < 2; ++n) {
            FLA_UNROLL
            for (int e = 0; e < 4; ++e) o[m][n].x[e] = 8 * n + frag_col(e) < first ? with[n].x[e] : o[m][n].x[e];
          }
          FLA_UNROLL
          for (int n = 0; n < 2; ++n) {
            FLA_UNROLL
            for (int e = 0; e < 4; ++e) o[m][n].x[e] *= exp2_approx(s.L[e / 2][n][e % 2]);
          }
          if (exact) exact_values(s, values[m], P, first, o[m]);
          FLA_UNROLL
          for (int n = 0; n < 2; ++n) {
            FLA_UNROLL
            for (int e = 0; e < 4; ++e) {
              const std::uint32_t w = values[m].x[2 * n + e / 2];
              o[m][n].x[e] += own[n][e % 2] * to_f32(T{static_cast<std::uint16_t>(e % 2 != 0 ? w >> 16U : w)});
            }
          }
          store_output<T>(p, a, t + 16 * b, a.v0 + row + 16 * m, o[m][0]);
          store_output<T>(p, a, t + 16 * b + 8, a.v0 + row + 16 * m, o[m][1]);
        }
      }
      float decay[WM][2];
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        const GateSums& s = sums[m];
        decay[m][0] = exp2_approx(s.last[0]);
        decay[m][1] = exp2_approx(s.last[1]);
        FLA_UNROLL
        for (int w = 0; w < 4; ++w) {
          const float(&L)[2] = s.L[w % 2][w / 2];
          values[m].x[w] = scale_pair<T>(values[m].x[w], p.update_scale * exp2_approx(s.last[w % 2] - L[0]),
                                         p.update_scale * exp2_approx(s.last[w % 2] - L[1]));
        }
      }
      FLA_UNROLL
      for (int n = 0; n < KP / 16; ++n) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, k + (16 * b * kLdK + 16 * n), kLdK);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          FLA_UNROLL
          for (int e = 0; e < 4; ++e) {
            S[m][2 * n].x[e] *= decay[m][e / 2];
            S[m][2 * n + 1].x[e] *= decay[m][e / 2];
          }
          mma(S[m][2 * n], values[m], b0);
          mma(S[m][2 * n + 1], values[m], b1);
        }
      }
      if (p.boundary == Boundary::None) continue;
      FLA_UNROLL
      for (int m = 0; m < WM; ++m) {
        load_a_trans(values[m], v + (16 * b * kLdV + row + 16 * m), kLdV);
        const GateSums& s = sums[m];
        FLA_UNROLL
        for (int w = 0; w < 4; ++w) {
          const float(&L)[2] = s.L[w % 2][w / 2];
          values[m].x[w] = rest_of_pair<T>(values[m].x[w], p.update_scale * exp2_approx(s.last[w % 2] - L[0]),
                                           p.update_scale * exp2_approx(s.last[w % 2] - L[1]));
        }
      }
      FLA_UNROLL
      for (int n = 0; n < KP / 16; ++n) {
        FragB<T> b0, b1;
        load_b_trans(b0, b1, k + (16 * b * kLdK + 16 * n), kLdK);
        FLA_UNROLL
        for (int m = 0; m < WM; ++m) {
          mma(S[m][2 * n], values[m], b0);
          mma(S[m][2 * n + 1], values[m], b1);
        }
      }
    }
    keep_at_boundary<KP, WM>(p, a, t + BT, Tiles::kValue, row, S);
  }

  if (a.s == p.segments - 1) sum_at_boundary<KP, WM>(p, a, a.length, Tiles::kValue, row, S);
  if (keeps_state(p, a)) store_warp_state<KP, WM>(p, a, a.v0 + row, S);
  if (p.pass == DiagPass::Local && lane_id() % 4 == 0) {
    FLA_UNROLL
    for (int m = 0; m < WM; ++m) {
      FLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int j = a.v0 + row + 16 * m + 8 * half + lane_id() / 4;
        if (j < p.V) p.total[((a.n * p.H + a.h) * p.segments + a.s) * p.V + j] = total[m][half];
      }
    }
  }
}

template <typename T, int KP, int BT, int NW, int WM, int BLOCKS>
Status launch_value(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  using Tiles = ValueTiles<KP, BT, NW, WM>;
  return launch<diag_value_kernel<T, KP, BT, NW, WM, BLOCKS>>({.name = plan.name(),
                                                               .grid = {p.N * p.H * p.segments * p.v_blocks},
                                                               .threads = Tiles::kThreads,
                                                               .shared_bytes = Tiles::kBytes},
                                                              stream, p);
}

template <typename T>
Status launch_diag_value(const DiagParams& p, const DiagPlan& plan, Stream stream) {
  switch (plan.key) {
    case 64:
      if (plan.value == 32) return launch_value<T, 64, 32, 2, 1, 4>(p, plan, stream);
      return launch_value<T, 64, 32, 4, 1, 3>(p, plan, stream);
    case 128:
      if (plan.value == 64) return launch_value<T, 128, 32, 4, 1, 2>(p, plan, stream);
      return launch_value<T, 128, 32, 8, 1, 1>(p, plan, stream);
    default: return launch_value<T, 256, 16, 4, 1, 2>(p, plan, stream);
  }
}

}  // namespace fla::cuda
