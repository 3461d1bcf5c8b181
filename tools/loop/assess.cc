#include <algorithm>

#include "tools/loop/commands.h"
#include "tools/loop/session.h"

namespace fla::tools {

namespace {

std::string axes_from(const Effort& e) {
  std::string s;
  for (const auto& r : e.rows)
    if (r.iteration > 0) s += fmt::format("{}{} ({})", s.empty() ? "" : "; ", r.direction, r.status);
  return s;
}

}  // namespace

int loop_assess(const AssessOptions& o) {
  Session s("assess", o.op, true);
  const State now = s.state();
  const std::vector<std::string> allowed = {"ready", "stalled", "floor-claimed", "promotable"};
  if (std::find(allowed.begin(), allowed.end(), now.name) == allowed.end())
    return refuse_step(s, now, o.json, fmt::format("loop assess: refused: {}", now.name));
  if (!s.repo.clean()) refuse("loop assess: the work tree has changes; the profile must be that of the best candidate");

  const auto log = s.repo.common_dir() / "fla-loop" / (s.op + ".build.log");
  if (!build_all(s.tree, log)) refuse("loop assess: the tree does not build; see {}", log.string());
  const std::string first = split(s.effort.contract["target shapes"], ',').front();
  const Verified v = run_verify(
      s, {"--no-gate", "--profile", "--shapes", first, "--modes", join(s.effort.contract.target_modes(), ",")});
  std::string reading;
  for (const auto& p : v.json.value("profile", Json::array()))
    reading += (reading.empty() ? "" : "; ") + p.value("reading", "");
  const std::string axes = axes_from(s.effort) + (o.axes.empty() ? "" : "; " + o.axes);

  std::vector<std::string> missing;
  if (reading.empty()) missing.emplace_back("a fresh profile");
  if (axes.empty()) missing.emplace_back("axes tried (--axes)");
  if (o.techniques.empty()) missing.emplace_back("techniques known for the family (--techniques)");
  if (o.next.empty()) missing.emplace_back("next direction (--next)");
  if (o.why.empty()) missing.emplace_back("why that direction (--why)");
  if (!missing.empty())
    return refuse_step(s, {now.name, missing}, o.json,
                       fmt::format("loop assess: not complete\nprofile: {}\naxes tried: {}", reading, axes));

  const int after = s.effort.rows.back().iteration;
  s.effort.assessments.push_back({after, axes, o.techniques, o.next, o.why, reading});
  std::string text = read_text(s.records / "OPT_LOG.md");
  text += fmt::format(
      "\n## Assessment after iteration {}\n\n- profile: {}\n- axes tried: {}\n- known techniques: {}\n- next: {}\n- "
      "why: {}\n",
      after, reading, axes, o.techniques, o.next, o.why);
  write_text(s.records / "OPT_LOG.md", text);
  write_text(s.records / "trace" / fmt::format("{:03}-profile.json", after), v.json.dump(1) + "\n");
  s.save();
  s.commit_records(fmt::format("{}: assessment after iteration {}", s.op, after));
  return answer(s, {.state = s.state(), .text = "profile: " + reading}, o.json);
}

}  // namespace fla::tools
