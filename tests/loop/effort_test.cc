// The records of an effort and the states they put it in.
#include "tools/loop/effort.h"

#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tools/compare/paired_bench.h"
#include "tools/loop/session.h"

namespace fla::tools {
namespace {

Contract full_contract() {
  Contract c;
  for (const auto& f : contract_fields()) c.values[f.key] = "x";
  c.values["target speedup"] = "1.1";
  c.values["target shapes"] = "B1_T512_H16_D64";
  c.values["target modes"] = "fwd";
  c.values["iteration cap"] = "8";
  c.values["threads"] = "all";
  c.values["device"] = "cuda";
  c.values["dtype"] = "bf16";
  c.values["kernel scope"] = "fla/ops/gla/*_cpu.cc, fla/engine/diag/cpu/*";
  return c;
}

LogRow row(int iteration, const std::string& status, double change = 0) {
  LogRow r;
  r.iteration = iteration;
  r.direction = "direction " + std::to_string(iteration);
  r.gate_green = true;
  r.passed = 100;
  r.skipped = 3;
  r.bench_ms = 2.5;
  r.status = status;
  r.commit = "0123456789abcdef" + std::to_string(iteration);
  if (change > 0) r.change = change, r.low = change - 0.02, r.high = change + 0.02;
  return r;
}

Effort started() {
  Effort e;
  e.op = "chunk_gla";
  e.contract = full_contract();
  e.baseline.commit = "abc";
  e.baseline.environment = "a machine";
  e.baseline.rows = Json::array({{{"shape", "B1_T512_H16_D64"}, {"mode", "fwd"}, {"new_ms", 2.5}}});
  e.baseline.gate = {{"passed", 100}};
  e.baseline.green = true;
  e.rows = {row(0, "base")};
  e.rows[0].total = 1.0;
  return e;
}

std::string state(const Effort& e, const Facts& f = {}) { return state_of(e, f).name; }

TEST(LoopState, EachStateNamesWhatIsMissing) {
  Effort e;
  EXPECT_EQ(state(e), "contract-missing");
  EXPECT_EQ(state_of(e, {}).missing.size(), contract_fields().size());
  e.contract = full_contract();
  EXPECT_EQ(state(e), "baseline-missing");
  e.baseline.gate = {{"failed", 1}};
  EXPECT_EQ(state(e), "gate-red");
  e = started();
  EXPECT_EQ(state(e), "ready");
  EXPECT_EQ(phase_of(e), "profile-guided");
  EXPECT_EQ(state(e, {.records_dirty = true}), "awaiting-log");
  EXPECT_EQ(state(e, {.pending = true}), "awaiting-log");
  const State frozen = state_of(e, {.frozen = {"edited tests/gate/x.cc"}});
  EXPECT_EQ(frozen.name, "frozen-scope-violated");
  EXPECT_EQ(frozen.missing, std::vector<std::string>{"edited tests/gate/x.cc"});
}

TEST(LoopState, ThreeRowsWithoutAKeepStallUntilAssessed) {
  Effort e = started();
  e.rows.push_back(row(1, "drop"));
  e.rows.push_back(row(2, "revert"));
  EXPECT_EQ(state(e), "ready");
  e.rows.push_back(row(3, "drop"));
  EXPECT_EQ(state(e), "stalled");
  e.assessments.push_back({.after = 3});
  EXPECT_EQ(state(e), "ready");
  e.rows.push_back(row(4, "drop"));
  e.rows.push_back(row(5, "keep", 1.05));
  e.rows.push_back(row(6, "drop"));
  e.rows.push_back(row(7, "drop"));
  EXPECT_EQ(state(e), "ready");
  e.rows.push_back(row(8, "drop"));
  EXPECT_EQ(state(e), "no-go-incomplete");  // the cap comes before the stall
}

TEST(LoopState, PromotableOnlyWhenTheTargetIsReachedAgainstTheBaseline) {
  Effort e = started();
  e.rows.push_back(row(1, "keep", 1.06));
  e.rows.back().total = 1.06;
  EXPECT_EQ(state(e), "ready");
  e.rows.push_back(row(2, "keep", 1.06));  // two times 1.06 is not a measurement of 1.12
  EXPECT_EQ(state(e), "ready");
  e.rows.back().total = 1.12;
  EXPECT_EQ(state(e), "promotable");
  e.promotion = {{"branch", "x"}};
  EXPECT_EQ(state(e), "promoted");
}

TEST(LoopState, AFloorIsAClaimUntilItIsConcludedOrAssessed) {
  Effort e = started();
  e.rows.push_back(row(1, "floor", 1.0));
  EXPECT_EQ(state(e), "floor-claimed");
  e.assessments.push_back({.after = 1});
  EXPECT_EQ(state(e), "ready");
}

TEST(NoGo, DemandsItsFiveItems) {
  Effort e;
  e.contract = full_contract();
  EXPECT_EQ(no_go_missing(e, "").size(), 5U);
  e = started();
  EXPECT_EQ(no_go_missing(e, "memory bandwidth").size(), 4U);  // no number
  LogRow unbuilt = row(1, "revert");
  unbuilt.built = false;
  unbuilt.passed = unbuilt.bench_ms = 0;
  e.rows.push_back(unbuilt);
  EXPECT_EQ(no_go_missing(e, "memory bandwidth: 94 % of 21 GB/s"),
            (std::vector<std::string>{"the gate's status of a candidate", "benchmark evidence of a candidate"}));
  e.rows.push_back(row(2, "drop", 1.0));
  EXPECT_TRUE(no_go_missing(e, "memory bandwidth: 94 % of 21 GB/s").empty());
}

TEST(Contract, WrittenReadAndRefused) {
  const Contract c = full_contract();
  EXPECT_EQ(parse_contract(render_contract(c), "draft.md").values, c.values);
  EXPECT_TRUE(c.missing().empty());
  EXPECT_EQ(c.scope(), (std::vector<std::string>{"fla/ops/gla/*_cpu.cc", "fla/engine/diag/cpu/*"}));
  for (const char* speedup : {"fast", "0.9", "1", "", "inf"}) {
    Contract bad = c;
    bad.values["target speedup"] = speedup;
    EXPECT_EQ(bad.missing().size(), 1U) << speedup;
  }
  Contract modes = c;
  modes.values["target modes"] = "fwd, bwd";
  EXPECT_EQ(modes.missing().size(), 1U);
  EXPECT_ANY_THROW(parse_contract("no table", "draft.md"));
  EXPECT_ANY_THROW(parse_contract("| field | value |\n|---|---|\n| tolerance | loose |\n", "draft.md"));
  Contract pipes = c;
  pipes.values["promotion criteria"] = "a | b";
  EXPECT_EQ(parse_contract(render_contract(pipes), "draft.md")["promotion criteria"], "a | b");
}

TEST(OptLog, WordsMayBeCorrectedFiguresMayNot) {
  Effort e = started();
  e.rows.push_back(row(1, "keep", 1.07));
  std::string log = render_log(e) + "\nA remark of mine.\n";
  Effort read = effort_from(to_json(e));
  ASSERT_TRUE(reconcile(read, log).ok());

  const auto edited = [&](const std::string& from, const std::string& to) {
    std::string text = log;
    const std::size_t at = text.rfind(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  ASSERT_TRUE(reconcile(read, edited("direction 1", "better words")).ok());
  EXPECT_EQ(read.rows[1].direction, "better words");
  EXPECT_NE(reconcile(read, edited("1.070", "1.700")).message().find("change vs best"), std::string::npos);
  EXPECT_NE(reconcile(read, edited("| keep", "| drop")).message().find("status"), std::string::npos);
  EXPECT_NE(reconcile(read, edited("(100/0/3)", "(100/0/0)")).message().find("gate"), std::string::npos);
  EXPECT_FALSE(reconcile(read, log.substr(0, log.rfind("| 1 |"))).ok());
}

TEST(OptLog, ARowIsAppendedBehindTheTableAndTheRestStays) {
  Effort e = started();
  const std::string log = render_log(e) + "\n## Assessment after iteration 0\n\n- next: x\n";
  e.rows.push_back(row(1, "drop", 1.01));
  const std::string longer = append_row(log, e.rows[1]);
  EXPECT_NE(longer.find("| 1 | direction 1 | pass (100/0/3) | 2.5 | 1.010 [0.990, 1.030] | drop |"), std::string::npos);
  EXPECT_NE(longer.find("- next: x"), std::string::npos);
  EXPECT_TRUE(reconcile(e, longer).ok());
}

TEST(OptLog, ALogWithoutItsTableIsRefused) {
  for (const char* log : {"", "# A page\n\n| other | table |\n|---|---|\n"}) {
    try {
      append_row(log, row(1, "keep"));
      FAIL() << "taken: " << log;
    } catch (const Stop& e) {
      EXPECT_EQ(e.code, kUsage);
      EXPECT_NE(std::string(e.what()).find("OPT_LOG.md: expected a table"), std::string::npos) << e.what();
    }
  }
}

TEST(Twin, RoundTrip) {
  Effort e = started();
  e.rows.push_back(row(1, "keep", 1.2));
  e.rows[1].files = {"fla/ops/gla/gla_cpu.cc"};
  e.rows[1].blocked = {"a reason"};
  e.assessments.push_back({1, "axes", "techniques", "next", "why", "reading"});
  e.buckets.push_back({"T < 64", "fla_small", "launch bound", {"a", "b"}, 2.0, 1.0, 2.0, 1});
  e.traps.push_back({"fact", "why", "apply"});
  e.no_go = {{"limit", "94 %"}};
  const Json once = to_json(e);
  EXPECT_EQ(to_json(effort_from(Json::parse(once.dump()))), once);
  EXPECT_EQ(phase_of(e), "specialisation");
}

Json verify_json(const std::string& verdict) {
  return {{"gate", {{"passed", 10}, {"failed", 0}, {"skipped", 1}, {"hash", "h"}, {"subset", nullptr}}},
          {"base", {{"commit", "abc"}}},
          {"rows", Json::array({{{"shape", "s"},
                                 {"mode", "fwd"},
                                 {"new_ms", 2.0},
                                 {"speedup", 1.1},
                                 {"verdict", "faster"},
                                 {"error", nullptr},
                                 {"flags", Json::array()}}})},
          {"geomean", 1.1},
          {"interval", {1.05, 1.15}},
          {"verdict", verdict}};
}

TEST(Decide, KeepsOnlyAWin) {
  std::vector<std::string> why;
  EXPECT_EQ(decide(verify_json("win"), why), "keep");
  EXPECT_EQ(decide(verify_json("no_win"), why), "drop");
  EXPECT_TRUE(why.empty());
  Json blocked = verify_json("blocked");
  blocked["rows"][0]["flags"] = {"numeric relaxation", "noisy"};
  EXPECT_EQ(decide(blocked, why), "revert");
  EXPECT_EQ(why, std::vector<std::string>{"s fwd: numeric relaxation"});
  why.clear();
  Json slower = verify_json("regression");
  slower["rows"][0]["verdict"] = "slower";
  EXPECT_EQ(decide(slower, why), "revert");
  EXPECT_EQ(why.size(), 1U);
}

// What the loop makes of times that `fla verify` gives without a verdict.
TEST(Decide, RowsCarryTheirVerdict) {
  const auto one = [](double speedup, double low, double high, Json flags = Json::array()) {
    return Json{{"speedup", speedup}, {"low", low}, {"high", high}, {"error", nullptr}, {"flags", std::move(flags)}};
  };
  EXPECT_EQ(verdict_of_rows(Json::array({one(1.2, 1.1, 1.3)})), Verdict::Win);
  EXPECT_EQ(verdict_of_rows(Json::array({one(1.2, 1.1, 1.3, {"noisy", "backend cpu -> other"})})), Verdict::Win);
  EXPECT_EQ(verdict_of_rows(Json::array({one(1.0, 0.98, 1.02)})), Verdict::NoWin);
  EXPECT_EQ(verdict_of_rows(Json::array({one(1.2, 1.1, 1.3), one(0.9, 0.88, 0.92)})), Verdict::Regression);
  EXPECT_EQ(verdict_of_rows(Json::array({one(1.2, 1.1, 1.3), one(1.2, 1.1, 1.3, {"skip suspect"})})), Verdict::Blocked);
  EXPECT_EQ(verdict_of_rows(Json::array()), Verdict::Blocked);
  Json failed = one(1.2, 1.1, 1.3);
  failed["error"] = "no kernel";
  EXPECT_EQ(verdict_of_rows(Json::array({failed})), Verdict::Blocked);
  Json unmeasured = one(1.2, 1.1, 1.3);
  unmeasured["speedup"] = nullptr;
  EXPECT_EQ(verdict_of_rows(Json::array({unmeasured})), Verdict::Blocked);
}

TEST(Decide, EvidenceNeedsTheWholeGate) {
  LogRow r;
  take_evidence(r, verify_json("win"));
  EXPECT_TRUE(r.gate_green);
  EXPECT_DOUBLE_EQ(r.bench_ms, 2.0);
  EXPECT_DOUBLE_EQ(r.low, 1.05);
  for (const auto& [key, value] : std::vector<std::pair<std::string, Json>>{
           {"subset", "backward"}, {"failed", 1}, {"passed", 0}, {"not_run", 2}}) {
    Json red = verify_json("win");
    red["gate"][key] = value;
    LogRow unproven;
    take_evidence(unproven, red);
    EXPECT_FALSE(unproven.gate_green) << key;
    EXPECT_EQ(unproven.bench_ms, 0) << key;  // a failed gate has no bench value
  }
}

TEST(Environment, CountsThreads) {
  EXPECT_NE(environment_line({{"threads", 1}}).find(", 1 thread; "), std::string::npos);
  EXPECT_NE(environment_line({{"threads", 2}}).find(", 2 threads; "), std::string::npos);
}

TEST(Dispatch, BucketsAreWrittenWithTheirEvidence) {
  const std::string text = render_dispatch({{"T < 64", "fla_small", "launch bound", {"a"}, 2.0, 1.0, 2.0, 1}});
  EXPECT_NE(text.find("| T < 64 | fla_small | 2 | 1 | 2.000 | launch bound |"), std::string::npos);
}

}  // namespace
}  // namespace fla::tools
