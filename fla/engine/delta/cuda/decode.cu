// delta_decode_kernel: 1 to 8 tokens a sequence on states whose value channels lie beside each other: each state is
// read and written once, and all of a thread's part of it is asked for before the first is used. The equations are
// delta_token_kernel's.
//
// grid     N * HV * ceil(V / 64) in x; a thread has 4 value channels of neighbouring key channels
// shared   the state, where there is one token; q, k, e^{g + gk} [T, KP], v, beta [T, 64], sums over a warp's keys
//          [2, 2, warps, 64], k^T q [T], fp32
// offsets  int64
#include "fla/engine/delta/cuda/token.cuh"

namespace fla::cuda {

namespace {

// Value channels of a block and of a thread; threads that share a key channel.
constexpr int kColumns = 64, kEach = 4, kLanes = kColumns / kEach, kMostTokens = 8;

// ONE: a single token. Its states wait in shared memory, which holds more of them than registers do, and many small
// blocks keep memory busier than few large ones.
template <typename T, int KP, bool ONE>
struct DecodeShape {
  static constexpr int kThreads = ONE ? 128 : 256, kWarps = kThreads / 32;
  static constexpr int kRows = KP * kLanes / kThreads;  // key channels of a thread
  static constexpr int kStateBytes = ONE ? KP * kColumns * static_cast<int>(sizeof(T)) : 0;
  // Blocks that fit on a multiprocessor.
  static constexpr int kBlocksOfOne = KP == 64 ? 8 : sizeof(T) == 2 ? (KP == 128 ? 8 : 5) : KP == 128 ? 5 : 3;
  static constexpr int kBlocks = ONE ? kBlocksOfOne : KP == 64 ? 3 : KP == 128 ? 2 : 1;
  static constexpr int bytes(int tokens) {
    return kStateBytes + 4 * (tokens * (3 * KP + 2 * kColumns + 1) + 4 * kWarps * kColumns);
  }
};

template <typename T, int KP, bool ONE>
FLA_KERNEL((DecodeShape<T, KP, ONE>::kThreads), (DecodeShape<T, KP, ONE>::kBlocks))
delta_decode_kernel(const DeltaArgs p) {
  using Shape = DecodeShape<T, KP, ONE>;
  constexpr int kThreads = Shape::kThreads, kWarps = Shape::kWarps, kRows = Shape::kRows;
  const int parts = (p.V + kColumns - 1) / kColumns, part = block_x() % parts, hv = block_x() / parts % p.HV;
  const int hk = hv / (p.HV / p.H), v0 = part * kColumns;
  const std::int64_t n = block_x() / parts / p.HV;
  const int tokens = ONE ? 1 : static_cast<int>(p.T);
  const int id = thread_id(), local = id % kLanes * kEach, first = id / kLanes * kRows, column = v0 + local;

  const std::int64_t source = source_slot(p, n);
  const bool padding = source < 0, inside = column < p.V, starts = p.h0.present() && !padding && inside;
  const T* from = starts ? p.h0.view.at<T>(source, hv, first) + column : nullptr;
  const auto has_row = [&](int i) { return first + i < p.K; };
  const Shared<T> waiting = shared<T>(0, Shape::kStateBytes / static_cast<int>(sizeof(T))) + id * kEach;
  if constexpr (ONE) {
    FLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const bool real = starts && has_row(i);
      constexpr int kBytes = kEach * static_cast<int>(sizeof(T));
      cp_async<kBytes>(waiting + i * kThreads * kEach, real ? from + i * p.h0.view.stride[2] : p.q.view.at<T>(0),
                       real ? kBytes : 0);
    }
    cp_async_commit();
  }

  const int key_tile = tokens * KP, value_tile = tokens * kColumns;
  int place = Shape::kStateBytes;
  const auto take = [&](int count) {
    place += 4 * count;
    return shared<float>(place - 4 * count, count);
  };
  const Shared<float> sq = take(key_tile), sk = take(key_tile), sd = take(key_tile), sv = take(value_tile),
                      sb = take(value_tile), partial = take(4 * kWarps * kColumns), sqk = take(tokens);
  for (int task = warp_id(); task < 3 * tokens; task += kWarps) {
    const int t = task / 3;
    if (task % 3 == 0) {
      float q[KP / 32] = {}, k[KP / 32] = {}, qq = 0.0F, kk = 0.0F, qk = 0.0F;
      load_lanes(p.q, n, t, hk, p.K, q);
      load_lanes(p.k, n, t, hk, p.K, k);
      FLA_UNROLL
      for (int i = 0; i < KP / 32; ++i) {
        qq += q[i] * q[i];
        kk += k[i] * k[i];
        qk += q[i] * k[i];
      }
      const auto squares_of = [](const float(&x)[KP / 32]) {
        return [&x](float shrink) {
          float sum = 0.0F;
          FLA_UNROLL
          for (const float y : x) sum += shrink * y * (shrink * y);
          return sum;
        };
      };
      if (p.normalize_q) qq = warp_sum(qq);
      if (p.normalize_k) kk = warp_sum(kk);
      const float by_q = p.scale * (p.normalize_q ? inverse_norm_of_any(qq, squares_of(q)) : 1.0F);
      const float by_k = p.normalize_k ? inverse_norm_of_any(kk, squares_of(k)) : 1.0F;
      const bool any_long = (p.normalize_q && qq >= kLongSquares) || (p.normalize_k && kk >= kLongSquares);
      float units = 0.0F;  // of rows that are too long for their product
      FLA_UNROLL
      for (int i = 0; i < KP / 32; ++i) {
        sq.store(t * KP + lane_id() + 32 * i, by_q * q[i]);
        sk.store(t * KP + lane_id() + 32 * i, by_k * k[i]);
        if (any_long) units += by_q * q[i] * (by_k * k[i]);
      }
      qk = any_long ? warp_sum(units) : warp_sum(qk) * by_q * by_k;
      if (lane_id() == 0) sqk.store(t, qk);
    } else if (task % 3 == 1) {
      stage_decay<KP>(p, n, t, hv, gate_scale(p, hv), sd + t * KP);
    } else {
      FLA_UNROLL
      for (int j = lane_id(); j < kColumns; j += 32) {
        const bool real = v0 + j < p.V;
        sv.store(t * kColumns + j, real ? p.v.load(n, t, hv, v0 + j) : 0.0F);
        sb.store(t * kColumns + j, real ? load_beta(p, n, t, hv, v0 + j) : 0.0F);
      }
    }
  }
  float S[ONE ? 1 : kRows][kEach];
  if constexpr (ONE) {
    cp_async_wait<0>();
  } else {
    FLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Vec<T, kEach> x = {};
      if (starts && has_row(i)) x = load_global<kEach>(from + i * p.h0.view.stride[2]);
      FLA_UNROLL
      for (int e = 0; e < kEach; ++e) S[i][e] = to_f32(x.x[e]);
    }
  }
  sync_threads();

  // The state's row i before token t, which the next call for it replaces.
  const auto row_before = [&](int i) {
    Vec<float, kEach> x;
    if constexpr (ONE) {
      const Vec<T, kEach> raw = waiting.template load_vec<kEach>(i * kThreads * kEach);
      FLA_UNROLL
      for (int e = 0; e < kEach; ++e) x.x[e] = to_f32(raw.x[e]);
    } else {
      FLA_UNROLL
      for (int e = 0; e < kEach; ++e) x.x[e] = S[i][e];
    }
    return x;
  };
  FLA_ROLL
  for (int t = 0; t < tokens; ++t) {
    Vec<float, kEach> seen = {}, out = {};
    FLA_UNROLL
    for (int i = 0; i < kRows; i += 4) {
      const int at = t * KP + first + i;
      const Vec<float, 4> d = sd.load_vec<4>(at), k = sk.load_vec<4>(at), q = sq.load_vec<4>(at);
      FLA_UNROLL
      for (int u = 0; u < 4; ++u) {
        const Vec<float, kEach> x = row_before(i + u);
        FLA_UNROLL
        for (int e = 0; e < kEach; ++e) {
          const float decayed = d.x[u] * x.x[e];
          seen.x[e] += k.x[u] * (p.decayed ? decayed : x.x[e]);
          out.x[e] += q.x[u] * decayed;
          if constexpr (!ONE) S[i + u][e] = decayed;
        }
      }
    }
    FLA_UNROLL
    for (int e = 0; e < kEach; ++e) {
      FLA_UNROLL
      for (int by = kLanes; by < 32; by *= 2) {
        seen.x[e] += shuffle_xor(seen.x[e], by);
        out.x[e] += shuffle_xor(out.x[e], by);
      }
    }
    const Shared<float> sums = partial + t % 2 * (2 * kWarps * kColumns);  // two, so that one barrier a token is enough
    if (lane_id() < kLanes) {
      sums.store_vec<kEach>(warp_id() * kColumns + local, seen);
      sums.store_vec<kEach>((kWarps + warp_id()) * kColumns + local, out);
    }
    sync_threads();
    const auto sum_of_warps = [&](Shared<float> from_warps) {
      Vec<float, kEach> sum = {};
      FLA_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        const Vec<float, kEach> x = from_warps.load_vec<kEach>(w * kColumns + local);
        FLA_UNROLL
        for (int e = 0; e < kEach; ++e) sum.x[e] += x.x[e];
      }
      return sum;
    };
    Vec<float, kEach> error = sum_of_warps(sums);
    {
      const Vec<float, kEach> v = sv.load_vec<kEach>(t * kColumns + local),
                              beta = sb.load_vec<kEach>(t * kColumns + local);
      FLA_UNROLL
      for (int e = 0; e < kEach; ++e) error.x[e] = beta.x[e] * (v.x[e] - error.x[e]);
    }
    std::int64_t slot = -1;
    if (p.ht.present() && !padding && (p.slots_by_token || t + 1 == tokens)) {
      slot = p.slot_indices.present() ? slot_of(p, n, t) : n;
    }
    T* pool = slot >= 0 ? p.ht.view.at<T>(slot, hv, first) + column : nullptr;
    T* step = p.steps.present() ? p.steps.view.at<T>(n, t, hv, first) + column : nullptr;
    FLA_UNROLL
    for (int i = 0; i < kRows; i += 4) {
      const Vec<float, 4> d = sd.load_vec<4>(t * KP + first + i), k = sk.load_vec<4>(t * KP + first + i);
      FLA_UNROLL
      for (int u = 0; u < 4; ++u) {
        Vec<float, kEach> x = row_before(i + u);
        Vec<T, kEach> y;
        FLA_UNROLL
        for (int e = 0; e < kEach; ++e) {
          if constexpr (ONE) x.x[e] *= d.x[u];
          x.x[e] += k.x[u] * error.x[e];
          if constexpr (!ONE) S[i + u][e] = x.x[e];
          y.x[e] = from_f32<T>(padding ? 0.0F : x.x[e]);
        }
        if (!inside || !has_row(i + u)) continue;
        if (pool != nullptr) store_global<kEach>(pool + (i + u) * p.ht.view.stride[2], y);
        if (step != nullptr) store_global<kEach>(step + (i + u) * p.steps.view.stride[3], y);
      }
    }
    if (p.o.present() && warp_id() == t % kWarps && lane_id() < kLanes && inside) {
      const Vec<float, kEach> all = sum_of_warps(sums + kWarps * kColumns);
      FLA_UNROLL
      for (int e = 0; e < kEach; ++e) {
        p.o.store(padding ? 0.0F : all.x[e] + sqk.load(t) * error.x[e], n, t, hv, column + e);
      }
    }
  }
}

template <typename T, int KP, bool ONE>
Status launch_decode(const DeltaProblem& p, Stream stream) {
  using Shape = DecodeShape<T, KP, ONE>;
  return launch<delta_decode_kernel<T, KP, ONE>>(
      {.name = "delta_decode_kernel",
       .grid = {p.N * p.HV * ((p.V + kColumns - 1) / kColumns)},
       .threads = Shape::kThreads,
       .shared_bytes = static_cast<std::size_t>(Shape::bytes(static_cast<int>(p.T)))},
      stream, delta_args(p));
}

template <typename T, int KP>
Status launch_decode(const DeltaProblem& p, Stream stream) {
  return p.T == 1 ? launch_decode<T, KP, true>(p, stream) : launch_decode<T, KP, false>(p, stream);
}

template <typename T>
Status launch_decode(const DeltaProblem& p, Stream stream) {
  if (p.K <= 64) return launch_decode<T, 64>(p, stream);
  if (p.K <= 128) return launch_decode<T, 128>(p, stream);
  return launch_decode<T, 256>(p, stream);
}

}  // namespace

bool delta_decode_serves(const DeltaProblem& p) {
  if (p.T < 1 || p.T > kMostTokens || p.cu_seqlens || p.reverse || p.gv || p.h || (!p.h0 && !p.ht)) return false;
  const DType type = p.h0 ? p.h0.dtype : p.ht.dtype;
  for (const TensorView* t : {&p.h0, &p.ht, &p.slots().steps}) {
    if (*t && (t->dtype != type || !vectorizable(*t))) return false;
  }
  return p.V * static_cast<std::int64_t>(size_of(type)) % 16 == 0;
}

Status delta_decode_forward(const DeltaProblem& p, Stream stream) {
  switch (p.h0 ? p.h0.dtype : p.ht.dtype) {
    case DType::BF16: return launch_decode<bf16>(p, stream);
    case DType::F16: return launch_decode<f16>(p, stream);
    default: return launch_decode<float>(p, stream);
  }
}

}  // namespace fla::cuda
