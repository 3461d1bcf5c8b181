// The double-precision reference of hgrn: README.md (1) to (3) channel by channel, written for reading. It shares no
// helper with any kernel.
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>

#include "fla/engine/common/ref_access.h"
#include "fla/ops/hgrn/hgrn.h"
#include "fla/registry/registry.h"

namespace fla {

namespace {

using reference::load;
using reference::store;

struct Sequence {
  std::int64_t row, begin, length;
};

Sequence sequence(const HgrnArgs& a, std::int64_t n) {
  if (!a.cu_seqlens) return {n, 0, a.x.dim(1)};
  const auto boundary = [&](std::int64_t i) { return static_cast<std::int64_t>(load(a.cu_seqlens, i)); };
  return {0, boundary(n), boundary(n + 1) - boundary(n)};
}

Status forward(const HgrnArgs& a, const CallInfo& c, const LaunchInfo& l) {
  const std::int64_t D = c.dims["D"];
  l.pool->run(c.dims["N"] * D, [&](std::int64_t task, int) {
    const std::int64_t n = task / D, d = task % D;
    const Sequence s = sequence(a, n);
    double h = a.initial_state ? load(a.initial_state, n, d) : 0.0;
    for (std::int64_t t = s.begin; t < s.begin + s.length; ++t) {  // (1)
      h = std::exp(load(a.g, s.row, t, d)) * h + load(a.x, s.row, t, d);
      if (a.o) store(a.o, h, s.row, t, d);
    }
    if (a.final_state) store(a.final_state, h, n, d);
  });
  return {};
}

// The states of one channel, for each worker.
std::size_t backward_workspace(const HgrnBackwardArgs&, const CallInfo& c) {
  return (static_cast<std::size_t>(c.dims["T"]) * static_cast<std::size_t>(c.threads) + 1) * sizeof(double);
}

Status backward(const HgrnBackwardArgs& a, const CallInfo& c, const LaunchInfo& l) {
  void* base = l.workspace.data();
  std::size_t space = l.workspace.size();
  std::align(alignof(double), sizeof(double), base, space);
  const std::int64_t T = c.dims["T"], D = c.dims["D"];
  l.pool->run(c.dims["N"] * D, [&](std::int64_t task, int worker) {
    const std::int64_t n = task / D, d = task % D;
    const Sequence s = sequence(a, n);
    double* before = static_cast<double*>(base) + worker * T;  // before[i]: the state that local token i finds
    double h = a.initial_state ? load(a.initial_state, n, d) : 0.0;
    for (std::int64_t i = 0; i < s.length; ++i) {
      before[i] = h;
      h = std::exp(load(a.g, s.row, s.begin + i, d)) * h + load(a.x, s.row, s.begin + i, d);
    }
    double dh = a.dht ? load(a.dht, n, d) : 0.0;
    for (std::int64_t i = s.length - 1; i >= 0; --i) {
      const std::int64_t t = s.begin + i;
      if (a.do_) dh += load(a.do_, s.row, t, d);
      if (a.dx) store(a.dx, dh, s.row, t, d);  // (2)
      dh *= std::exp(load(a.g, s.row, t, d));
      if (a.dg) store(a.dg, dh * before[i], s.row, t, d);  // (3)
    }
    if (a.dh0) store(a.dh0, dh, n, d);
  });
  return {};
}

void add(Registry& r, FunctionId<HgrnArgs> f, FunctionId<HgrnBackwardArgs> b) {
  r.add(Kernel<HgrnArgs>{.function = f,
                         .backend = kReference,
                         .name = "hgrn.recurrence",
                         .verify = {},
                         .workspace = {},
                         .launch = forward});
  r.add(Kernel<HgrnBackwardArgs>{.function = b,
                                 .backend = kReference,
                                 .name = "hgrn.recurrence",
                                 .verify = {},
                                 .workspace = backward_workspace,
                                 .launch = backward});
}

}  // namespace

void register_hgrn_ref(Registry& r) {
  add(r, kFusedRecurrentHgrn, kFusedRecurrentHgrnBackward);
  add(r, kChunkHgrn, kChunkHgrnBackward);
}

}  // namespace fla
