#include "fla/engine/attn/ref.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "fla/engine/attn/nsa.h"
#include "fla/engine/attn/path.h"
#include "fla/engine/attn/wall_cache.h"
#include "fla/engine/common/ref_access.h"

namespace fla::reference {

namespace {

using Doubles = std::vector<double>;

Doubles doubles(std::int64_t n) { return Doubles(static_cast<std::size_t>(n), 0.0); }

// Rows [begin, begin + length) of a head, widened; zeros when absent.
Doubles rows(const TensorView& x, std::int64_t row, std::int64_t begin, std::int64_t length, std::int64_t h,
             std::int64_t width) {
  Doubles m = doubles(length * width);
  if (!x) return m;
  for (std::int64_t t = 0; t < length; ++t)
    for (std::int64_t c = 0; c < width; ++c)
      m[static_cast<std::size_t>(t * width + c)] =
          x.ndim > 3 ? load(x, row, begin + t, h, c) : load(x, row, begin + t, h);
  return m;
}

// The same of tokens [0, length) of sequence n in a cache.
Doubles key_rows(const AttnProblem& p, const TensorView& x, const AttnSpan& s, std::int64_t n, std::int64_t h,
                 std::int64_t width) {
  if (!p.pages) return rows(x, s.row, s.k_begin, s.k_length, h, width);
  Doubles all;
  const std::int64_t page = p.k.dim(1);
  for (std::int64_t j = 0; j < s.k_length; j += page) {
    const Doubles m = rows(x, read_index(p.pages, n, j / page), 0, std::min(page, s.k_length - j), h, width);
    all.insert(all.end(), m.begin(), m.end());
  }
  return all;
}

double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// One sequence and query head. A row's weights are kept by key; decays go outwards from the query's own position, so
// that a gate of -inf on the way masks what lies behind it.
struct Head {
  const AttnProblem& p;
  std::int64_t n, h, K, V, L;
  AttnSpan span;
  Doubles q, r, k, v, g, gk;
  bool has_sink;
  double b;
  // Of the row that was evaluated last.
  KeyRange seen;
  Doubles s, P, u, E;  // logits, (2), u of (3), [L, K] e^{P_t - P_j} of a channel gate
  double sink = 0.0, lse = 0.0, ubar = 0.0;

  Head(const AttnProblem& problem, std::int64_t sequence, std::int64_t head)
      : p(problem), n(sequence), h(head), K(p.K), V(p.V), span(p.sequence(sequence)) {
    const std::int64_t kv = h / p.group();
    L = span.k_length;
    q = rows(p.q, span.row, span.q_begin, span.q_length, h, K);
    r = rows(p.r, span.row, span.q_begin, span.q_length, h, K);
    k = key_rows(p, p.k, span, n, kv, K);
    v = key_rows(p, p.v, span, n, kv, V);
    if (p.g) g = key_rows(p, p.g, span, n, h, 1);
    if (p.gk) gk = rows(p.gk, span.row, span.k_begin, L, h, K);
    has_sink = p.sink.present();
    b = has_sink ? load(p.sink, h) : 0.0;
    s = P = u = doubles(L);
    if (p.gk) E = doubles(L * K);
  }
  const double* key(std::int64_t j) const { return k.data() + j * K; }
  const double* value(std::int64_t j) const { return v.data() + j * V; }
  double decay(std::int64_t j, std::int64_t c) const { return p.gk ? E[static_cast<std::size_t>(j * K + c)] : 1.0; }

  void row(std::int64_t i) {
    seen = p.visible(span, n, i);
    const double* qi = q.data() + i * K;
    const double* ri = r.data() + i * K;
    double C = 0.0;
    Doubles D = doubles(K);
    double most = has_sink ? b : -std::numeric_limits<double>::infinity();
    for (std::int64_t j = seen.hi - 1; j >= seen.lo; --j) {
      const auto at = static_cast<std::size_t>(j);
      double sum = 0.0;
      for (std::int64_t c = 0; c < K; ++c) {
        if (p.gk) E[static_cast<std::size_t>(j * K + c)] = std::exp(D[static_cast<std::size_t>(c)]);
        sum += qi[c] * key(j)[c] * decay(j, c);
      }
      s[at] = p.scale * sum + C;
      u[at] = p.r ? dot(ri, key(j), K) : 0.0;
      most = std::max(most, s[at]);
      if (p.g) C += p.gate_scale * g[at];
      for (std::int64_t c = 0; p.gk && c < K; ++c)
        D[static_cast<std::size_t>(c)] += gk[static_cast<std::size_t>(j * K + c)];
    }
    double Z = has_sink ? std::exp(b - most) : 0.0;
    for (std::int64_t j = seen.lo; j < seen.hi; ++j) Z += std::exp(s[static_cast<std::size_t>(j)] - most);
    ubar = 0.0;
    for (std::int64_t j = seen.lo; j < seen.hi; ++j) {
      const auto at = static_cast<std::size_t>(j);
      P[at] = std::exp(s[at] - most) / Z;
      ubar += P[at] * u[at];
    }
    sink = has_sink ? std::exp(b - most) / Z : 0.0;
    lse = Z > 0.0 ? most + std::log(Z) : 0.0;
  }
  // The weight of v_j in o_i: p_ij, or p_ij (1 + ubar_i - u_ij).
  double weight(std::int64_t j) const {
    const auto at = static_cast<std::size_t>(j);
    return p.r ? P[at] * (1.0 + ubar - u[at]) : P[at];
  }
};

void forward_one(const AttnProblem& p, std::int64_t n, std::int64_t h) {
  Head x(p, n, h);
  for (std::int64_t i = 0; i < x.span.q_length; ++i) {
    x.row(i);
    const std::int64_t at = x.span.q_begin + i;
    for (std::int64_t c = 0; p.o && c < p.V; ++c) {
      double o = 0.0;
      for (std::int64_t j = x.seen.lo; j < x.seen.hi; ++j) o += x.weight(j) * x.value(j)[c];
      store(p.o, o, x.span.row, at, h, c);
    }
    if (p.lse) store(p.lse, x.lse, x.span.row, at, h);
  }
}

// Gradients of one key head: those of its G query heads are summed. With a_ij = <do_i, v_j>, t_i = <do_i, o_i>:
//   D_ij = p_ij (a_ij - t_i)                                             gradient of s_ij
//   with r: D_ij = p_ij (a_ij - t_i + (ubar_i - u_ij)(a_ij - vbar_i)),   vbar_i = sum_j p_ij a_ij
//           U_ij = -p_ij (a_ij - vbar_i)                                 gradient of u_ij
void backward_one(const AttnProblem& p, std::int64_t n, std::int64_t kv, std::vector<double>& dsink) {
  const AttnSpan span = p.sequence(n);
  const std::int64_t L = span.k_length, K = p.K, V = p.V, G = p.group();
  Doubles dk = doubles(L * K), dv = doubles(L * V);
  for (std::int64_t h = kv * G; h < (kv + 1) * G; ++h) {
    Head x(p, n, h);
    const Doubles dout = rows(p.do_, span.row, span.q_begin, span.q_length, h, V);
    Doubles dg = doubles(L), dgk = doubles(L * K), a = doubles(L);
    for (std::int64_t i = 0; i < span.q_length; ++i) {
      x.row(i);
      const double* qi = x.q.data() + i * K;
      const double* ri = x.r.data() + i * K;
      const double* doi = dout.data() + i * V;
      double t = 0.0, vbar = 0.0;
      for (std::int64_t j = x.seen.lo; j < x.seen.hi; ++j) {
        const auto at = static_cast<std::size_t>(j);
        a[at] = dot(doi, x.value(j), V);
        t += x.weight(j) * a[at];
        vbar += x.P[at] * a[at];
      }
      dsink[static_cast<std::size_t>(n * p.HQ + h)] -= x.sink * t;
      Doubles dq = doubles(K), dr = doubles(K), through = doubles(K);
      // A gate at time m lies between query and key for the keys before m: what the keys before m have collected.
      double before = 0.0;
      for (std::int64_t j = x.seen.lo; j < x.seen.hi; ++j) {
        const auto at = static_cast<std::size_t>(j);
        dg[at] += p.gate_scale * before;
        double D = x.P[at] * (a[at] - t), U = 0.0;
        if (p.r) {
          D = x.P[at] * (a[at] - t + (x.ubar - x.u[at]) * (a[at] - vbar));
          U = -x.P[at] * (a[at] - vbar);
        }
        before += D;
        for (std::int64_t c = 0; c < K; ++c) {
          const auto at_c = static_cast<std::size_t>(j * K + c), ch = static_cast<std::size_t>(c);
          const double E = x.decay(j, c), kc = x.key(j)[c];
          dq[ch] += p.scale * D * kc * E;
          dk[at_c] += p.scale * D * qi[c] * E + U * ri[c];
          dr[ch] += U * kc;
          dgk[at_c] += through[ch];
          through[ch] += p.scale * D * qi[c] * kc * E;
        }
        for (std::int64_t c = 0; c < V; ++c) dv[static_cast<std::size_t>(j * V + c)] += x.weight(j) * doi[c];
      }
      for (std::int64_t c = 0; c < K; ++c) {
        if (p.dq) store(p.dq, dq[static_cast<std::size_t>(c)], span.row, span.q_begin + i, h, c);
        if (p.dr) store(p.dr, dr[static_cast<std::size_t>(c)], span.row, span.q_begin + i, h, c);
      }
    }
    for (std::int64_t j = 0; j < L; ++j) {
      if (p.dg) store(p.dg, dg[static_cast<std::size_t>(j)], span.row, span.k_begin + j, h);
      for (std::int64_t c = 0; p.dgk && c < K; ++c)
        store(p.dgk, dgk[static_cast<std::size_t>(j * K + c)], span.row, span.k_begin + j, h, c);
    }
  }
  for (std::int64_t j = 0; j < L; ++j) {
    for (std::int64_t c = 0; p.dk && c < K; ++c)
      store(p.dk, dk[static_cast<std::size_t>(j * K + c)], span.row, span.k_begin + j, kv, c);
    for (std::int64_t c = 0; p.dv && c < V; ++c)
      store(p.dv, dv[static_cast<std::size_t>(j * V + c)], span.row, span.k_begin + j, kv, c);
  }
}

}  // namespace

Status attn_forward(const AttnProblem& p, ThreadPool& pool) {
  pool.run(p.N * p.HQ, [&](std::int64_t task, int) { forward_one(p, task / p.HQ, task % p.HQ); });
  return {};
}

Status attn_backward(const AttnProblem& p, ThreadPool& pool) {
  Doubles dsink = doubles(p.N * p.HQ);
  pool.run(p.N * p.H, [&](std::int64_t task, int) { backward_one(p, task / p.H, task % p.H, dsink); });
  for (std::int64_t h = 0; p.dsink && h < p.HQ; ++h) {
    double sum = 0.0;
    for (std::int64_t n = 0; n < p.N; ++n) sum += dsink[static_cast<std::size_t>(n * p.HQ + h)];
    store(p.dsink, sum, h);
  }
  return {};
}

Status wall_decode(const WallDecodeProblem& p, ThreadPool& pool) {
  pool.run(p.B() * p.HQ(), [&](std::int64_t task, int) {
    const std::int64_t b = task / p.HQ(), h = task % p.HQ(), T = p.T(), kv = h / p.group();
    for (std::int64_t i = 0; i < p.Q(); ++i) {
      std::vector<double> s(static_cast<std::size_t>(T));
      double most = p.sink ? load(p.sink, h) : -std::numeric_limits<double>::infinity();
      for (std::int64_t j = 0; j < T; ++j) {  // (1)
        double sum = 0.0;
        for (std::int64_t c = 0; c < p.K(); ++c)
          sum += load(p.q, b, i, h, c) * load(p.k, b, j, h, c) *
                 std::exp2(load(p.p, b, i, h, c) - load(p.r, b, j / p.chunk, h, c));
        double& x = s[static_cast<std::size_t>(j)];
        x = p.scale * sum;
        if (p.c) x += std::log(2.0) * (load(p.c, b, T - p.Q() + i, h) - load(p.c, b, j, h));
        most = std::max(most, x);
      }
      double Z = p.sink ? std::exp(load(p.sink, h) - most) : 0.0;  // (2)
      for (double& x : s) Z += x = std::exp(x - most);
      for (std::int64_t c = 0; p.o && c < p.V(); ++c) {
        double o = 0.0;
        for (std::int64_t j = 0; j < T; ++j) o += s[static_cast<std::size_t>(j)] / Z * load(p.v, b, j, kv, c);
        store(p.o, o, b, i, h, c);
      }
      if (p.lse) store(p.lse, Z > 0.0 ? (most + std::log(Z)) / std::log(2.0) : 0.0, b, i, h);
    }
  });
  return {};
}

Status wall_cache(const WallCacheProblem& p, ThreadPool& pool) {
  const std::int64_t T = p.p.dim(1), HQ = p.p.dim(2), K = p.p.dim(3), G = HQ / p.q.dim(2);
  pool.run(p.p.dim(0) * HQ, [&](std::int64_t task, int) {
    const std::int64_t b = task / HQ, h = task % HQ;
    for (std::int64_t j = 0; j < T; ++j)
      for (std::int64_t c = 0; c < K; ++c) {  // (3)
        const double anchor = load(p.p, b, j / p.chunk * p.chunk, h, c);
        if (p.r && j % p.chunk == 0) store(p.r, anchor, b, j / p.chunk, h, c);
        if (p.k_tilde)
          store(p.k_tilde, load(p.q, b, j, h / G, c) * std::exp2(anchor - load(p.p, b, j, h, c)), b, j, h, c);
      }
  });
  return {};
}

// ---- PaTH --------------------------------------------------------------------------------------------------------

namespace {

// A query goes back key by key: at key j it has become y_j = R_{j+1}^T ... R_i^T q_i, and the next step is
//   y_{j-1} = y_j - beta_j w_j <w_j, y_j>.
struct PathHead {
  const PathProblem& p;
  AttnSpan span;
  std::int64_t h, K, V, L;
  Doubles q, k, v, w, beta, g;
  Doubles y, P;  // of the row that was evaluated last: [L, K] and (1)
  double lse = 0.0;

  PathHead(const PathProblem& problem, std::int64_t n, std::int64_t head)
      : p(problem), span(p.sequence(n)), h(head), K(p.K), V(p.V), L(span.k_length) {
    const std::int64_t kv = h / p.group();
    q = rows(p.q, span.row, span.q_begin, L, h, K);
    k = rows(p.k, span.row, span.k_begin, L, kv, K);
    v = rows(p.v, span.row, span.k_begin, L, kv, V);
    w = rows(p.w, span.row, span.k_begin, L, kv, K);
    beta = rows(p.beta, span.row, span.k_begin, L, kv, 1);
    g = rows(p.g, span.row, span.k_begin, L, h, 1);
    y = doubles(L * K);
    P = doubles(L);
  }
  static double* at(Doubles& x, std::int64_t i, std::int64_t width) { return x.data() + i * width; }

  void row(std::int64_t i) {
    std::copy_n(at(q, i, K), K, at(y, i, K));
    double C = 0.0, most = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = i; j >= 0; --j) {
      const auto u = static_cast<std::size_t>(j);
      P[u] = p.scale * (dot(at(y, j, K), at(k, j, K), K) + C);
      most = std::max(most, P[u]);
      C += g[u];
      if (j == 0) break;
      const double step = beta[u] * dot(at(w, j, K), at(y, j, K), K);
      for (std::int64_t c = 0; c < K; ++c) at(y, j - 1, K)[c] = at(y, j, K)[c] - step * at(w, j, K)[c];
    }
    double Z = 0.0;
    for (std::int64_t j = 0; j <= i; ++j) Z += std::exp(P[static_cast<std::size_t>(j)] - most);
    for (std::int64_t j = 0; j <= i; ++j)
      P[static_cast<std::size_t>(j)] = std::exp(P[static_cast<std::size_t>(j)] - most) / Z;
  }
};

void path_backward_one(const PathProblem& p, std::int64_t n, std::int64_t kv) {
  const AttnSpan span = p.sequence(n);
  const std::int64_t L = span.k_length, K = p.K, V = p.V, G = p.group();
  Doubles dk = doubles(L * K), dv = doubles(L * V), dw = doubles(L * K), dbeta = doubles(L);
  for (std::int64_t h = kv * G; h < (kv + 1) * G; ++h) {
    PathHead x(p, n, h);
    const Doubles dout = rows(p.do_, span.row, span.q_begin, L, h, V);
    Doubles dg = doubles(L), D = doubles(L);
    for (std::int64_t i = 0; i < L; ++i) {
      x.row(i);
      const double* doi = dout.data() + i * V;
      double t = 0.0;
      for (std::int64_t j = 0; j <= i; ++j) {
        const auto u = static_cast<std::size_t>(j);
        D[u] = dot(doi, x.at(x.v, j, V), V);
        t += x.P[u] * D[u];
      }
      double before = 0.0;
      Doubles dy = doubles(K);  // of y_j, from the keys up to j
      for (std::int64_t j = 0; j <= i; ++j) {
        const auto u = static_cast<std::size_t>(j);
        const double *y = x.at(x.y, j, K), *w = x.at(x.w, j, K);
        if (j > 0) {  // y_{j-1} was made from y_j
          const double wy = dot(w, y, K), wd = dot(w, dy.data(), K);
          dbeta[u] -= wy * wd;
          for (std::int64_t c = 0; c < K; ++c) {
            double& d = dy[static_cast<std::size_t>(c)];
            dw[static_cast<std::size_t>(j * K + c)] -= x.beta[u] * (wy * d + wd * y[c]);
            d -= x.beta[u] * w[c] * wd;
          }
        }
        const double Dj = p.scale * x.P[u] * (D[u] - t);
        dg[u] += before;
        before += Dj;
        for (std::int64_t c = 0; c < K; ++c) {
          dy[static_cast<std::size_t>(c)] += Dj * x.at(x.k, j, K)[c];
          dk[static_cast<std::size_t>(j * K + c)] += Dj * y[c];
        }
        for (std::int64_t c = 0; c < V; ++c) dv[static_cast<std::size_t>(j * V + c)] += x.P[u] * doi[c];
      }
      for (std::int64_t c = 0; p.dq && c < K; ++c)
        store(p.dq, dy[static_cast<std::size_t>(c)], span.row, span.q_begin + i, h, c);
    }
    for (std::int64_t j = 0; p.dg && j < L; ++j)
      store(p.dg, dg[static_cast<std::size_t>(j)], span.row, span.k_begin + j, h);
  }
  for (std::int64_t j = 0; j < L; ++j) {
    const std::int64_t t = span.k_begin + j;
    for (std::int64_t c = 0; c < K; ++c) {
      if (p.dk) store(p.dk, dk[static_cast<std::size_t>(j * K + c)], span.row, t, kv, c);
      if (p.dw) store(p.dw, dw[static_cast<std::size_t>(j * K + c)], span.row, t, kv, c);
    }
    for (std::int64_t c = 0; p.dv && c < V; ++c)
      store(p.dv, dv[static_cast<std::size_t>(j * V + c)], span.row, t, kv, c);
    if (p.dbeta) store(p.dbeta, dbeta[static_cast<std::size_t>(j)], span.row, t, kv);
  }
}

}  // namespace

Status path_forward(const PathProblem& p, ThreadPool& pool) {
  pool.run(p.N * p.HQ, [&](std::int64_t task, int) {
    PathHead x(p, task / p.HQ, task % p.HQ);
    for (std::int64_t i = 0; p.o && i < x.L; ++i) {
      x.row(i);
      for (std::int64_t c = 0; c < p.V; ++c) {
        double o = 0.0;
        for (std::int64_t j = 0; j <= i; ++j) o += x.P[static_cast<std::size_t>(j)] * x.at(x.v, j, p.V)[c];
        store(p.o, o, x.span.row, x.span.q_begin + i, x.h, c);
      }
    }
    if (!p.k_cache || x.h % p.group() != 0) return;
    for (std::int64_t j = 0; j < x.L; ++j) {  // (2)
      double* k = x.at(x.k, j, p.K);
      for (std::int64_t s = j + 1; s < x.L; ++s) {
        const double step = x.beta[static_cast<std::size_t>(s)] * dot(x.at(x.w, s, p.K), k, p.K);
        for (std::int64_t c = 0; c < p.K; ++c) k[c] -= step * x.at(x.w, s, p.K)[c];
      }
      for (std::int64_t c = 0; c < p.K; ++c) store(p.k_cache, k[c], x.span.row, x.span.k_begin + j, x.h / p.group(), c);
    }
  });
  return {};
}

Status path_backward(const PathProblem& p, ThreadPool& pool) {
  pool.run(p.N * p.H, [&](std::int64_t task, int) { path_backward_one(p, task / p.H, task % p.H); });
  return {};
}

// ---- native sparse attention -------------------------------------------------------------------------------------

namespace {

// One key head of one sequence, with pooled keys and values.
struct NsaHead {
  const NsaProblem& p;
  AttnSpan span;
  std::int64_t kv, K, V, L, n, blocks;
  Doubles k, v, kc, vc;

  NsaHead(const NsaProblem& problem, std::int64_t sequence, std::int64_t head)
      : p(problem), span(p.sequence(sequence)), kv(head), K(p.K), V(p.V), L(span.k_length), n(p.block) {
    blocks = (L + n - 1) / n;
    if (p.pooled_keys) {
      kc = rows(p.k, span.row, p.first_block(sequence), blocks, kv, K);
      return;
    }
    k = rows(p.k, span.row, span.k_begin, L, kv, K);
    v = rows(p.v, span.row, span.k_begin, L, kv, V);
    kc = pooled(k, K);
    vc = pooled(v, V);
  }
  std::int64_t length(std::int64_t block) const { return std::min(n, L - block * n); }
  Doubles pooled(const Doubles& x, std::int64_t width) const {
    Doubles m = doubles(blocks * width);
    for (std::int64_t j = 0; j < L; ++j)
      for (std::int64_t c = 0; c < width; ++c)
        m[static_cast<std::size_t>(j / n * width + c)] +=
            x[static_cast<std::size_t>(j * width + c)] / static_cast<double>(length(j / n));
    return m;
  }
  std::int64_t position(std::int64_t i) const { return i + span.offset; }
  std::int64_t passed(std::int64_t i) const { return std::min(blocks, (position(i) + 1) / n); }

  // The blocks that query i reads: the given list, or (2).
  std::vector<std::int64_t> list(std::int64_t i) const {
    const std::int64_t t = position(i), own = t / n;
    std::vector<std::int64_t> found;
    if (p.indices) {
      for (std::int64_t s = 0; s < p.count(span, i, kv); ++s) {
        const std::int64_t block = p.entry(p.indices, span.row, span.q_begin + i, kv, s);
        if (block >= 0 && block * n <= t && block * n < L) found.push_back(block);
      }
      return found;
    }
    Doubles score = doubles(own + 1);
    const std::int64_t G = p.group();
    for (std::int64_t h = kv * G; h < (kv + 1) * G; ++h) {
      Doubles share = doubles(passed(i));
      double most = -std::numeric_limits<double>::infinity(), Z = 0.0;
      for (std::int64_t j = 0; j < passed(i); ++j) {
        double sum = 0.0;
        for (std::int64_t c = 0; c < K; ++c)
          sum += load(p.q, span.row, span.q_begin + i, h, c) * kc[static_cast<std::size_t>(j * K + c)];
        share[static_cast<std::size_t>(j)] = p.scale * sum;
        most = std::max(most, p.scale * sum);
      }
      for (double& x : share) Z += x = std::exp(x - most);
      for (std::size_t j = 0; j < share.size(); ++j) score[j] += share[j] / Z / static_cast<double>(G);
    }
    for (const std::int64_t forced : {std::int64_t{0}, own - 1, own})
      if (forced >= 0) score[static_cast<std::size_t>(forced)] = 10.0;  // a share is at most 1
    std::vector<std::int64_t> order;
    for (std::int64_t j = 0; j <= own; ++j) order.push_back(j);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      return score[static_cast<std::size_t>(a)] > score[static_cast<std::size_t>(b)];
    });
    for (std::int64_t s = 0; s < std::min(p.slots, own + 1); ++s) found.push_back(order[static_cast<std::size_t>(s)]);
    return found;
  }
};

// Softmax attention of one query over some rows of keys and values.
struct NsaBranch {
  std::vector<std::int64_t> at;  // rows
  Doubles P, o;

  void run(const double* q, const Doubles& k, const Doubles& v, std::int64_t K, std::int64_t V, double scale) {
    P.assign(at.size(), 0.0);
    o = doubles(V);
    double most = -std::numeric_limits<double>::infinity(), Z = 0.0;
    for (std::size_t j = 0; j < at.size(); ++j) {
      P[j] = scale * dot(q, k.data() + at[j] * K, K);
      most = std::max(most, P[j]);
    }
    for (double& x : P) Z += x = std::exp(x - most);
    for (std::size_t j = 0; j < at.size(); ++j) {
      P[j] /= Z;
      for (std::int64_t c = 0; c < V; ++c)
        o[static_cast<std::size_t>(c)] += P[j] * v[static_cast<std::size_t>(at[j] * V + c)];
    }
  }
  // do' is the gradient of o.
  void back(const double* q, const Doubles& k, const Doubles& v, std::int64_t K, std::int64_t V, double scale,
            const Doubles& dout, Doubles& dq, Doubles& dk, Doubles& dv) const {
    const double t = dot(dout.data(), o.data(), V);
    for (std::size_t j = 0; j < at.size(); ++j) {
      const double D = scale * P[j] * (dot(dout.data(), v.data() + at[j] * V, V) - t);
      for (std::int64_t c = 0; c < K; ++c) {
        dq[static_cast<std::size_t>(c)] += D * k[static_cast<std::size_t>(at[j] * K + c)];
        dk[static_cast<std::size_t>(at[j] * K + c)] += D * q[c];
      }
      for (std::int64_t c = 0; c < V; ++c)
        dv[static_cast<std::size_t>(at[j] * V + c)] += P[j] * dout[static_cast<std::size_t>(c)];
    }
  }
};

void nsa_one(const NsaProblem& p, std::int64_t n, std::int64_t kv, bool backward) {
  NsaHead x(p, n, kv);
  const std::int64_t K = p.K, V = p.V, G = p.group();
  const double own_scale = 1.0 / std::sqrt(static_cast<double>(K));
  Doubles dk = doubles(x.L * K), dv = doubles(x.L * V), dkc = doubles(x.blocks * K), dvc = doubles(x.blocks * V);
  for (std::int64_t i = 0; i < x.span.q_length; ++i) {
    const std::int64_t row = x.span.row, at = x.span.q_begin + i, t = x.position(i);
    NsaBranch cmp, slc, swa;
    for (std::int64_t j = 0; p.has_cmp() && j < x.passed(i); ++j) cmp.at.push_back(j);
    for (const std::int64_t block : x.list(i))
      for (std::int64_t j = block * p.block; j < std::min({(block + 1) * p.block, t + 1, x.L}); ++j)
        slc.at.push_back(j);
    for (std::int64_t j = std::max<std::int64_t>(0, t + 1 - p.swa); p.has_swa() && j <= t; ++j) swa.at.push_back(j);
    for (std::int64_t h = kv * G; h < (kv + 1) * G; ++h) {
      Doubles q = doubles(K), dq = doubles(K), dout = doubles(V);
      for (std::int64_t c = 0; c < K; ++c) q[static_cast<std::size_t>(c)] = load(p.q, row, at, h, c);
      cmp.run(q.data(), x.kc, x.vc, K, V, p.scale);
      slc.run(q.data(), x.k, x.v, K, V, p.scale);
      swa.run(q.data(), x.k, x.v, K, V, own_scale);
      const auto gate = [&](const TensorView& g, double absent) { return g ? load(g, row, at, h) : absent; };
      const double gc = gate(p.g_cmp, 0.0), gs = gate(p.g_slc, 1.0), gw = p.has_swa() ? gate(p.g_swa, 0.0) : 0.0;
      if (!backward) {
        for (std::int64_t c = 0; c < V; ++c) {
          const auto u = static_cast<std::size_t>(c);
          store(p.o, gc * cmp.o[u] + gs * slc.o[u] + gw * swa.o[u], row, at, h, c);
        }
        continue;
      }
      for (std::int64_t c = 0; p.do_ && c < V; ++c) dout[static_cast<std::size_t>(c)] = load(p.do_, row, at, h, c);
      if (p.dg_cmp) store(p.dg_cmp, dot(dout.data(), cmp.o.data(), V), row, at, h);
      if (p.dg_slc) store(p.dg_slc, dot(dout.data(), slc.o.data(), V), row, at, h);
      if (p.dg_swa) store(p.dg_swa, p.has_swa() ? dot(dout.data(), swa.o.data(), V) : 0.0, row, at, h);
      const auto times = [&](double g) {
        Doubles d = dout;
        for (double& e : d) e *= g;
        return d;
      };
      cmp.back(q.data(), x.kc, x.vc, K, V, p.scale, times(gc), dq, dkc, dvc);
      slc.back(q.data(), x.k, x.v, K, V, p.scale, times(gs), dq, dk, dv);
      swa.back(q.data(), x.k, x.v, K, V, own_scale, times(gw), dq, dk, dv);
      for (std::int64_t c = 0; p.dq && c < K; ++c) store(p.dq, dq[static_cast<std::size_t>(c)], row, at, h, c);
    }
  }
  if (!backward) return;
  for (std::int64_t j = 0; j < x.L; ++j) {
    const std::int64_t block = j / p.block;
    const double share = 1.0 / static_cast<double>(x.length(block));
    for (std::int64_t c = 0; p.dk && c < K; ++c)
      store(p.dk, dk[static_cast<std::size_t>(j * K + c)] + share * dkc[static_cast<std::size_t>(block * K + c)],
            x.span.row, x.span.k_begin + j, kv, c);
    for (std::int64_t c = 0; p.dv && c < V; ++c)
      store(p.dv, dv[static_cast<std::size_t>(j * V + c)] + share * dvc[static_cast<std::size_t>(block * V + c)],
            x.span.row, x.span.k_begin + j, kv, c);
  }
}

}  // namespace

Status nsa_forward(const NsaProblem& p, ThreadPool& pool) {
  if (p.o) pool.run(p.N * p.H, [&](std::int64_t task, int) { nsa_one(p, task / p.H, task % p.H, false); });
  return {};
}

Status nsa_backward(const NsaProblem& p, ThreadPool& pool) {
  pool.run(p.N * p.H, [&](std::int64_t task, int) { nsa_one(p, task / p.H, task % p.H, true); });
  return {};
}

Status nsa_choose(const NsaProblem& p, ThreadPool& pool) {
  pool.run(p.N * p.H, [&](std::int64_t task, int) {
    const NsaHead x(p, task / p.H, task % p.H);
    for (std::int64_t i = 0; i < x.span.q_length; ++i) {
      std::vector<std::int64_t> found = x.list(i);
      std::sort(found.begin(), found.end());
      found.resize(static_cast<std::size_t>(p.slots), -1);
      for (std::int64_t s = 0; s < p.slots; ++s)
        p.choose(x.span.row, x.span.q_begin + i, x.kv, s, found[static_cast<std::size_t>(s)]);
    }
  });
  return {};
}

}  // namespace fla::reference
