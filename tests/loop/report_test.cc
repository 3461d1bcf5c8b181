// The page is parsed: every tag closed in order, nothing loaded from anywhere, hostile words only as words.
#include "tools/report/report.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace fla::tools {
namespace {

// Of a page written as XML would be; what is wrong with it, or "".
std::string parse(const std::string& page, std::vector<std::string>& elements, std::string& words) {
  std::vector<std::string> open;
  std::size_t at = page.find("<html");
  if (!page.starts_with("<!DOCTYPE html>") || at == std::string::npos) return "no document type";
  while (at < page.size()) {
    const std::size_t tag = page.find('<', at);
    words += page.substr(at, std::min(tag, page.size()) - at);
    if (tag == std::string::npos) break;
    const std::size_t end = page.find('>', tag);
    if (end == std::string::npos) return "a tag does not end";
    std::string inside = page.substr(tag + 1, end - tag - 1);
    at = end + 1;
    const bool closes = inside[0] == '/', alone = inside.back() == '/';
    std::string name = closes ? inside.substr(1) : inside;
    name = name.substr(0, name.find_first_of(" /\n"));
    if (std::count(inside.begin(), inside.end(), '"') % 2 != 0) return "quotes in <" + inside + ">";
    if (inside.find("http:") != std::string::npos || inside.find("https:") != std::string::npos ||
        inside.find("src=") != std::string::npos || inside.find("href=") != std::string::npos)
      return "loads something: <" + inside + ">";
    if (closes) {
      if (open.empty() || open.back() != name) return "closes " + name + " inside " + (open.empty() ? "" : open.back());
      open.pop_back();
      continue;
    }
    elements.push_back(name);
    if (!alone) open.push_back(name);
  }
  return open.empty() ? "" : open.back() + " is not closed";
}

ReportInput sample() {
  ReportInput in;
  Effort& e = in.effort;
  e.op = "chunk_gla";
  for (const auto& f : contract_fields()) e.contract.values[f.key] = "value";
  e.baseline.environment = "machine <b> & \"quotes\"";
  for (int i = 0; i < 5; ++i) {
    LogRow r;
    r.iteration = i;
    r.direction = i == 2 ? "<script>alert(1)</script>" : "direction";
    r.gate_green = i != 3;
    r.passed = 10;
    r.status = i == 0 ? "base" : i == 4 ? "keep" : i == 3 ? "revert" : "drop";
    if (i > 0 && i != 3) r.change = 1.0 + 0.03 * i, r.low = r.change - 0.02, r.high = r.change + 0.02;
    if (i == 0 || i == 4) r.total = i == 0 ? 1.0 : 1.12;
    e.rows.push_back(r);
  }
  e.assessments.push_back({3, "axes", "techniques", "next", "why", "reading"});
  e.traps.push_back({"fact", "why", "apply"});
  e.buckets.push_back({"T < 64", "entry", "why", {"a"}, 2, 1, 2, 4});
  e.promotion = {{"branch", "b"}, {"geomeans", {1.1, 1.2}}};
  in.state = {"promoted", {}};
  in.source = "trace/004.json";
  Json row = {{"shape", "B1_T512_H16_D64"},
              {"mode", "fwd"},
              {"base_ms", 2.2},
              {"new_ms", 2.0},
              {"speedup", 1.1},
              {"p10", 1.0},
              {"p90", 1.2},
              {"low", 1.05},
              {"high", 1.15},
              {"n", 40},
              {"err_base", 1e-6},
              {"err_new", 1e-6},
              {"flops", 2.0e8},
              {"bytes", 1.0e7},
              {"verdict", "faster"},
              {"error", nullptr},
              {"flags", Json::array({"noisy"})}};
  Json failed = {{"shape", "B1_T4096_H16_D64"}, {"mode", "fwd"}, {"speedup", nullptr}, {"error", "o <differs>"}};
  in.evidence = {{"rows", Json::array({row, failed})},
                 {"machine",
                  {{"cpu", "cpu"},
                   {"peak_gflops", 200.0},
                   {"bandwidth_gbs", 20.0},
                   {"bandwidth_levels", Json::array({{{"bytes", 65536.0}, {"gbs", 300.0}}})},
                   {"mhz_during", {2400.0, 2500.0}},
                   {"load_before", 0.5},
                   {"load_after", 0.7}}}};
  return in;
}

TEST(Report, IsWellFormedAndLoadsNothing) {
  std::vector<std::string> elements;
  std::string words;
  EXPECT_EQ(parse(render_report(sample()), elements, words), "");
  EXPECT_EQ(std::count(elements.begin(), elements.end(), "svg"), 3);  // history, speedups, roofline
  EXPECT_EQ(std::count(elements.begin(), elements.end(), "script"), 0);
  for (const char* what : {"History", "Speedup per shape", "Roofline", "Accuracy beside speed", "Environment",
                           "Task contract", "Assessment after iteration 3", "Traps met", "Promotion", "Shape buckets",
                           "&lt;script&gt;alert(1)&lt;/script&gt;", "o &lt;differs&gt;", "2400 to 2500 MHz", "1.100"})
    EXPECT_NE(words.find(what), std::string::npos) << what;
  EXPECT_EQ(words.find("nan"), std::string::npos);
  EXPECT_EQ(words.find("inf"), std::string::npos);
}

TEST(Report, OfAnEffortWithoutFiguresIsAPageToo) {
  ReportInput in;
  in.effort.op = "chunk_gla";
  in.state = {"contract-missing", {"target shapes"}};
  std::vector<std::string> elements;
  std::string words;
  EXPECT_EQ(parse(render_report(in), elements, words), "");
  EXPECT_NE(words.find("No iteration has been timed yet."), std::string::npos);
  EXPECT_NE(words.find("target shapes"), std::string::npos);
}

TEST(Report, EscapesWhatHtmlWouldRead) {
  EXPECT_EQ(escape_html("<a b=\"c\">'&\x01"), "&lt;a b=&quot;c&quot;&gt;&#39;&amp; ");
}

}  // namespace
}  // namespace fla::tools
