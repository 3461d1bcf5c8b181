#include "fla/ops/attnres/attnres.h"
#include "fla/registry/registry.h"
#include "fla/registry/spec.h"

namespace fla {

namespace {

double elements(const Dims& d) {
  return static_cast<double>(d["L"]) * static_cast<double>(d["B"] * d["T"]) * static_cast<double>(d["D"]);
}

// Of every element of a source: its square, its product with the key, and its part in the sum. Then those again, its
// product with the gradient, and its own gradient and part in that of the key.
double forward_flops(const Dims& d) { return 6.0 * elements(d); }
double backward_flops(const Dims& d) { return 14.0 * elements(d); }

}  // namespace

void register_attnres_spec(Registry& r) {
  using A = AttnresArgs;
  using G = AttnresBackwardArgs;
  OpSpec<A, G> s(kFusedAttnres, kFusedAttnresBackward, "attnres");
  s.in("query", &A::query, "D", &G::dquery, {.types = Types::Float, .other_dims = {"D 1"}, .doc = "one for all tokens"})
      .in("residuals", &A::residuals, "B T D", &G::dresiduals,
          {.other_dims = {"D", "T D", "B T S D", "B T S R D"}, .count = "L", .doc = "sources, of [..., D]"})
      .in("rms_weight", &A::rms_weight, "D", &G::drms_weight,
          {.types = Types::Float, .doc = "weight of the sources' normalisation in the logits"})
      .opt_in("output_rms_weight", &A::output_rms_weight, "D", &G::doutput_rms_weight,
              {.types = Types::Float, .doc = "normalises the result, with this weight"})
      .flag("rms_eps", &A::rms_eps, {.def = 1e-6, .min = 0.0}, "added to both means of squares")
      .flag("scale", &A::scale, {.def = 1.0}, "of the logits")
      .output_flag("return_weights", "return p")
      .flag("checkpoint_level", &A::checkpoint_level, {.def = std::int64_t{1}, .min = 0, .max = 1},
            "0 or 1; the results are the same")
      .out("o", &A::o, "B T D", &G::do_,
           {.other_dims = {"D", "T D", "B T S D", "B T S R D"}, .shaped_as = "residuals", .doc = "as residuals"})
      .out("p", &A::p, "L B T", nullptr,
           {.types = Types::Acc,
            .other_dims = {"L", "L T", "L B T S", "L B T S R"},
            .shaped_as = "residuals",
            .requested_by = "return_weights",
            .doc = "weights of the sources"})
      .tolerance(0.005)
      .flops(forward_flops, backward_flops)
      .doc("Softmax over the sources of a residual stream, by one query for all tokens.", "arXiv 2603.15031");
  r.add(s);
}

}  // namespace fla
