// The double-precision reference of log_linear_attn: README.md (1) to (5), written for reading. The forward is the
// counter (2) token by token, the backward goes pair by pair. It shares no helper with any kernel.
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "fla/engine/common/ref_access.h"
#include "fla/ops/log_linear_attn/log_linear_attn_sequence.h"
#include "fla/registry/registry.h"

namespace fla {

namespace {

using reference::load;
using reference::store;
using Vector = std::vector<double>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t level(std::int64_t i, std::int64_t j) {
  std::int64_t bits = 0;
  for (std::int64_t x = i ^ j; x > 0; x >>= 1) ++bits;
  return bits;
}

// One sequence and head.
struct Head {
  const LogLinearAttnArgs& a;
  LogLinearSequence s;
  std::int64_t n, h, K, V, L;
  Vector S;  // [L, K, V]

  Head(const LogLinearAttnArgs& args, std::int64_t sequence, std::int64_t head)
      : a(args),
        s(args, sequence),
        n(sequence),
        h(head),
        K(args.q.dim(3)),
        V(args.v.dim(3)),
        L(args.level_scales.dim(3)),
        S(size(L * K * V)) {
    for (std::int64_t b = 0; b < L; ++b)
      for (std::int64_t i = 0; i < K && a.past_state && (s.past >> b & 1) != 0; ++i)
        for (std::int64_t j = 0; j < V; ++j) at(b, i, j) = load(a.past_state, n, h, b, i, j);
  }
  double& at(std::int64_t b, std::int64_t i, std::int64_t j) { return S[size((b * K + i) * V + j)]; }
  double q(std::int64_t t, std::int64_t c) const { return load(a.q, s.row, s.begin + t, 0, c); }
  double k(std::int64_t t, std::int64_t c) const { return load(a.k, s.row, s.begin + t, 0, c); }
  double v(std::int64_t t, std::int64_t c) const { return load(a.v, s.row, s.begin + t, h, c); }
  double g(std::int64_t t) const { return load(a.g, s.row, s.begin + t, h); }
  double lambda(std::int64_t t, std::int64_t l) const { return load(a.level_scales, s.row, s.begin + t, h, l); }
  double score(std::int64_t i, std::int64_t j) const {
    double dot = 0.0;
    for (std::int64_t c = 0; c < K; ++c) dot += q(i, c) * k(j, c);
    return dot;
  }

  void decay(std::int64_t t) {
    const double e = std::exp(g(t));
    for (double& x : S) x *= e;
  }
  // The counter's step after token t, which writes nothing when only the past is followed.
  void merge(std::int64_t t, bool write) {
    Vector carry(size(K * V));
    for (std::int64_t i = 0; i < K && write; ++i)
      for (std::int64_t j = 0; j < V; ++j) carry[size(i * V + j)] = k(t, i) * v(t, j);
    std::int64_t b = 0;
    for (; ((s.past + t) >> b & 1) != 0; ++b)
      for (std::int64_t x = 0; x < K * V; ++x) {
        carry[size(x)] += S[size(b * K * V + x)];
        S[size(b * K * V + x)] = 0.0;
      }
    for (std::int64_t x = 0; x < K * V; ++x) S[size(b * K * V + x)] = carry[size(x)];
  }
};

Status forward(const LogLinearAttnArgs& a, const CallInfo&, const LaunchInfo& launch) {
  const std::int64_t H = a.v.dim(2);
  launch.pool->run(log_linear_sequences(a) * H, [&](std::int64_t task, int) {
    Head w(a, task / H, task % H);
    for (std::int64_t t = 0; t < w.s.length; ++t) {
      w.decay(t);
      const std::int64_t position = w.s.past + t;
      const double own = a.o ? w.lambda(t, 0) * w.score(t, t) : 0.0;
      for (std::int64_t j = 0; j < w.V && a.o; ++j) {
        double o = own * w.v(t, j);
        for (std::int64_t b = 0; b + 1 < w.L; ++b)
          for (std::int64_t i = 0; i < w.K && (position >> b & 1) != 0; ++i)
            o += w.lambda(t, b + 1) * w.at(b, i, j) * w.q(t, i);
        store(a.o, o, w.s.row, w.s.begin + t, w.h, j);
      }
      w.merge(t, true);
    }
    for (std::int64_t b = 0; b < w.L && a.final_state; ++b)
      for (std::int64_t i = 0; i < w.K; ++i)
        for (std::int64_t j = 0; j < w.V; ++j) store(a.final_state, w.at(b, i, j), w.n, w.h, b, i, j);
  });
  return {};
}

Status backward(const LogLinearAttnBackwardArgs& a, const CallInfo&, const LaunchInfo& launch) {
  const std::int64_t H = a.v.dim(2), K = a.q.dim(3), V = a.v.dim(3), L = a.level_scales.dim(3);
  launch.pool->run(log_linear_sequences(a), [&](std::int64_t n, int) {
    const LogLinearSequence s(a, n);
    const std::int64_t T = s.length;
    Vector dq(size(T * K)), dk(size(T * K));
    for (std::int64_t h = 0; h < H; ++h) {
      Head w(a, n, h);
      const auto up = [&](std::int64_t t, std::int64_t j) {
        return a.do_ ? load(a.do_, s.row, s.begin + t, h, j) : 0.0;
      };
      Vector dv(size(T * V)), dG(size(T)), dl(size(T * L));
      for (std::int64_t i = 0; i < T; ++i) {
        w.decay(i);
        for (std::int64_t b = 0; b + 1 < L; ++b) {  // what is left of the past, still in buckets
          if (((s.past + i) >> b & 1) == 0) continue;
          double use = 0.0;
          for (std::int64_t x = 0; x < K; ++x) {
            double read = 0.0;
            for (std::int64_t y = 0; y < V; ++y) read += w.at(b, x, y) * up(i, y);
            dq[size(i * K + x)] += w.lambda(i, b + 1) * read;
            use += w.q(i, x) * read;
          }
          dl[size(i * L + b + 1)] += use;
          dG[size(i)] += w.lambda(i, b + 1) * use;
        }
        w.merge(i, false);
        double gap = 0.0;  // G_i - G_j, summed outwards from the diagonal
        for (std::int64_t j = i; j >= 0; --j) {
          const std::int64_t l = level(s.past + i, s.past + j);
          const double e = std::exp(gap), dot = w.score(i, j), lambda = w.lambda(i, l);
          double dP = 0.0;
          for (std::int64_t y = 0; y < V; ++y) {
            dP += up(i, y) * w.v(j, y);
            dv[size(j * V + y)] += lambda * e * dot * up(i, y);
          }
          dl[size(i * L + l)] += dP * e * dot;
          for (std::int64_t x = 0; x < K; ++x) {
            dq[size(i * K + x)] += dP * lambda * e * w.k(j, x);
            dk[size(j * K + x)] += dP * lambda * e * w.q(i, x);
          }
          if (j < i) {
            dG[size(i)] += dP * lambda * e * dot;
            dG[size(j)] -= dP * lambda * e * dot;
          }
          gap += w.g(j);
        }
      }
      double sum = 0.0;
      for (std::int64_t t = T - 1; t >= 0; --t) {
        sum += dG[size(t)];
        if (a.dg) store(a.dg, sum, s.row, s.begin + t, h);
        for (std::int64_t y = 0; y < V && a.dv; ++y) store(a.dv, dv[size(t * V + y)], s.row, s.begin + t, h, y);
        for (std::int64_t l = 0; l < L && a.dlevel_scales; ++l)
          store(a.dlevel_scales, dl[size(t * L + l)], s.row, s.begin + t, h, l);
      }
    }
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t x = 0; x < K; ++x) {
        if (a.dq) store(a.dq, dq[size(t * K + x)], s.row, s.begin + t, 0, x);
        if (a.dk) store(a.dk, dk[size(t * K + x)], s.row, s.begin + t, 0, x);
      }
  });
  return {};
}

}  // namespace

void register_log_linear_attn_ref(Registry& r) {
  r.add(Kernel<LogLinearAttnArgs>{.function = kChunkLogLinearAttn,
                                  .backend = kReference,
                                  .name = "log_linear.recurrence",
                                  .verify = {},
                                  .workspace = {},
                                  .launch = forward});
  r.add(Kernel<LogLinearAttnBackwardArgs>{.function = kChunkLogLinearAttnBackward,
                                          .backend = kReference,
                                          .name = "log_linear.pairs",
                                          .verify = {},
                                          .workspace = {},
                                          .launch = backward});
}

}  // namespace fla
