// The double-precision reference of gated_oja_rule: README.md (1) and (2) and their gradients token by token, written
// for reading. It shares no helper with any kernel.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>

#include "fla/engine/common/ref_access.h"
#include "fla/ops/gated_oja_rule/gated_oja_rule.h"
#include "fla/registry/registry.h"

namespace fla {

namespace {

using reference::load;
using reference::store;

struct Shape {
  std::int64_t T, H, HV, K, V, N;
  double scale;

  explicit Shape(const GatedOjaRuleArgs& a)
      : T(a.q.dim(1)),
        H(a.q.dim(2)),
        HV(a.v.dim(2)),
        K(a.q.dim(3)),
        V(a.v.dim(3)),
        N(a.cu_seqlens ? a.cu_seqlens.dim(0) - 1 : a.q.dim(0)),
        scale(a.scale.value_or(1.0 / std::sqrt(static_cast<double>(K)))) {}
  // Tokens between two kept states in the backward.
  std::int64_t segment() const {
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(T)))));
  }
};

struct Memory {
  double *S, *q, *k, *v, *decay, *miss, *x;  // [K, V]; [K]; [K]; [V]; [V]; [K]; [max(K, V)]
  double *D, *next, *starts, *inside;        // [K, V], [K, V], [segments, K, V], [segment + 1, K, V]
  double *dq, *dk, *up, *dv;                 // [T, K], sums over the value heads of a group; [V]; [V]
  std::size_t doubles = 0;

  // Without a base it measures.
  Memory(double* base, const Shape& s, bool backward) {
    const auto take = [&](std::int64_t n) {
      double* at = base == nullptr ? nullptr : base + doubles;
      doubles += static_cast<std::size_t>(n);
      return at;
    };
    const std::int64_t KV = s.K * s.V;
    S = take(KV);
    q = take(s.K);
    k = take(s.K);
    v = take(s.V);
    decay = take(s.V);
    miss = take(s.K);
    x = take(std::max(s.K, s.V));
    D = next = starts = inside = dq = dk = up = dv = nullptr;
    if (!backward) return;
    D = take(KV);
    next = take(KV);
    starts = take((s.T / s.segment() + 1) * KV);
    inside = take((s.segment() + 1) * KV);
    dq = take(s.T * s.K);
    dk = take(s.T * s.K);
    up = take(s.V);
    dv = take(s.V);
  }
};

double* align(std::span<std::byte> workspace) {
  void* base = workspace.data();
  std::size_t space = workspace.size();
  std::align(alignof(double), sizeof(double), base, space);
  return static_cast<double*>(base);
}

// One value head of one sequence.
struct Walk {
  const GatedOjaRuleArgs& a;
  const Shape& s;
  std::int64_t n, hv, hk, row, begin, length;

  Walk(const GatedOjaRuleArgs& args, const Shape& shape, std::int64_t sequence, std::int64_t head)
      : a(args),
        s(shape),
        n(sequence),
        hv(head),
        hk(head / (shape.HV / shape.H)),
        row(sequence),
        begin(0),
        length(shape.T) {
    if (!a.cu_seqlens) return;
    row = 0;
    begin = static_cast<std::int64_t>(load(a.cu_seqlens, n));
    length = static_cast<std::int64_t>(load(a.cu_seqlens, n + 1)) - begin;
  }

  // Returns 1 / norm, or 1.
  double get_key(const TensorView& x, std::int64_t t, bool unit, double* to) const {
    double sum = 1e-6;
    for (std::int64_t i = 0; i < s.K; ++i) {
      to[i] = load(x, row, begin + t, hk, i);
      sum += to[i] * to[i];
    }
    if (!unit) return 1.0;
    const double r = 1.0 / std::sqrt(sum);
    for (std::int64_t i = 0; i < s.K; ++i) to[i] *= r;
    return r;
  }
  double beta(std::int64_t t) const { return a.beta ? load(a.beta, row, begin + t, hv) : 1.0; }
  // k, v and the decay of token t; S becomes S', and miss = k - S' v.
  void predict(const Memory& m, std::int64_t t, double* S) const {
    get_key(a.k, t, a.use_k_l2norm, m.k);
    for (std::int64_t j = 0; j < s.V; ++j) {
      m.v[j] = load(a.v, row, begin + t, hv, j);
      m.decay[j] = a.gv ? std::exp(load(a.gv, row, begin + t, hv, j)) : 1.0;
    }
    for (std::int64_t i = 0; i < s.K; ++i) {
      m.miss[i] = m.k[i];
      for (std::int64_t j = 0; j < s.V; ++j) {
        S[i * s.V + j] *= m.decay[j];
        m.miss[i] -= S[i * s.V + j] * m.v[j];
      }
    }
  }
  void advance(const Memory& m, std::int64_t t, double* S) const {  // (1)
    predict(m, t, S);
    const double b = beta(t);
    for (std::int64_t i = 0; i < s.K; ++i)
      for (std::int64_t j = 0; j < s.V; ++j) S[i * s.V + j] += b * m.miss[i] * m.v[j];
  }
  void get_state(const TensorView& from, double* S) const {
    for (std::int64_t i = 0; i < s.K; ++i)
      for (std::int64_t j = 0; j < s.V; ++j) S[i * s.V + j] = from ? load(from, n, hv, i, j) : 0.0;
  }
  void put_state(const TensorView& to, const double* S) const {
    for (std::int64_t i = 0; i < s.K; ++i)
      for (std::int64_t j = 0; j < s.V; ++j) store(to, S[i * s.V + j], n, hv, i, j);
  }
};

void forward_one(const Walk& w, const Memory& m) {
  w.get_state(w.a.initial_state, m.S);
  for (std::int64_t t = 0; t < w.length; ++t) {
    w.advance(m, t, m.S);
    if (!w.a.o) continue;
    w.get_key(w.a.q, t, w.a.use_q_l2norm, m.q);
    for (std::int64_t j = 0; j < w.s.V; ++j) {  // (2)
      double o = 0.0;
      for (std::int64_t i = 0; i < w.s.K; ++i) o += m.S[i * w.s.V + j] * m.q[i];
      store(w.a.o, w.s.scale * o, w.row, w.begin + t, w.hv, j);
    }
  }
  if (w.a.final_state) w.put_state(w.a.final_state, m.S);
}

// D: in, gradient of the state after token t; out, of the state before it, which is `before`.
void token_backward(const GatedOjaRuleBackwardArgs& g, const Walk& w, const Memory& m, std::int64_t t,
                    const double* before) {
  const std::int64_t K = w.s.K, V = w.s.V;
  std::copy_n(before, K * V, m.S);
  w.predict(m, t, m.S);
  const double beta = w.beta(t);
  double dbeta = 0.0;
  std::fill_n(m.dv, V, 0.0);
  for (std::int64_t i = 0; i < K; ++i) {
    double Dv = 0.0;
    for (std::int64_t j = 0; j < V; ++j) Dv += m.D[i * V + j] * m.v[j];
    dbeta += m.miss[i] * Dv;
    m.x[i] = beta * Dv;  // of miss, hence of k
    m.dk[t * K + i] += m.x[i];
    for (std::int64_t j = 0; j < V; ++j) m.dv[j] += beta * m.D[i * V + j] * m.miss[i] - m.S[i * V + j] * m.x[i];
  }
  if (g.dbeta) store(g.dbeta, dbeta, w.row, w.begin + t, w.hv);
  for (std::int64_t j = 0; j < V; ++j) {
    double dgv = 0.0;
    for (std::int64_t i = 0; i < K; ++i) {
      double& D = m.D[i * V + j];
      D -= m.x[i] * m.v[j];
      dgv += D * m.S[i * V + j];
      D *= m.decay[j];
    }
    if (g.dv) store(g.dv, m.dv[j], w.row, w.begin + t, w.hv, j);
    if (g.dgv) store(g.dgv, dgv, w.row, w.begin + t, w.hv, j);
  }
}

void head_backward(const GatedOjaRuleBackwardArgs& g, const Walk& w, const Memory& m) {
  const std::int64_t K = w.s.K, V = w.s.V, KV = K * V, seg = w.s.segment();
  w.get_state(g.initial_state, m.next);
  for (std::int64_t t = 0; t < w.length; ++t) {
    if (t % seg == 0) std::copy_n(m.next, KV, m.starts + t / seg * KV);
    w.advance(m, t, m.next);
  }
  w.get_state(g.dht, m.D);
  for (std::int64_t first = (w.length + seg - 1) / seg * seg - seg; first >= 0; first -= seg) {
    const std::int64_t end = std::min(first + seg, w.length);
    std::copy_n(m.starts + first / seg * KV, KV, m.inside);
    for (std::int64_t t = first; t < end; ++t) {
      double* state = m.inside + (t - first) * KV;
      std::copy_n(state, KV, state + KV);
      w.advance(m, t, state + KV);
    }
    for (std::int64_t t = end - 1; t >= first; --t) {
      const double* before = m.inside + (t - first) * KV;
      if (g.do_) {
        w.get_key(g.q, t, g.use_q_l2norm, m.q);
        for (std::int64_t j = 0; j < V; ++j) m.up[j] = load(g.do_, w.row, w.begin + t, w.hv, j);
        for (std::int64_t i = 0; i < K; ++i)
          for (std::int64_t j = 0; j < V; ++j) {
            m.dq[t * K + i] += w.s.scale * before[KV + i * V + j] * m.up[j];
            m.D[i * V + j] += w.s.scale * m.q[i] * m.up[j];
          }
      }
      token_backward(g, w, m, t, before);
    }
  }
  if (g.dh0) w.put_state(g.dh0, m.D);
}

// dx = r (dy - y <y, dy>) where x was normalised, else dx = dy.
void put_key_gradient(const Walk& w, const TensorView& x, const TensorView& dx, std::int64_t t, bool unit,
                      const double* dy, double* y) {
  if (!dx) return;
  const double r = w.get_key(x, t, unit, y);
  double dot = 0.0;
  for (std::int64_t i = 0; i < w.s.K; ++i) dot += y[i] * dy[i];
  for (std::int64_t i = 0; i < w.s.K; ++i)
    store(dx, unit ? r * (dy[i] - y[i] * dot) : dy[i], w.row, w.begin + t, w.hk, i);
}

Status forward(const GatedOjaRuleArgs& a, const CallInfo&, const LaunchInfo& l) {
  const Shape s(a);
  double* base = align(l.workspace);
  const std::size_t each = Memory(nullptr, s, false).doubles;
  l.pool->run(s.N * s.HV, [&](std::int64_t task, int worker) {
    forward_one(Walk(a, s, task / s.HV, task % s.HV), Memory(base + static_cast<std::size_t>(worker) * each, s, false));
  });
  return {};
}

Status backward(const GatedOjaRuleBackwardArgs& g, const CallInfo&, const LaunchInfo& l) {
  const Shape s(g);
  double* base = align(l.workspace);
  const std::size_t each = Memory(nullptr, s, true).doubles;
  l.pool->run(s.N * s.H, [&](std::int64_t task, int worker) {
    const Memory m(base + static_cast<std::size_t>(worker) * each, s, true);
    const std::int64_t n = task / s.H, group = s.HV / s.H, first = task % s.H * group;
    const Walk any(g, s, n, first);
    std::fill_n(m.dq, any.length * s.K, 0.0);
    std::fill_n(m.dk, any.length * s.K, 0.0);
    for (std::int64_t i = 0; i < group; ++i) head_backward(g, Walk(g, s, n, first + i), m);
    for (std::int64_t t = 0; t < any.length; ++t) {
      put_key_gradient(any, g.q, g.dq, t, g.use_q_l2norm, m.dq + t * s.K, m.x);
      put_key_gradient(any, g.k, g.dk, t, g.use_k_l2norm, m.dk + t * s.K, m.x);
    }
  });
  return {};
}

std::size_t bytes(const GatedOjaRuleArgs& a, const CallInfo& c, bool backwards) {
  return Memory(nullptr, Shape(a), backwards).doubles * static_cast<std::size_t>(c.threads) * sizeof(double) +
         alignof(double);
}

void add(Registry& r, FunctionId<GatedOjaRuleArgs> f, FunctionId<GatedOjaRuleBackwardArgs> b) {
  r.add(Kernel<GatedOjaRuleArgs>{
      .function = f,
      .backend = kReference,
      .name = "oja.recurrence",
      .verify = {},
      .workspace = [](const GatedOjaRuleArgs& a, const CallInfo& c) { return bytes(a, c, false); },
      .launch = forward});
  r.add(Kernel<GatedOjaRuleBackwardArgs>{
      .function = b,
      .backend = kReference,
      .name = "oja.recurrence",
      .verify = {},
      .workspace = [](const GatedOjaRuleBackwardArgs& a, const CallInfo& c) { return bytes(a, c, true); },
      .launch = backward});
}

}  // namespace

void register_gated_oja_rule_ref(Registry& r) {
  add(r, kChunkGatedOjaRule, kChunkGatedOjaRuleBackward);
  add(r, kFusedRecurrentGatedOjaRule, kFusedRecurrentGatedOjaRuleBackward);
}

}  // namespace fla
