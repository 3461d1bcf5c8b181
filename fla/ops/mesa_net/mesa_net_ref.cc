// The double-precision reference of mesa_net: README.md (1) to (4) token by token, written for reading. It shares no
// helper with any kernel.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "fla/engine/common/ref_access.h"
#include "fla/ops/mesa_net/mesa_net.h"
#include "fla/registry/registry.h"

namespace fla {

namespace {

using reference::load;
using reference::store;

// y = A x + lamb o x.
void multiply(std::int64_t K, const double* A, const double* lamb, const double* x, double* y) {
  for (std::int64_t i = 0; i < K; ++i) {
    y[i] = lamb[i] * x[i];
    for (std::int64_t j = 0; j < K; ++j) y[i] += A[i * K + j] * x[j];
  }
}

double dot(std::int64_t n, const double* x, const double* y) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

struct Solve {
  double iterations, residual;
};

// (3): `steps` steps from x, which has residual r. p and y are scratch. The 1e-5 belong to the operator.
Solve conjugate_gradients(std::int64_t K, const double* A, const double* lamb, std::int64_t steps, double* x, double* r,
                          double* p, double* y) {
  std::copy_n(r, K, p);
  double delta = dot(K, r, r), iterations = 0.0;
  for (std::int64_t step = 0; step < steps; ++step) {
    if (delta > 0.0) iterations += 1.0;
    multiply(K, A, lamb, p, y);
    const double alpha = delta / (dot(K, p, y) + 1e-5);
    for (std::int64_t i = 0; i < K; ++i) {
      x[i] += alpha * p[i];
      r[i] -= alpha * y[i];
    }
    const double next = dot(K, r, r);
    for (std::int64_t i = 0; i < K; ++i) p[i] = r[i] + next / (delta + 1e-5) * p[i];
    delta = next;
  }
  return {iterations, std::sqrt(delta)};
}

// M becomes the factors of A + diag(lamb) with its rows exchanged; row[i] tells which row went to i.
void factor(std::int64_t K, const double* A, const double* lamb, double* M, double* row) {
  for (std::int64_t i = 0; i < K; ++i)
    for (std::int64_t j = 0; j < K; ++j) M[i * K + j] = A[i * K + j] + (i == j ? lamb[i] : 0.0);
  for (std::int64_t c = 0; c < K; ++c) {
    std::int64_t pivot = c;
    for (std::int64_t i = c + 1; i < K; ++i)
      if (std::abs(M[i * K + c]) > std::abs(M[pivot * K + c])) pivot = i;
    row[c] = static_cast<double>(pivot);
    for (std::int64_t j = 0; j < K; ++j) std::swap(M[c * K + j], M[pivot * K + j]);
    for (std::int64_t i = c + 1; i < K; ++i) {
      M[i * K + c] /= M[c * K + c];
      for (std::int64_t j = c + 1; j < K; ++j) M[i * K + j] -= M[i * K + c] * M[c * K + j];
    }
  }
}

// x := (A + diag(lamb))^{-1} x.
void solve(std::int64_t K, const double* M, const double* row, double* x) {
  for (std::int64_t c = 0; c < K; ++c) std::swap(x[c], x[static_cast<std::int64_t>(row[c])]);
  for (std::int64_t i = 0; i < K; ++i)
    for (std::int64_t j = 0; j < i; ++j) x[i] -= M[i * K + j] * x[j];
  for (std::int64_t i = K - 1; i >= 0; --i) {
    for (std::int64_t j = i + 1; j < K; ++j) x[i] -= M[i * K + j] * x[j];
    x[i] /= M[i * K + i];
  }
}

double* align(std::span<std::byte> workspace) {
  void* base = workspace.data();
  std::size_t space = workspace.size();
  std::align(alignof(double), sizeof(double), base, space);
  return static_cast<double*>(base);
}

// Tokens between two kept states in the backward.
std::int64_t segment_length(std::int64_t T) {
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(T)))));
}

struct Memory {
  double* S;                                                                       // [2, K, K]: A, C
  double *lamb = nullptr, *q = nullptr, *k = nullptr, *v = nullptr, *z = nullptr;  // [K]
  double *r = nullptr, *p = nullptr, *y = nullptr;                                 // [K]
  double *D, *M, *row, *up;  // [2, K, K]: gradients of A and C; [K, K]; [K]; [K]
  double *starts, *inside;   // [segments, 2, K, K], [segment + 1, 2, K, K]
  double* dk;                // [K]
  std::size_t doubles = 0;

  // Without a base it measures.
  Memory(double* base, std::int64_t T, std::int64_t K, bool backward) {
    const auto take = [&](std::int64_t n) {
      double* at = base == nullptr ? nullptr : base + doubles;
      doubles += static_cast<std::size_t>(n);
      return at;
    };
    S = take(2 * K * K);
    for (double** x : {&lamb, &q, &k, &v, &z, &r, &p, &y}) *x = take(K);
    D = M = row = up = starts = inside = dk = nullptr;
    if (!backward) return;
    D = take(2 * K * K);
    M = take(K * K);
    row = take(K);
    up = take(K);
    dk = take(K);
    starts = take((T / segment_length(T) + 1) * 2 * K * K);
    inside = take((segment_length(T) + 1) * 2 * K * K);
  }
};

// One head of one sequence.
struct Walk {
  const MesaNetArgs& a;
  std::int64_t n, h, T, K, row, begin, length;

  Walk(const MesaNetArgs& args, std::int64_t sequence, std::int64_t head)
      : a(args), n(sequence), h(head), T(args.q.dim(1)), K(args.q.dim(3)), row(sequence), begin(0), length(T) {
    if (!a.cu_seqlens) return;
    row = 0;
    begin = static_cast<std::int64_t>(load(a.cu_seqlens, n));
    length = static_cast<std::int64_t>(load(a.cu_seqlens, n + 1)) - begin;
  }

  void get(const TensorView& x, std::int64_t t, double* to) const {
    for (std::int64_t i = 0; i < K; ++i) to[i] = load(x, row, begin + t, h, i);
  }
  // Returns 1 / norm, or 1.
  double get_unit(const TensorView& x, std::int64_t t, double* to) const {
    get(x, t, to);
    if (!a.use_qk_l2norm_in_kernel) return 1.0;
    const double r = 1.0 / std::sqrt(dot(K, to, to) + 1e-6);
    for (std::int64_t i = 0; i < K; ++i) to[i] *= r;
    return r;
  }
  double decay(std::int64_t t) const { return std::exp(load(a.g, row, begin + t, h)); }
  double beta(std::int64_t t) const { return load(a.beta, row, begin + t, h); }
  void get_lamb(double* to) const {
    for (std::int64_t i = 0; i < K; ++i) to[i] = load(a.lamb, h, i);
  }
  void get_states(const TensorView& A, const TensorView& C, double* S) const {
    for (std::int64_t i = 0; i < K; ++i)
      for (std::int64_t j = 0; j < K; ++j) {
        S[i * K + j] = A ? load(A, n, h, i, j) : 0.0;
        S[(K + i) * K + j] = C ? load(C, n, h, i, j) : 0.0;
      }
  }
  void put_states(const TensorView& A, const TensorView& C, const double* S) const {
    for (std::int64_t i = 0; i < K; ++i)
      for (std::int64_t j = 0; j < K; ++j) {
        if (A) store(A, S[i * K + j], n, h, i, j);
        if (C) store(C, S[(K + i) * K + j], n, h, i, j);
      }
  }
  void advance(const Memory& m, std::int64_t t, double* S) const {  // (1)
    get_unit(a.k, t, m.k);
    get(a.v, t, m.v);
    const double e = decay(t), b = beta(t);
    for (std::int64_t i = 0; i < K; ++i)
      for (std::int64_t j = 0; j < K; ++j) {
        S[i * K + j] = e * S[i * K + j] + b * m.k[i] * m.k[j];
        S[(K + i) * K + j] = e * S[(K + i) * K + j] + b * m.k[i] * m.v[j];
      }
  }
};

void forward_one(const Walk& w, const Memory& m) {
  const std::int64_t K = w.K;
  w.get_lamb(m.lamb);
  w.get_states(w.a.h_kk_init, w.a.h_kv_init, m.S);
  for (std::int64_t t = 0; t < w.length; ++t) {
    w.advance(m, t, m.S);
    if (!w.a.o && !w.a.cg_iterations && !w.a.cg_residual) continue;
    w.get_unit(w.a.q, t, m.r);
    std::fill_n(m.z, K, 0.0);
    const Solve s = conjugate_gradients(K, m.S, m.lamb, w.a.max_CG_iteration, m.z, m.r, m.p, m.y);
    if (w.a.cg_iterations) store(w.a.cg_iterations, s.iterations, w.row, w.begin + t, w.h);
    if (w.a.cg_residual) store(w.a.cg_residual, s.residual, w.row, w.begin + t, w.h);
    for (std::int64_t j = 0; j < K && w.a.o; ++j) {  // (2)
      double o = 0.0;
      for (std::int64_t i = 0; i < K; ++i) o += m.S[(K + i) * K + j] * m.z[i];
      store(w.a.o, o, w.row, w.begin + t, w.h, j);
    }
  }
  w.put_states(w.a.h_kk_final, w.a.h_kv_final, m.S);
}

// dx = r (dy - y <y, dy>) where x was normalised, else dx = dy. y is scratch.
void put_key_gradient(const Walk& w, const TensorView& x, const TensorView& dx, std::int64_t t, const double* dy,
                      double* y) {
  if (!dx) return;
  const double r = w.get_unit(x, t, y), along = w.a.use_qk_l2norm_in_kernel ? dot(w.K, y, dy) : 0.0;
  for (std::int64_t i = 0; i < w.K; ++i) store(dx, r * (dy[i] - y[i] * along), w.row, w.begin + t, w.h, i);
}

// before, after: the states around token t. D: in, gradient of the states after it through later tokens and the final
// states; out, of the states before it. (4) solves exactly.
void token_backward(const MesaNetBackwardArgs& g, const Walk& w, const Memory& m, std::int64_t t, const double* before,
                    const double* after, double* dlamb) {
  const std::int64_t K = w.K, KK = K * K;
  double *a = m.D, *c = m.D + KK, *z = m.z, *y = m.y;
  std::fill_n(y, K, 0.0);
  if (g.do_) {
    w.get(g.do_, t, m.up);
    factor(K, after, m.lamb, m.M, m.row);
    w.get_unit(g.q, t, z);
    solve(K, m.M, m.row, z);
    for (std::int64_t i = 0; i < K; ++i) y[i] = dot(K, after + KK + i * K, m.up);
    solve(K, m.M, m.row, y);
    for (std::int64_t i = 0; i < K; ++i) {
      dlamb[i] -= y[i] * z[i];
      for (std::int64_t j = 0; j < K; ++j) {
        a[i * K + j] -= y[i] * z[j];
        c[i * K + j] += z[i] * m.up[j];
      }
    }
  }
  put_key_gradient(w, g.q, g.dq, t, y, m.p);

  w.get_unit(g.k, t, m.k);
  w.get(g.v, t, m.v);
  const double b = w.beta(t), e = w.decay(t);
  double dbeta = 0.0;
  for (std::int64_t i = 0; i < K; ++i) {
    const double along_a = dot(K, a + i * K, m.k), along_c = dot(K, c + i * K, m.v);
    double across_a = 0.0, across_c = 0.0;
    for (std::int64_t j = 0; j < K; ++j) {
      across_a += a[j * K + i] * m.k[j];
      across_c += c[j * K + i] * m.k[j];
    }
    dbeta += m.k[i] * (along_a + along_c);
    m.dk[i] = b * (along_a + across_a + along_c);
    if (g.dv) store(g.dv, b * across_c, w.row, w.begin + t, w.h, i);
  }
  put_key_gradient(w, g.k, g.dk, t, m.dk, m.p);
  if (g.dbeta) store(g.dbeta, dbeta, w.row, w.begin + t, w.h);
  if (g.dg) store(g.dg, e * dot(2 * KK, m.D, before), w.row, w.begin + t, w.h);
  for (std::int64_t i = 0; i < 2 * KK; ++i) m.D[i] *= e;
}

void backward_one(const MesaNetBackwardArgs& g, const Walk& w, const Memory& m, double* dlamb) {
  const std::int64_t size = 2 * w.K * w.K, seg = segment_length(w.T);
  std::fill_n(dlamb, w.K, 0.0);
  w.get_lamb(m.lamb);
  w.get_states(g.h_kk_init, g.h_kv_init, m.S);
  for (std::int64_t t = 0; t < w.length; ++t) {
    if (t % seg == 0) std::copy_n(m.S, size, m.starts + t / seg * size);
    w.advance(m, t, m.S);
  }
  w.get_states(g.dh_kkt, g.dh_kvt, m.D);
  for (std::int64_t first = (w.length + seg - 1) / seg * seg - seg; first >= 0; first -= seg) {
    const std::int64_t end = std::min(first + seg, w.length);
    std::copy_n(m.starts + first / seg * size, size, m.inside);
    for (std::int64_t t = first; t < end; ++t) {
      double* states = m.inside + (t - first) * size;
      std::copy_n(states, size, states + size);
      w.advance(m, t, states + size);
    }
    for (std::int64_t t = end - 1; t >= first; --t) {
      const double* before = m.inside + (t - first) * size;
      token_backward(g, w, m, t, before, before + size, dlamb);
    }
  }
  w.put_states(g.dh_kk0, g.dh_kv0, m.D);
}

Status forward(const MesaNetArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const std::int64_t H = c.dims["H"];
  double* base = align(l.workspace);
  const std::size_t each = Memory(nullptr, c.dims["T"], c.dims["K"], false).doubles;
  l.pool->run(c.dims["N"] * H, [&](std::int64_t task, int worker) {
    const Walk w(a, task / H, task % H);
    forward_one(w, Memory(base + static_cast<std::size_t>(worker) * each, w.T, w.K, false));
  });
  return {};
}

Status backward(const MesaNetBackwardArgs& g, const CallInfo& c, const LaunchInfo& l) {
  const std::int64_t H = c.dims["H"], K = c.dims["K"], N = c.dims["N"];
  double* dlamb = align(l.workspace);  // [N, H, K]
  double* base = dlamb + N * H * K;
  const std::size_t each = Memory(nullptr, c.dims["T"], K, true).doubles;
  l.pool->run(N * H, [&](std::int64_t task, int worker) {
    const Walk w(g, task / H, task % H);
    backward_one(g, w, Memory(base + static_cast<std::size_t>(worker) * each, w.T, w.K, true), dlamb + task * K);
  });
  if (g.dlamb)
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t i = 0; i < K; ++i) {
        double sum = 0.0;
        for (std::int64_t n = 0; n < N; ++n) sum += dlamb[(n * H + h) * K + i];
        store(g.dlamb, sum, h, i);
      }
  return {};
}

// A, C, and nine vectors.
std::int64_t step_doubles(std::int64_t K, std::int64_t V) { return K * K + K * V + 8 * K + V; }

Status step(const MesaNetStepArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const std::int64_t H = c.dims["H"], K = c.dims["K"], V = c.dims["V"];
  double* base = align(l.workspace);
  l.pool->run(c.dims["B"] * H, [&](std::int64_t task, int worker) {
    const std::int64_t n = task / H, h = task % H;
    double *A = base + worker * step_doubles(K, V), *C = A + K * K, *lamb = C + K * V, *q = lamb + K, *k = q + K,
           *x = k + K, *r = x + K, *p = r + K, *y = p + K;
    const double e = std::exp(load(a.g, n, h)), b = load(a.beta, n, h);
    for (std::int64_t i = 0; i < K; ++i) {
      lamb[i] = load(a.lamb, h, i);
      q[i] = load(a.q, n, h, i);
      k[i] = load(a.k, n, h, i);
    }
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < K; ++j) A[i * K + j] = e * load(a.prev_h_kk, n, h, i, j) + b * k[i] * k[j];
      for (std::int64_t j = 0; j < V; ++j)
        C[i * V + j] = e * load(a.prev_h_kv, n, h, i, j) + b * k[i] * load(a.v, n, h, j);
      x[i] = q[i] / (A[i * K + i] + lamb[i] + 1e-5);
    }
    multiply(K, A, lamb, x, y);
    for (std::int64_t i = 0; i < K; ++i) r[i] = q[i] - y[i];
    const Solve s = conjugate_gradients(K, A, lamb, a.max_CG_iteration, x, r, p, y);
    if (a.cg_iterations) store(a.cg_iterations, s.iterations, n, h);
    if (a.cg_residual) store(a.cg_residual, s.residual, n, h);
    for (std::int64_t j = 0; j < V && a.o; ++j) {
      double o = 0.0;
      for (std::int64_t i = 0; i < K; ++i) o += C[i * V + j] * x[i];
      store(a.o, o, n, h, j);
    }
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < K && a.h_kk; ++j) store(a.h_kk, A[i * K + j], n, h, i, j);
      for (std::int64_t j = 0; j < V && a.h_kv; ++j) store(a.h_kv, C[i * V + j], n, h, i, j);
    }
  });
  return {};
}

std::size_t bytes(std::size_t doubles) { return doubles * sizeof(double) + alignof(double); }

}  // namespace

void register_mesa_net_ref(Registry& r) {
  r.add(Kernel<MesaNetArgs>{.function = kChunkMesaNet,
                            .backend = kReference,
                            .name = "mesa.recurrence",
                            .verify = {},
                            .workspace =
                                [](const MesaNetArgs&, const CallInfo& c) {
                                  return bytes(Memory(nullptr, c.dims["T"], c.dims["K"], false).doubles *
                                               static_cast<std::size_t>(c.threads));
                                },
                            .launch = forward});
  r.add(Kernel<MesaNetBackwardArgs>{
      .function = kChunkMesaNetBackward,
      .backend = kReference,
      .name = "mesa.recurrence",
      .verify = {},
      .workspace =
          [](const MesaNetBackwardArgs&, const CallInfo& c) {
            return bytes(Memory(nullptr, c.dims["T"], c.dims["K"], true).doubles * static_cast<std::size_t>(c.threads) +
                         static_cast<std::size_t>(c.dims["N"] * c.dims["H"] * c.dims["K"]));
          },
      .launch = backward});
  r.add(Kernel<MesaNetStepArgs>{.function = kMesaNetDecodingOneStep,
                                .backend = kReference,
                                .name = "mesa.recurrence",
                                .verify = {},
                                .workspace =
                                    [](const MesaNetStepArgs&, const CallInfo& c) {
                                      return bytes(static_cast<std::size_t>(step_doubles(c.dims["K"], c.dims["V"])) *
                                                   static_cast<std::size_t>(c.threads));
                                    },
                                .launch = step});
}

}  // namespace fla
