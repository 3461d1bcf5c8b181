// The backward that serves every element type and stride, in fp32; D_t is the gradient of S_t, S' = e^{g} o S_{t-1}.
//   D_t += scale q do^T,  y = D_t^T k,  de = beta y,  dv = de,  dbeta = y z,  D_{t-1} = e^g o (D_t - k de^T)       (1)
//   dq = scale S_t do,  u = D_t (beta z),  b = -S' de,  dk = u + b                                                 (2)
//   dg_t = sum_{i>=t} (q o dq - k o u + k o b)_i, up to the segment's end, + rowsum(S o D) there                   (3)
// Four kernels: the forward, which keeps z and the states every 64 tokens; delta_token_reverse_kernel for (1) and u;
// delta_token_again_kernel, a block per segment, for what needs S; delta_token_gradient_kernel adds the value channels'
// and heads' parts in one order and ends (2) and (3). q and k are the normalised ones.
#include "fla/engine/delta/cuda/token.cuh"

namespace fla::cuda {

namespace {

constexpr int kStaged = 8;

struct TokenSpace {
  TokenKept kept;
  float* de;             // [B T, HV, V]
  float *u, *b, *q;      // [parts, B T, HV, K]
  float* tail;           // [parts, places, HV, K]  rowsum(S o D) at the end of the segment
  float* dbeta;          // [parts, B T, HV]
  float *sum_q, *sum_k;  // [B T, H, K]
  float* partials;       // [places, HV, 1 + C]
  std::int64_t tokens, places;
};

// Segment of a place; `rows` is 0 where there is none.
struct Segment {
  Sequence s;
  std::int64_t t0;
  int rows;
};
FLA_DEVICE Segment find_segment(const DeltaArgs& p, std::int64_t place) {
  const std::int64_t n =
      p.cu_seqlens.present()
          ? find_sequence(p.cu_seqlens.view, p.cu_seqlens.type, p.N, place,
                          [](std::int64_t m, std::int64_t begin) { return begin / kKeptTokens + 2 * m; })
          : place / ((p.T + kKeptTokens - 1) / kKeptTokens + 1);
  const Sequence s = sequence(p, n);
  const std::int64_t t0 = (place - first_kept(p, s, n)) * kKeptTokens, left = s.length - t0;
  return {s, t0, static_cast<int>(left <= 0 ? 0 : left < kKeptTokens ? left : kKeptTokens)};
}

template <int KP>
struct TokenShared {
  static constexpr int kRow = 4 * kStaged * KP, kValue = 4 * kStaged * kTokenColumns;
  static constexpr int kQ = 0, kK = kRow, kD = 2 * kRow, kDo = 3 * kRow, kZ = kDo + kValue, kB = kZ + kValue;
  static constexpr int kDe = kB + kValue, kBeta = kDe + kValue, kSum = kBeta + 4 * kStaged * kTokenWarps;
  static constexpr int bytes(int sums) { return kSum + sums * kTokenWarps * kRow; }
};

// The sum over a warp's 4 value channels of x, which belongs to channel own + 8 j of token i.
template <int KP>
FLA_DEVICE void add_columns(Shared<float> sums, int i, int channel, float x) {
  x += shuffle_xor(x, 8);
  x += shuffle_xor(x, 16);
  if (lane_id() < 8) sums.store((warp_id() * kStaged + i) * KP + channel, x);
}
template <int KP>
FLA_DEVICE float all_columns(Shared<float> sums, int i, int channel) {
  float x = 0.0F;
  FLA_UNROLL
  for (int warp = 0; warp < kTokenWarps; ++warp) x += sums.load((warp * kStaged + i) * KP + channel);
  return x;
}

template <int KP>
FLA_KERNEL(kTokenThreads, 1)
delta_token_reverse_kernel(const DeltaBackwardArgs p, const TokenSpace w) {
  using L = TokenShared<KP>;
  constexpr int kOwn = KP / 8, kTile = kStaged * KP, kValues = kStaged * kTokenColumns;
  const Shared<float> sq = shared<float>(L::kQ, kTile), sk = shared<float>(L::kK, kTile),
                      sd = shared<float>(L::kD, kTile), sdo = shared<float>(L::kDo, kValues),
                      sz = shared<float>(L::kZ, kValues), sb = shared<float>(L::kB, kValues),
                      s_beta = shared<float>(L::kBeta, kStaged * kTokenWarps),
                      sums = shared<float>(L::kSum, kTokenWarps * kTile);
  const TokenBlock b = token_block(p);
  const Sequence s = sequence(p, b.outer);
  const std::int64_t place = first_kept(p, s, b.outer);
  const GateScale multiplier = gate_scale(p, b.hv);

  float D[kOwn];
  FLA_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int c = b.own + 8 * i;
    D[i] = p.dht.present() && b.real && c < p.K ? p.dht.load(b.outer, b.hv, c, b.column) : 0.0F;
  }
  // rowsum(S o D) for the segment that ends where D now stands.
  const auto put_tail = [&](std::int64_t segment) {
    sync_threads();
    FLA_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int c = b.own + 8 * i;
      const bool inside = c < p.K && b.real;
      const float S = inside ? w.kept.states[(((place + segment + 1) * p.HV + b.hv) * p.K + c) * p.V + b.column] : 0.0F;
      add_columns<KP>(sums, 0, c, S * D[i]);
    }
    sync_threads();
    for (int c = thread_id(); c < p.K; c += kTokenThreads) {
      w.tail[((b.part * w.places + place + segment) * p.HV + b.hv) * p.K + c] = all_columns<KP>(sums, 0, c);
    }
  };
  const std::int64_t stages = (s.length + kStaged - 1) / kStaged;
  for (std::int64_t stage = stages - 1; stage >= 0; --stage) {
    const std::int64_t t0 = stage * kStaged;
    const int count = static_cast<int>(s.length - t0 < kStaged ? s.length - t0 : kStaged);
    if (stage == stages - 1 || (t0 + kStaged) % kKeptTokens == 0) put_tail(t0 / kKeptTokens);
    sync_threads();
    for (int i = warp_id(); i < count; i += kTokenWarps) {
      const std::int64_t t = token_at(p, s, t0 + i);
      stage_row<KP>(p.q, s.row, t, b.hk, p.K, p.normalize_q, sq + i * KP);
      stage_row<KP>(p.k, s.row, t, b.hk, p.K, p.normalize_k, sk + i * KP);
      stage_decay<KP>(p, s.row, t, b.hv, multiplier, sd + i * KP);
      const int j = b.part * kTokenColumns + lane_id(), to = i * kTokenColumns + lane_id();
      const bool inside = j < p.V;
      sdo.store(to, inside && p.do_.present() ? p.do_.load(s.row, t, b.hv, j) : 0.0F);
      sz.store(to, inside ? w.kept.z[((s.row * p.T + t) * p.HV + b.hv) * p.V + j] : 0.0F);
      sb.store(to, inside ? load_beta(p, s.row, t, b.hv, j) : 0.0F);
    }
    sync_threads();
    for (int i = count - 1; i >= 0; --i) {
      const int at = i * kTokenColumns + b.local;
      const float do_ = p.scale * sdo.load(at), z = sz.load(at), beta = sb.load(at), e = beta * z;
      float y = 0.0F;
      FLA_UNROLL
      for (int j = 0; j < kOwn; ++j) {
        const int c = b.own + 8 * j;
        D[j] += sq.load(i * KP + c) * do_;
        y += D[j] * sk.load(i * KP + c);
        add_columns<KP>(sums, i, c, D[j] * e);
      }
      y = warp_sum<8>(y);
      const float de = beta * y;
      FLA_UNROLL
      for (int j = 0; j < kOwn; ++j) {
        const int c = b.own + 8 * j;
        D[j] = (D[j] - sk.load(i * KP + c) * de) * sd.load(i * KP + c);
      }
      float of_beta = y * z;
      const std::int64_t t = token_at(p, s, t0 + i);
      if (b.own == 0 && b.real) {
        w.de[((s.row * p.T + t) * p.HV + b.hv) * p.V + b.column] = de;
        if (p.dv.present()) p.dv.store(de, s.row, t, b.hv, b.column);
        if (p.dbeta.present() && p.beta_per_value) {
          const float slope = p.beta_sigmoid > 0.0F ? beta * (1.0F - beta / p.beta_sigmoid) : 1.0F;
          p.dbeta.store(of_beta * slope, s.row, t, b.hv, b.column);
        }
      }
      of_beta += shuffle_xor(of_beta, 8);
      of_beta += shuffle_xor(of_beta, 16);
      if (lane_id() == 0) s_beta.store(i * kTokenWarps + warp_id(), of_beta);
    }
    sync_threads();
    for (int i = 0; i < count; ++i) {
      const std::int64_t token = s.row * p.T + token_at(p, s, t0 + i);
      for (int c = thread_id(); c < p.K; c += kTokenThreads) {
        w.u[((b.part * w.tokens + token) * p.HV + b.hv) * p.K + c] = all_columns<KP>(sums, i, c);
      }
      if (thread_id() == i) {
        float x = 0.0F;
        for (int warp = 0; warp < kTokenWarps; ++warp) x += s_beta.load(i * kTokenWarps + warp);
        w.dbeta[(b.part * w.tokens + token) * p.HV + b.hv] = x;
      }
    }
  }
  if (!p.dh0.present() || !b.real) return;
  FLA_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    if (b.own + 8 * i < p.K) p.dh0.store(D[i], b.outer, b.hv, b.own + 8 * i, b.column);
  }
}

template <int KP>
FLA_KERNEL(kTokenThreads, 1)
delta_token_again_kernel(const DeltaBackwardArgs p, const TokenSpace w) {
  using L = TokenShared<KP>;
  constexpr int kOwn = KP / 8, kTile = kStaged * KP, kValues = kStaged * kTokenColumns;
  const Shared<float> sk = shared<float>(L::kK, kTile), sd = shared<float>(L::kD, kTile),
                      sdo = shared<float>(L::kDo, kValues), sz = shared<float>(L::kZ, kValues),
                      sb = shared<float>(L::kB, kValues), sde = shared<float>(L::kDe, kValues),
                      sums_b = shared<float>(L::kSum, kTokenWarps * kTile),
                      sums_q = shared<float>(L::kSum + 4 * kTokenWarps * kTile, kTokenWarps * kTile);
  const TokenBlock b = token_block(p);
  const Segment x = find_segment(p, b.outer);
  if (x.rows == 0) return;
  const Sequence& s = x.s;
  const GateScale multiplier = gate_scale(p, b.hv);
  float S[kOwn];
  FLA_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int c = b.own + 8 * i;
    S[i] = b.real && c < p.K ? w.kept.states[((b.outer * p.HV + b.hv) * p.K + c) * p.V + b.column] : 0.0F;
  }
  for (int t0 = 0; t0 < x.rows; t0 += kStaged) {
    const int count = x.rows - t0 < kStaged ? x.rows - t0 : kStaged;
    sync_threads();
    for (int i = warp_id(); i < count; i += kTokenWarps) {
      const std::int64_t t = token_at(p, s, x.t0 + t0 + i);
      stage_row<KP>(p.k, s.row, t, b.hk, p.K, p.normalize_k, sk + i * KP);
      stage_decay<KP>(p, s.row, t, b.hv, multiplier, sd + i * KP);
      const int j = b.part * kTokenColumns + lane_id(), to = i * kTokenColumns + lane_id();
      const std::int64_t from = ((s.row * p.T + t) * p.HV + b.hv) * p.V + j;
      const bool inside = j < p.V;
      sdo.store(to, inside && p.do_.present() ? p.do_.load(s.row, t, b.hv, j) : 0.0F);
      sz.store(to, inside ? w.kept.z[from] : 0.0F);
      sb.store(to, inside ? load_beta(p, s.row, t, b.hv, j) : 0.0F);
      sde.store(to, inside ? w.de[from] : 0.0F);
    }
    sync_threads();
    for (int i = 0; i < count; ++i) {
      const int at = i * kTokenColumns + b.local;
      const float do_ = p.scale * sdo.load(at), e = sb.load(at) * sz.load(at), de = sde.load(at);
      FLA_UNROLL
      for (int j = 0; j < kOwn; ++j) {
        const int c = b.own + 8 * j;
        S[j] *= sd.load(i * KP + c);
        add_columns<KP>(sums_b, i, c, -S[j] * de);
        S[j] += sk.load(i * KP + c) * e;
        add_columns<KP>(sums_q, i, c, S[j] * do_);
      }
    }
    sync_threads();
    for (int i = 0; i < count; ++i) {
      const std::int64_t token = s.row * p.T + token_at(p, s, x.t0 + t0 + i);
      for (int c = thread_id(); c < p.K; c += kTokenThreads) {
        const std::int64_t to = ((b.part * w.tokens + token) * p.HV + b.hv) * p.K + c;
        w.b[to] = all_columns<KP>(sums_b, i, c);
        w.q[to] = all_columns<KP>(sums_q, i, c);
      }
    }
  }
}

// A gate that lets nothing through that fp32 would show: its own gradient is zero, and what the sums over the tokens
// behind it have gathered by rounding ends there.
constexpr float kClosedGate = -18.0F;

// The gates' sums are differences of larger numbers, and every token's gradient holds the rounding errors of all behind
// it: they are formed in double.
constexpr int kGradientSums = 8 * (static_cast<int>(kKeptTokens) + kTokenWarps);
constexpr std::size_t kGradientBytes = kGradientSums + 8 * kKeptTokens;

// A block per (place, key head).
FLA_KERNEL(kTokenThreads, 1)
delta_token_gradient_kernel(const DeltaBackwardArgs p, const TokenSpace w) {
  constexpr int kRows = static_cast<int>(kKeptTokens);
  const Shared<float> sRq = shared<float>(0, kRows), sRk = shared<float>(4 * kRows, kRows),
                      sWarp = shared<float>(8 * kRows, 2 * kTokenWarps);
  const Shared<double> sX = shared<double>(kGradientSums, kRows);
  const int group = p.HV / p.H, hk = block_x() % p.H, id = thread_id(), lane = lane_id();
  const int parts = (p.V + kTokenColumns - 1) / kTokenColumns;
  const std::int64_t place = block_x() / p.H;
  const bool channel = p.gk.present(), parameters = p.dA_log.present() || p.ddt_bias.present();
  const int entries = 1 + (channel ? p.K : 1);
  const Segment x = find_segment(p, place);
  if (x.rows == 0) {
    for (int i = id; parameters && i < group * entries; i += kTokenThreads) {
      w.partials[(place * p.HV + hk * group) * entries + i] = 0.0F;
    }
    return;
  }
  const Sequence& s = x.s;
  const auto token = [&](int r) { return token_at(p, s, x.t0 + r); };
  const auto sum_parts = [&](const float* from, std::int64_t t, int hv, int c) {
    float sum = 0.0F;
    for (int i = 0; i < parts; ++i) sum += from[((i * w.tokens + s.row * p.T + t) * p.HV + hv) * p.K + c];
    return sum;
  };
  for (int r = warp_id(); r < x.rows; r += kTokenWarps) {
    const auto inverse = [&](const TypedView& of, bool unit) {
      if (!unit) return 1.0F;
      const auto squares = [&](float shrink) {
        float sum = 0.0F;
        for (int c = lane; c < p.K; c += 32) {
          const float y = shrink * of.load(s.row, token(r), hk, c);
          sum += y * y;
        }
        return sum;
      };
      return inverse_norm_of_any(warp_sum(squares(1.0F)), squares);
    };
    const float rq = inverse(p.q, p.normalize_q), rk = inverse(p.k, p.normalize_k);
    if (lane == 0) {
      sRq.store(r, rq);
      sRk.store(r, rk);
    }
  }
  sync_threads();
  for (int j = 0; j < group; ++j) {
    const int hv = hk * group + j;
    const GateScale multiplier = gate_scale(p, hv);
    float sum_a = 0.0F, tail = 0.0F;
    if (id < p.K) {
      const int c = id;
      for (int i = 0; i < parts; ++i) tail += w.tail[((i * w.places + place) * p.HV + hv) * p.K + c];
      double sum = tail;
      float sum_bias = 0.0F;
      for (int r = x.rows - 1; r >= 0; --r) {
        const std::int64_t t = token(r), to = ((s.row * p.T + t) * p.H + hk) * p.K + c;
        const float dq = sum_parts(w.q, t, hv, c), u = sum_parts(w.u, t, hv, c), b = sum_parts(w.b, t, hv, c);
        w.sum_q[to] = (j > 0 ? w.sum_q[to] : 0.0F) + dq;
        w.sum_k[to] = (j > 0 ? w.sum_k[to] : 0.0F) + (u + b);
        if (!channel) continue;
        sum += static_cast<double>(p.q.load(s.row, t, hk, c) * sRq.load(r)) * dq +
               static_cast<double>(p.k.load(s.row, t, hk, c) * sRk.load(r)) * (b - u);
        const float raw = p.gk.load(s.row, t, hv, c), bias = gate_bias(p, hv, c);
        if (activate(p, raw, bias, multiplier) < kClosedGate) sum = 0.0;
        const GateSlopes g = gate_slopes(p, raw, bias, multiplier);
        const auto of_gate = static_cast<float>(sum);
        if (p.dg.present()) p.dg.store(of_gate * g.raw, s.row, t, hv, c);
        sum_a += of_gate * g.A_log;
        sum_bias += of_gate * g.raw;
      }
      if (parameters && channel) w.partials[(place * p.HV + hv) * entries + 1 + c] = sum_bias;
    }
    sum_a = warp_sum(sum_a);
    tail = warp_sum(tail);
    if (lane == 0) {
      sWarp.store(warp_id(), sum_a);
      sWarp.store(kTokenWarps + warp_id(), tail);
    }
    if (p.g.present() && !channel) {
      for (int r = warp_id(); r < x.rows; r += kTokenWarps) {
        double sum = 0.0;
        for (int c = lane; c < p.K; c += 32) {
          const std::int64_t t = token(r);
          const float u = sum_parts(w.u, t, hv, c), b = sum_parts(w.b, t, hv, c);
          sum += static_cast<double>(p.q.load(s.row, t, hk, c) * sRq.load(r)) * sum_parts(w.q, t, hv, c) +
                 static_cast<double>(p.k.load(s.row, t, hk, c) * sRk.load(r)) * (b - u);
        }
        FLA_UNROLL
        for (int by = 16; by > 0; by /= 2) sum += shuffle_xor(sum, by);
        if (lane == 0) sX.store(r, sum);
      }
    }
    if (p.dbeta.present() && !p.beta_per_value && id < x.rows) {
      float d = 0.0F;
      for (int i = 0; i < parts; ++i) d += w.dbeta[(i * w.tokens + s.row * p.T + token(id)) * p.HV + hv];
      const float beta = load_beta(p, s.row, token(id), hv, 0);
      if (p.beta_sigmoid > 0.0F) d *= beta * (1.0F - beta / p.beta_sigmoid);
      p.dbeta.store(d, s.row, token(id), hv);
    }
    sync_threads();
    if (id == 0) {
      float a = 0.0F;
      double end = 0.0;
      for (int i = 0; i < kTokenWarps; ++i) {
        a += sWarp.load(i);
        end += sWarp.load(kTokenWarps + i);
      }
      float bias = 0.0F;
      for (int r = x.rows - 1; p.g.present() && !channel && r >= 0; --r) {
        end += sX.load(r);
        const float raw = p.g.load(s.row, token(r), hv), gate_offset = gate_bias(p, hv, 0);
        if (activate(p, raw, gate_offset, multiplier) < kClosedGate) end = 0.0;
        const GateSlopes g = gate_slopes(p, raw, gate_offset, multiplier);
        const auto of_gate = static_cast<float>(end);
        if (p.dg.present()) p.dg.store(of_gate * g.raw, s.row, token(r), hv);
        a += of_gate * g.A_log;
        bias += of_gate * g.raw;
      }
      if (parameters) {
        float* to = w.partials + (place * p.HV + hv) * entries;
        to[0] = a;
        if (!channel) to[1] = bias;
      }
    }
    sync_threads();
  }
  for (int r = warp_id(); r < x.rows; r += kTokenWarps) {
    const std::int64_t t = token(r), from = ((s.row * p.T + t) * p.H + hk) * p.K;
    const float rq = sRq.load(r), rk = sRk.load(r);
    float q_dot = 0.0F, k_dot = 0.0F;
    for (int c = lane; c < p.K; c += 32) {
      q_dot += p.q.load(s.row, t, hk, c) * rq * w.sum_q[from + c];
      k_dot += p.k.load(s.row, t, hk, c) * rk * w.sum_k[from + c];
    }
    q_dot = p.normalize_q ? warp_sum(q_dot) : 0.0F;
    k_dot = p.normalize_k ? warp_sum(k_dot) : 0.0F;
    for (int c = lane; c < p.K; c += 32) {
      if (p.dq.present()) {
        p.dq.store(rq * (w.sum_q[from + c] - p.q.load(s.row, t, hk, c) * rq * q_dot), s.row, t, hk, c);
      }
      if (p.dk.present()) {
        p.dk.store(rk * (w.sum_k[from + c] - p.k.load(s.row, t, hk, c) * rk * k_dot), s.row, t, hk, c);
      }
    }
  }
}

std::size_t carve_token_space(const DeltaBackwardProblem& p, std::byte* base, TokenSpace& w) {
  std::size_t bytes = 0;
  const auto take = [&](float*& to, std::int64_t n) {
    to = n == 0 ? nullptr : reinterpret_cast<float*>(base + bytes);
    bytes += (static_cast<std::size_t>(n) * sizeof(float) + 255) / 256 * 256;
  };
  const std::int64_t parts = (p.V + kTokenColumns - 1) / kTokenColumns;
  w.tokens = p.B * p.T;
  w.places = kept_places(p);
  take(w.kept.z, w.tokens * p.HV * p.V);
  take(w.kept.states, w.places * p.HV * p.K * p.V);
  take(w.de, w.tokens * p.HV * p.V);
  take(w.u, parts * w.tokens * p.HV * p.K);
  take(w.b, parts * w.tokens * p.HV * p.K);
  take(w.q, parts * w.tokens * p.HV * p.K);
  take(w.tail, parts * w.places * p.HV * p.K);
  take(w.dbeta, parts * w.tokens * p.HV);
  take(w.sum_q, w.tokens * p.H * p.K);
  take(w.sum_k, w.tokens * p.H * p.K);
  take(w.partials, p.dA_log || p.ddt_bias ? w.places * p.HV * (1 + (p.gk ? p.K : 1)) : 0);
  return bytes;
}

template <int KP>
Status launch_token_backward(const DeltaBackwardProblem& p, const TokenSpace& w, Stream stream) {
  const DeltaBackwardArgs a = delta_args(p);
  const std::int64_t parts = (p.V + kTokenColumns - 1) / kTokenColumns;
  if (const Status s = launch<delta_token_reverse_kernel<KP>>({.name = "delta_token_reverse_kernel",
                                                               .grid = {p.N * p.HV * parts},
                                                               .threads = kTokenThreads,
                                                               .shared_bytes = TokenShared<KP>::bytes(1)},
                                                              stream, a, w);
      !s) {
    return s;
  }
  return launch<delta_token_again_kernel<KP>>({.name = "delta_token_again_kernel",
                                               .grid = {w.places * p.HV * parts},
                                               .threads = kTokenThreads,
                                               .shared_bytes = TokenShared<KP>::bytes(2)},
                                              stream, a, w);
}

}  // namespace

std::size_t delta_token_backward_workspace(const DeltaBackwardProblem& p) {
  TokenSpace w;
  return carve_token_space(p, nullptr, w);
}

Status delta_token_backward(const DeltaBackwardProblem& p, Stream stream, std::span<std::byte> workspace) {
  TokenSpace w;
  carve_token_space(p, workspace.data(), w);
  DeltaProblem forward = p;
  forward.o = forward.ht = forward.h = {};
  if (const Status s = launch_token_forward(forward, w.kept, stream); !s) return s;
  const Status s = p.K <= 64    ? launch_token_backward<64>(p, w, stream)
                   : p.K <= 128 ? launch_token_backward<128>(p, w, stream)
                                : launch_token_backward<256>(p, w, stream);
  if (!s) return s;
  if (const Status g = launch<delta_token_gradient_kernel>({.name = "delta_token_gradient_kernel",
                                                            .grid = {w.places * p.H},
                                                            .threads = kTokenThreads,
                                                            .shared_bytes = kGradientBytes},
                                                           stream, delta_args(p), w);
      !g || (!p.dA_log && !p.ddt_bias)) {
    return g;
  }
  return delta_parameter_gradients(p, w.partials, w.places, stream);
}

}  // namespace fla::cuda
