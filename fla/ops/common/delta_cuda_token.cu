// delta_token_kernel: o and the state of one (sequence, value head, 32 value channels), token after token, in fp32.
//   e_t = beta_t (v_t - (e^{g_t} o S_{t-1})^T k_t),  S_t = e^{g_t} o S_{t-1} + k_t e_t^T,  o_t = scale S_t^T q_t
// (Plain: e_t reads S_{t-1} itself.) Serves every element type, stride and gate.
// grid     N * HV * ceil(V / 32) in x; 256 threads: 8 lanes share a value channel, each keeps KP / 8 of its state
// shared   16 tokens: q, k, e^{g + gk} [16, KP] and v, beta, e^{gv} [16, 32], fp32
// offsets  int64
#include "fla/ops/common/delta_cuda_token.cuh"

namespace fla::cuda {

namespace {

constexpr int kStaged = 16;

template <int KP>
constexpr int token_shared_bytes() {
  return 4 * kStaged * (3 * KP + 3 * kTokenColumns) + 8 * kTokenWarps;
}

template <int KP>
FLA_KERNEL(kTokenThreads, 1)
delta_token_kernel(const DeltaArgs p, const TokenKept kept) {
  constexpr int kOwn = KP / 8;
  const Shared<float> sq = shared<float>(0, kStaged * KP), sk = shared<float>(4 * kStaged * KP, kStaged * KP),
                      sd = shared<float>(8 * kStaged * KP, kStaged * KP);
  constexpr int kRest = 12 * kStaged * KP, kTile = 4 * kStaged * kTokenColumns;
  const Shared<float> sv = shared<float>(kRest, kStaged * kTokenColumns),
                      sb = shared<float>(kRest + kTile, kStaged * kTokenColumns),
                      sdv = shared<float>(kRest + 2 * kTile, kStaged * kTokenColumns);
  const Shared<std::int64_t> sums = shared<std::int64_t>(kRest + 3 * kTile, kTokenWarps);

  const TokenBlock b = token_block(p);
  const Span s = sequence(p, b.outer);
  const std::int64_t nt = p.h.present() ? first_state(p, b.outer, sums) : 0;
  const std::int64_t slot = first_kept(p, s, b.outer);

  float S[kOwn];  // channel own + 8 i
  FLA_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int c = b.own + 8 * i;
    S[i] = p.h0.present() && b.real && c < p.K ? p.h0.load(b.outer, b.hv, c, b.column) : 0.0F;
  }
  const auto keep = [&](std::int64_t at) {
    FLA_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int c = b.own + 8 * i;
      if (c < p.K && b.real) kept.states[((at * p.HV + b.hv) * p.K + c) * p.V + b.column] = S[i];
    }
  };
  const float multiplier = gate_multiplier(p, b.hv);
  for (std::int64_t t0 = 0; t0 < s.length; t0 += kStaged) {
    const int count = static_cast<int>(s.length - t0 < kStaged ? s.length - t0 : kStaged);
    sync_threads();
    for (int i = warp_id(); i < count; i += kTokenWarps) {
      const std::int64_t t = token_at(p, s, t0 + i);
      stage_row<KP>(p.q, s.row, t, b.hk, p.K, p.normalize_q, sq + i * KP);
      stage_row<KP>(p.k, s.row, t, b.hk, p.K, p.normalize_k, sk + i * KP);
      stage_decay<KP>(p, s.row, t, b.hv, multiplier, sd + i * KP);
      const int j = b.part * kTokenColumns + lane_id(), to = i * kTokenColumns + lane_id();
      const bool inside = j < p.V;
      sv.store(to, inside ? p.v.load(s.row, t, b.hv, j) : 0.0F);
      sb.store(to, inside ? load_beta(p, s.row, t, b.hv, j) : 0.0F);
      sdv.store(to, inside && p.gv.present() ? expf(p.gv.load(s.row, t, b.hv, j)) : 1.0F);
    }
    sync_threads();
    if (p.h.present() && t0 % p.h_chunk == 0 && b.real) {
      FLA_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        if (b.own + 8 * i < p.K) p.h.store(S[i], s.row, nt + t0 / p.h_chunk, b.hv, b.own + 8 * i, b.column);
      }
    }
    if (kept.states != nullptr && t0 % kKeptTokens == 0) keep(slot + t0 / kKeptTokens);
    for (int i = 0; i < count; ++i) {
      const float dv = sdv.load(i * kTokenColumns + b.local);
      float before = 0.0F, after = 0.0F;
      FLA_UNROLL
      for (int j = 0; j < kOwn; ++j) {
        const int at = i * KP + b.own + 8 * j;
        const float k = sk.load(at), was = S[j];
        S[j] = was * sd.load(at) * dv;
        before += was * k;
        after += S[j] * k;
      }
      const float z = sv.load(i * kTokenColumns + b.local) - warp_sum<8>(p.decayed ? after : before);
      const float e = sb.load(i * kTokenColumns + b.local) * z;
      float out = 0.0F;
      FLA_UNROLL
      for (int j = 0; j < kOwn; ++j) {
        const int at = i * KP + b.own + 8 * j;
        S[j] += sk.load(at) * e;
        out += S[j] * sq.load(at);
      }
      out = warp_sum<8>(out);
      if (b.own != 0 || !b.real) continue;
      const std::int64_t t = token_at(p, s, t0 + i);
      if (p.o.present()) p.o.store(p.scale * out, s.row, t, b.hv, b.column);
      if (kept.z != nullptr) kept.z[((s.row * p.T + t) * p.HV + b.hv) * p.V + b.column] = z;
    }
  }
  if (kept.states != nullptr) keep(slot + (s.length + kKeptTokens - 1) / kKeptTokens);
  if (!p.ht.present() || !b.real) return;
  FLA_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    if (b.own + 8 * i < p.K) p.ht.store(S[i], b.outer, b.hv, b.own + 8 * i, b.column);
  }
}

}  // namespace

Status launch_token_forward(const DeltaProblem& p, const TokenKept& kept, Stream stream) {
  Launch l{.name = "delta_token_kernel",
           .grid = {p.N * p.HV * ((p.V + kTokenColumns - 1) / kTokenColumns)},
           .threads = kTokenThreads};
  const DeltaArgs a = delta_args(p);
  if (p.K <= 64) {
    l.shared_bytes = token_shared_bytes<64>();
    return launch<delta_token_kernel<64>>(l, stream, a, kept);
  }
  if (p.K <= 128) {
    l.shared_bytes = token_shared_bytes<128>();
    return launch<delta_token_kernel<128>>(l, stream, a, kept);
  }
  l.shared_bytes = token_shared_bytes<256>();
  return launch<delta_token_kernel<256>>(l, stream, a, kept);
}

Status delta_token_forward(const DeltaProblem& p, Stream stream) { return launch_token_forward(p, {}, stream); }

}  // namespace fla::cuda
