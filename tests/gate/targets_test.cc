// The vector kernels are compiled for several instruction sets and one is chosen at run time. Every other one that this
// machine can run is right too.
#include <hwy/targets.h>

#include <set>

#include "fla/engine/diag/cpu/entry.h"
#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

struct BestTarget {
  ~BestTarget() { hwy::SetSupportedTargetsForTest(0); }
};

// Calls fn once for each instruction set, from the best down.
template <typename Fn>
void for_each_target(Fn fn) {
  const BestTarget restore;
  std::set<std::string> seen;
  std::int64_t left = hwy::SupportedTargets();
  while (left != 0) {
    hwy::SetSupportedTargetsForTest(left);
    if (seen.insert(cpu::isa_name()).second) fn(std::string(cpu::isa_name()));
    left &= left - 1;  // better ones have lower bits
  }
}

void EveryInstructionSet(const Registry::Entry& e) {
  for_each_target([&](const std::string& isa) {
    SCOPED_TRACE(isa);
    for (const auto& backend : backends(e))
      for (const GateRegime r : {GateRegime::Plain, GateRegime::Extreme}) {
        for (const Sizes& s : {sizes(2, 65, 2, 33, 20), sizes(1, 40, 1, 5, 60), sizes(1, 3, 2, 64, 64)}) {
          Case c = make_case(e.spec.name, s, {.regime = r});
          if (c.takes("initial_state")) c = c.with("initial_state");
          expect_agrees(c, backend);
          if (c.takes("gv")) expect_agrees(c.with("gv"), backend);
          if (c.has_flag("reverse")) expect_agrees(c.flag("reverse", true), backend);
          if (c.has_flag("normalize")) expect_agrees(c.flag("normalize", true), backend);
        }
        expect_agrees(make_case(e.spec.name, sizes(1, 40, 2, 33, 20), {.dtype = DType::BF16, .regime = r}), backend);
        expect_agrees(make_case(e.spec.name, sizes(1, 40, 2, 33, 20), {.dtype = DType::F16, .regime = r}), backend);
      }
  });
}

const bool registered = for_every_function("EveryInstructionSet", EveryInstructionSet);

TEST(Targets, AtLeastOneIsTried) {
  int count = 0;
  for_each_target([&](const std::string& isa) {
    ++count;
    RecordProperty("isa", isa);
  });
  EXPECT_GT(count, 0);
}

}  // namespace
}  // namespace fla::gate
