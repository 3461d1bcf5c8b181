#include "fla/engine/slot/ref.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "fla/engine/common/ref_access.h"

namespace fla::reference {

namespace {

using Vector = std::vector<double>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// One sequence and head: local time t = 0, 1, ... in the direction of the recurrence.
struct Walk {
  const SlotProblem& p;
  std::int64_t n, h;
  Sequence span;
  Vector Hk, Hv;  // [K, M], [M, V]

  Walk(const SlotProblem& problem, std::int64_t task)
      : p(problem),
        n(task / problem.H),
        h(task % problem.H),
        span(problem.sequence(n)),
        Hk(size(p.K * p.M)),
        Hv(size(p.M * p.V)) {
    load_state(p.hk0, Hk, p.K, p.M);
    load_state(p.hv0, Hv, p.M, p.V);
  }

  std::int64_t row(std::int64_t t) const { return span.begin + (p.reverse ? span.length - 1 - t : t); }
  double at(const TensorView& x, std::int64_t t, std::int64_t c) const { return load(x, span.row, row(t), h, c); }
  double decay(std::int64_t t, std::int64_t m) const { return std::exp(at(p.g, t, m)); }
  void load_state(const TensorView& from, Vector& to, std::int64_t rows, std::int64_t columns) const {
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) to[size(i * columns + j)] = from ? load(from, n, h, i, j) : 0.0;
  }
  void store_state(const Vector& from, const TensorView& to, std::int64_t rows, std::int64_t columns) const {
    for (std::int64_t i = 0; to && i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) store(to, from[size(i * columns + j)], n, h, i, j);
  }

  void forget(std::int64_t t) {
    for (std::int64_t m = 0; m < p.M; ++m) {
      const double e = decay(t, m);
      for (std::int64_t c = 0; c < p.K; ++c) Hk[size(c * p.M + m)] *= e;
      for (std::int64_t c = 0; c < p.V; ++c) Hv[size(m * p.V + c)] *= e;
    }
  }
  void write(std::int64_t t) {
    for (std::int64_t m = 0; m < p.M; ++m) {
      const double s = at(p.s, t, m);
      for (std::int64_t c = 0; c < p.K; ++c) Hk[size(c * p.M + m)] += s * at(p.k, t, c);
      for (std::int64_t c = 0; c < p.V; ++c) Hv[size(m * p.V + c)] += s * at(p.v, t, c);
    }
  }
  void advance(std::int64_t t) {
    forget(t);
    write(t);
  }
  // y and p of query head i.
  void weights(std::int64_t t, std::int64_t i, double* y, double* w) const {
    double most = -1e300, sum = 0.0;
    for (std::int64_t m = 0; m < p.M; ++m) {
      y[m] = 0.0;
      for (std::int64_t c = 0; c < p.K; ++c)
        y[m] += p.scale * Hk[size(c * p.M + m)] * load(p.q, span.row, row(t), i, c);
      most = std::max(most, y[m]);
    }
    for (std::int64_t m = 0; m < p.M; ++m) sum += w[m] = std::exp(y[m] - most);
    for (std::int64_t m = 0; m < p.M; ++m) w[m] /= sum;
  }
};

void forward_one(Walk& w) {
  const SlotProblem& p = w.p;
  Vector y(size(p.M)), weight(size(p.M));
  for (std::int64_t t = 0; t < w.span.length; ++t) {
    w.advance(t);
    for (std::int64_t i = w.h * p.G; p.o && i < (w.h + 1) * p.G; ++i) {
      w.weights(t, i, y.data(), weight.data());
      for (std::int64_t c = 0; c < p.V; ++c) {
        double o = 0.0;
        for (std::int64_t m = 0; m < p.M; ++m) o += w.Hv[size(m * p.V + c)] * weight[size(m)];
        store(p.o, o, w.span.row, w.row(t), i, c);
      }
    }
  }
  w.store_state(w.Hk, p.hkt, p.K, p.M);
  w.store_state(w.Hv, p.hvt, p.M, p.V);
}

// Upwards in t: y, p, dp = Hv_t do_t, dy and dq. Downwards with the gradients of the states: everything else. A gate's
// gradient is a sum over what was written before it and read at or after it. Of a write only what lies behind a later gate
// takes part, as the rest would cancel, which leaves its rounding beside what strong gates make small.
void backward_one(const SlotBackwardProblem& p, std::int64_t task) {
  Walk w(p, task);
  const std::int64_t L = w.span.length, M = p.M, K = p.K, V = p.V;
  const auto up = [&](std::int64_t t, std::int64_t i, std::int64_t c) {
    return p.do_ ? load(p.do_, w.span.row, w.row(t), i, c) : 0.0;
  };
  Vector y(size(M)), dp(size(M));
  Vector weight(size(L * p.G * M)), dy(size(L * p.G * M)), path(size(L * M));  // path: y o dy + p o dp
  Vector gate(size(L * M));  // the same of states without the token's own write
  Vector Dk(size(K * M)), Dv(size(M * V)), sum(size(M));
  w.load_state(p.dhkt, Dk, K, M);
  w.load_state(p.dhvt, Dv, M, V);
  for (std::int64_t t = 0; t < L; ++t) {
    w.forget(t);
    const Vector past_k = w.Hk, past_v = w.Hv;
    w.write(t);
    for (std::int64_t m = 0; t + 1 == L && m < M; ++m) {
      for (std::int64_t c = 0; c < K; ++c) sum[size(m)] += past_k[size(c * M + m)] * Dk[size(c * M + m)];
      for (std::int64_t c = 0; c < V; ++c) sum[size(m)] += past_v[size(m * V + c)] * Dv[size(m * V + c)];
    }
    for (std::int64_t j = 0; j < p.G; ++j) {
      const std::int64_t i = w.h * p.G + j, at = (t * p.G + j) * M;
      w.weights(t, i, y.data(), &weight[size(at)]);
      double mean = 0.0;
      for (std::int64_t m = 0; m < M; ++m) {
        dp[size(m)] = 0.0;
        for (std::int64_t c = 0; c < V; ++c) dp[size(m)] += w.Hv[size(m * V + c)] * up(t, i, c);
        mean += weight[size(at + m)] * dp[size(m)];
      }
      for (std::int64_t m = 0; m < M; ++m) {
        dy[size(at + m)] = weight[size(at + m)] * (dp[size(m)] - mean);
        path[size(t * M + m)] += y[size(m)] * dy[size(at + m)] + weight[size(at + m)] * dp[size(m)];
        double past_y = 0.0, past_dp = 0.0;
        for (std::int64_t c = 0; c < K; ++c)
          past_y += p.scale * past_k[size(c * M + m)] * load(p.q, w.span.row, w.row(t), i, c);
        for (std::int64_t c = 0; c < V; ++c) past_dp += past_v[size(m * V + c)] * up(t, i, c);
        gate[size(t * M + m)] += past_y * dy[size(at + m)] + weight[size(at + m)] * past_dp;
      }
      for (std::int64_t c = 0; c < K && p.dq; ++c) {
        double dq = 0.0;
        for (std::int64_t m = 0; m < M; ++m) dq += p.scale * w.Hk[size(c * M + m)] * dy[size(at + m)];
        store(p.dq, dq, w.span.row, w.row(t), i, c);
      }
    }
    for (std::int64_t m = 0; m < M && p.path; ++m) store(p.path, path[size(t * M + m)], w.span.row, w.row(t), w.h, m);
  }

  Vector dk(size(K)), dv(size(V));
  Vector source(size(M));  // s ds of a token's write, for what lies behind the next gate
  for (std::int64_t t = L - 1; t >= 0; --t) {
    std::fill(dk.begin(), dk.end(), 0.0);
    std::fill(dv.begin(), dv.end(), 0.0);
    for (std::int64_t m = 0; m < M; ++m) {
      const double s = w.at(p.s, t, m), e = w.decay(t, m);
      double ds = 0.0;
      for (std::int64_t j = 0; j < p.G; ++j) {
        const std::int64_t i = w.h * p.G + j, at = (t * p.G + j) * M + m;
        for (std::int64_t c = 0; c < K; ++c)
          Dk[size(c * M + m)] += p.scale * load(p.q, w.span.row, w.row(t), i, c) * dy[size(at)];
        for (std::int64_t c = 0; c < V; ++c) Dv[size(m * V + c)] += weight[size(at)] * up(t, i, c);
      }
      for (std::int64_t c = 0; c < K; ++c) {
        ds += Dk[size(c * M + m)] * w.at(p.k, t, c);
        dk[size(c)] += Dk[size(c * M + m)] * s;
        Dk[size(c * M + m)] *= e;
      }
      for (std::int64_t c = 0; c < V; ++c) {
        ds += Dv[size(m * V + c)] * w.at(p.v, t, c);
        dv[size(c)] += Dv[size(m * V + c)] * s;
        Dv[size(m * V + c)] *= e;
      }
      sum[size(m)] += gate[size(t * M + m)] - source[size(m)];
      source[size(m)] = 0.0;
      for (std::int64_t c = 0; t > 0 && c < K; ++c) source[size(m)] += Dk[size(c * M + m)] * w.at(p.k, t - 1, c);
      for (std::int64_t c = 0; t > 0 && c < V; ++c) source[size(m)] += Dv[size(m * V + c)] * w.at(p.v, t - 1, c);
      if (t > 0) source[size(m)] *= w.at(p.s, t - 1, m);
      if (p.ds) store(p.ds, ds, w.span.row, w.row(t), w.h, m);
      if (p.dg) store(p.dg, sum[size(m)], w.span.row, w.row(t), w.h, m);
    }
    for (std::int64_t c = 0; c < K && p.dk; ++c) store(p.dk, dk[size(c)], w.span.row, w.row(t), w.h, c);
    for (std::int64_t c = 0; c < V && p.dv; ++c) store(p.dv, dv[size(c)], w.span.row, w.row(t), w.h, c);
  }
  w.store_state(Dk, p.dhk0, K, M);
  w.store_state(Dv, p.dhv0, M, V);
}

}  // namespace

std::size_t slot_forward_workspace(const SlotProblem&, int) { return 0; }

Status slot_forward(const SlotProblem& p, ThreadPool& pool, std::span<std::byte>) {
  pool.run(p.N * p.H, [&](std::int64_t task, int) {
    Walk w(p, task);
    forward_one(w);
  });
  return {};
}

std::size_t slot_backward_workspace(const SlotBackwardProblem&, int) { return 0; }

Status slot_backward(const SlotBackwardProblem& p, ThreadPool& pool, std::span<std::byte>) {
  pool.run(p.N * p.H, [&](std::int64_t task, int) { backward_one(p, task); });
  return {};
}

}  // namespace fla::reference
