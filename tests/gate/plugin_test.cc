// What a plug-in is most likely made for, so that one which takes nothing but these is judged on what it takes: head
// widths of 64, 128 and 256, whole chunks, 16 bits.
#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

void TunedSizes(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const DType t : {DType::BF16, DType::F16, DType::F32})
      for (const std::int64_t width : {64, 128, 256}) {
        const std::vector<Sizes> shapes = {sizes(1, 64, 2, width, width), sizes(2, 128, 2, width, width),
                                           sizes(1, 192, 4, width, width), sizes(1, 100, 2, width, width)};
        for (const Sizes& s : shapes) {
          if (!allows(e.spec, s)) continue;
          const Case c = make_case(e.spec.name, s, {.dtype = t});
          expect_agrees(c, backend);
          if (c.takes("initial_state")) expect_agrees(c.with("initial_state"), backend);
          for (const auto& g : gates(c))
            if (t != DType::F32) expect_agrees(c.cast(g, t), backend);
        }
        const Sizes p = packed({0, 64, 192, 256}, 2, width, width, DType::I32);
        if (takes(e.spec, "cu_seqlens") && allows(e.spec, p))
          expect_agrees(make_case(e.spec.name, p, {.dtype = t}), backend);
      }
}

const bool registered = for_every_plugin("TunedSizes", TunedSizes);

}  // namespace
}  // namespace fla::gate
