// delta_gradient_kernel: the part of the backward that is parallel over chunks; equations (6) to (10) are in
// chunk_backward.cuh. A block serves a (slot, key head), a warp 16 key channels of all its tokens: what belongs to a
// (token, channel) stays in one lane's registers from the products with the states to the gradients.
//   P_ij = scale r_i r'_j dP_ij (j <= i),  L_ij = -r'_i r'_j dL_ij (j < i)   r, r': what normalises a row of q, of k
//   (1)
// are rounded to 16 bits once, so that <q, dq> and <k, u> of a pair of tokens cancel; the rows of q and k stay as
// given. A gate per head is part of P and L. A gate per channel leaves no pair of factors for all pairs of rows: the
// pairs whose highest differing bit is b go through m, the last row of the lower half of 2^{b+1} rows: 2^{G_i - G_j} =
// 2^{G_i - G_m} 2^{G_m - G_j}, both exponents at most 0; a product for each b. The gates' gradient sums q o dq - k o u
// apart, with rows as these products see them, rounded: else a pair would leave the rounding errors of both sides.
// grid     slots * H in x; 2 KP threads
// shared   states and adjoints (a warp's own, later its decayed rows and its sums), q, k, dO, E, dVbar, P, L
#pragma once

#include <algorithm>

#include "fla/engine/delta/cuda/chunk.cuh"

namespace fla::cuda {

inline constexpr int kLdP = kBT + 8, kLdR = 24;  // row pitches of P and L, and of a warp's decayed rows

template <int KP>
struct GradientLayout {
  static constexpr int kLdK = KP + 8, kLdF = KP + 4, kLdG = KP + 8;
  static constexpr int kQ = 0, kK = kQ + 2 * kBT * kLdK, kP = kK + 2 * kBT * kLdK, kL = kP + 2 * kBT * kLdP;
  static constexpr int kRows = kL + 2 * kBT * kLdP, kStates = kRows + 4 * (10 * kBT + 16);
  // piece: tiles of value channels that a warp has of its states and adjoints at a time; own: their bytes; the others
  // are offsets
  int ldV, piece, own, values, totals, bytes;

  FLA_HOST_DEVICE GradientLayout(int value_tiles, bool group) {
    ldV = 16 * value_tiles + 8;
    const int most = KP < 256 ? 16 : group ? 4 : 8;
    piece = value_tiles < most ? value_tiles : most;
    own = piece < 4 ? 4096 : piece * 1024;
    values = kStates + KP / 16 * own;
    const int rows = 3 * 2 * kBT * ldV, gates = 4 * (kBT + 1) * kLdG;
    totals = values + (rows < gates ? gates : rows);
    bytes = totals + (group ? 8 * kBT * kLdF : 0);
  }
};

// Row of element f of tile m, channel of element f of tile n in a warp's [BT, 16].
FLA_DEVICE int tile_row(int m, int f) { return 16 * m + frag_row(f); }
FLA_DEVICE int tile_channel(int n, int f) { return 8 * n + frag_col(f); }

// Starts the copy of [BT, width] to shared memory, zeros past rows and columns; both widths are multiples of 8.
template <typename T>
FLA_DEVICE void fetch_rows(Shared<T> to, int ld, const T* from, std::int64_t stride, int width, int rows, int columns) {
  for (int i = thread_id(); i < kBT * width / 8; i += block_threads()) {
    const int r = i / (width / 8), col = i % (width / 8) * 8;
    const bool inside = r < rows && col < columns;
    cp_async<16>(to + (r * ld + col), inside ? from + (r * stride + col) : from, inside ? 16 : 0);
  }
}

// The bits of a word of a P tile's 8 x 8 block on the diagonal, two neighbours beside column 2t of row g, that belong
// to pairs whose highest differing bit is b. Transposed: rows are j.
FLA_DEVICE std::uint32_t pair_mask(int b, bool transposed) {
  std::uint32_t mask = 0;
  FLA_UNROLL
  for (int e = 0; e < 2; ++e) {
    const int g = lane_id() / 4, t = frag_col(e), later = transposed ? t : g, earlier = transposed ? g : t;
    if (later > earlier && (later ^ earlier) >> b == 1) mask |= 0xffffU << (16 * e);
  }
  return mask;
}

// x summed over the lanes that share t, g from 0 to 7.
FLA_DEVICE float sum_rows(float x) {
  FLA_UNROLL
  for (int by = 4; by < 32; by *= 2) x += shuffle_xor(x, by);
  return x;
}

// c += a b for a lower square a of 16-bit rows at s and the 16 channels at `rows`; TRANSPOSED: a^T.
template <bool TRANSPOSED, typename T>
FLA_DEVICE void add_lower(FragC (&c)[2][2], Shared<T> s, Shared<T> rows, int ld) {
  FLA_UNROLL
  for (int i = 0; i < 2; ++i) {
    FragB<T> b0, b1;
    load_b_trans(b0, b1, rows + 16 * i * ld, ld);
    FLA_UNROLL
    for (int m = TRANSPOSED ? 0 : i; m < (TRANSPOSED ? i + 1 : 2); ++m) {
      FragA<T> a;
      if constexpr (TRANSPOSED) {
        load_a_trans(a, s + (16 * i * kLdP + 16 * m), kLdP);
      } else {
        load_a(a, s + (16 * m * kLdP + 16 * i), kLdP);
      }
      mma(c[m][0], a, b0);
      mma(c[m][1], a, b1);
    }
  }
}

template <typename T, int KP, bool CHANNEL>
FLA_KERNEL(2 * KP, KP == 256              ? 1
                   : KP == 64 && !CHANNEL ? 3
                                          : 2)
delta_gradient_kernel(const DeltaBackwardArgs p, const DeltaChunkSpace<T> w) {
  constexpr int kWarps = KP / 16, kThreads = 32 * kWarps, kTasks = (6 + kWarps - 1) / kWarps;
  const int group = p.HV / p.H, value_tiles = w.value_tiles;
  using L = GradientLayout<KP>;
  const L y(value_tiles, group > 1);
  const int id = thread_id(), lane = lane_id(), warp = warp_id(), g = lane / 4, t = lane % 4;
  const int hk = block_x() % p.H, entries = 1 + (CHANNEL ? p.K : 1);
  const std::int64_t slot = block_x() / p.H;
  const Chunk c = find_chunk(p, w, slot);
  const bool parameters = p.dA_log.present() || p.ddt_bias.present();
  if (c.rows == 0) {
    for (int i = id; parameters && i < group * entries; i += kThreads) {
      w.partials[(slot * p.HV + hk * group) * entries + i] = 0.0F;
    }
    return;
  }
  const std::int64_t first = c.s.begin + c.t0;
  const int channel = 16 * warp;
  const int value_tile = kBT * y.ldV;
  const Shared<T> sQ = shared<T>(L::kQ, kBT * L::kLdK), sK = shared<T>(L::kK, kBT * L::kLdK),
                  sP = shared<T>(L::kP, kBT * kLdP), sL = shared<T>(L::kL, kBT * kLdP),
                  sDO = shared<T>(y.values, value_tile), sE = shared<T>(y.values + 2 * value_tile, value_tile),
                  sDV = shared<T>(y.values + 4 * value_tile, value_tile);
  const Shared<T> sS = shared<T>(L::kStates + warp * y.own, y.own / 2);
  const Shared<float> rows = shared<float>(L::kRows, 10 * kBT + 16);
  const Shared<float> sBeta = rows, sRk = rows + kBT, sRq = rows + 2 * kBT, sG = rows + 3 * kBT, dotQ = rows + 4 * kBT,
                      dotK = rows + 5 * kBT, dotA = rows + 6 * kBT, dotV = rows + 7 * kBT, totalQ = rows + 8 * kBT,
                      totalK = rows + 9 * kBT, sTail = rows + 10 * kBT;

  fetch_rows(sQ, L::kLdK, p.q.view.at<T>(c.s.row, first, hk), p.q.view.stride[1], KP, c.rows, p.K);
  fetch_rows(sK, L::kLdK, p.k.view.at<T>(c.s.row, first, hk), p.k.view.stride[1], KP, c.rows, p.K);

  FragC dq[2][2], dk[2][2];  // dk: u + beta a
  for (int j_group = 0; j_group < group; ++j_group) {
    const int hv = hk * group + j_group;
    const std::int64_t at = slot * p.HV + hv;
    if (j_group > 0) sync_threads();
    // A warp's states and adjoints from value tile i on.
    const auto fetch_states = [&](int i) {
      const int count = (value_tiles - i < y.piece ? value_tiles - i : y.piece) * 256;
      for (int of = 0; of < 2; ++of) {
        const T* from = (of == 0 ? w.states : w.adjoints) + ((at * kWarps + warp) * value_tiles + i) * 256;
        for (int e = 8 * lane; e < count; e += 256) cp_async<16>(sS + (of * y.piece * 256 + e), from + e, 16);
      }
    };
    fetch_states(0);
    const std::int64_t kept = at * (kBT * 16 * value_tiles);
    fetch_rows(sDO, y.ldV, p.do_.view.at<T>(c.s.row, first, hv), p.do_.view.stride[1], 16 * value_tiles, c.rows, p.V);
    fetch_rows(sE, y.ldV, w.e + kept, 16 * value_tiles, 16 * value_tiles, kBT, 16 * value_tiles);
    fetch_rows(sDV, y.ldV, w.dvbar + kept, 16 * value_tiles, 16 * value_tiles, kBT, 16 * value_tiles);
    cp_async_commit();
    if (id < kBT) {
      sBeta.store(id, id < c.rows ? load_beta(p, c.s.row, first + id, hv, 0) : 0.0F);
      if constexpr (!CHANNEL) sG.store(id, w.scalars[at * (5 * kBT) + 4 * kBT + id]);
    }
    constexpr int kOfRow = kThreads / kBT, kPieces = 256 / 8 / kOfRow;  // threads of a row, and what each has of v
    Vec<T, 8> v[kPieces];
    const int v_row = id / kOfRow;
    FLA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int col = 8 * (id % kOfRow + kOfRow * i);
      v[i] = {};
      if (p.dbeta.present() && v_row < c.rows && col < p.V) {
        v[i] = load_global<8>(p.v.view.at<T>(c.s.row, first + v_row, hv, col));
      }
    }
    cp_async_wait<0>();
    sync_threads();

    // ---- what normalises the rows, <dVbar, v>, and the sums of P and L
    if (j_group == 0) {
      for (int r = warp; r < kBT; r += kWarps) {
        float qq = 0.0F, kk = 0.0F;
        FLA_UNROLL
        for (int i = 2 * lane; i < KP; i += 64) {
          const Vec<T, 2> x = sQ.template load_vec<2>(r * L::kLdK + i), z = sK.template load_vec<2>(r * L::kLdK + i);
          FLA_UNROLL
          for (int e = 0; e < 2; ++e) {
            qq += to_f32(x.x[e]) * to_f32(x.x[e]);
            kk += to_f32(z.x[e]) * to_f32(z.x[e]);
          }
        }
        qq = warp_sum(qq);
        kk = warp_sum(kk);
        if (lane == 0) {
          sRq.store(r, p.normalize_q ? inverse_norm(qq) : 1.0F);
          sRk.store(r, p.normalize_k ? inverse_norm(kk) : 1.0F);
          totalQ.store(r, 0.0F);
          totalK.store(r, 0.0F);
        }
      }
    }
    if (p.dbeta.present()) {
      float sum = 0.0F;
      FLA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        const int col = 8 * (id % kOfRow + kOfRow * i);
        if (col >= 16 * value_tiles) continue;
        const Vec<T, 8> x = sDV.template load_vec<8>(v_row * y.ldV + col);
        FLA_UNROLL
        for (int e = 0; e < 8; ++e) sum += to_f32(x.x[e]) * to_f32(v[i].x[e]);
      }
      sum = warp_sum<kOfRow>(sum);
      if (id % kOfRow == 0) dotV.store(v_row, sum);
    }
    FragC square[kTasks][2];
    const auto each_task = [&](auto&& f) {
      FLA_UNROLL
      for (int i = 0; i < kTasks; ++i) {
        const int task = warp + kWarps * i, block = task % 3;
        if (task < 6) f(square[i], task < 3, block == 0 ? 0 : 16, block == 2 ? 16 : 0);
      }
    };
    each_task([&](FragC(&x)[2], bool of_p, int m, int n) {
      clear(x[0]);
      clear(x[1]);
      const Shared<T> left = (of_p ? sDO : sDV) + m * y.ldV;
      for (int i = 0; i < 16 * value_tiles; i += 16) {
        FragA<T> a;
        FragB<T> b0, b1;
        load_a(a, left + i, y.ldV);
        load_b(b0, b1, sE + (n * y.ldV + i), y.ldV);
        mma(x[0], a, b0);
        mma(x[1], a, b1);
      }
    });
    sync_threads();
    each_task([&](FragC(&x)[2], bool of_p, int m, int n) {
      FLA_UNROLL
      for (int e = 0; e < 2; ++e) {
        FLA_UNROLL
        for (int f = 0; f < 4; f += 2) {
          const int r = m + frag_row(f);
          const float by = of_p ? p.scale * sRq.load(r) : -sRk.load(r);
          Vec<T, 2> z;
          FLA_UNROLL
          for (int h = 0; h < 2; ++h) {
            const int col = n + 8 * e + frag_col(h);
            float decay = by * sRk.load(col);
            if constexpr (!CHANNEL) decay *= exp2_approx(col < r ? sG.load(r) - sG.load(col) : 0.0F);
            z.x[h] = from_f32<T>((of_p ? col <= r : col < r) ? decay * x[e].x[f + h] : 0.0F);
          }
          (of_p ? sP : sL).template store_vec<2>(r * kLdP + n + 8 * e + frag_col(0), z);
        }
      }
    });

    // ---- S_0 dO, S_0 dVbar, D E as [token, channel]; rowsum(S_0 o D)
    FragC a[2][2], u[2][2];
    FLA_UNROLL
    for (int m = 0; m < 2; ++m) {
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        clear(dq[m][n]);
        clear(a[m][n]);
        clear(u[m][n]);
      }
    }
    float ends[2] = {};  // of key channels g and g + 8
    for (int i = 0; i < value_tiles; ++i) {
      const int in_piece = KP < 256 ? i : i % y.piece;
      if (in_piece == 0 && i > 0) {
        sync_warp();
        fetch_states(i);
        cp_async_commit();
        cp_async_wait<0>();
        sync_warp();
      }
      std::uint32_t s[4], d[4];
      ldmatrix_x4<true>(s, sS + (in_piece * 256 + 8 * lane));
      ldmatrix_x4<true>(d, sS + ((y.piece + in_piece) * 256 + 8 * lane));
      FLA_UNROLL
      for (int e = 0; e < 4; ++e) {
        ends[e / 2] += low_half<T>(s[e]) * low_half<T>(d[e]) + high_half<T>(s[e]) * high_half<T>(d[e]);
      }
      const FragB<T> s0 = {{s[0], s[1]}}, s1 = {{s[2], s[3]}}, d0 = {{d[0], d[1]}}, d1 = {{d[2], d[3]}};
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        FragA<T> x;
        load_a(x, sDO + (16 * m * y.ldV + 16 * i), y.ldV);
        mma(dq[m][0], x, s0);
        mma(dq[m][1], x, s1);
        load_a(x, sDV + (16 * m * y.ldV + 16 * i), y.ldV);
        mma(a[m][0], x, s0);
        mma(a[m][1], x, s1);
        load_a(x, sE + (16 * m * y.ldV + 16 * i), y.ldV);
        mma(u[m][0], x, d0);
        mma(u[m][1], x, d1);
      }
    }
    FLA_UNROLL
    for (float& x : ends) {
      x += shuffle_xor(x, 1);
      x += shuffle_xor(x, 2);
    }
    sync_threads();

    // ---- a gate per channel: its sums, by a thread per channel, where dO, E and dVbar were
    const Shared<float> sGate = shared<float>(y.values, CHANNEL ? (kBT + 1) * L::kLdG : 0);
    if constexpr (CHANNEL) {
      if (id < KP) {
        FLA_ROLL  // all at once leave no room for the sums
            for (int from = 0; from < kBT; from += kBT / 2) {
          float raw[kBT / 2] = {};
          if (id < p.K) load_gate_column(p.gk, c.s.row, first + from, hv, id, c.rows - from, raw);
          FLA_UNROLL
          for (int i = 0; i < kBT / 2; ++i) sGate.store((from + i) * L::kLdG + id, raw[i]);
        }
        const GateScale multiplier = gate_scale(p, hv);
        const float bias = id < p.K ? gate_bias(p, hv, id) : 0.0F;
        const int count = id < p.K ? c.rows : 0;
        float sum = 0.0F;
        FLA_ROLL
        for (int i = 0; i < kBT; ++i) {
          if (i < count) sum += log2_gate(p, sGate.load(i * L::kLdG + id), bias, multiplier);
          sGate.store(i * L::kLdG + id, sum);
        }
      }
      sync_threads();
    }

    // ---- (7), (8) and u; q and k of a lane's elements, as given
    const auto each = [&](auto&& f) {
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        FLA_UNROLL
        for (int h = 0; h < 2; ++h) {
          const int r = tile_row(m, 2 * h);
          FLA_UNROLL
          for (int n = 0; n < 2; ++n) {
            const int from = r * L::kLdK + channel + tile_channel(n, 0);
            const Vec<T, 2> xq = sQ.template load_vec<2>(from), xk = sK.template load_vec<2>(from);
            FLA_UNROLL
            for (int e = 0; e < 2; ++e) f(m, n, 2 * h + e, r, to_f32(xq.x[e]), to_f32(xk.x[e]));
          }
        }
      }
    };
    float tail[2][2] = {};  // of channel tile_channel(n, e); with a gate per head all in one
    {
      float end[2][2];
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        FLA_UNROLL
        for (int e = 0; e < 2; ++e)
          end[n][e] = CHANNEL ? sGate.load((kBT - 1) * L::kLdG + channel + tile_channel(n, e)) : sG.load(kBT - 1);
      }
      each([&](int m, int n, int f, int r, float /*q*/, float k) {
        const float gate = CHANNEL ? sGate.load(r * L::kLdG + channel + tile_channel(n, f)) : sG.load(r),
                    into = exp2_approx(gate);
        dq[m][n].x[f] *= p.scale * into * sRq.load(r);
        a[m][n].x[f] *= -into * sRk.load(r);
        u[m][n].x[f] *= exp2_approx(end[n][f & 1] - gate) * sRk.load(r);
        tail[CHANNEL ? n : 0][CHANNEL ? f & 1 : 0] += k * u[m][n].x[f];
      });
      if constexpr (CHANNEL) {
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) {
          FLA_UNROLL
          for (int e = 0; e < 2; ++e) {
            const float sum = sum_rows(tail[n][e]) + exp2_approx(end[n][e]) * shuffle(ends[n], 4 * (2 * t + e));
            if (g == 0) sGate.store(kBT * L::kLdG + channel + tile_channel(n, e), sum);
          }
        }
      } else {
        tail[0][0] = warp_sum(tail[0][0]) + exp2_approx(end[0][0]) * sum_rows(ends[0] + ends[1]);
      }
    }
    // Gate per channel: q o dq + k o (beta a - u) as accumulators, and this lane's part of <a, k>; from here on u is
    // u + beta a.
    const Shared<float> sGates = shared<float>(L::kStates + warp * y.own + 2048, 512);
    const auto gates_at = [&](int m, int n) { return sGates + (128 * (2 * m + n) + 4 * lane); };
    float a_rows[2][2] = {};
    if constexpr (CHANNEL) {
      // The warp's decayed rows, where its states were: [2, BT, 8].
      constexpr int kPlane = kBT * 8;
      const Shared<T> tK = sS, tQ = sS + 2 * kPlane;
      each([&](int m, int n, int f, int r, float q, float k) {
        const float diagonal = to_f32(sP.load(r * kLdP + r)), beta_a = sBeta.load(r) * a[m][n].x[f];
        gates_at(m, n).store(f, q * dq[m][n].x[f] + k * (beta_a - u[m][n].x[f]));
        a_rows[m][f / 2] += k * a[m][n].x[f];
        dq[m][n].x[f] += diagonal * k;
        u[m][n].x[f] += diagonal * q + beta_a;
      });
      // A lane's elements of a tile: decays, and the decayed rows as they are rounded. A pair of tokens adds the same
      // product of three rounded factors to the earlier's gates and takes it from the later's.
      struct Decayed {
        float by[2][4];
        Vec<T, 2> q[2][2], k[2][2];
        Vec<float, 4> gates[2];
      };
      const auto load_rows = [&](FragB<T>(&b)[2], const Shared<T>& from, int m) {
        load_b_at<true>(b[0], b[1], from + (lane / 16 * kPlane + (16 * m + lane % 16) * 8));
      };
      const auto load_gates = [&](int m, Decayed& d) {
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) d.gates[n] = gates_at(m, n).template load_vec<4>(0);
      };
      const auto store_gates = [&](int m, const Decayed& d) {
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) gates_at(m, n).template store_vec<4>(0, d.gates[n]);
      };
      const auto decay_rows = [&](int b, int m, Decayed& d) {
        FLA_UNROLL
        for (int h = 0; h < 2; ++h) {
          const int r = tile_row(m, 2 * h);
          const bool later = (r >> b & 1) != 0;
          FLA_UNROLL
          for (int n = 0; n < 2; ++n) {
            const int last = (r >> (b + 1) << (b + 1)) + (1 << b) - 1;  // of the lower half
            const Vec<float, 2> gate = sGate.load_vec<2>(r * L::kLdG + channel + tile_channel(n, 0)),
                                middle = sGate.load_vec<2>(last * L::kLdG + channel + tile_channel(n, 0));
            const int from = r * L::kLdK + channel + tile_channel(n, 0);
            const Vec<T, 2> xq = sQ.template load_vec<2>(from), xk = sK.template load_vec<2>(from);
            FLA_UNROLL
            for (int e = 0; e < 2; ++e) {
              const float x = gate.x[e] - middle.x[e], decay = exp2_approx(later ? x : -x);
              d.by[n][2 * h + e] = decay;
              d.k[n][h].x[e] = from_f32<T>(to_f32(xk.x[e]) * decay * (later ? sBeta.load(r) : 1.0F));
              d.q[n][h].x[e] = from_f32<T>(to_f32(xq.x[e]) * decay);
            }
            tK.template store_vec<2>(n * kPlane + r * 8 + frag_col(0), d.k[n][h]);
            tQ.template store_vec<2>(n * kPlane + r * 8 + frag_col(0), d.q[n][h]);
          }
        }
      };
      const auto add_dq = [&](int m, Decayed& d, const FragA<T>& P, const FragB<T>(&k)[2]) {
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) {
          FragC z;
          clear(z);
          mma(z, P, k[n]);
          FLA_UNROLL
          for (int f = 0; f < 4; ++f) {
            dq[m][n].x[f] += d.by[n][f] * z.x[f];
            d.gates[n].x[f] += to_f32(d.q[n][f / 2].x[f & 1]) * z.x[f];
          }
        }
      };
      const auto add_a = [&](int m, Decayed& d, const FragA<T>& l, const FragB<T>(&k)[2]) {
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) {
          FragC z;
          clear(z);
          mma(z, l, k[n]);
          FLA_UNROLL
          for (int h = 0; h < 2; ++h) {
            const int r = tile_row(m, 2 * h);
            const Vec<T, 2> xk = sK.template load_vec<2>(r * L::kLdK + channel + tile_channel(n, 0));
            FLA_UNROLL
            for (int e = 0; e < 2; ++e) {
              const float x = d.by[n][2 * h + e] * z.x[2 * h + e];
              u[m][n].x[2 * h + e] += sBeta.load(r) * x;
              d.gates[n].x[2 * h + e] += to_f32(d.k[n][h].x[e]) * z.x[2 * h + e];
              a_rows[m][h] += to_f32(xk.x[e]) * x;
            }
          }
        }
      };
      const auto add_u = [&](int m, Decayed& d, const FragA<T>& P, const FragB<T>(&q)[2], const FragA<T>& l,
                             const FragB<T>(&k)[2]) {
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) {
          FragC z;
          clear(z);
          mma(z, P, q[n]);
          mma(z, l, k[n]);
          FLA_UNROLL
          for (int f = 0; f < 4; ++f) {
            u[m][n].x[f] += d.by[n][f] * z.x[f];
            d.gates[n].x[f] -= to_f32(d.k[n][f / 2].x[f & 1]) * z.x[f];
          }
        }
      };
      Decayed d;
      FragB<T> k[2], q[2];
      FragA<T> x, x2;
      FLA_ROLL
      for (int b = 0; b < 4; ++b) {
        const std::uint32_t mask = pair_mask(b, false), mask_t = pair_mask(b, true), whole = b == 3 ? ~0U : 0U;
        FLA_UNROLL
        for (int m = 0; m < 2; ++m) {
          sync_warp();
          decay_rows(b, m, d);
          sync_warp();
          load_rows(k, tK, m);
          load_rows(q, tQ, m);
          const int from = 16 * m * kLdP + 16 * m;
          const auto only = [&](FragA<T>& y_tile, bool transposed) {
            const std::uint32_t keep = transposed ? mask_t : mask;
            const int other = transposed ? 2 : 1;
            FLA_UNROLL
            for (int i = 0; i < 4; ++i) y_tile.x[i] &= i == other ? whole : i % 3 == 0 ? keep : 0;
          };
          load_a(x, sP + from, kLdP);
          only(x, false);
          load_gates(m, d);
          add_dq(m, d, x, k);
          load_a(x, sL + from, kLdP);
          only(x, false);
          add_a(m, d, x, k);
          load_a_trans(x, sP + from, kLdP);
          only(x, true);
          load_a_trans(x2, sL + from, kLdP);
          only(x2, true);
          add_u(m, d, x, q, x2, k);
          store_gates(m, d);
        }
      }
      sync_warp();
      decay_rows(4, 1, d);
      decay_rows(4, 0, d);
      sync_warp();
      load_rows(k, tK, 1);
      load_rows(q, tQ, 1);
      load_a_trans(x, sP + 16 * kLdP, kLdP);
      load_a_trans(x2, sL + 16 * kLdP, kLdP);
      load_gates(0, d);
      add_u(0, d, x, q, x2, k);
      store_gates(0, d);
      load_rows(k, tK, 0);
      sync_warp();
      decay_rows(4, 1, d);  // once more, rather than in registers all the while
      load_gates(1, d);
      load_a(x, sP + 16 * kLdP, kLdP);
      add_dq(1, d, x, k);
      load_a(x, sL + 16 * kLdP, kLdP);
      add_a(1, d, x, k);
      store_gates(1, d);
    } else {
      add_lower<false>(dq, sP, sK + channel, L::kLdK);
      add_lower<false>(a, sL, sK + channel, L::kLdK);
      add_lower<true>(u, sP, sQ + channel, L::kLdK);
      // beta k, rounded as a decayed row is
      const Shared<T> tK = sS;
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        FLA_UNROLL
        for (int h = 0; h < 2; ++h) {
          const int r = tile_row(m, 2 * h);
          FLA_UNROLL
          for (int n = 0; n < 2; ++n) {
            Vec<T, 2> x = sK.template load_vec<2>(r * L::kLdK + channel + tile_channel(n, 0));
            FLA_UNROLL
            for (int e = 0; e < 2; ++e) x.x[e] = from_f32<T>(to_f32(x.x[e]) * sBeta.load(r));
            tK.template store_vec<2>(r * kLdR + tile_channel(n, 0), x);
          }
        }
      }
      sync_warp();
      add_lower<true>(u, sL, tK, kLdR);
    }

    // ---- sums over channels: <q, dq>, <k, u>, <a, k>
    const Shared<float> sums = shared<float>(L::kStates + warp * y.own, 3 * kBT);
    sync_warp();
    FLA_UNROLL
    for (int m = 0; m < 2; ++m) {
      FLA_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int r = tile_row(m, 2 * h);
        const float beta = sBeta.load(r), by_q = 1.0F / sRq.load(r), by_k = 1.0F / sRk.load(r);
        float q_sum = 0.0F, k_sum = 0.0F, a_sum = CHANNEL ? a_rows[m][h] : 0.0F;
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) {
          const int from = r * L::kLdK + channel + tile_channel(n, 0);
          const Vec<T, 2> xq = sQ.template load_vec<2>(from), xk = sK.template load_vec<2>(from);
          Vec<float, 2> of_gate;
          FLA_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int f = 2 * h + e;
            const float q = to_f32(xq.x[e]), k = to_f32(xk.x[e]);
            q_sum += q * dq[m][n].x[f];
            dq[m][n].x[f] *= by_q;
            k_sum += k * u[m][n].x[f];
            dk[m][n].x[f] = by_k * u[m][n].x[f];
            if constexpr (CHANNEL) {
              of_gate.x[e] = gates_at(m, n).load(f);
            } else {
              a_sum += k * a[m][n].x[f];
              dk[m][n].x[f] += by_k * beta * a[m][n].x[f];
            }
          }
          // In the place of the gates' sums, which have served.
          if constexpr (CHANNEL) sGate.store_vec<2>(r * L::kLdG + channel + tile_channel(n, 0), of_gate);
        }
        FLA_UNROLL
        for (int by = 1; by < 4; by *= 2) {
          q_sum += shuffle_xor(q_sum, by);
          k_sum += shuffle_xor(k_sum, by);
          a_sum += shuffle_xor(a_sum, by);
        }
        if (t == 0) {
          sums.store(r, q_sum);
          sums.store(kBT + r, k_sum);
          sums.store(2 * kBT + r, a_sum);
        }
      }
    }
    if constexpr (!CHANNEL) {
      if (lane == 0) sTail.store(warp, tail[0][0]);
    }
    if (group > 1) {
      const Shared<float> TQ = shared<float>(y.totals, kBT * L::kLdF),
                          TK = shared<float>(y.totals + 4 * kBT * L::kLdF, kBT * L::kLdF);
      FLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        FLA_UNROLL
        for (int n = 0; n < 2; ++n) {
          FLA_UNROLL
          for (int f = 0; f < 4; ++f) {
            const int to = tile_row(m, f) * L::kLdF + channel + tile_channel(n, f);
            if (j_group > 0) {
              dq[m][n].x[f] += TQ.load(to);
              dk[m][n].x[f] += TK.load(to);
            }
            TQ.store(to, dq[m][n].x[f]);
            TK.store(to, dk[m][n].x[f]);
          }
        }
      }
    }

    // ---- the gate's gradient
    float* partials = w.partials + at * entries;
    sync_threads();
    if (id < 3 * kBT) {
      float sum = 0.0F;
      FLA_UNROLL
      for (int i = 0; i < kWarps; ++i) sum += shared<float>(L::kStates + i * y.own, 3 * kBT).load(id);
      dotQ.store(id, sum);  // dotK and dotA follow
    }
    if constexpr (CHANNEL) {
      if (warp < KP / 32) {
        float sum_a = 0.0F, sum_bias = 0.0F;
        if (id < p.K) {
          const GateScale multiplier = gate_scale(p, hv);
          const float bias = gate_bias(p, hv, id);
          float sum = sGate.load(kBT * L::kLdG + id);
          FLA_ROLL
          for (int i = kBT - 1; i >= 0; --i) {
            sum += sGate.load(i * L::kLdG + id);
            if (i >= c.rows) continue;
            GateSlopes s = {1.0F, 0.0F};
            if (p.gate != GateActivation::Kind::None) {
              s = gate_slopes(p, p.gk.load(c.s.row, first + i, hv, id), bias, multiplier);
            }
            if (p.dg.present()) p.dg.store(sum * s.raw, c.s.row, first + i, hv, id);
            sum_a += sum * s.A_log;
            sum_bias += sum * s.raw;
          }
          if (parameters) partials[1 + id] = sum_bias;
        }
        sum_a = warp_sum(sum_a);
        if (lane == 0) sTail.store(warp, sum_a);
      }
    }
    sync_threads();
    if constexpr (CHANNEL) {
      if (parameters && id == kThreads - 1) {
        float sum = 0.0F;
        for (int i = 0; i < KP / 32; ++i) sum += sTail.load(i);
        partials[0] = sum;
      }
    }
    if (warp == 0) {
      const float beta = sBeta.load(lane), q_dot = dotQ.load(lane), k_dot = dotK.load(lane), a_dot = dotA.load(lane);
      totalQ.store(lane, totalQ.load(lane) + q_dot);
      totalK.store(lane, totalK.load(lane) + (CHANNEL ? k_dot : k_dot + beta * a_dot));
      if (p.dbeta.present() && lane < c.rows) {
        float d = a_dot + dotV.load(lane);
        if (p.beta_sigmoid > 0.0F) d *= beta * (1.0F - beta / p.beta_sigmoid);
        p.dbeta.store(d, c.s.row, first + lane, hv);
      }
      if constexpr (!CHANNEL) {
        if (p.g.present()) {
          float end = 0.0F;
          for (int i = 0; i < kWarps; ++i) end += sTail.load(i);
          float sum = q_dot - k_dot + beta * a_dot;
          FLA_UNROLL
          for (int by = 1; by < 32; by *= 2) {
            const float after = shuffle_down(sum, by);
            if (lane + by < 32) sum += after;
          }
          sum += end;
          float sum_a = 0.0F, sum_bias = 0.0F;
          if (lane < c.rows) {
            const GateSlopes s =
                gate_slopes(p, p.g.load(c.s.row, first + lane, hv), gate_bias(p, hv, 0), gate_scale(p, hv));
            if (p.dg.present()) p.dg.store(sum * s.raw, c.s.row, first + lane, hv);
            sum_a = sum * s.A_log;
            sum_bias = sum * s.raw;
          }
          if (parameters) {
            sum_a = warp_sum(sum_a);
            sum_bias = warp_sum(sum_bias);
            if (lane == 0) {
              partials[0] = sum_a;
              partials[1] = sum_bias;
            }
          }
        }
      }
    }
  }
  sync_threads();

  // ---- through the normalisation
  FLA_UNROLL
  for (int m = 0; m < 2; ++m) {
    FLA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int r = tile_row(m, 2 * h);
      const float rq = sRq.load(r), rk = sRk.load(r);
      const float q_by = p.normalize_q ? rq * totalQ.load(r) : 0.0F, k_by = p.normalize_k ? rk * totalK.load(r) : 0.0F;
      FLA_UNROLL
      for (int n = 0; n < 2; ++n) {
        const int col = channel + tile_channel(n, 0);
        if (r >= c.rows || col >= p.K) continue;
        const Vec<T, 2> xq = sQ.template load_vec<2>(r * L::kLdK + col),
                        xk = sK.template load_vec<2>(r * L::kLdK + col);
        Vec<T, 2> to_q, to_k;
        FLA_UNROLL
        for (int e = 0; e < 2; ++e) {
          to_q.x[e] = from_f32<T>(rq * (dq[m][n].x[2 * h + e] - to_f32(xq.x[e]) * q_by));
          to_k.x[e] = from_f32<T>(rk * (dk[m][n].x[2 * h + e] - to_f32(xk.x[e]) * k_by));
        }
        if (p.dq.present()) store_global<2>(p.dq.view.at<T>(c.s.row, first + r, hk, col), to_q);
        if (p.dk.present()) store_global<2>(p.dk.view.at<T>(c.s.row, first + r, hk, col), to_k);
      }
    }
  }
}

// ---- host

template <typename T>
std::int64_t delta_gradient_bytes(const DeltaBackwardProblem& p, const DeltaPlan& plan) {
  const int value_tiles = static_cast<int>(plan.parts * plan.columns / 16);
  const bool group = p.HV > p.H;
  return plan.width == 64    ? GradientLayout<64>(value_tiles, group).bytes
         : plan.width == 128 ? GradientLayout<128>(value_tiles, group).bytes
                             : GradientLayout<256>(value_tiles, group).bytes;
}

template <typename T, int KP, bool CHANNEL>
Status launch_gradient_kernel(const DeltaBackwardProblem& p, const DeltaChunkSpace<T>& w, Stream stream) {
  return launch<delta_gradient_kernel<T, KP, CHANNEL>>(
      {.name = "delta_gradient_kernel",
       .grid = {delta_chunk_slots(p) * p.H},
       .threads = 2 * KP,
       .shared_bytes = static_cast<std::size_t>(GradientLayout<KP>(w.value_tiles, p.HV > p.H).bytes)},
      stream, delta_args(p), w);
}

template <typename T>
Status launch_gradient(const DeltaBackwardProblem& p, const DeltaPlan& plan, const DeltaChunkSpace<T>& w,
                       Stream stream) {
  if (plan.width == 64) {
    return p.gk ? launch_gradient_kernel<T, 64, true>(p, w, stream)
                : launch_gradient_kernel<T, 64, false>(p, w, stream);
  }
  if (plan.width == 128) {
    return p.gk ? launch_gradient_kernel<T, 128, true>(p, w, stream)
                : launch_gradient_kernel<T, 128, false>(p, w, stream);
  }
  return p.gk ? launch_gradient_kernel<T, 256, true>(p, w, stream)
              : launch_gradient_kernel<T, 256, false>(p, w, stream);
}

}  // namespace fla::cuda
