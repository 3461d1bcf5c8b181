#include "fla/ops/parallax/parallax.h"
#include "fla/ops/spec/attn_spec.h"

namespace fla {

namespace {

constexpr const char* kSource = "Parallax: Parameterized Local Linear Attention, arXiv 2605.29157, 2026";

// Two products with keys and two with values; four more of each kind in the gradients.
double forward_flops(const Dims& d) { return attn_flops(d, 2.0, 2.0); }
double backward_flops(const Dims& d) { return attn_flops(d, 6.0, 2.0); }

OpSpec<ParallaxDecodeArgs> decode(FunctionId<ParallaxDecodeArgs> f, const std::string& queries, const char* doc) {
  using A = ParallaxDecodeArgs;
  OpSpec<A> s(f, "parallax");
  const std::string dims = "B " + queries + " HQ K";
  s.in("q", &A::q, dims, nullptr, {.doc = "queries: the last positions"})
      .in("r", &A::r, dims, nullptr, {.doc = "second queries, not scaled"})
      .in("k", &A::k, "B T H K", nullptr, {.doc = "keys"})
      .in("v", &A::v, "B T H K", nullptr, {.doc = "values, as wide as keys"});
  s.flag("scale", &A::scale, "multiplies <q, k>; default K^(-1/2)");
  s.flag("window_size", &A::window_size, {.min = 1},
         "keys that a query sees, itself included; default all up to itself");
  s.opt_in("cache_start", &A::cache_start, "B", nullptr,
           left_out("the first key that counts; absent = 0", Types::Index));
  s.out("o", &A::o, dims, nullptr, {.doc = "output; zeros for a query without keys"});
  s.max_dim("K", 0).tolerance(0.005).family_export();
  s.check([](const A& a, const Dims& d) {
    if (Status r = check_query_groups(d); !r) return r;
    if (a.q.dim(1) > std::max<std::int64_t>(a.k.dim(1), 1))  // one query over an empty cache gives zeros
      return refused("q", "expected at most the " + std::to_string(a.k.dim(1)) + " positions of k, got " +
                              std::to_string(a.q.dim(1)));
    return Status();
  });
  s.doc(doc, kSource);
  return s;
}

}  // namespace

void register_parallax_spec(Registry& r) {
  {
    using A = ParallaxArgs;
    using G = ParallaxBackwardArgs;
    OpSpec<A, G> s(kParallelParallax, kParallelParallaxBackward, "parallax");
    s.in("q", &A::q, "B T HQ K", &G::dq, {.doc = "queries; query head h reads key head h / (HQ / H)"})
        .in("r", &A::r, "B T HQ K", &G::dr, {.doc = "second queries, not scaled"})
        .in("k", &A::k, "B T H K", &G::dk, {.doc = "keys"})
        .in("v", &A::v, "B T H K", &G::dv, {.doc = "values, as wide as keys"});
    s.flag("scale", &A::scale, "multiplies <q, k>; default K^(-1/2)");
    add_window(s, 1);
    add_boundaries(s);
    s.out("o", &A::o, "B T HQ K", &G::do_, {.doc = "output"});
    s.max_dim("K", 0).tolerance(0.005).flops(forward_flops, backward_flops);
    s.check([](const A&, const Dims& d) { return check_query_groups(d); });
    s.doc("Softmax attention minus the covariance of values with a second query's scores.", kSource);
    r.add(s);
  }
  {
    OpSpec<ParallaxDecodeArgs> s =
        decode(kParallaxDecode, "TQ", "Parallax of the last queries over a cache of keys: for decoding.");
    r.add(s);
  }
  {
    OpSpec<ParallaxDecodeArgs> s =
        decode(kParallaxDecodeOneStep, "1", "Parallax of one query over a cache of keys: for decoding.");
    r.add(s);
  }
}

}  // namespace fla
