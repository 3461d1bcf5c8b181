#include "fla/engine/delta/ref.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "fla/engine/common/ref_access.h"

namespace fla::reference {

namespace {

double sigmoid(double x) { return x >= 0.0 ? 1.0 / (1.0 + std::exp(-x)) : std::exp(x) / (1.0 + std::exp(x)); }
double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

// y = x r with r = 1 / sqrt(sum x^2 + 1e-6); returns r.
double normalize(const double* x, std::int64_t n, double* y) {
  double sum = 1e-6;
  for (std::int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const double r = 1.0 / std::sqrt(sum);
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] * r;
  return r;
}

bool reads_decayed(const DeltaProblem& p) { return p.erase == Erase::Decayed || p.erase == Erase::Gated; }
bool writes_per_value_head(const DeltaProblem& p) { return p.w && p.w.dim(2) != p.H; }

// ---- what a worker keeps

// One row of one token: the vectors that change the state.
struct Row {
  double* k;          // [K] as it enters the formulas: normalised if asked
  double* erase;      // [K] alpha without beta and decay; in General: a
  double* write;      // [K] w or k; in General: b
  double *v, *value;  // [V] v; and what the correction compares with the state: v, or ew o v
  double* beta;       // [V] after the sigmoid; one number repeated, unless per value channel
  double *read, *e;   // [V] S^T erase; and beta o (value - read)
  double* decay_k;    // [K] e^{g + gk}, ones in rows after the first
  double* decay_v;    // [V] e^{gv}
};

// Tokens between two kept states: the states at the segments' starts and those inside one segment are equally many.
std::int64_t segment_length(const DeltaProblem& p) {
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(p.T)))));
}

struct Memory {
  double *S, *D, *decayed, *dread;  // [K, V] each; dread: gradient of the state that the correction reads
  double* starts;                   // [segments, K, V]
  double* inside;                   // [segment * R + 1, K, V]
  Row row;
  double *q, *up, *x;       // [K], [V], [max(K, V)]
  double* dq;               // [T, K], sums over the value heads of a group
  double* dk;               // [T R, K]
  double *derase, *dwrite;  // [T, K]: of p or a; of w or b
  std::size_t doubles = 0;

  // Without a base it measures.
  Memory(double* base, const DeltaProblem& p, bool backward) {
    const auto take = [&](std::int64_t n) {
      double* at = base == nullptr ? nullptr : base + doubles;
      doubles += static_cast<std::size_t>(n);
      return at;
    };
    const std::int64_t K = p.K, V = p.V, KV = K * V, seg = segment_length(p);
    S = take(KV);
    row.k = take(K);
    row.erase = take(K);
    row.write = take(K);
    row.v = take(V);
    row.value = take(V);
    row.beta = take(V);
    row.read = take(V);
    row.e = take(V);
    row.decay_k = take(K);
    row.decay_v = take(V);
    q = take(K);
    up = take(V);
    x = take(std::max(K, V));
    D = decayed = dread = starts = inside = dq = dk = derase = dwrite = nullptr;
    if (!backward) return;
    D = take(KV);
    decayed = take(KV);
    dread = take(KV);
    starts = take((p.T / seg + 1) * KV);
    inside = take((seg * p.R + 1) * KV);
    dq = take(p.T * K);
    dk = take(p.T * p.R * K);
    derase = take(p.T * K);
    dwrite = take(p.T * K);
  }
};

double* align(std::span<std::byte> workspace) {
  void* base = workspace.data();
  std::size_t space = workspace.size();
  std::align(alignof(double), sizeof(double), base, space);
  return static_cast<double*>(base);
}

// ---- one value head of one sequence; local time t = 0, 1, ... in the direction of the recurrence

struct Walk {
  const DeltaProblem& p;
  std::int64_t n, hv, hk;
  Sequence span;

  Walk(const DeltaProblem& problem, std::int64_t sequence, std::int64_t head)
      : p(problem), n(sequence), hv(head), hk(head / problem.group()), span(problem.sequence(sequence)) {}

  std::int64_t token(std::int64_t t) const { return span.begin + (p.reverse ? span.length - 1 - t : t); }
  std::int64_t line(std::int64_t t, std::int64_t r) const { return token(t) * p.R + r; }
  std::int64_t write_head() const { return writes_per_value_head(p) ? hv : hk; }

  void get(const TensorView& x, std::int64_t at, std::int64_t head, std::int64_t width, double* to) const {
    for (std::int64_t i = 0; i < width; ++i) to[i] = load(x, span.row, at, head, i);
  }
  void get_unit(const TensorView& x, std::int64_t at, std::int64_t head, bool unit, double* to) const {
    get(x, at, head, p.K, to);
    if (unit) normalize(to, p.K, to);
  }

  // The activation's argument and multiplier; channel 0 for g.
  double A_log() const { return p.gate.A_log ? load(p.gate.A_log, hv) : 0.0; }
  // Finite and not 0, as it may stand beside 0 and infinity.
  double multiplier() const { return std::clamp(std::exp(A_log()), 1e-300, 1e300); }
  // e^{A_log} times f(y), which is e^y for y far below 0: as one power there, where the factors may be no numbers.
  double multiplied(double y, double (*f)(double)) const {
    return y < -40.0 ? std::exp(A_log() + y) : multiplier() * f(y);
  }
  double shifted(double raw, std::int64_t channel) const {
    return p.gate.dt_bias ? raw + load(p.gate.dt_bias, hv, channel) : raw;
  }
  double activate(double raw, std::int64_t channel) const {
    switch (p.gate.kind) {
      case GateActivation::Kind::None: return raw;
      case GateActivation::Kind::Softplus: return -multiplied(shifted(raw, channel), softplus);
      case GateActivation::Kind::Bounded: return p.gate.lower_bound * sigmoid(multiplier() * shifted(raw, channel));
    }
    return raw;
  }
  double raw_beta(std::int64_t at, std::int64_t j) const {
    if (!p.beta) return 1.0;
    return p.beta.ndim == 4 ? load(p.beta, span.row, at, hv, j) : load(p.beta, span.row, at, hv);
  }

  void get_row(std::int64_t t, std::int64_t r, const Row& x) const {
    const std::int64_t at = line(t, r), tok = token(t), K = p.K, V = p.V;
    get_unit(p.k, at, hk, p.normalize_k, x.k);
    get(p.v, at, hv, V, x.v);
    std::copy_n(x.v, V, x.value);
    std::copy_n(x.k, K, x.erase);
    if (p.erase == Erase::Other && p.p) get_unit(p.p, tok, hk, p.normalize_k, x.erase);
    if (p.erase == Erase::Gated) {
      for (std::int64_t i = 0; i < K; ++i) x.erase[i] *= load(p.eb, span.row, tok, hv, i);
      for (std::int64_t j = 0; j < V; ++j) x.value[j] *= load(p.ew, span.row, tok, hv, j);
    }
    std::copy_n(x.k, K, x.write);
    if (p.w) get(p.w, tok, write_head(), K, x.write);
    if (p.erase == Erase::General) {
      get(p.a, tok, hk, K, x.erase);
      get(p.b, tok, hk, K, x.write);
    }
    for (std::int64_t j = 0; j < V; ++j) {
      x.beta[j] = raw_beta(at, j);
      if (p.beta_sigmoid > 0.0) x.beta[j] = p.beta_sigmoid * sigmoid(x.beta[j]);
    }
    for (std::int64_t i = 0; i < K; ++i) {
      double g = 0.0;
      if (r == 0 && p.g) g += activate(load(p.g, span.row, tok, hv), 0);
      if (r == 0 && p.gk) {
        const double raw = load(p.gk, span.row, tok, hv, i);
        g += p.g ? raw : activate(raw, i);
      }
      x.decay_k[i] = std::exp(g);
    }
    for (std::int64_t j = 0; j < V; ++j)
      x.decay_v[j] = r == 0 && p.gv ? std::exp(load(p.gv, span.row, tok, hv, j)) : 1.0;
  }

  void start(double* S) const {
    const std::int64_t from = p.slots().source(n);
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) S[i * p.V + j] = p.h0 ? load(p.h0, from, hv, i, j) : 0.0;
  }
  void put_state(const TensorView& to, const double* S, std::int64_t at) const {
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) store(to, S[i * p.V + j], at, hv, i, j);
  }
  void put_step(std::int64_t t, const double* S) const {
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) store(p.slots().steps, S[i * p.V + j], span.row, token(t), hv, i, j);
  }

  void decay(const Row& x, const double* S, double* to) const {
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) to[i * p.V + j] = x.decay_k[i] * x.decay_v[j] * S[i * p.V + j];
  }
  // to_j = sum_i x_i S_ij, and to_i = sum_j S_ij x_j.
  void down(const double* S, const double* x, double* to) const {
    for (std::int64_t j = 0; j < p.V; ++j) to[j] = 0.0;
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) to[j] += x[i] * S[i * p.V + j];
  }
  void across(const double* S, const double* x, double* to) const {
    for (std::int64_t i = 0; i < p.K; ++i) {
      to[i] = 0.0;
      for (std::int64_t j = 0; j < p.V; ++j) to[i] += S[i * p.V + j] * x[j];
    }
  }
  void add_outer(double factor, const double* x, const double* y, double* S) const {
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j) S[i * p.V + j] += factor * x[i] * y[j];
  }

  // (1) or (2); x holds the row, and afterwards what it read and wrote.
  void advance(double* S, const Row& x) const {
    if (!reads_decayed(p)) down(S, x.erase, x.read);
    decay(x, S, S);
    if (reads_decayed(p)) down(S, x.erase, x.read);
    if (p.erase == Erase::General) {
      add_outer(1.0, x.write, x.read, S);
      add_outer(1.0, x.k, x.v, S);
      return;
    }
    for (std::int64_t j = 0; j < p.V; ++j) x.e[j] = x.beta[j] * (x.value[j] - x.read[j]);
    add_outer(1.0, x.write, x.e, S);
  }
};

std::int64_t chunks_before(const DeltaProblem& p, std::int64_t n) {
  if (!p.cu_seqlens) return 0;  // a dense batch has an axis for the sequences
  std::int64_t chunks = 0;
  for (std::int64_t i = 0; i < n; ++i) chunks += (p.sequence(i).length + p.h_chunk - 1) / p.h_chunk;
  return chunks;
}

void forward_one(const Walk& w, const Memory& m) {
  const DeltaProblem& p = w.p;
  const std::int64_t first_chunk = p.h ? chunks_before(p, w.n) : 0;
  const std::int64_t L = w.span.length;
  const bool padding = p.slots().padding(w.n);
  if (padding) {
    std::fill_n(m.S, p.K * p.V, 0.0);
  } else {
    w.start(m.S);
  }
  for (std::int64_t t = 0; t < L; ++t) {
    if (p.h && t % p.h_chunk == 0)
      for (std::int64_t i = 0; i < p.K; ++i)
        for (std::int64_t j = 0; j < p.V; ++j)
          store(p.h, m.S[i * p.V + j], w.span.row, first_chunk + t / p.h_chunk, w.hv, i, j);
    for (std::int64_t r = 0; r < p.R && !padding; ++r) {
      w.get_row(t, r, m.row);
      w.advance(m.S, m.row);
    }
    const std::int64_t to = padding ? -1 : p.slots().target(w.n, t, L);
    if (p.ht && to >= 0) w.put_state(p.ht, m.S, to);
    if (p.slots().steps) w.put_step(t, m.S);
    if (!p.o) continue;
    w.get_unit(p.q, w.token(t), w.hk, p.normalize_q, m.q);
    w.down(m.S, m.q, m.x);
    for (std::int64_t j = 0; j < p.V; ++j)  // (3)
      store(p.o, padding ? 0.0 : p.scale * m.x[j], w.span.row, w.token(t), w.hv, j);
  }
  if (p.ht && L == 0 && !p.slots().indices) w.put_state(p.ht, m.S, w.n);
}

// ---- backward

// Sums over the tokens of one sequence and value head.
struct GateSums {
  double* dA_log;    // one number
  double* ddt_bias;  // [K], or one number for g
};

// Gradient of the raw gate from that of the log gate g = activate(raw).
double gate_chain(const Walk& w, double raw, std::int64_t channel, double dg, const GateSums& sums) {
  const GateActivation& gate = w.p.gate;
  if (gate.kind == GateActivation::Kind::None) return dg;
  const double y = w.shifted(raw, channel), x = w.multiplier() * y;
  // A raw gate may be infinite: its share of dA_log is then the limit, 0.
  const auto share = [](double slope, double by) { return slope == 0.0 ? 0.0 : slope * by; };
  double draw = 0.0;
  if (gate.kind == GateActivation::Kind::Softplus) {
    draw = share(-dg, w.multiplied(y, sigmoid));
    *sums.dA_log += share(dg, w.activate(raw, channel));
  } else {
    const double r = dg * gate.lower_bound * sigmoid(x) * sigmoid(-x);
    draw = r * w.multiplier();
    *sums.dA_log += share(r, x);
  }
  sums.ddt_bias[channel] += draw;
  return draw;
}

// One row downwards. before: the state that the row found. In: D, gradient of the state after the row. Out: of before.
void row_backward(const DeltaBackwardProblem& p, const Walk& w, const Memory& m, std::int64_t t, std::int64_t r,
                  const double* before, const GateSums& sums) {
  const Row& x = m.row;
  const std::int64_t K = p.K, V = p.V, KV = K * V, at = w.line(t, r), tok = w.token(t), row = w.span.row;
  double *dk = m.dk + (t * p.R + r) * K, *derase = m.derase + t * K, *dwrite = m.dwrite + t * K;
  const auto add = [](double* to, const double* from, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
  };

  w.get_row(t, r, x);
  w.decay(x, before, m.decayed);
  w.down(reads_decayed(p) ? m.decayed : before, x.erase, x.read);
  std::fill_n(m.dread, KV, 0.0);
  if (p.erase == Erase::General) {
    w.down(m.D, x.k, m.x);
    if (p.dv)
      for (std::int64_t j = 0; j < V; ++j) store(p.dv, m.x[j], row, at, w.hv, j);
    w.across(m.D, x.v, m.x);
    add(dk, m.x, K);
    w.across(m.D, x.read, m.x);
    add(dwrite, m.x, K);
    double* dz = m.x;  // [V] gradient of a^T S
    w.down(m.D, x.write, dz);
    w.add_outer(1.0, x.erase, dz, m.dread);
    for (std::int64_t i = 0; i < K; ++i)
      for (std::int64_t j = 0; j < V; ++j) derase[i] += before[i * V + j] * dz[j];
  } else {
    for (std::int64_t j = 0; j < V; ++j) x.e[j] = x.beta[j] * (x.value[j] - x.read[j]);
    double* write_sum = p.w ? dwrite : dk;
    for (std::int64_t i = 0; i < K; ++i)
      for (std::int64_t j = 0; j < V; ++j) write_sum[i] += m.D[i * V + j] * x.e[j];
    double* de = m.x;  // [V]
    w.down(m.D, x.write, de);

    double dbeta = 0.0;
    for (std::int64_t j = 0; j < V; ++j) {
      double db = de[j] * (x.value[j] - x.read[j]);
      if (p.beta_sigmoid > 0.0) {
        const double s = sigmoid(w.raw_beta(at, j));
        db *= p.beta_sigmoid * s * (1.0 - s);
      }
      dbeta += db;
      if (p.dbeta && p.beta.ndim == 4) store(p.dbeta, db, row, at, w.hv, j);
    }
    if (p.dbeta && p.beta.ndim == 3) store(p.dbeta, dbeta, row, at, w.hv);

    double* dvalue = m.x;  // [V] of beta o (value - read), hence of value, and with a minus of read
    for (std::int64_t j = 0; j < V; ++j) dvalue[j] *= x.beta[j];
    for (std::int64_t j = 0; j < V; ++j) {
      const double gate = p.erase == Erase::Gated ? load(p.ew, row, tok, w.hv, j) : 1.0;
      if (p.dv) store(p.dv, gate * dvalue[j], row, at, w.hv, j);
      if (p.dew) store(p.dew, x.v[j] * dvalue[j], row, tok, w.hv, j);
    }
    w.add_outer(-1.0, x.erase, dvalue, m.dread);
    const double* seen = reads_decayed(p) ? m.decayed : before;
    for (std::int64_t i = 0; i < K; ++i) {
      double dx = 0.0;  // of erase
      for (std::int64_t j = 0; j < V; ++j) dx -= seen[i * V + j] * dvalue[j];
      if (p.erase == Erase::Gated) {
        if (p.deb) store(p.deb, x.k[i] * dx, row, tok, w.hv, i);
        dk[i] += load(p.eb, row, tok, w.hv, i) * dx;
      } else if (p.erase == Erase::Other && p.p) {
        derase[i] += dx;
      } else {
        dk[i] += dx;
      }
    }
  }

  // Through the decay. D becomes the gradient of the decayed state, then of the state before.
  if (reads_decayed(p)) add(m.D, m.dread, KV);
  if (r == 0) {
    double dg = 0.0;
    for (std::int64_t i = 0; i < K; ++i) {
      double dgk = 0.0;
      for (std::int64_t j = 0; j < V; ++j) dgk += m.D[i * V + j] * m.decayed[i * V + j];
      dg += dgk;
      if (!p.gk) continue;
      const double d = p.g ? dgk : gate_chain(w, load(p.gk, row, tok, w.hv, i), i, dgk, sums);
      if (p.dgk) store(p.dgk, d, row, tok, w.hv, i);
    }
    if (p.g) {
      const double d = gate_chain(w, load(p.g, row, tok, w.hv), 0, dg, sums);
      if (p.dg) store(p.dg, d, row, tok, w.hv);
    }
    if (p.dgv)
      for (std::int64_t j = 0; j < V; ++j) {
        double d = 0.0;
        for (std::int64_t i = 0; i < K; ++i) d += m.D[i * V + j] * m.decayed[i * V + j];
        store(p.dgv, d, row, tok, w.hv, j);
      }
  }
  w.decay(x, m.D, m.D);
  if (!reads_decayed(p)) add(m.D, m.dread, KV);
}

// Upwards for the states at the segments' starts; downwards segment by segment, whose states are made again.
void head_backward(const DeltaBackwardProblem& p, const Walk& w, const Memory& m, const GateSums& sums) {
  const std::int64_t L = w.span.length, KV = p.K * p.V, seg = segment_length(p);
  w.start(m.S);
  for (std::int64_t t = 0; t < L; ++t) {
    if (t % seg == 0) std::copy_n(m.S, KV, m.starts + t / seg * KV);
    for (std::int64_t r = 0; r < p.R; ++r) {
      w.get_row(t, r, m.row);
      w.advance(m.S, m.row);
    }
  }
  for (std::int64_t i = 0; i < p.K; ++i)
    for (std::int64_t j = 0; j < p.V; ++j) m.D[i * p.V + j] = p.dht ? load(p.dht, w.n, w.hv, i, j) : 0.0;
  for (std::int64_t begin = (L + seg - 1) / seg * seg - seg; begin >= 0; begin -= seg) {
    const std::int64_t end = std::min(begin + seg, L);
    std::copy_n(m.starts + begin / seg * KV, KV, m.inside);
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t r = 0; r < p.R; ++r) {
        double* state = m.inside + ((t - begin) * p.R + r) * KV;
        std::copy_n(state, KV, state + KV);
        w.get_row(t, r, m.row);
        w.advance(state + KV, m.row);
      }
    for (std::int64_t t = end - 1; t >= begin; --t) {
      const double* states = m.inside + (t - begin) * p.R * KV;
      if (p.do_) {
        w.get(p.do_, w.token(t), w.hv, p.V, m.up);
        w.get_unit(p.q, w.token(t), w.hk, p.normalize_q, m.q);
        w.across(states + p.R * KV, m.up, m.x);
        for (std::int64_t i = 0; i < p.K; ++i) m.dq[t * p.K + i] += p.scale * m.x[i];
        w.add_outer(p.scale, m.q, m.up, m.D);
      }
      for (std::int64_t r = p.R - 1; r >= 0; --r) row_backward(p, w, m, t, r, states + r * KV, sums);
    }
  }
  if (p.dh0) w.put_state(p.dh0, m.D, w.n);
}

// dx = r (dy - y <y, dy>) where x was normalised, else dx = dy.
void put_key_gradient(const Walk& w, const TensorView& x, const TensorView& dx, std::int64_t at, std::int64_t head,
                      bool unit, const double* dy, double* y) {
  if (!dx) return;
  const std::int64_t K = w.p.K;
  double r = 1.0, dot = 0.0;
  if (unit) {
    w.get(x, at, head, K, y);
    r = normalize(y, K, y);
    for (std::int64_t i = 0; i < K; ++i) dot += y[i] * dy[i];
  }
  for (std::int64_t i = 0; i < K; ++i) store(dx, unit ? r * (dy[i] - y[i] * dot) : dy[i], w.span.row, at, head, i);
}

// A sequence's value heads that share key head hk, one after the other: their sums have one order.
void group_backward(const DeltaBackwardProblem& p, std::int64_t n, std::int64_t hk, const Memory& m, double* sums,
                    std::int64_t sums_per_head) {
  const Walk any(p, n, hk * p.group());
  const std::int64_t L = any.span.length, K = p.K;
  std::fill_n(m.dq, L * K, 0.0);
  std::fill_n(m.dk, L * p.R * K, 0.0);
  std::fill_n(m.derase, L * K, 0.0);
  std::fill_n(m.dwrite, L * K, 0.0);
  const TensorView& dwrite = p.erase == Erase::General ? p.db : p.dw;
  const auto put_write = [&](const Walk& w) {
    for (std::int64_t t = 0; t < L; ++t)
      put_key_gradient(w, {}, dwrite, w.token(t), p.w ? w.write_head() : w.hk, false, m.dwrite + t * K, m.x);
  };
  for (std::int64_t i = 0; i < p.group(); ++i) {
    const Walk w(p, n, hk * p.group() + i);
    double* own = sums + (n * p.HV + w.hv) * sums_per_head;
    std::fill_n(own, sums_per_head, 0.0);
    head_backward(p, w, m, {own, own + 1});
    if (writes_per_value_head(p)) {
      put_write(w);
      std::fill_n(m.dwrite, L * K, 0.0);
    }
  }
  if (!writes_per_value_head(p)) put_write(any);
  for (std::int64_t t = 0; t < L; ++t) {
    const std::int64_t tok = any.token(t);
    put_key_gradient(any, p.q, p.dq, tok, hk, p.normalize_q, m.dq + t * K, m.x);
    for (std::int64_t r = 0; r < p.R; ++r)
      put_key_gradient(any, p.k, p.dk, any.line(t, r), hk, p.normalize_k, m.dk + (t * p.R + r) * K, m.x);
    if (p.erase == Erase::Other) put_key_gradient(any, p.p, p.dp, tok, hk, p.normalize_k, m.derase + t * K, m.x);
    if (p.erase == Erase::General) put_key_gradient(any, p.a, p.da, tok, hk, false, m.derase + t * K, m.x);
  }
}

std::int64_t sums_per_head(const DeltaProblem& p) { return 1 + (p.g ? 1 : p.K); }

}  // namespace

std::size_t delta_forward_workspace(const DeltaProblem& p, int threads) {
  return Memory(nullptr, p, false).doubles * static_cast<std::size_t>(threads) * sizeof(double) + alignof(double);
}

Status delta_forward(const DeltaProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  double* base = align(workspace);
  const std::size_t each = Memory(nullptr, p, false).doubles;
  pool.run(p.N * p.HV, [&](std::int64_t task, int worker) {
    forward_one(Walk(p, task / p.HV, task % p.HV), Memory(base + static_cast<std::size_t>(worker) * each, p, false));
  });
  return {};
}

std::size_t delta_backward_workspace(const DeltaBackwardProblem& p, int threads) {
  const std::size_t sums = static_cast<std::size_t>(p.N * p.HV * sums_per_head(p));
  return (Memory(nullptr, p, true).doubles * static_cast<std::size_t>(threads) + sums) * sizeof(double) +
         alignof(double);
}

Status delta_backward(const DeltaBackwardProblem& p, ThreadPool& pool, std::span<std::byte> workspace) {
  const std::int64_t per_head = sums_per_head(p);
  double* sums = align(workspace);  // [N, HV, 1 + K]: of A_log, of dt_bias
  double* base = sums + p.N * p.HV * per_head;
  const std::size_t each = Memory(nullptr, p, true).doubles;
  pool.run(p.N * p.H, [&](std::int64_t task, int worker) {
    group_backward(p, task / p.H, task % p.H, Memory(base + static_cast<std::size_t>(worker) * each, p, true), sums,
                   per_head);
  });
  const auto total = [&](std::int64_t hv, std::int64_t i) {
    double sum = 0.0;
    for (std::int64_t n = 0; n < p.N; ++n) sum += sums[(n * p.HV + hv) * per_head + i];
    return sum;
  };
  for (std::int64_t hv = 0; hv < p.HV; ++hv) {
    if (p.dA_log) store(p.dA_log, total(hv, 0), hv);
    if (p.ddt_bias)
      for (std::int64_t i = 0; i + 1 < per_head; ++i) store(p.ddt_bias, total(hv, i + 1), hv, i);
  }
  return {};
}

}  // namespace fla::reference
