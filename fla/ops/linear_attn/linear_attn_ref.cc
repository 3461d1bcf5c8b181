// The double-precision reference of linear_attn: the recurrence through the diagonal-decay reference, the
// normalisation, README.md (3) to (7), as plain loops in double.
#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "fla/engine/common/ref_access.h"
#include "fla/engine/diag/ref.h"
#include "fla/ops/linear_attn/linear_attn_problem.h"
#include "fla/registry/registry.h"

namespace fla {

namespace {

using reference::load;
using reference::store;

// One (sequence, head), tokens counted in the direction of the recurrence.
struct Head {
  const DiagProblem& p;
  std::int64_t n, h;
  Sequence span;

  Head(const DiagProblem& problem, std::int64_t task)
      : p(problem), n(task / problem.H), h(task % problem.H), span(problem.sequence(n)) {}
  std::int64_t row(std::int64_t t) const { return span.begin + (p.reverse ? span.length - 1 - t : t); }

  std::vector<double> first_z(const TensorView& z0) const {
    std::vector<double> z(static_cast<std::size_t>(p.K), 0.0);
    if (z0)
      for (std::int64_t i = 0; i < p.K; ++i) z[static_cast<std::size_t>(i)] = load(z0, n, 0, h, i);
    return z;
  }
  // (3)
  void add_key(std::vector<double>& z, std::int64_t t) const {
    for (std::int64_t i = 0; i < p.K; ++i) z[static_cast<std::size_t>(i)] += load(p.k, span.row, row(t), h, i);
  }
  // (4)
  double denominator(const std::vector<double>& z, std::int64_t t) const {
    double dot = 0.0;
    for (std::int64_t i = 0; i < p.K; ++i) dot += load(p.q, span.row, row(t), h, i) * z[static_cast<std::size_t>(i)];
    return p.scale * dot + kLinearAttnEpsilon;
  }
  void write_z(const TensorView& to, const std::vector<double>& z) const {
    for (std::int64_t i = 0; i < p.K; ++i) store(to, z[static_cast<std::size_t>(i)], n, 0, h, i);
  }
};

// Intermediate tensors of the normalised form, in double, and the recurrence's own memory.
struct Memory {
  TensorView y;       // [B, T, H, V]: S^T q scaled, later the gradient of it
  TensorView dd;      // [B, T, H]: gradient of the denominator
  TensorView dq, dk;  // [B, T, H, K]: what the recurrence gives
  std::span<std::byte> rest;
  std::size_t bytes;

  Memory(const DiagProblem& p, bool backward, std::size_t engine, std::span<std::byte> workspace) {
    void* at = workspace.data();
    std::size_t space = workspace.size();
    std::align(alignof(double), sizeof(double), at, space);
    auto* base = static_cast<double*>(at);
    std::int64_t used = 0;
    const auto take = [&](std::initializer_list<std::int64_t> dims) {
      TensorView t(base == nullptr ? nullptr : base + used, DType::F64, std::span(dims.begin(), dims.size()));
      used += t.numel();
      return t;
    };
    y = take({p.B, p.T, p.H, p.V});
    if (backward) {
      dd = take({p.B, p.T, p.H});
      dq = take({p.B, p.T, p.H, p.K});
      dk = take({p.B, p.T, p.H, p.K});
    }
    bytes = static_cast<std::size_t>(used + 1) * sizeof(double) + engine;
    if (base != nullptr) rest = {reinterpret_cast<std::byte*>(base + used), engine};
  }
};

Status normalised_forward(const LinearAttnArgs& a, ThreadPool& pool, std::span<std::byte> workspace) {
  DiagProblem p = to_problem(a);
  const Memory m(p, false, reference::diag_forward_workspace(p, pool.size()), workspace);
  if (a.o) p.o = m.y;
  if (Status s = reference::diag_forward(p, pool, m.rest); !s) return s;
  pool.run(p.N * p.H, [&](std::int64_t task, int) {
    const Head w(p, task);
    std::vector<double> z = w.first_z(a.initial_z);
    for (std::int64_t t = 0; t < w.span.length; ++t) {
      w.add_key(z, t);
      if (!a.o) continue;
      const double d = w.denominator(z, t);
      for (std::int64_t j = 0; j < p.V; ++j)  // (5)
        store(a.o, load(m.y, w.span.row, w.row(t), w.h, j) / d, w.span.row, w.row(t), w.h, j);
    }
    if (a.final_z) w.write_z(a.final_z, z);
  });
  return {};
}

Status normalised_backward(const LinearAttnBackwardArgs& a, ThreadPool& pool, std::span<std::byte> workspace) {
  DiagBackwardProblem p = to_problem(a);
  const std::size_t engine =
      std::max(reference::diag_forward_workspace(p, pool.size()), reference::diag_backward_workspace(p, pool.size()));
  const Memory m(p, true, engine, workspace);
  DiagProblem again = p;
  again.o = m.y;
  again.ht = {};
  if (Status s = reference::diag_forward(again, pool, m.rest); !s) return s;
  pool.run(p.N * p.H, [&](std::int64_t task, int) {  // (6)
    const Head w(p, task);
    std::vector<double> z = w.first_z(a.initial_z);
    for (std::int64_t t = 0; t < w.span.length; ++t) {
      w.add_key(z, t);
      const double d = w.denominator(z, t);
      double dot = 0.0;
      for (std::int64_t j = 0; j < p.V; ++j) {
        const double up = a.do_ ? load(a.do_, w.span.row, w.row(t), w.h, j) : 0.0;
        dot += up * load(m.y, w.span.row, w.row(t), w.h, j);
        store(m.y, up / d, w.span.row, w.row(t), w.h, j);
      }
      store(m.dd, a.do_ ? -dot / (d * d) : 0.0, w.span.row, w.row(t), w.h);
    }
  });
  p.do_ = a.do_ ? m.y : TensorView();
  p.dq = m.dq;
  p.dk = m.dk;
  if (Status s = reference::diag_backward(p, pool, m.rest); !s) return s;
  pool.run(p.N * p.H, [&](std::int64_t task, int) {  // (7)
    const Head w(p, task);
    std::vector<double> z = w.first_z(a.initial_z);
    for (std::int64_t t = 0; t < w.span.length; ++t) {
      w.add_key(z, t);
      const double dd = load(m.dd, w.span.row, w.row(t), w.h);
      for (std::int64_t i = 0; i < p.K && a.dq; ++i)
        store(a.dq, load(m.dq, w.span.row, w.row(t), w.h, i) + dd * p.scale * z[static_cast<std::size_t>(i)],
              w.span.row, w.row(t), w.h, i);
    }
    std::vector<double> dz = w.first_z(a.dzt);
    for (std::int64_t t = w.span.length - 1; t >= 0; --t) {
      const double dd = load(m.dd, w.span.row, w.row(t), w.h);
      for (std::int64_t i = 0; i < p.K; ++i) {
        double& e = dz[static_cast<std::size_t>(i)];
        e += dd * p.scale * load(p.q, w.span.row, w.row(t), w.h, i);
        if (a.dk) store(a.dk, load(m.dk, w.span.row, w.row(t), w.h, i) + e, w.span.row, w.row(t), w.h, i);
      }
    }
    if (a.dz0) w.write_z(a.dz0, dz);
  });
  return {};
}

void add(Registry& r, FunctionId<LinearAttnArgs> f, FunctionId<LinearAttnBackwardArgs> b, bool normalize) {
  r.add(Kernel<LinearAttnArgs>{.function = f,
                               .backend = kReference,
                               .name = "linear.recurrence",
                               .verify = {},
                               .workspace =
                                   [normalize](const LinearAttnArgs& a, const CallInfo& c) {
                                     const DiagProblem p = to_problem(a);
                                     const std::size_t engine = reference::diag_forward_workspace(p, c.threads);
                                     return a.normalize.value_or(normalize) ? Memory(p, false, engine, {}).bytes
                                                                            : engine;
                                   },
                               .launch =
                                   [normalize](const LinearAttnArgs& a, const CallInfo&, const LaunchInfo& l) {
                                     if (a.normalize.value_or(normalize))
                                       return normalised_forward(a, *l.pool, l.workspace);
                                     return reference::diag_forward(to_problem(a), *l.pool, l.workspace);
                                   }});
  r.add(Kernel<LinearAttnBackwardArgs>{
      .function = b,
      .backend = kReference,
      .name = "linear.recurrence",
      .verify = {},
      .workspace =
          [normalize](const LinearAttnBackwardArgs& a, const CallInfo& c) {
            const DiagBackwardProblem p = to_problem(a);
            const std::size_t back = reference::diag_backward_workspace(p, c.threads);
            if (!a.normalize.value_or(normalize)) return back;
            return Memory(p, true, std::max(back, reference::diag_forward_workspace(p, c.threads)), {}).bytes;
          },
      .launch =
          [normalize](const LinearAttnBackwardArgs& a, const CallInfo&, const LaunchInfo& l) {
            if (a.normalize.value_or(normalize)) return normalised_backward(a, *l.pool, l.workspace);
            return reference::diag_backward(to_problem(a), *l.pool, l.workspace);
          }});
}

}  // namespace

void register_linear_attn_ref(Registry& r) {
  add(r, kChunkLinearAttn, kChunkLinearAttnBackward, true);
  add(r, kFusedChunkLinearAttn, kFusedChunkLinearAttnBackward, true);
  add(r, kFusedRecurrentLinearAttn, kFusedRecurrentLinearAttnBackward, false);
}

}  // namespace fla
