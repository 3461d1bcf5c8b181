// The key preconditioner in fp32, one thread per head of a sequence. The logarithm's slope reaches 1 / eps where a
// channel has seen nothing, so nothing here is rounded to 16 bits.
#include <algorithm>
#include <cmath>
#include <memory>

#include "fla/engine/precond/problem.h"
#include "fla/kernels/cpu/element.h"

namespace fla::cpu {

namespace {

float get(const std::byte* at, DType t) { return static_cast<float>(load_element(at, t)); }

// A row along the last axis, `axis` its number.
void get_row(const TensorView& x, const std::byte* at, int axis, std::int64_t n, float* to) {
  const std::int64_t step = x.stride[static_cast<std::size_t>(axis)] * static_cast<std::int64_t>(size_of(x.dtype));
  for (std::int64_t i = 0; i < n; ++i) to[i] = get(at + i * step, x.dtype);
}
void put_row(const float* from, const TensorView& x, std::byte* at, int axis, std::int64_t n) {
  const std::int64_t step = x.stride[static_cast<std::size_t>(axis)] * static_cast<std::int64_t>(size_of(x.dtype));
  for (std::int64_t i = 0; i < n; ++i) store_element(at + i * step, x.dtype, from[i]);
}

float* align(std::span<std::byte> workspace) {
  void* base = workspace.data();
  std::size_t space = workspace.size();
  std::align(alignof(float), sizeof(float), base, space);
  return static_cast<float*>(base);
}

struct Head {
  const PrecondProblem& p;
  std::int64_t n, ha, hk;
  Sequence span;
  float centre, log_x, eps;

  Head(const PrecondProblem& problem, std::int64_t sequence, std::int64_t head)
      : p(problem),
        n(sequence),
        ha(head),
        hk(head / problem.group()),
        span(problem.sequence(sequence)),
        centre(problem.log_atk_scale ? get(problem.log_atk_scale.at(head), problem.log_atk_scale.dtype) : -0.2F),
        log_x(static_cast<float>(std::log(problem.x))),
        eps(static_cast<float>(problem.eps)) {}

  float gate(const TensorView& x, std::int64_t t) const { return get(x.at(span.row, span.begin + t, ha), x.dtype); }
  float key(std::int64_t t, float* k) const {
    get_row(p.k, p.k.at(span.row, span.begin + t, hk), 3, p.K, k);
    if (!p.normalize) return 1.0F;
    float sum = 1e-6F, shrink = 1.0F;
    for (std::int64_t i = 0; i < p.K; ++i) sum += k[i] * k[i];
    if (sum >= 0x1p120F) {  // its squares leave fp32
      sum = 0.0F;
      shrink = 0x1p-96F;
      for (std::int64_t i = 0; i < p.K; ++i) {
        k[i] *= shrink;
        sum += k[i] * k[i];
      }
    }
    const float r = 1.0F / std::sqrt(sum);
    for (std::int64_t i = 0; i < p.K; ++i) k[i] *= r;
    return r * shrink;
  }
  void first(float* A) const {
    std::fill_n(A, p.K, 0.0F);
    if (p.a0) get_row(p.a0, p.a0.at(n, ha), 2, p.K, A);
  }
  void advance(std::int64_t t, const float* k, const float* from, float* to) const {  // (1)
    const float decay = std::exp(gate(p.g_atk, t)), weight = gate(p.beta_atk, t);
    for (std::int64_t i = 0; i < p.K; ++i) to[i] = decay * from[i] + weight * k[i] * k[i];
  }
};

void forward_one(const Head& h, float* A, float* k) {
  const PrecondProblem& p = h.p;
  h.first(A);
  for (std::int64_t t = 0; t < h.span.length; ++t) {
    h.key(t, k);
    h.advance(t, k, A, A);
    for (std::int64_t i = 0; i < p.K; ++i) {  // (2)
      const float r = std::log(A[i] + h.eps) - h.centre;
      k[i] *= std::exp(-h.log_x * r / (1.0F + std::abs(r)));
    }
    put_row(k, p.w, p.w.at(h.span.row, h.span.begin + t, h.ha), 3, p.K);
  }
  if (p.at) put_row(A, p.at, p.at.at(h.n, h.ha), 2, p.K);
}

struct BackwardScratch {
  float *A, *a, *k, *dw, *dk;  // [T + 1, K]: A before each token; [K]; [K]; [K]; [T, K]
  static std::int64_t floats(const PrecondProblem& p) { return (2 * p.T + 4) * p.K; }
  BackwardScratch(float* base, const PrecondProblem& p)
      : A(base), a(A + (p.T + 1) * p.K), k(a + p.K), dw(k + p.K), dk(dw + p.K) {}
};

double backward_one(const Head& h, const PrecondBackwardProblem& p, const BackwardScratch& s) {
  const std::int64_t L = h.span.length, K = p.K;
  h.first(s.A);
  for (std::int64_t t = 0; t < L; ++t) {
    h.key(t, s.k);
    h.advance(t, s.k, s.A + t * K, s.A + (t + 1) * K);
  }
  std::fill_n(s.a, K, 0.0F);
  if (p.dat) get_row(p.dat, p.dat.at(h.n, h.ha), 2, K, s.a);
  double dcentre = 0.0;  // sums L K terms of either sign
  for (std::int64_t t = L - 1; t >= 0; --t) {
    const std::int64_t tok = h.span.begin + t;
    const float decay = std::exp(h.gate(p.g_atk, t)), weight = h.gate(p.beta_atk, t);
    const float *before = s.A + t * K, *now = before + K;
    float dg = 0.0F, dweight = 0.0F, dcentre_t = 0.0F;
    h.key(t, s.k);
    get_row(p.dw, p.dw.at(h.span.row, tok, h.ha), 3, K, s.dw);
    for (std::int64_t i = 0; i < K; ++i) {
      const float k = s.k[i], r = std::log(now[i] + h.eps) - h.centre, inverse = 1.0F / (1.0F + std::abs(r));
      const float m = std::exp(-h.log_x * r * inverse);
      const float dr = -h.log_x * m * s.dw[i] * k * inverse * inverse;
      dcentre_t -= dr;
      s.a[i] += dr / (now[i] + h.eps);
      dg += s.a[i] * before[i];
      dweight += s.a[i] * k * k;
      s.dk[t * K + i] += s.dw[i] * m + 2.0F * weight * s.a[i] * k;
      s.a[i] *= decay;
    }
    dcentre += static_cast<double>(dcentre_t);
    if (p.dg_atk) store_element(p.dg_atk.at(h.span.row, tok, h.ha), p.dg_atk.dtype, decay * dg);
    if (p.dbeta_atk) store_element(p.dbeta_atk.at(h.span.row, tok, h.ha), p.dbeta_atk.dtype, dweight);
  }
  if (p.da0) put_row(s.a, p.da0, p.da0.at(h.n, h.ha), 2, K);
  return dcentre;
}

}  // namespace

std::size_t precond_forward_workspace(const PrecondProblem& p, int threads) {
  return static_cast<std::size_t>(2 * p.K) * static_cast<std::size_t>(threads) * sizeof(float) + alignof(float);
}

Status precond_forward(const PrecondProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  float* base = align(workspace);
  pool.run(p.N * p.HA, [&](std::int64_t task, int worker) {
    float* A = base + std::int64_t{2} * worker * p.K;
    forward_one(Head(p, task / p.HA, task % p.HA), A, A + p.K);
  });
  return {};
}

std::size_t precond_backward_workspace(const PrecondBackwardProblem& p, int threads) {
  return static_cast<std::size_t>(BackwardScratch::floats(p) * threads + p.N * p.HA) * sizeof(float) + alignof(float);
}

Status precond_backward(const PrecondBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  float* dcentre = align(workspace);  // [N, HA]
  float* base = dcentre + p.N * p.HA;
  const std::int64_t each = BackwardScratch::floats(p);
  pool.run(p.N * p.H, [&](std::int64_t task, int worker) {
    const std::int64_t n = task / p.H, hk = task % p.H, K = p.K;
    const BackwardScratch s(base + worker * each, p);
    const std::int64_t length = p.sequence(n).length;
    std::fill_n(s.dk, length * K, 0.0F);
    for (std::int64_t j = 0; j < p.group(); ++j) {  // in one order, whatever the thread count
      const Head h(p, n, hk * p.group() + j);
      dcentre[n * p.HA + h.ha] = static_cast<float>(backward_one(h, p, s));
    }
    if (!p.dk) return;
    const Head h(p, n, hk * p.group());
    for (std::int64_t t = 0; t < length; ++t) {
      const std::int64_t tok = h.span.begin + t;
      const float r = h.key(t, s.k);
      float* dk = s.dk + t * K;
      float dot = 0.0F;
      for (std::int64_t i = 0; i < K; ++i) dot += s.k[i] * dk[i];
      get_row(p.dk_erase, p.dk_erase.at(h.span.row, tok, hk), 3, K, s.dw);
      for (std::int64_t i = 0; i < K; ++i) {
        // With one channel the difference is the 1e-6 inside the root alone.
        const float across = K == 1 ? 1e-6F * r * r * dk[i] : dk[i] - s.k[i] * dot;
        dk[i] = s.dw[i] + (p.normalize ? r * across : dk[i]);
      }
      put_row(dk, p.dk, p.dk.at(h.span.row, tok, hk), 3, K);
    }
  });
  if (p.dlog_atk_scale)
    for (std::int64_t head = 0; head < p.HA; ++head) {
      float sum = 0.0F;
      for (std::int64_t n = 0; n < p.N; ++n) sum += dcentre[n * p.HA + head];
      store_element(p.dlog_atk_scale.at(head), p.dlog_atk_scale.dtype, sum);
    }
  return {};
}

}  // namespace fla::cpu
