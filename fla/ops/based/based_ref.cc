// The double-precision reference of based: README.md (1) to (4) pair by pair, written for reading. It shares no helper
// with any kernel.
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "fla/engine/common/ref_access.h"
#include "fla/ops/based/based.h"
#include "fla/registry/registry.h"

namespace fla {

namespace {

using reference::load;
using reference::store;

// One batch row and head.
struct Head {
  const BasedArgs& a;
  std::int64_t b, h, T, K, V;
  double scale;

  Head(const BasedArgs& args, std::int64_t task)
      : a(args),
        b(task / args.q.dim(2)),
        h(task % args.q.dim(2)),
        T(args.q.dim(1)),
        K(args.q.dim(3)),
        V(args.v.dim(3)),
        scale(args.scale.value_or(1.0 / std::sqrt(static_cast<double>(K)))) {}

  double score(std::int64_t i, std::int64_t j) const {
    double dot = 0.0;
    for (std::int64_t c = 0; c < K; ++c) dot += load(a.q, b, i, h, c) * load(a.k, b, j, h, c);
    return scale * dot;
  }
  static double taylor(double x) { return 1.0 + x + 0.5 * x * x; }

  // o_i [V]; returns what it was divided by.
  double output(std::int64_t i, std::vector<double>& o) const {
    o.assign(static_cast<std::size_t>(V), 0.0);
    double z = 0.0;
    for (std::int64_t j = 0; j <= i; ++j) {
      const double P = taylor(score(i, j));
      z += P;
      for (std::int64_t c = 0; c < V; ++c) o[static_cast<std::size_t>(c)] += P * load(a.v, b, j, h, c);
    }
    const double by = a.use_norm ? z + 1e-6 : 1.0;
    for (double& x : o) x /= by;
    return by;
  }
};

Status forward(const BasedArgs& a, const CallInfo&, const LaunchInfo& l) {
  l.pool->run(a.q.dim(0) * a.q.dim(2), [&](std::int64_t task, int) {
    const Head w(a, task);
    std::vector<double> o;
    for (std::int64_t i = 0; i < w.T; ++i) {
      w.output(i, o);
      for (std::int64_t j = 0; j < w.V; ++j) store(a.o, o[static_cast<std::size_t>(j)], w.b, i, w.h, j);
    }
  });
  return {};
}

Status backward(const BasedBackwardArgs& a, const CallInfo&, const LaunchInfo& l) {
  l.pool->run(a.q.dim(0) * a.q.dim(2), [&](std::int64_t task, int) {
    const Head w(a, task);
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    std::vector<double> o, up(size(w.V)), dq(size(w.T * w.K)), dk(size(w.T * w.K)), dv(size(w.T * w.V));
    for (std::int64_t i = 0; i < w.T && a.do_; ++i) {
      const double by = w.output(i, o);
      double dz = 0.0;
      for (std::int64_t x = 0; x < w.V; ++x) {
        up[size(x)] = load(a.do_, w.b, i, w.h, x) / by;
        if (a.use_norm) dz -= up[size(x)] * o[size(x)];
      }
      for (std::int64_t j = 0; j <= i; ++j) {
        const double s = w.score(i, j), P = Head::taylor(s);
        double dP = dz;
        for (std::int64_t x = 0; x < w.V; ++x) {
          dP += up[size(x)] * load(a.v, w.b, j, w.h, x);
          dv[size(j * w.V + x)] += P * up[size(x)];
        }
        const double da = w.scale * dP * (1.0 + s);
        for (std::int64_t x = 0; x < w.K; ++x) {
          dq[size(i * w.K + x)] += da * load(a.k, w.b, j, w.h, x);
          dk[size(j * w.K + x)] += da * load(a.q, w.b, i, w.h, x);
        }
      }
    }
    for (std::int64_t t = 0; t < w.T; ++t) {
      for (std::int64_t x = 0; x < w.K; ++x) {
        if (a.dq) store(a.dq, dq[size(t * w.K + x)], w.b, t, w.h, x);
        if (a.dk) store(a.dk, dk[size(t * w.K + x)], w.b, t, w.h, x);
      }
      for (std::int64_t x = 0; x < w.V && a.dv; ++x) store(a.dv, dv[size(t * w.V + x)], w.b, t, w.h, x);
    }
  });
  return {};
}

void add(Registry& r, FunctionId<BasedArgs> f, FunctionId<BasedBackwardArgs> b) {
  r.add(Kernel<BasedArgs>{
      .function = f, .backend = kReference, .name = "based.pairs", .verify = {}, .workspace = {}, .launch = forward});
  r.add(Kernel<BasedBackwardArgs>{
      .function = b, .backend = kReference, .name = "based.pairs", .verify = {}, .workspace = {}, .launch = backward});
}

}  // namespace

void register_based_ref(Registry& r) {
  add(r, kFusedChunkBased, kFusedChunkBasedBackward);
  add(r, kParallelBased, kParallelBasedBackward);
}

}  // namespace fla
