// delta_decode_kernel: 1 to 8 tokens a sequence on states whose value channels lie beside each other: each state is
// read and written once, 16 bytes a thread at a time, all of them asked for before the first is used, and after the
// tokens, so that these need no registers beside them. The equations are delta_token_kernel's.
//
// grid     N * HV * ceil(V / 64) in x; 256 threads: a thread has 16 bytes of each of its neighbouring key channels
// shared   q, k, e^{g + gk} [T, KP], v, beta [T, 64], k^T q [T], sums over a warp's keys [2, 8, 2, 64], fp32
// offsets  int64
#include "fla/ops/common/delta_cuda_token.cuh"

namespace fla::cuda {

namespace {

constexpr int kColumns = 64, kThreads = 256, kWarps = kThreads / 32, kMostTokens = 8;

template <typename T, int KP>
struct DecodeShape {
  static constexpr int kEach = 16 / static_cast<int>(sizeof(T));  // value channels of a thread
  static constexpr int kLanes = kColumns / kEach;                 // threads that share a key channel
  static constexpr int kRows = KP * kLanes / kThreads;            // key channels of a thread
  static constexpr int kPiece = kRows < 4 || sizeof(T) == 4 ? 2 : 4;
  // Blocks that a multiprocessor's registers hold with all states in them.
  static constexpr int kBlocks = KP == 256 ? 1 : sizeof(T) == 2 ? 2 : KP == 64 ? 4 : 3;
  static constexpr int bytes(int tokens) { return 4 * (tokens * (3 * KP + 2 * kColumns + 1) + 4 * kWarps * kColumns); }
};

template <typename T, int KP>
FLA_KERNEL(kThreads, (DecodeShape<T, KP>::kBlocks))
delta_decode_kernel(const DeltaArgs p) {
  using Shape = DecodeShape<T, KP>;
  constexpr int kEach = Shape::kEach, kLanes = Shape::kLanes, kRows = Shape::kRows, kPiece = Shape::kPiece;
  const int parts = (p.V + kColumns - 1) / kColumns, part = block_x() % parts, hv = block_x() / parts % p.HV;
  const int n = block_x() / parts / p.HV, hk = hv / (p.HV / p.H), tokens = static_cast<int>(p.T), v0 = part * kColumns;
  const int id = thread_id(), local = id % kLanes * kEach, first = id / kLanes * kRows, column = v0 + local;

  const std::int64_t source = source_slot(p, n);
  const bool padding = source < 0;
  const int key_tile = tokens * KP, value_tile = tokens * kColumns;
  const Shared<float> sq = shared<float>(0, key_tile), sk = shared<float>(4 * key_tile, key_tile),
                      sd = shared<float>(8 * key_tile, key_tile), sv = shared<float>(12 * key_tile, value_tile),
                      sb = shared<float>(12 * key_tile + 4 * value_tile, value_tile),
                      partial = shared<float>(12 * key_tile + 8 * value_tile, 4 * kWarps * kColumns),
                      sqk = shared<float>(12 * key_tile + 8 * value_tile + 16 * kWarps * kColumns, tokens);
  const float multiplier = gate_multiplier(p, hv);
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
      const float by_q = p.scale * (p.normalize_q ? inverse_norm(warp_sum(qq)) : 1.0F);
      const float by_k = p.normalize_k ? inverse_norm(warp_sum(kk)) : 1.0F;
      FLA_UNROLL
      for (int i = 0; i < KP / 32; ++i) {
        sq.store(t * KP + lane_id() + 32 * i, by_q * q[i]);
        sk.store(t * KP + lane_id() + 32 * i, by_k * k[i]);
      }
      qk = warp_sum(qk) * by_q * by_k;
      if (lane_id() == 0) sqk.store(t, qk);
    } else if (task % 3 == 1) {
      stage_decay<KP>(p, n, t, hv, multiplier, sd + t * KP);
    } else {
      FLA_UNROLL
      for (int j = lane_id(); j < kColumns; j += 32) {
        const bool inside = v0 + j < p.V;
        sv.store(t * kColumns + j, inside ? p.v.load(n, t, hv, v0 + j) : 0.0F);
        sb.store(t * kColumns + j, inside ? load_beta(p, n, t, hv, v0 + j) : 0.0F);
      }
    }
  }
  Vec<T, kEach> raw[kRows];
  const T* from = p.h0.present() && !padding ? p.h0.view.at<T>(source, hv, first) + column : nullptr;
  FLA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    raw[i] = {};
    if (from != nullptr && column < p.V && first + i < p.K) raw[i] = load_global<kEach>(from + i * p.h0.view.stride[2]);
  }
  sync_threads();

  float S[kRows][kEach];
  FLA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FLA_UNROLL
    for (int e = 0; e < kEach; ++e) S[i][e] = to_f32(raw[i].x[e]);
  }
  FLA_ROLL
  for (int t = 0; t < tokens; ++t) {
    float seen[kEach] = {}, out[kEach] = {};
    FLA_UNROLL
    for (int i = 0; i < kRows; i += kPiece) {
      const int at = t * KP + first + i;
      const auto d = sd.load_vec<kPiece>(at), k = sk.load_vec<kPiece>(at), q = sq.load_vec<kPiece>(at);
      FLA_UNROLL
      for (int u = 0; u < kPiece; ++u) {
        FLA_UNROLL
        for (int e = 0; e < kEach; ++e) {
          float& x = S[i + u][e];
          const float was = x;
          x *= d.x[u];
          seen[e] += k.x[u] * (p.decayed ? x : was);
          out[e] += q.x[u] * x;
        }
      }
    }
    FLA_UNROLL
    for (int e = 0; e < kEach; ++e) {
      FLA_UNROLL
      for (int by = kLanes; by < 32; by *= 2) {
        seen[e] += shuffle_xor(seen[e], by);
        out[e] += shuffle_xor(out[e], by);
      }
    }
    const Shared<float> sums = partial + t % 2 * (2 * kWarps * kColumns);  // two, so that one barrier a token is enough
    if (lane_id() < kLanes) {
      FLA_UNROLL
      for (int e = 0; e < kEach; e += 4) {
        const int to = warp_id() * kColumns + local + e;
        sums.store_vec<4>(to, Vec<float, 4>{{seen[e], seen[e + 1], seen[e + 2], seen[e + 3]}});
        sums.store_vec<4>(kWarps * kColumns + to, Vec<float, 4>{{out[e], out[e + 1], out[e + 2], out[e + 3]}});
      }
    }
    sync_threads();
    float error[kEach] = {};
    FLA_UNROLL
    for (int e = 0; e < kEach; e += 4) {
      FLA_ROLL
      for (int w = 0; w < kWarps; w += 2) {  // all at once would not leave the states their registers
        const Vec<float, 4> x = sums.load_vec<4>(w * kColumns + local + e),
                            y = sums.load_vec<4>((w + 1) * kColumns + local + e);
        FLA_UNROLL
        for (int f = 0; f < 4; ++f) error[e + f] += x.x[f] + y.x[f];
      }
      const Vec<float, 4> v = sv.load_vec<4>(t * kColumns + local + e), beta = sb.load_vec<4>(t * kColumns + local + e);
      FLA_UNROLL
      for (int f = 0; f < 4; ++f) error[e + f] = beta.x[f] * (v.x[f] - error[e + f]);
    }
    FLA_UNROLL
    for (int i = 0; i < kRows; i += kPiece) {
      const auto k = sk.load_vec<kPiece>(t * KP + first + i);
      FLA_UNROLL
      for (int u = 0; u < kPiece; ++u) {
        FLA_UNROLL
        for (int e = 0; e < kEach; ++e) S[i + u][e] += k.x[u] * error[e];
      }
    }
    if (p.o.present() && id < kColumns && v0 + id < p.V) {
      float seen_all = 0.0F, out_all = 0.0F;
      FLA_ROLL
      for (int w = 0; w < kWarps; ++w) {
        seen_all += sums.load(w * kColumns + id);
        out_all += sums.load((kWarps + w) * kColumns + id);
      }
      out_all += sqk.load(t) * sb.load(t * kColumns + id) * (sv.load(t * kColumns + id) - seen_all);
      p.o.store(padding ? 0.0F : out_all, n, t, hv, v0 + id);
    }

    const bool last = t + 1 == tokens;
    std::int64_t slot = -1;
    if (p.ht.present() && !padding && (p.slots_by_token || last)) {
      slot = p.slot_indices.present() ? slot_of(p, n, t) : n;
    }
    unsigned places = (slot >= 0 ? 1U : 0U) | (p.steps.present() ? 2U : 0U);
    for (; places != 0; places &= places - 1) {
      const bool pool = (places & 1U) != 0;
      T* to = (pool ? p.ht.view.at<T>(slot, hv, first) : p.steps.view.at<T>(n, t, hv, first)) + column;
      const std::int64_t stride = pool ? p.ht.view.stride[2] : p.steps.view.stride[3];
      FLA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        Vec<T, kEach> x;
        FLA_UNROLL
        for (int e = 0; e < kEach; ++e) x.x[e] = from_f32<T>(padding ? 0.0F : S[i][e]);
        if (column < p.V && first + i < p.K) store_global<kEach>(to + i * stride, x);
      }
    }
  }
}

template <typename T, int KP>
Status launch_decode(const DeltaProblem& p, Stream stream) {
  return launch<delta_decode_kernel<T, KP>>(
      {.name = "delta_decode_kernel",
       .grid = {p.N * p.HV * ((p.V + kColumns - 1) / kColumns)},
       .threads = kThreads,
       .shared_bytes = static_cast<std::size_t>(DecodeShape<T, KP>::bytes(static_cast<int>(p.T)))},
      stream, delta_args(p));
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
  for (const TensorView* t : {&p.h0, &p.ht, &p.slots.steps}) {
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
