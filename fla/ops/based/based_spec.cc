#include <algorithm>

#include "fla/ops/based/based.h"
#include "fla/registry/registry.h"
#include "fla/registry/spec.h"

namespace fla {

namespace {

using A = BasedArgs;
using G = BasedBackwardArgs;

// The cheaper of the two algorithms: a state of F rows, written and read once per token, or scores with every earlier
// key. The backward: three products with states, or five with scores, for one.
double forward_flops(const Dims& d) {
  const double rows = static_cast<double>(d["B"] * d["T"] * d["H"]), K = static_cast<double>(d["K"]),
               V = static_cast<double>(d["V"]), T = static_cast<double>(d["T"]);
  const double features = 1.0 + K + K * (K + 1.0) / 2.0;
  return rows * std::min(4.0 * features * V, T * (K + V));
}
double backward_flops(const Dims& d) { return 2.5 * forward_flops(d); }

void add(Registry& r, FunctionId<A> f, FunctionId<G> b, std::int64_t widest, const char* doc) {
  OpSpec<A, G> s(f, b, "based");
  s.in("q", &A::q, "B T H K", &G::dq, {.doc = "queries"})
      .in("k", &A::k, "B T H K", &G::dk, {.doc = "keys"})
      .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"})
      .flag("scale", &A::scale, "multiplies q; default K^(-1/2)")
      .flag("use_norm", &A::use_norm, true, "divide by the sum of scores + 1e-6")
      .out("o", &A::o, "B T H V", &G::do_, {.doc = "output"})
      .max_dim("K", widest)
      .max_dim("V", 0)
      .tolerance(0.01, {{"o", 0.005}})
      .flops(forward_flops, backward_flops)
      .doc(doc, "Arora et al., Simple linear attention language models balance the recall-throughput tradeoff, 2024");
  r.add(s);
}

}  // namespace

void register_based_spec(Registry& r) {
  add(r, kFusedChunkBased, kFusedChunkBasedBackward, 16,
      "Second-order Taylor linear attention with a state: time linear in T.");
  add(r, kParallelBased, kParallelBasedBackward, 128,
      "Second-order Taylor linear attention for wider keys; above 16 every query meets every key before it.");
}

}  // namespace fla
