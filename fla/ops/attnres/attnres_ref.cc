// The double-precision reference of attnres: README.md (1) to (9) in their order, written for reading. It shares no
// helper with any kernel.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <memory>

#include "fla/engine/common/ref_access.h"
#include "fla/ops/attnres/attnres.h"
#include "fla/registry/registry.h"

namespace fla {

namespace {

using reference::load;
using reference::store;

// A call's tokens in row-major order of their axes.
struct Tokens {
  const AttnresArgs& a;
  int axes;  // before D
  std::int64_t count = 1, L, D;

  explicit Tokens(const AttnresArgs& args)
      : a(args),
        axes(args.residuals[0].ndim - 1),
        L(static_cast<std::int64_t>(args.residuals.size())),
        D(args.residuals[0].dim(axes)) {
    for (int i = 0; i < axes; ++i) count *= args.residuals[0].dim(i);
  }

  // Token n's part of a tensor whose axes from `first` on are the tokens'.
  TensorView of(TensorView t, std::int64_t n, int first = 0) const {
    const auto own = static_cast<std::size_t>(first);
    const auto bytes = static_cast<std::int64_t>(size_of(t.dtype));
    for (auto i = static_cast<std::size_t>(axes); i-- > 0;) {
      const std::int64_t size = a.residuals[0].shape[i];
      t.data = static_cast<std::byte*>(t.data) + n % size * t.stride[own + i] * bytes;
      n /= size;
    }
    t.stride[0] = t.stride[static_cast<std::size_t>(first == 0 ? axes : 0)];
    return t;
  }
  double v(std::int64_t n, std::int64_t l, std::int64_t d) const {
    return load(of(a.residuals[static_cast<std::size_t>(l)], n), d);
  }
  double key(std::int64_t d) const { return load(a.query, d) * load(a.rms_weight, d); }
};

// What the call computes of each token before anything else.
struct Weights {
  double *rho, *z, *p;  // [N, L]
  double* r;            // [N]: of the result's normalisation
};

std::size_t weights_size(const Tokens& t) { return static_cast<std::size_t>(t.count * (3 * t.L + 1)); }

Weights weights_in(double* memory, const Tokens& t) {
  const std::int64_t n = t.count * t.L;
  return {memory, memory + n, memory + 2 * n, memory + 3 * n};
}

double u_of(const Tokens& t, const Weights& w, std::int64_t n, std::int64_t d) {  // (4)
  double u = 0.0;
  for (std::int64_t l = 0; l < t.L; ++l) u += w.p[n * t.L + l] * t.v(n, l, d);
  return u;
}

void compute_weights(const Tokens& t, const Weights& w, std::int64_t n) {
  double *rho = w.rho + n * t.L, *z = w.z + n * t.L, *p = w.p + n * t.L;
  for (std::int64_t l = 0; l < t.L; ++l) {
    double squares = 0.0, product = 0.0;
    for (std::int64_t d = 0; d < t.D; ++d) {
      squares += t.v(n, l, d) * t.v(n, l, d);
      product += t.v(n, l, d) * t.key(d);
    }
    rho[l] = 1.0 / std::sqrt(squares / static_cast<double>(t.D) + t.a.rms_eps);  // (1)
    z[l] = rho[l] * product;                                                     // (2)
  }
  double most = t.a.scale * z[0], sum = 0.0;
  for (std::int64_t l = 1; l < t.L; ++l) most = std::max(most, t.a.scale * z[l]);
  for (std::int64_t l = 0; l < t.L; ++l) sum += std::exp(t.a.scale * z[l] - most);
  for (std::int64_t l = 0; l < t.L; ++l) p[l] = std::exp(t.a.scale * z[l] - most) / sum;  // (3)
  if (!t.a.output_rms_weight) return;
  double squares = 0.0;
  for (std::int64_t d = 0; d < t.D; ++d) squares += u_of(t, w, n, d) * u_of(t, w, n, d);
  w.r[n] = 1.0 / std::sqrt(squares / static_cast<double>(t.D) + t.a.rms_eps);
}

double* aligned(std::span<std::byte> memory) {
  void* p = memory.data();
  std::size_t space = memory.size();
  return static_cast<double*>(std::align(alignof(double), sizeof(double), p, space));
}

std::size_t forward_workspace(const AttnresArgs& a, const CallInfo&) {
  return (weights_size(Tokens(a)) + 1) * sizeof(double);
}

Status forward(const AttnresArgs& a, const CallInfo&, const LaunchInfo& l) {
  const Tokens t(a);
  const Weights w = weights_in(aligned(l.workspace), t);
  l.pool->run(t.count, [&](std::int64_t n, int) {
    compute_weights(t, w, n);
    for (std::int64_t i = 0; a.p && i < t.L; ++i) store(t.of(a.p, n, 1), w.p[n * t.L + i], i);
    for (std::int64_t d = 0; a.o && d < t.D; ++d) {
      const double u = u_of(t, w, n, d);
      store(t.of(a.o, n), a.output_rms_weight ? load(a.output_rms_weight, d) * u * w.r[n] : u, d);  // (5)
    }
  });
  return {};
}

// Beside the weights: e [N, L] and du [N, D].
std::size_t backward_workspace(const AttnresBackwardArgs& a, const CallInfo&) {
  const Tokens t(a);
  return (weights_size(t) + static_cast<std::size_t>(t.count * (t.L + t.D)) + 1) * sizeof(double);
}

Status backward(const AttnresBackwardArgs& a, const CallInfo&, const LaunchInfo& launch) {
  const Tokens t(a);
  const std::int64_t L = t.L, D = t.D;
  double* memory = aligned(launch.workspace);
  const Weights w = weights_in(memory, t);
  double *gradients = memory + weights_size(t), *du_rows = gradients + t.count * L;
  const auto up = [&](std::int64_t n, std::int64_t d) { return a.do_ ? load(t.of(a.do_, n), d) : 0.0; };

  launch.pool->run(t.count, [&](std::int64_t n, int) {
    compute_weights(t, w, n);
    const double *rho = w.rho + n * L, *z = w.z + n * L, *p = w.p + n * L;
    double *e = gradients + n * L, *du = du_rows + n * D;
    if (a.output_rms_weight) {
      double mean = 0.0;
      for (std::int64_t d = 0; d < D; ++d)
        mean += u_of(t, w, n, d) * w.r[n] * load(a.output_rms_weight, d) * up(n, d) / static_cast<double>(D);
      for (std::int64_t d = 0; d < D; ++d)  // (6)
        du[d] = w.r[n] * (load(a.output_rms_weight, d) * up(n, d) - u_of(t, w, n, d) * w.r[n] * mean);
    } else {
      for (std::int64_t d = 0; d < D; ++d) du[d] = up(n, d);
    }
    double delta = 0.0;
    for (std::int64_t l = 0; l < L; ++l) {
      e[l] = 0.0;
      for (std::int64_t d = 0; d < D; ++d) e[l] += du[d] * t.v(n, l, d);
      delta += p[l] * e[l];
    }
    // One source alone has a constant softmax: sums of another order would leave a rounding here.
    for (std::int64_t l = 0; l < L; ++l) e[l] = L == 1 ? 0.0 : a.scale * p[l] * (e[l] - delta);  // (7)
    for (std::int64_t l = 0; l < L; ++l) {
      if (a.dresiduals.empty() || !a.dresiduals[static_cast<std::size_t>(l)]) continue;
      const TensorView dv = t.of(a.dresiduals[static_cast<std::size_t>(l)], n);
      for (std::int64_t d = 0; d < D; ++d)  // (8)
        store(dv, p[l] * du[d] + e[l] * rho[l] * (t.key(d) - t.v(n, l, d) * rho[l] * z[l] / static_cast<double>(D)), d);
    }
  });

  launch.pool->run(D, [&](std::int64_t d, int) {  // (9)
    double S = 0.0, dw = 0.0;
    for (std::int64_t n = 0; n < t.count; ++n) {
      for (std::int64_t l = 0; l < L; ++l) S += gradients[n * L + l] * w.rho[n * L + l] * t.v(n, l, d);
      if (a.doutput_rms_weight) dw += u_of(t, w, n, d) * w.r[n] * up(n, d);
    }
    if (a.dquery) store(a.dquery, S * load(a.rms_weight, d), d);
    if (a.drms_weight) store(a.drms_weight, S * load(a.query, d), d);
    if (a.doutput_rms_weight) store(a.doutput_rms_weight, dw, d);
  });
  return {};
}

}  // namespace

void register_attnres_ref(Registry& r) {
  r.add(Kernel<AttnresArgs>{.function = kFusedAttnres,
                            .backend = kReference,
                            .name = "attnres.sum",
                            .verify = {},
                            .workspace = forward_workspace,
                            .launch = forward});
  r.add(Kernel<AttnresBackwardArgs>{.function = kFusedAttnresBackward,
                                    .backend = kReference,
                                    .name = "attnres.sum",
                                    .verify = {},
                                    .workspace = backward_workspace,
                                    .launch = backward});
}

}  // namespace fla
