#include "fla/engine/diag/ref.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "fla/engine/common/ref_access.h"

namespace fla::reference {

namespace {

// The log gate of head h where the head alone tells it, rounded to fp32 as the contract forms it. Written here once more:
// the reference shares no formula with kernels.
double head_gate(const HeadDecay& d, std::int64_t h) {
  switch (d.kind) {
    case HeadDecay::Kind::None: return 0.0;
    case HeadDecay::Kind::Tensor: return load(d.gamma, h);
    case HeadDecay::Kind::Retention:
      return static_cast<float>(std::log(1.0 - std::ldexp(1.0, static_cast<int>(-5 - h))));
    case HeadDecay::Kind::Lightning: return static_cast<float>(d.slope) * static_cast<float>(h);
  }
  return 0.0;
}

// One (sequence, head): local time t = 0, 1, ... in the direction of the recurrence.
struct Walk {
  const DiagProblem& p;
  std::int64_t n, h;
  Sequence span;

  Walk(const DiagProblem& problem, std::int64_t task)
      : p(problem), n(task / problem.H), h(task % problem.H), span(problem.sequence(n)) {}

  std::int64_t row(std::int64_t t) const { return span.begin + (p.reverse ? span.length - 1 - t : t); }
  // The log gate of state element (i, j) at time t.
  double key_gate(std::int64_t t, std::int64_t i) const {
    if (p.gk) return load(p.gk, span.row, row(t), h, i);
    if (p.g) return load(p.g, span.row, row(t), h);
    return head_gate(p.head, h);
  }
  double key_decay(std::int64_t t, std::int64_t i) const { return std::exp(key_gate(t, i)); }
  double value_decay(std::int64_t t, std::int64_t j) const {
    return p.gv ? std::exp(load(p.gv, span.row, row(t), h, j)) : 1.0;
  }
  double q(std::int64_t t, std::int64_t i) const { return load(p.q, span.row, row(t), h, i); }
  double k(std::int64_t t, std::int64_t i) const { return load(p.k, span.row, row(t), h, i); }
  double v(std::int64_t t, std::int64_t j) const { return load(p.v, span.row, row(t), h, j); }
  double bonus(std::int64_t i) const { return load(p.u, h, i); }

  void start(double* S) const {
    const std::int64_t from = p.slots().source(n);
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) S[i * p.V + j] = p.h0 ? load(p.h0, from, h, i, j) : 0.0;
  }
  // (1)
  void decay(double* S, std::int64_t t) const {
    for (std::int64_t i = 0; i < p.K; ++i) {
      const double by_key = key_decay(t, i);
      for (std::int64_t j = 0; j < p.V; ++j) S[i * p.V + j] *= by_key * value_decay(t, j);
    }
  }
  void write(double* S, std::int64_t t) const {
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) S[i * p.V + j] += k(t, i) * v(t, j);
  }
  void advance(double* S, std::int64_t t) const {
    decay(S, t);
    write(S, t);
  }
  void write_state(const TensorView& to, const double* S, std::int64_t at) const {
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) store(to, S[i * p.V + j], at, h, i, j);
  }
  void write_step(std::int64_t t, const double* S) const {
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) store(p.slots().steps, S[i * p.V + j], span.row, row(t), h, i, j);
  }
};

double* scratch(std::span<std::byte> workspace, int worker, std::size_t doubles) {
  void* base = workspace.data();
  std::size_t space = workspace.size();
  std::align(alignof(double), sizeof(double), base, space);
  return static_cast<double*>(base) + static_cast<std::size_t>(worker) * doubles;
}

std::size_t bytes(std::size_t doubles, int threads) {
  return doubles * static_cast<std::size_t>(threads) * sizeof(double) + alignof(double);
}

std::size_t forward_doubles(const DiagProblem& p) { return static_cast<std::size_t>(p.K * p.V); }

// S, D, and per token q.dq (by key channel), o.do (by value channel).
std::size_t backward_doubles(const DiagBackwardProblem& p) {
  return static_cast<std::size_t>(2 * p.K * p.V + p.T * (p.K + p.V));
}

// (2) after the update of token t, (2') before it.
void read(const Walk& w, const double* S, std::int64_t t, bool padding) {
  const DiagProblem& p = w.p;
  for (std::int64_t j = 0; j < p.V; ++j) {
    double o = 0.0;
    for (std::int64_t i = 0; !padding && i < p.K; ++i) {
      const double own = p.u ? w.bonus(i) * w.k(t, i) * w.v(t, j) : 0.0;
      o += (S[i * p.V + j] + own) * w.q(t, i);
    }
    store(p.o, padding ? 0.0 : p.scale * o, w.span.row, w.row(t), w.h, j);
  }
}

void forward_one(const Walk& w, double* S) {
  const DiagProblem& p = w.p;
  const std::int64_t L = w.span.length;
  const bool padding = p.slots().padding(w.n);
  if (padding) {
    std::fill_n(S, p.K * p.V, 0.0);
  } else {
    w.start(S);
  }
  for (std::int64_t t = 0; t < L; ++t) {
    if (p.o && p.u) read(w, S, t, padding);
    if (!padding) {
      w.advance(S, t);
      if (const std::int64_t to = p.slots().target(w.n, t, L); p.ht && to >= 0) w.write_state(p.ht, S, to);
    }
    if (p.slots().steps) w.write_step(t, S);
    if (p.o && !p.u) read(w, S, t, padding);
  }
  if (p.ht && L == 0 && !p.slots().indices) w.write_state(p.ht, S, w.n);
}

// Upwards in t with S: dq. Downwards with D, the gradient of S_t: dk, dv, dh0. The gates' gradients follow from
//   dgk_t = sum_{i >= t} (q_i o dq_i - k_i o dk_i) + rowsum(S_T o dS_T),  dgv_t likewise with (o o do - v o dv)
// where a write counts for what lies behind a later gate only: what reads it before that would be in both sums, and their
// difference as inexact as it is, where gates are strong.
// Of (2'), where q_t meets S_{t-1}: the queries' sum starts behind t, and the bonus' parts stay out of both.
void backward_one(const DiagBackwardProblem& p, std::int64_t task, double* memory) {
  const Walk w(p, task);
  const std::int64_t L = w.span.length, K = p.K, V = p.V;
  const auto upstream = [&](std::int64_t t, std::int64_t j) {
    return p.do_ ? load(p.do_, w.span.row, w.row(t), w.h, j) : 0.0;
  };
  double* S = memory;
  double* D = S + K * V;
  double* by_key = D + K * V;         // [L, K]: q o dq
  double* by_value = by_key + L * K;  // [L, V]: o o do

  // scale <v_t, do_t>, what the bonus' gradients share.
  const auto own = [&](std::int64_t t) {
    double sum = 0.0;
    for (std::int64_t j = 0; p.u && j < V; ++j) sum += p.scale * w.v(t, j) * upstream(t, j);
    return sum;
  };
  // What token t reads of a decayed state.
  const auto reads = [&](std::int64_t t) {
    for (std::int64_t i = 0; i < K; ++i) {
      double dq = 0.0;
      for (std::int64_t j = 0; j < V; ++j) dq += p.scale * S[i * V + j] * upstream(t, j);
      by_key[t * K + i] = w.q(t, i) * dq;
    }
    for (std::int64_t j = 0; j < V; ++j) {
      double o = 0.0;
      for (std::int64_t i = 0; i < K; ++i) o += p.scale * S[i * V + j] * w.q(t, i);
      by_value[t * V + j] = o * upstream(t, j);
    }
  };
  const auto query_gradient = [&](std::int64_t t) {
    const double m = own(t);
    for (std::int64_t i = 0; p.dq && i < K; ++i) {
      double dq = p.u ? m * w.bonus(i) * w.k(t, i) : 0.0;
      for (std::int64_t j = 0; j < V; ++j) dq += p.scale * S[i * V + j] * upstream(t, j);
      store(p.dq, dq, w.span.row, w.row(t), w.h, i);
    }
  };
  for (std::int64_t i = 0; i < K; ++i)
    for (std::int64_t j = 0; j < V; ++j) D[i * V + j] = p.dht ? load(p.dht, w.n, w.h, i, j) : 0.0;
  // rowsum and colsum of S_T o dS_T, without what the last token wrote, start the gates' running sums.
  std::vector<double> key_sum(static_cast<std::size_t>(K), 0.0), value_sum(static_cast<std::size_t>(V), 0.0);
  w.start(S);
  if (p.u) std::fill_n(by_key, std::min<std::int64_t>(L, 1) * K, 0.0);
  if (p.u) std::fill_n(by_value, std::min<std::int64_t>(L, 1) * V, 0.0);
  for (std::int64_t t = 0; t < L; ++t) {
    if (p.u) query_gradient(t);
    w.decay(S, t);
    if (!p.u) reads(t);
    if (p.u && t + 1 < L) reads(t + 1);
    for (std::int64_t i = 0; t + 1 == L && i < K; ++i)
      for (std::int64_t j = 0; j < V; ++j) {
        key_sum[static_cast<std::size_t>(i)] += S[i * V + j] * D[i * V + j];
        value_sum[static_cast<std::size_t>(j)] += S[i * V + j] * D[i * V + j];
      }
    w.write(S, t);
    if (!p.u) query_gradient(t);
  }
  // k o dk and v o dv of a token's write, for what lies behind the next gate.
  std::vector<double> key_source(static_cast<std::size_t>(K), 0.0), value_source(static_cast<std::size_t>(V), 0.0);
  const auto sources = [&](std::int64_t t) {
    for (std::int64_t i = 0; i < K; ++i) {
      double dk = 0.0;
      for (std::int64_t j = 0; j < V; ++j) dk += D[i * V + j] * w.v(t, j);
      key_source[static_cast<std::size_t>(i)] = w.k(t, i) * dk;
    }
    for (std::int64_t j = 0; j < V; ++j) {
      double dv = 0.0;
      for (std::int64_t i = 0; i < K; ++i) dv += D[i * V + j] * w.k(t, i);
      value_source[static_cast<std::size_t>(j)] = w.v(t, j) * dv;
    }
  };

  const auto add_read = [&](std::int64_t t) {
    for (std::int64_t i = 0; i < K; ++i)
      for (std::int64_t j = 0; j < V; ++j) D[i * V + j] += p.scale * w.q(t, i) * upstream(t, j);
  };
  for (std::int64_t t = L - 1; t >= 0; --t) {
    if (!p.u) add_read(t);
    const double m = own(t);
    double reads_own = 0.0;  // scale <q_t, u o k_t>
    for (std::int64_t i = 0; p.u && i < K; ++i) reads_own += p.scale * w.q(t, i) * w.bonus(i) * w.k(t, i);
    for (std::int64_t i = 0; i < K; ++i) {
      double dk = 0.0;
      for (std::int64_t j = 0; j < V; ++j) dk += D[i * V + j] * w.v(t, j);
      if (p.u) dk += m * w.bonus(i) * w.q(t, i);
      if (p.dk) store(p.dk, dk, w.span.row, w.row(t), w.h, i);
    }
    for (std::int64_t j = 0; j < V; ++j) {
      double dv = 0.0;
      for (std::int64_t i = 0; i < K; ++i) dv += D[i * V + j] * w.k(t, i);
      dv += reads_own * upstream(t, j);
      if (p.dv) store(p.dv, dv, w.span.row, w.row(t), w.h, j);
    }
    double head_sum = 0.0;
    for (std::int64_t i = 0; i < K; ++i) {
      auto& sum = key_sum[static_cast<std::size_t>(i)];
      sum -= key_source[static_cast<std::size_t>(i)];
      if (!p.u) sum += by_key[t * K + i];
      head_sum += sum;
      if (p.dgk) store(p.dgk, sum, w.span.row, w.row(t), w.h, i);
      if (p.u) sum += by_key[t * K + i];
    }
    if (p.dg) store(p.dg, head_sum, w.span.row, w.row(t), w.h);
    for (std::int64_t j = 0; j < V; ++j) {
      auto& sum = value_sum[static_cast<std::size_t>(j)];
      sum += by_value[t * V + j] - value_source[static_cast<std::size_t>(j)];
      if (p.dgv) store(p.dgv, sum, w.span.row, w.row(t), w.h, j);
    }
    w.decay(D, t);
    if (t > 0) sources(t - 1);
    if (p.u) add_read(t);
  }
  if (p.dh0) w.write_state(p.dh0, D, w.n);
}

// du = sum over sequences and tokens of scale <v_t, do_t> q_t o k_t.
void bonus_gradient(const DiagBackwardProblem& p) {
  std::vector<double> sum(static_cast<std::size_t>(p.H * p.K), 0.0);
  for (std::int64_t task = 0; task < p.N * p.H; ++task) {
    const Walk w(p, task);
    for (std::int64_t t = 0; t < w.span.length; ++t) {
      double m = 0.0;
      for (std::int64_t j = 0; j < p.V; ++j)
        m += p.scale * w.v(t, j) * (p.do_ ? load(p.do_, w.span.row, w.row(t), w.h, j) : 0.0);
      for (std::int64_t i = 0; i < p.K; ++i) sum[static_cast<std::size_t>(w.h * p.K + i)] += m * w.q(t, i) * w.k(t, i);
    }
  }
  for (std::int64_t h = 0; h < p.H; ++h)
    for (std::int64_t i = 0; i < p.K; ++i) store(p.du, sum[static_cast<std::size_t>(h * p.K + i)], h, i);
}

}  // namespace

std::size_t diag_forward_workspace(const DiagProblem& p, int threads) { return bytes(forward_doubles(p), threads); }

Status diag_forward(const DiagProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  pool.run(p.N * p.H, [&](std::int64_t task, int worker) {
    forward_one(Walk(p, task), scratch(workspace, worker, forward_doubles(p)));
  });
  return {};
}

std::size_t diag_backward_workspace(const DiagBackwardProblem& p, int threads) {
  return bytes(backward_doubles(p), threads);
}

Status diag_backward(const DiagBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  pool.run(p.N * p.H, [&](std::int64_t task, int worker) {
    backward_one(p, task, scratch(workspace, worker, backward_doubles(p)));
  });
  if (p.du) bonus_gradient(p);
  return {};
}

Status diag_scores(const DiagProblem& p, const TensorView& attn, ThreadPool& pool) {
  pool.run(p.N * p.H, [&](std::int64_t task, int) {
    const Walk w(p, task);
    for (std::int64_t i = 0; i < p.T; ++i) {
      double decay = 0.0;  // G_i - G_j, summed outwards from the diagonal
      for (std::int64_t j = i; j >= 0; --j) {
        double dot = 0.0;
        for (std::int64_t c = 0; c < p.K; ++c) dot += w.q(i, c) * w.k(j, c);
        store(attn, p.scale * dot * std::exp(decay), w.n, w.h, i, j);
        decay += w.key_gate(j, 0);
      }
      for (std::int64_t j = i + 1; j < p.T; ++j) store(attn, 0.0, w.n, w.h, i, j);
    }
  });
  return {};
}

}  // namespace fla::reference
