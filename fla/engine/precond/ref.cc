// The double-precision reference of the key preconditioner: problem.h (1) and (2) token by token, written for reading.
#include <algorithm>
#include <cmath>
#include <memory>

#include "fla/engine/common/ref_access.h"
#include "fla/engine/precond/problem.h"

namespace fla::reference {

namespace {

double* align(std::span<std::byte> workspace) {
  void* base = workspace.data();
  std::size_t space = workspace.size();
  std::align(alignof(double), sizeof(double), base, space);
  return static_cast<double*>(base);
}

// One head of the statistics in one sequence.
struct Walk {
  const PrecondProblem& p;
  std::int64_t n, ha, hk;
  Sequence span;

  Walk(const PrecondProblem& problem, std::int64_t sequence, std::int64_t head)
      : p(problem), n(sequence), ha(head), hk(head / problem.group()), span(problem.sequence(sequence)) {}

  double centre() const { return p.log_atk_scale ? load(p.log_atk_scale, ha) : -0.2; }
  double decay(std::int64_t t) const { return std::exp(load(p.g_atk, span.row, span.begin + t, ha)); }
  double weight(std::int64_t t) const { return load(p.beta_atk, span.row, span.begin + t, ha); }
  // The key as the statistics see it; returns 1 / norm, or 1.
  double key(std::int64_t t, double* k) const {
    double sum = 1e-6;
    for (std::int64_t i = 0; i < p.K; ++i) {
      k[i] = load(p.k, span.row, span.begin + t, hk, i);
      sum += k[i] * k[i];
    }
    if (!p.normalize) return 1.0;
    const double r = 1.0 / std::sqrt(sum);
    for (std::int64_t i = 0; i < p.K; ++i) k[i] *= r;
    return r;
  }
  double squashed(double A) const { return std::log(A + p.eps) - centre(); }
  double multiplier(double r) const { return std::pow(p.x, -r / (1.0 + std::abs(r))); }
};

void forward_one(const Walk& w, double* A, double* k) {
  const PrecondProblem& p = w.p;
  for (std::int64_t i = 0; i < p.K; ++i) A[i] = p.a0 ? load(p.a0, w.n, w.ha, i) : 0.0;
  for (std::int64_t t = 0; t < w.span.length; ++t) {
    const double decay = w.decay(t), weight = w.weight(t);
    w.key(t, k);
    for (std::int64_t i = 0; i < p.K; ++i) {
      A[i] = decay * A[i] + weight * k[i] * k[i];                                                // (1)
      store(p.w, k[i] * w.multiplier(w.squashed(A[i])), w.span.row, w.span.begin + t, w.ha, i);  // (2)
    }
  }
  if (p.at)
    for (std::int64_t i = 0; i < p.K; ++i) store(p.at, A[i], w.n, w.ha, i);
}

// Adds to dk [T, K], gradient of the normalised key; returns the gradient of the centre.
double backward_one(const Walk& w, const PrecondBackwardProblem& p, double* A, double* a, double* k, double* dk) {
  const std::int64_t L = w.span.length, K = p.K;
  for (std::int64_t i = 0; i < K; ++i) A[i] = p.a0 ? load(p.a0, w.n, w.ha, i) : 0.0;
  for (std::int64_t t = 0; t < L; ++t) {
    w.key(t, k);
    for (std::int64_t i = 0; i < K; ++i) A[(t + 1) * K + i] = w.decay(t) * A[t * K + i] + w.weight(t) * k[i] * k[i];
  }
  double dcentre = 0.0;
  for (std::int64_t i = 0; i < K; ++i) a[i] = p.dat ? load(p.dat, w.n, w.ha, i) : 0.0;
  for (std::int64_t t = L - 1; t >= 0; --t) {
    const std::int64_t tok = w.span.begin + t;
    const double decay = w.decay(t), weight = w.weight(t);
    double dg = 0.0, dweight = 0.0;
    w.key(t, k);
    for (std::int64_t i = 0; i < K; ++i) {
      const double now = A[(t + 1) * K + i], r = w.squashed(now), m = w.multiplier(r);
      const double dw = load(p.dw, w.span.row, tok, w.ha, i);
      const double dr = -std::log(p.x) * m * dw * k[i] / ((1.0 + std::abs(r)) * (1.0 + std::abs(r)));
      dcentre -= dr;
      a[i] += dr / (now + p.eps);
      dg += decay * a[i] * A[t * K + i];
      dweight += a[i] * k[i] * k[i];
      dk[t * K + i] += dw * m + 2.0 * weight * a[i] * k[i];
      a[i] *= decay;
    }
    if (p.dg_atk) store(p.dg_atk, dg, w.span.row, tok, w.ha);
    if (p.dbeta_atk) store(p.dbeta_atk, dweight, w.span.row, tok, w.ha);
  }
  if (p.da0)
    for (std::int64_t i = 0; i < K; ++i) store(p.da0, a[i], w.n, w.ha, i);
  return dcentre;
}

std::size_t forward_doubles(const PrecondProblem& p) { return static_cast<std::size_t>(2 * p.K); }
// A before and after every token, its gradient, k, dk.
std::size_t backward_doubles(const PrecondProblem& p) {
  return static_cast<std::size_t>((p.T + 1) * p.K + 2 * p.K + p.T * p.K);
}
std::size_t bytes(std::size_t doubles) { return doubles * sizeof(double) + alignof(double); }

}  // namespace

std::size_t precond_forward_workspace(const PrecondProblem& p, int threads) {
  return bytes(forward_doubles(p) * static_cast<std::size_t>(threads));
}

Status precond_forward(const PrecondProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  double* base = align(workspace);
  pool.run(p.N * p.HA, [&](std::int64_t task, int worker) {
    double* A = base + static_cast<std::size_t>(worker) * forward_doubles(p);
    forward_one(Walk(p, task / p.HA, task % p.HA), A, A + p.K);
  });
  return {};
}

std::size_t precond_backward_workspace(const PrecondBackwardProblem& p, int threads) {
  return bytes(backward_doubles(p) * static_cast<std::size_t>(threads) + static_cast<std::size_t>(p.N * p.HA));
}

Status precond_backward(const PrecondBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  double* dcentre = align(workspace);  // [N, HA]
  double* base = dcentre + p.N * p.HA;
  pool.run(p.N * p.H, [&](std::int64_t task, int worker) {
    const std::int64_t n = task / p.H, hk = task % p.H, K = p.K;
    double* A = base + static_cast<std::size_t>(worker) * backward_doubles(p);
    double *a = A + (p.T + 1) * K, *k = a + K, *dk = k + K;
    const std::int64_t length = p.sequence(n).length;
    std::fill_n(dk, length * K, 0.0);
    for (std::int64_t j = 0; j < p.group(); ++j) {  // in one order, whatever the thread count
      const Walk w(p, n, hk * p.group() + j);
      dcentre[n * p.HA + w.ha] = backward_one(w, p, A, a, k, dk);
    }
    if (!p.dk) return;
    const Walk w(p, n, hk * p.group());
    for (std::int64_t t = 0; t < length; ++t) {
      const double r = w.key(t, k);
      double dot = 0.0;
      for (std::int64_t i = 0; i < K; ++i) dot += k[i] * dk[t * K + i];
      for (std::int64_t i = 0; i < K; ++i) {
        const double through = p.normalize ? r * (dk[t * K + i] - k[i] * dot) : dk[t * K + i];
        store(p.dk, load(p.dk_erase, w.span.row, w.span.begin + t, hk, i) + through, w.span.row, w.span.begin + t, hk,
              i);
      }
    }
  });
  if (p.dlog_atk_scale)
    for (std::int64_t h = 0; h < p.HA; ++h) {
      double sum = 0.0;
      for (std::int64_t n = 0; n < p.N; ++n) sum += dcentre[n * p.HA + h];
      store(p.dlog_atk_scale, sum, h);
    }
  return {};
}

}  // namespace fla::reference
