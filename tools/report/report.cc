// fla report: HTML with inline SVG, nothing loaded from anywhere.
#include "tools/report/report.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "CLI/CLI.hpp"
#include "tools/loop/session.h"

namespace fla::tools {

namespace fs = std::filesystem;

std::string escape_html(const std::string& text) {
  std::string s;
  for (const char c : text) {
    switch (c) {
      case '&': s += "&amp;"; break;
      case '<': s += "&lt;"; break;
      case '>': s += "&gt;"; break;
      case '"': s += "&quot;"; break;
      case '\'': s += "&#39;"; break;
      default: s += static_cast<unsigned char>(c) < 0x20 && c != '\n' ? ' ' : c;
    }
  }
  return s;
}

namespace {

constexpr const char* kStyle = R"(
:root{--ink:#1c2430;--soft:#5c6878;--line:#d9dee5;--base:#7a8794;--new:#0b6bcb;--good:#16794a;--bad:#b3261e;--warn:#9a6700}
*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);max-width:1080px;margin:0 auto;padding:24px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 8px;border-bottom:1px solid var(--line);padding-bottom:4px}
p.sub{color:var(--soft);margin:0 0 16px}.tag{display:inline-block;padding:1px 8px;border-radius:10px;background:#eef2f6;font-size:13px}
table{border-collapse:collapse;font-size:13px;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:4px 8px;border-bottom:1px solid var(--line);vertical-align:top}th{color:var(--soft);font-weight:600}
td.n,th.n{text-align:right}svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}.wide{overflow-x:auto}
.keep,.base{color:var(--good)}.revert{color:var(--bad)}.drop,.floor{color:var(--warn)}
@media print{body{padding:0}h2{break-after:avoid}})";

std::string number_text(double x) { return std::isfinite(x) && x != 0 ? fmt::format("{:.4g}", x) : "-"; }

double real(const Json& j, const char* key) {
  const auto it = j.find(key);
  return it != j.end() && it->is_number() ? it->get<double>() : 0.0;
}
std::string text_of(const Json& j, const char* key) {
  const auto it = j.find(key);
  return it != j.end() && it->is_string() ? it->get<std::string>() : "";
}

class Svg {
 public:
  Svg(double width, double height, const std::string& title)
      : text_(fmt::format("<svg viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" height=\"{1:.0f}\" role=\"img\" "
                          "aria-label=\"{2}\">\n<title>{2}</title>\n",
                          width, height, escape_html(title))) {}
  void line(double x1, double y1, double x2, double y2, const std::string& color, double width = 1,
            const std::string& dash = "") {
    text_ += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{}\"{}/>\n", x1, y1,
        x2, y2, color, width, dash.empty() ? "" : " stroke-dasharray=\"" + dash + "\"");
  }
  void dot(double x, double y, const std::string& color, const std::string& tip, double radius = 4.5) {
    text_ += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\"><title>{}</title></circle>\n", x, y,
                         radius, color, escape_html(tip));
  }
  void text(double x, double y, const std::string& t, const std::string& anchor = "start",
            const std::string& color = "#5c6878") {
    text_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" fill=\"{}\">{}</text>\n", x, y, anchor,
                         color, escape_html(t));
  }
  std::string done() const { return text_ + "</svg>\n"; }

 private:
  std::string text_;
};

constexpr const char* kInk = "#5c6878";
constexpr const char* kGrid = "#d9dee5";
constexpr const char* kBase = "#7a8794";
constexpr const char* kNew = "#0b6bcb";

const char* color_of(const std::string& status) {
  if (status == "keep" || status == "base") return "#16794a";
  return status == "revert" ? "#b3261e" : "#9a6700";
}

struct Scale {
  double from, to, at_from, at_to;
  double operator()(double x) const { return at_from + (x - from) / (to - from) * (at_to - at_from); }
};

// Round steps that divide a range into four to eight parts.
std::vector<double> ticks(double low, double high) {
  const double rough = (high - low) / 5, power = std::pow(10, std::floor(std::log10(rough)));
  double step = power;
  for (const double m : {1.0, 2.0, 5.0, 10.0})
    if (step = m * power; step >= rough) break;
  std::vector<double> list;
  for (double t = std::ceil(low / step) * step; t <= high + step * 1e-9; t += step) list.push_back(t);
  return list;
}

std::string history(const Effort& e) {
  if (e.rows.size() < 2) return "<p>No iteration has been timed yet.</p>\n";
  double low = 0.95, high = 1.05;
  for (const auto& r : e.rows)
    for (const double v : {r.change > 0 ? std::max(r.low, 0.2) : 1.0, r.change > 0 ? std::min(r.high, 5.0) : 1.0,
                           r.total > 0 ? r.total : 1.0})
      low = std::min(low, v), high = std::max(high, v);
  const double width = 980, height = 300, left = 60, right = 960, top = 16, bottom = 250;
  Svg svg(width, height, "History of iterations: speedup against the best so far, and against the baseline");
  const double last = e.rows.back().iteration;
  const Scale x{-0.5, last + 0.5, left, right}, y{low * 0.98, high * 1.02, bottom, top};
  for (const double t : ticks(low * 0.98, high * 1.02)) {
    svg.line(left, y(t), right, y(t), kGrid);
    svg.text(left - 6, y(t) + 4, fmt::format("{:.2f}", t), "end");
  }
  svg.line(left, y(1), right, y(1), kInk, 1.2);
  double px = 0, py = 0;
  for (const auto& r : e.rows) {
    svg.text(x(r.iteration), bottom + 16, std::to_string(r.iteration), "middle");
    svg.text(x(r.iteration), bottom + 32, r.status, "middle", color_of(r.status));
    if (r.total > 0) {
      const double nx = x(r.iteration), ny = y(r.total);
      if (px > 0) svg.line(px, py, nx, ny, kNew, 1.5);
      svg.dot(nx, ny, kNew, fmt::format("iteration {}: {:.3f} against the baseline", r.iteration, r.total), 3.5);
      px = nx, py = ny;
    }
    if (r.change <= 0) continue;
    svg.line(x(r.iteration), y(std::max(r.low, 0.2)), x(r.iteration), y(std::min(r.high, 5.0)), color_of(r.status), 2);
    svg.dot(
        x(r.iteration), y(r.change), color_of(r.status),
        fmt::format("iteration {}: {}: {:.3f} [{:.3f}, {:.3f}]", r.iteration, r.direction, r.change, r.low, r.high));
  }
  svg.text(left, height - 4,
           "iteration; bars: speedup against the best so far with its interval; blue: kept, against the baseline");
  return svg.done();
}

bool timed(const Json& row) { return real(row, "speedup") > 0; }

std::string speedups(const Json& rows) {
  double low = 0.95, high = 1.05;
  std::size_t n = 0;
  for (const auto& r : rows) {
    if (!timed(r)) continue;
    ++n;
    low = std::min({low, std::max(real(r, "low"), 0.2), std::max(real(r, "p10"), 0.2)});
    high = std::max({high, std::min(real(r, "high"), 5.0), std::min(real(r, "p90"), 5.0)});
  }
  if (n == 0) return "<p>No shape has been compared with a base yet.</p>\n";
  const double width = 980, left = 260, right = 950, step = 24, height = static_cast<double>(n) * step + 56;
  Svg svg(width, height, "Speedup per shape with its interval");
  const Scale x{low * 0.98, high * 1.02, left, right};
  for (const double t : ticks(low * 0.98, high * 1.02)) {
    svg.line(x(t), 8, x(t), height - 40, kGrid);
    svg.text(x(t), height - 24, fmt::format("{:.2f}", t), "middle");
  }
  svg.line(x(1), 8, x(1), height - 40, kInk, 1.2);
  double at = 22;
  for (const auto& r : rows) {
    if (!timed(r)) continue;
    const std::string verdict = text_of(r, "verdict");
    const char* color = verdict == "faster" ? "#16794a" : verdict == "slower" ? "#b3261e" : kBase;
    svg.text(left - 10, at + 4, text_of(r, "shape") + " " + text_of(r, "mode"), "end", "#1c2430");
    svg.line(x(std::max(real(r, "p10"), 0.2)), at, x(std::min(real(r, "p90"), 5.0)), at, kGrid, 7);
    svg.line(x(std::max(real(r, "low"), 0.2)), at, x(std::min(real(r, "high"), 5.0)), at, color, 2.5);
    svg.dot(x(real(r, "speedup")), at, color,
            fmt::format("{:.3f} [{:.3f}, {:.3f}], p10 {:.3f}, p90 {:.3f}, n {:.0f}", real(r, "speedup"), real(r, "low"),
                        real(r, "high"), real(r, "p10"), real(r, "p90"), real(r, "n")));
    at += step;
  }
  svg.text(left, height - 6, "base / candidate; thin: interval of the median, broad: p10 to p90 of the pairs");
  return svg.done();
}

std::string roofline(const Json& rows, const Json& machine) {
  const double peak = real(machine, "peak_gflops"), memory = real(machine, "bandwidth_gbs");
  struct Point {
    double x, base, candidate;
    std::string name;
  };
  std::vector<Point> points;
  for (const auto& r : rows) {
    const double flops = real(r, "flops"), bytes = real(r, "bytes");
    if (!timed(r) || flops <= 0 || bytes <= 0) continue;
    points.push_back({flops / bytes, flops / real(r, "base_ms") * 1e-6, flops / real(r, "new_ms") * 1e-6,
                      text_of(r, "shape") + " " + text_of(r, "mode")});
  }
  if (points.empty() || peak <= 0 || memory <= 0)
    return "<p>No operation count or no measured roof: no roofline.</p>\n";
  double cache = memory;
  for (const auto& l : machine.value("bandwidth_levels", Json::array())) cache = std::max(cache, real(l, "gbs"));
  double xlow = peak / cache / 2, xhigh = peak / memory * 2, ylow = peak / 4;
  for (const auto& p : points) {
    xlow = std::min(xlow, p.x / 2), xhigh = std::max(xhigh, p.x * 2);
    ylow = std::min({ylow, p.base / 2, p.candidate / 2});
  }
  const double width = 980, height = 380, left = 70, right = 950, top = 16, bottom = 330;
  Svg svg(width, height, "Roofline with both versions");
  const Scale x{std::log10(xlow), std::log10(xhigh), left, right},
      y{std::log10(ylow), std::log10(peak * 1.6), bottom, top};
  for (double t = std::ceil(std::log10(xlow)); t <= std::log10(xhigh); ++t) {
    svg.line(x(t), top, x(t), bottom, kGrid);
    svg.text(x(t), bottom + 16, fmt::format("{:g}", std::pow(10, t)), "middle");
  }
  for (double t = std::ceil(std::log10(ylow)); t <= std::log10(peak * 1.6); ++t) {
    svg.line(left, y(t), right, y(t), kGrid);
    svg.text(left - 6, y(t) + 4, fmt::format("{:g}", std::pow(10, t)), "end");
  }
  const auto roof = [&](double bandwidth, const std::string& name, const std::string& dash) {
    const double knee = peak / bandwidth, from = std::max(xlow, ylow / bandwidth);
    svg.line(x(std::log10(from)), y(std::log10(from * bandwidth)), x(std::log10(knee)), y(std::log10(peak)), kInk, 1.6,
             dash);
    svg.text(x(std::log10(knee)) - 8, y(std::log10(peak)) + 16, fmt::format("{} {:.0f} GB/s", name, bandwidth), "end");
  };
  roof(memory, "memory", "");
  if (cache > memory) roof(cache, "cache", "4 3");
  const double flat = peak / cache;
  svg.line(x(std::log10(std::max(flat, xlow))), y(std::log10(peak)), right, y(std::log10(peak)), kInk, 1.6);
  svg.text(right, y(std::log10(peak)) - 6, fmt::format("{:.0f} GFLOP/s F32", peak), "end");
  for (const auto& p : points) {
    const double at = x(std::log10(p.x));
    svg.line(at, y(std::log10(p.base)), at, y(std::log10(p.candidate)), kBase, 1);
    svg.dot(at, y(std::log10(p.base)), kBase, fmt::format("{} base: {:.1f} GFLOP/s", p.name, p.base));
    svg.dot(at, y(std::log10(p.candidate)), kNew, fmt::format("{} candidate: {:.1f} GFLOP/s", p.name, p.candidate));
  }
  svg.text(left, height - 6, "operations per byte; GFLOP/s upwards; grey: base, blue: candidate");
  return svg.done();
}

std::string accuracy(const Json& rows) {
  std::string s =
      "<div class=\"wide\"><table><thead><tr><th>shape</th><th>mode</th><th class=\"n\">base ms</th><th "
      "class=\"n\">candidate ms</th>"
      "<th class=\"n\">speedup</th><th class=\"n\">interval</th><th class=\"n\">n</th><th class=\"n\">R base</th>"
      "<th class=\"n\">R candidate</th><th class=\"n\">ratio</th><th>compared "
      "on</th><th>remarks</th></tr></thead><tbody>\n";
  for (const auto& r : rows) {
    const double before = real(r, "err_base"), after = real(r, "err_new");
    std::string remarks = text_of(r, "error");
    for (const auto& f : r.value("flags", Json::array()))
      remarks += (remarks.empty() ? "" : ", ") + f.get<std::string>();
    s += fmt::format(
        "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td "
        "class=\"n\">{}</td>"
        "<td class=\"n\">{:.0f}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td "
        "class=\"n\">{}</td><td>{}</td><td>{}</td></tr>\n",
        escape_html(text_of(r, "shape")), escape_html(text_of(r, "mode")), number_text(real(r, "base_ms")),
        number_text(real(r, "new_ms")), timed(r) ? fmt::format("{:.3f}", real(r, "speedup")) : "-",
        timed(r) ? fmt::format("[{:.3f}, {:.3f}]", real(r, "low"), real(r, "high")) : "-", real(r, "n"),
        before > 0 ? fmt::format("{:.2g}", before) : "-", after > 0 ? fmt::format("{:.2g}", after) : "-",
        before > 0 ? fmt::format("{:.2f}", after / before) : "-", escape_html(text_of(r, "err_on")),
        escape_html(remarks));
  }
  return s + "</tbody></table></div>\n";
}

std::string log_table(const Effort& e) {
  std::string s =
      "<div class=\"wide\"><table><thead><tr><th class=\"n\">iteration</th><th>direction</th><th>gate "
      "(passed/failed/skipped)</th>"
      "<th class=\"n\">bench ms</th><th>change vs "
      "best</th><th>status</th><th>commit</th><th>note</th></tr></thead><tbody>\n";
  for (const auto& r : e.rows) {
    const auto cells = log_cells(r);
    std::string note = r.note;
    for (const auto& b : r.blocked) note += (note.empty() ? "" : "; ") + b;
    s += fmt::format(
        "<tr><td class=\"n\">{}</td><td>{}</td><td>{}</td><td class=\"n\">{}</td><td>{}</td><td "
        "class=\"{}\">{}</td><td>{}</td><td>{}</td></tr>\n",
        cells[0], escape_html(cells[1]), escape_html(cells[2]), cells[3], escape_html(cells[4]), escape_html(r.status),
        escape_html(cells[5]), escape_html(short_commit(r.commit)), escape_html(note));
  }
  return s + "</tbody></table></div>\n";
}

std::string pairs(const std::vector<std::pair<std::string, std::string>>& list) {
  std::string s = "<table><tbody>\n";
  for (const auto& [key, value] : list)
    s += fmt::format("<tr><th>{}</th><td>{}</td></tr>\n", escape_html(key), escape_html(value));
  return s + "</tbody></table>\n";
}

std::string environment(const Json& m, const Effort& e) {
  std::vector<std::pair<std::string, std::string>> list = {{"at the baseline", e.baseline.environment}};
  if (m.is_object()) {
    list.push_back({"at the evidence", environment_line(m)});
    double least = 0, most = 0;
    for (const auto& x : m.value("mhz_during", Json::array())) {
      const double mhz = x.is_number() ? x.get<double>() : 0.0;
      least = least == 0 ? mhz : std::min(least, mhz), most = std::max(most, mhz);
    }
    list.push_back(
        {"clock during", most > 0 ? fmt::format("{:.0f} to {:.0f} MHz", least, most) : "the system tells none"});
    list.push_back({"load", fmt::format("{:.2f} before, {:.2f} after", real(m, "load_before"), real(m, "load_after"))});
  }
  return pairs(list);
}

}  // namespace

std::string render_report(const ReportInput& in) {
  const Effort& e = in.effort;
  const Json rows = in.evidence.is_object() ? in.evidence.value("rows", Json::array()) : Json::array();
  const Json machine = in.evidence.is_object() ? in.evidence.value("machine", Json()) : Json();
  std::string s = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>{0}: optimisation</title>\n"
      "<style>{1}</style>\n</head>\n<body>\n<h1>{0}</h1>\n<p class=\"sub\">target {2} x on {3} ({4}) "
      "<span class=\"tag\">{5}</span> <span class=\"tag\">{6}</span></p>\n",
      escape_html(e.op), kStyle, escape_html(e.contract["target speedup"]), escape_html(e.contract["target shapes"]),
      escape_html(e.contract["target modes"]), escape_html(in.state.name), escape_html(phase_of(e)));
  if (!in.state.missing.empty()) s += "<p>Missing: " + escape_html(join(in.state.missing, "; ")) + "</p>\n";
  const auto section = [&](const char* title, const std::string& body) {
    s += fmt::format("<h2>{}</h2>\n{}", title, body);
  };
  section("History", history(e) + log_table(e));
  const std::string source = in.source.empty() ? "" : "<p class=\"sub\">from " + escape_html(in.source) + "</p>\n";
  section("Speedup per shape", source + speedups(rows));
  section("Roofline", roofline(rows, machine));
  section("Accuracy beside speed", accuracy(rows));
  section("Environment", environment(machine, e));
  std::vector<std::pair<std::string, std::string>> contract;
  for (const auto& f : contract_fields()) contract.emplace_back(f.key, e.contract[f.key]);
  section("Task contract", pairs(contract));
  if (!e.buckets.empty()) {
    std::vector<std::pair<std::string, std::string>> list;
    for (const auto& b : e.buckets)
      list.emplace_back(b.condition, fmt::format("{}: {:.4g} ms to {:.4g} ms, {:.3f}; {}", b.entry, b.base_ms, b.new_ms,
                                                 b.speedup, b.why));
    section("Shape buckets", pairs(list));
  }
  for (const auto& a : e.assessments)
    section(fmt::format("Assessment after iteration {}", a.after).c_str(), pairs({{"profile", a.reading},
                                                                                  {"axes tried", a.axes},
                                                                                  {"known techniques", a.techniques},
                                                                                  {"next", a.next},
                                                                                  {"why", a.why}}));
  if (!e.traps.empty()) {
    std::vector<std::pair<std::string, std::string>> list;
    for (const auto& t : e.traps) list.emplace_back(t.fact, t.why + "; " + t.apply);
    section("Traps met", pairs(list));
  }
  for (const auto& [title, j] : {std::pair<const char*, const Json*>{"No win to ship", &e.no_go},
                                 std::pair<const char*, const Json*>{"Promotion", &e.promotion}}) {
    if (!j->is_object()) continue;
    std::vector<std::pair<std::string, std::string>> list;
    for (const auto& [key, value] : j->items())
      list.emplace_back(key, value.is_string() ? value.get<std::string>() : value.dump());
    section(title, pairs(list));
  }
  return s + "</body>\n</html>\n";
}

Command add_report(CLI::App& root) {
  struct Options {
    std::string dir, out;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(root, "report", "An optimisation effort as one self-contained page",
                              "  fla report profile/chunk_gla-opt -o report.html");
  app->add_option("DIR", o->dir, "records of the effort")->required();
  app->add_option("-o", o->out, "page to write")->required();
  add_json(app, o->json);
  return {app, [o] {
            fs::path dir = fs::path(o->dir).lexically_normal();
            if (!dir.has_filename()) dir = dir.parent_path();
            std::string op = dir.filename().string();
            constexpr std::string_view kEnd = "-opt";
            if (!op.ends_with(kEnd) || !fs::is_directory(dir))
              refuse("report: expected the records of an effort (profile/<op>-opt), got '{}'", o->dir);
            op.resize(op.size() - kEnd.size());
            ReportInput in;
            in.effort = load_effort(dir, op);
            if (in.effort.contract.values.empty()) refuse("report: {} holds no records", o->dir);
            in.state = state_of(in.effort, {});
            std::vector<std::string> candidates;
            if (in.effort.promotion.is_object()) candidates.emplace_back("promote-1.json");
            for (const bool kept : {true, false})
              for (auto r = in.effort.rows.rbegin(); r != in.effort.rows.rend(); ++r)
                if (!kept || r->status == "keep") {
                  candidates.push_back(fmt::format("{:03}-total.json", r->iteration));
                  candidates.push_back(fmt::format("{:03}.json", r->iteration));
                }
            for (const auto& name : candidates) {
              in.evidence = Json::parse(read_text(dir / "trace" / name), nullptr, false);
              if (!in.evidence.is_object() || in.evidence.value("rows", Json::array()).empty()) continue;
              in.source = "trace/" + name;
              break;
            }
            const std::string page = render_report(in);
            write_text(o->out, page);
            if (o->json)
              print_json({{"op", op},
                          {"file", o->out},
                          {"bytes", page.size()},
                          {"state", in.state.name},
                          {"evidence", in.source}});
            else
              print("{}: {} bytes\n", o->out, page.size());
            return kGood;
          }};
}

}  // namespace fla::tools
