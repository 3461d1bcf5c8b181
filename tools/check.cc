// fla check: recomputes recorded cases and compares.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "CLI/CLI.hpp"
#include "fla/core/context.h"
#include "fla/core/text.h"
#include "tools/command.h"
#include "tools/common/fixture.h"
#include "tools/plugin/child.h"

namespace fla::tools {
namespace {

struct Options {
  std::vector<std::string> paths;
  std::string function;
  CallOptions call;
  PluginOptions plugin;
  bool json = false;
};

Json to_json(const CheckResult& c) {
  Json tensors = Json::array();
  for (const auto& t : c.tensors)
    tensors.push_back({{"name", t.name},
                       {"R", number(t.R)},
                       {"max_abs", number(t.max_abs)},
                       {"index", t.index},
                       {"limit", number(t.limit)},
                       {"block_R", number(t.block_R)},
                       {"ok", t.ok},
                       {"reason", t.reason}});
  return {{"file", c.file},
          {"function", c.function},
          {"backend", c.backend},
          {"dtype", option_name(c.dtype)},
          {"status", name_of(c.status)},
          {"ok", c.ok()},
          {"reason", c.reason},
          {"dropped_flags", c.dropped_flags},
          {"uncovered_tensors", c.uncovered},
          {"tensors", std::move(tensors)}};
}

CheckResult check_result(const Json& j) {
  CheckResult c;
  c.file = j.at("file").get<std::string>();
  c.function = j.at("function").get<std::string>();
  c.backend = j.at("backend").get<std::string>();
  c.dtype = parse_dtype(j.at("dtype").get<std::string>());
  for (const auto s : {CheckResult::Status::Ok, CheckResult::Status::Failed, CheckResult::Status::NotCovered})
    if (j.at("status") == name_of(s)) c.status = s;
  c.reason = j.at("reason").get<std::string>();
  c.dropped_flags = j.at("dropped_flags").get<std::vector<std::string>>();
  c.uncovered = j.at("uncovered_tensors").get<std::vector<std::string>>();
  const auto real = [](const Json& x) { return x.is_number() ? x.get<double>() : std::nan(""); };
  for (const Json& t : j.at("tensors"))
    c.tensors.push_back({t.at("name").get<std::string>(), real(t.at("R")), real(t.at("max_abs")),
                         t.at("index").get<std::vector<std::int64_t>>(), real(t.at("limit")), real(t.at("block_R")),
                         t.at("ok").get<bool>(), t.at("reason").get<std::string>()});
  return c;
}

void print_failure(const CheckResult& c) {
  print("FAILED {} {} ({}): {}\n", printable(c.file), c.function, c.backend.empty() ? "not served" : c.backend,
        c.reason);
  std::vector<std::vector<std::string>> rows;
  for (const auto& t : c.tensors)
    if (!t.ok)
      rows.push_back({"  " + printable(t.name), fmt::format("R {:.3g}", t.R), fmt::format("limit {:.3g}", t.limit),
                      fmt::format("max {:.3g} at {}", t.max_abs, shape_string(t.index)), t.reason});
  print_table(rows);
}

// What the cases gave, and what could not be read: file, message.
struct Checked {
  std::vector<CheckResult> results;
  std::vector<std::pair<std::string, std::string>> errors;
  std::size_t files = 0;
};

std::vector<std::filesystem::path> files_of(const Options& o, Checked& checked) {
  std::vector<std::filesystem::path> files;
  for (const auto& path : o.paths) {
    std::error_code error;
    if (!std::filesystem::exists(path, error)) {
      checked.errors.emplace_back(path, printable(path) + ": no such file or folder");
      continue;
    }
    const auto found = find_cases(path);
    if (found.empty()) print(stderr, "fla: {}: no .safetensors files\n", printable(path));
    files.insert(files.end(), found.begin(), found.end());
  }
  checked.files = files.size();
  return files;
}

Checked check_here(const Options& o) {
  const Device device = device_of(o.call);
  require_backend(Registry::global(), o.call.backend);
  const Context ctx(context_options(o.call));
  const CheckOptions options{
      .backend = o.call.backend, .function = o.function, .dtype = parse_dtype(o.call.dtype), .device = device};
  Checked all;
  const auto files = files_of(o, all);
  Progress progress;
  for (std::size_t i = 0; i < files.size(); ++i) {
    progress.show(fmt::format("check: {} of {}  {}", i + 1, files.size(), files[i].filename().string()));
    Result<std::vector<CheckResult>> checked = check_file(files[i], options, ctx);
    if (checked)
      std::move(checked->begin(), checked->end(), std::back_inserter(all.results));
    else
      all.errors.emplace_back(files[i].string(), checked.status().message());
  }
  return all;
}

// One function of one file after the other in a child process: a plug-in that dies fails that case.
int check_in_parts(const Options& o, const Json& failed, Checked& all) {
  struct Part {
    std::filesystem::path file;
    std::string function;
  };
  std::vector<Part> parts;
  for (const auto& file : files_of(o, all)) {
    const auto functions = recorded_functions(file);
    if (!functions) {
      all.errors.emplace_back(file.string(), functions.status().message());
      continue;
    }
    for (const auto& f : *functions)
      if (o.function.empty() || f == o.function) parts.push_back({file, f});
  }
  std::optional<Context> ctx;  // of the child: its threads do not outlive a fork
  PluginParts work;
  work.count = std::max<std::size_t>(parts.size(), 1);  // also nothing to check loads the plug-in
  work.part = [&](std::size_t i, const std::string& backend) {
    CallOptions call = o.call;
    if (call.backend.empty()) call.backend = backend;
    require_backend(Registry::global(), call.backend);
    if (i >= parts.size()) return Json::array();
    if (!ctx) ctx.emplace(context_options(call));
    const CheckOptions options{.backend = call.backend,
                               .function = parts[i].function,
                               .dtype = parse_dtype(call.dtype),
                               .device = device_of(call)};
    const auto checked = check_file(parts[i].file, options, *ctx);
    if (!checked) return Json{{"error", checked.status().message()}};
    Json answer = Json::array();
    for (const auto& c : *checked) answer.push_back(to_json(c));
    return answer;
  };
  work.done = [&](std::size_t i, const Json& answer) {
    if (answer.is_object())
      all.errors.emplace_back(parts[i].file.string(), answer.at("error").get<std::string>());
    else
      for (const auto& c : answer) all.results.push_back(check_result(c));
  };
  work.died = [&](std::size_t i, const std::string& text) {
    if (i >= parts.size()) return;
    CheckResult c;
    c.file = parts[i].file.string();
    c.function = parts[i].function;
    c.dtype = parse_dtype(o.call.dtype);
    c.status = CheckResult::Status::Failed;
    c.reason = text;
    all.results.push_back(std::move(c));
  };
  return in_parts(o.plugin, o.json, failed, work);
}

int report(const Options& o, const Checked& checked) {
  const Registry& r = Registry::global();
  const auto& results = checked.results;
  const auto& errors = checked.errors;
  const auto count = [&](CheckResult::Status s) {
    return std::count_if(results.begin(), results.end(), [&](const CheckResult& c) { return c.status == s; });
  };
  const auto passed = count(CheckResult::Status::Ok), failed = count(CheckResult::Status::Failed),
             not_covered = count(CheckResult::Status::NotCovered);
  if (results.empty() && !o.function.empty() && r.find(o.function) == nullptr)
    refuse("--function: no file names '{}', nor is it an operator of this build; nearest: {}", o.function,
           join(r.nearest(o.function)));

  if (o.json) {
    Json out = {{"cases", Json::array()},
                {"passed", passed},
                {"failed", failed},
                {"not_covered", not_covered},
                {"errors", Json::array()}};
    for (const auto& c : results) out["cases"].push_back(to_json(c));
    for (const auto& [file, message] : errors) out["errors"].push_back({{"file", file}, {"message", message}});
    if (!errors.empty()) out["error"] = error_json(kUsage, errors.front().second);
    print_json(out);
  } else {
    for (const auto& c : results)
      if (c.status == CheckResult::Status::Failed) print_failure(c);
    std::map<std::string, std::pair<int, std::string>> missing;
    std::map<std::pair<std::string, std::string>, std::pair<int, double>> by_function;  // passed, worst R / limit
    for (const auto& c : results) {
      if (c.status == CheckResult::Status::NotCovered) {
        auto& m = missing[c.function];
        if (m.first++ == 0) m.second = c.reason;
        continue;
      }
      auto& row = by_function[{c.function, c.backend}];
      row.first += c.ok() ? 1 : 0;
      // Where the expected tensor is zero the limit is on the largest value, and R means nothing.
      for (const auto& t : c.tensors)
        if (t.ok && t.R < 1.0) row.second = std::max(row.second, t.R);
    }
    std::vector<std::vector<std::string>> rows;
    rows.reserve(by_function.size());
    for (const auto& [key, row] : by_function)
      rows.push_back({"  " + key.first, key.second, fmt::format("{} passed", row.first),
                      fmt::format("largest R {:.2g}", row.second)});
    print_table(rows, {2});
    std::map<std::pair<std::string, std::string>, int> forward_only;
    for (const auto& c : results)
      if (!c.uncovered.empty()) ++forward_only[{c.function, c.backend}];
    for (const auto& [key, n] : forward_only)
      print("forward only {} ({} cases): backend {} has no backward, gradients are not covered\n", key.first, n,
            key.second);
    for (const auto& [function, m] : missing)
      print("not covered {} ({} cases): {}\n", printable(function), m.first, m.second);
  }
  for (const auto& [file, message] : errors) print(stderr, "fla: {}\n", message);
  if (!o.json) {
    print("check: {} passed, {} failed, {} not covered", passed, failed, not_covered);
    if (!errors.empty()) print(", {} unreadable", errors.size());
    print(" ({} files, {}, {})\n", checked.files, o.call.dtype,
          !o.call.backend.empty()  ? o.call.backend
          : !o.plugin.path.empty() ? "plug-in " + o.plugin.path
                                   : "the route of dispatch");
  }
  if (!errors.empty()) return kUsage;
  if (failed > 0) return kFailed;
  return passed > 0 ? kGood : kNothing;
}

}  // namespace

Command add_check(CLI::App& root) {
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(root, "check", "Recompute recorded cases and compare",
                              "  fla check tests/golden/gla\n  fla check tests/golden --backend reference --json\n"
                              "  fla check tests/golden/gla --function chunk_gla --dtype bf16\n"
                              "  fla check tests/golden/gla --plugin ./mine.so");
  app->add_option("FILE", o->paths, "recorded cases (.safetensors), or folders of them")->required();
  app->add_option("--function", o->function, "only this function of each file")->check(not_empty("a function"));
  add_backend(app, o->call);
  add_dtype(app, o->call);
  add_device(app, o->call);
  add_threads(app, o->call);
  add_plugin(app, o->plugin);
  add_json(app, o->json);
  return {app, [o] {
            device_of(o->call);  // refused before a child is started
            if (o->plugin.path.empty()) return report(*o, check_here(*o));
            const Json failed = {{"cases", Json::array()}, {"passed", 0}, {"failed", 1}, {"not_covered", 0}};
            Checked all;
            const int code = check_in_parts(*o, failed, all);
            return code == kGood ? report(*o, all) : code;
          }};
}

}  // namespace fla::tools
