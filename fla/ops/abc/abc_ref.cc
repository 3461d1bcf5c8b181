// The double-precision reference of abc: the weights and gates of README.md (1) token by token, then the reference of
// the attention over slots.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "fla/engine/common/ref_access.h"
#include "fla/engine/slot/ref.h"
#include "fla/ops/abc/abc_problem.h"
#include "fla/registry/registry.h"

namespace fla {

namespace {

using reference::load;
using reference::store;

// Doubles of the shape [B, T, H, M].
struct Slots {
  std::vector<double> data;
  TensorView view;
  explicit Slots(const TensorView& like) : data(static_cast<std::size_t>(like.numel())) {
    view = {data.data(), DType::F64, like.dims()};
  }
};

// fn(b, h, m) for every slot of every sequence.
template <typename Fn>
void for_slots(const TensorView& s, const Fn& fn) {
  for (std::int64_t b = 0; b < s.dim(0); ++b)
    for (std::int64_t h = 0; h < s.dim(2); ++h)
      for (std::int64_t m = 0; m < s.dim(3); ++m) fn(b, h, m);
}

void weights(const TensorView& s, const TensorView& w, const TensorView& g) {
  for_slots(s, [&](std::int64_t b, std::int64_t h, std::int64_t m) {
    double z = 0.0;
    for (std::int64_t t = 0; t < s.dim(1); ++t) {
      const double x = load(s, b, t, h, m), before = z;
      z = t == 0 ? x : std::max(x, before) + std::log1p(std::exp(-std::abs(x - before)));
      store(w, std::exp(x - z), b, t, h, m);
      store(g, t == 0 ? 0.0 : before - z, b, t, h, m);
    }
  });
}

Status forward(const AbcArgs& a, const CallInfo&, const LaunchInfo& l) {
  const Slots w(a.s), g(a.s);
  weights(a.s, w.view, g.view);
  return reference::slot_forward(abc_problem(a, w.view, g.view), *l.pool, {});
}

// README.md (3)
Status backward(const AbcBackwardArgs& a, const CallInfo&, const LaunchInfo& l) {
  const Slots w(a.s), g(a.s), dw(a.s), dg(a.s);
  weights(a.s, w.view, g.view);
  SlotBackwardProblem p = abc_problem(a, w.view, g.view);
  p.ds = dw.view;
  p.dg = dg.view;
  p.dhk0 = a.dh0;
  p.dhv0 = a.dh0_values;
  if (Status s = reference::slot_backward(p, *l.pool, {}); !s) return s;
  if (!a.ds) return {};
  const std::int64_t T = a.s.dim(1);
  for_slots(a.s, [&](std::int64_t b, std::int64_t h, std::int64_t m) {
    double sum = 0.0;  // sum over i >= t of e^{z_t - z_i} dz_i
    for (std::int64_t t = T - 1; t >= 0; --t) {
      const double wt = load(w.view, b, t, h, m), dwt = load(dw.view, b, t, h, m);
      double dz = -wt * dwt;
      if (t > 0) dz -= load(dg.view, b, t, h, m);
      if (t + 1 < T) {
        dz += load(dg.view, b, t + 1, h, m);
        sum *= std::exp(load(g.view, b, t + 1, h, m));
      }
      sum += dz;
      store(a.ds, wt * (dwt + sum), b, t, h, m);
    }
  });
  return {};
}

}  // namespace

void register_abc_ref(Registry& r) {
  r.add(Kernel<AbcArgs>{.function = kChunkAbc,
                        .backend = kReference,
                        .name = "abc.recurrence",
                        .verify = {},
                        .workspace = {},
                        .launch = forward});
  r.add(Kernel<AbcBackwardArgs>{.function = kChunkAbcBackward,
                                .backend = kReference,
                                .name = "abc.recurrence",
                                .verify = {},
                                .workspace = {},
                                .launch = backward});
}

}  // namespace fla
