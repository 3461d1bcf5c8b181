#include "tools/loop/commands.h"
#include "tools/loop/session.h"

namespace fla::tools {

namespace {

// Every one has fooled somebody; the program's reaction stands in the last column.
const std::vector<Trap>& catalogue() {
  static const std::vector<Trap> traps = {
      {"an output that was written only in part passes now and then", "fresh memory is often zero",
       "the gate and every timed run fill outputs with NaN first, and compare all of them afterwards"},
      {"a reference product in TF32 fails a right candidate", "its mantissa has 10 bits",
       "references compute in double; a tolerance is never loosened for this"},
      {"one error ratio for a whole tensor hides a few bad elements", "a degraded kernel passes at a looser ratio",
       "tolerances are frozen; verify blocks an error above 1.5 times the base's"},
      {"a side with other flags or a narrower accumulator is faster", "both sides pass their tests",
       "both builds' flags are compared file by file; a difference blocks"},
      {"32-bit address arithmetic wraps at large lengths only", "small cases pass",
       "the gate's long case is mandatory"},
      {"a speedup beyond what the change can give", "a shape was skipped, or an early exit taken",
       "below the roofline's floor: skip suspect; outputs are compared with the base's at the timed shape"},
      {"a result kept from an earlier call", "the same inputs come again and again in a benchmark",
       "after timing, new contents in the same memory must give new results"},
      {"a tuning choice survives the edit it was made for", "the old kernel is timed",
       "a base is built from its commit alone, and both libraries say which commit they are"},
      {"the same program takes another time a minute later", "clocks and load drift",
       "both sides run in turns in one process, and only paired ratios decide"}};
  return traps;
}

}  // namespace

int loop_trap_add(const std::string& op, const std::string& fact, const std::string& why, const std::string& apply,
                  bool json) {
  Session s("trap add", op, true);
  for (const auto& [name, text] : {std::pair{"--fact", &fact}, {"--why", &why}, {"--apply", &apply}})
    if (text->find_first_not_of(" \t\n") == std::string::npos)
      refuse("loop trap add: {}: expected words, got none", name);
  const State now = s.state();
  if (now.name == "awaiting-log" || now.name == "contract-missing")
    return refuse_step(s, now, json, fmt::format("loop trap add: refused: {}", now.name));
  s.effort.traps.push_back({fact, why, apply});
  write_text(s.records / "TRAPS.md", render_traps(s.effort.traps, "Traps met: " + s.op));
  s.save();
  s.commit_records(fmt::format("{}: trap: {}", s.op, fact));
  return answer(s, {.state = s.state()}, json);
}

int loop_trap_list(const std::string& op, bool json) {
  std::vector<Trap> own;
  if (!op.empty()) {
    // Reading takes no lock: a list may be looked at while a step runs.
    find_operator(Registry::global(), op);
    own = load_effort(this_build_tree("loop").source / records_of(op), op).traps;
  }
  if (json) {
    const auto list = [](const std::vector<Trap>& traps) {
      Json j = Json::array();
      for (const auto& t : traps) j.push_back({{"fact", t.fact}, {"why", t.why}, {"apply", t.apply}});
      return j;
    };
    print_json({{"op", op.empty() ? Json(nullptr) : Json(op)}, {"catalogue", list(catalogue())}, {"traps", list(own)}});
    return kGood;
  }
  const auto show = [](const std::vector<Trap>& traps) {
    for (const auto& t : traps) print("- {}\n    why it fools: {}\n    apply: {}\n", t.fact, t.why, t.apply);
  };
  show(catalogue());
  if (!own.empty()) print("\nmet while tuning {}:\n", op);
  show(own);
  return kGood;
}

}  // namespace fla::tools
