// fla check: recomputes recorded cases and compares.
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "CLI/CLI.hpp"
#include "fla/core/context.h"
#include "fla/core/text.h"
#include "tools/command.h"
#include "tools/common/fixture.h"
#include "tools/plugin.h"

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

int run(const Options& o) {
  const Registry& r = Registry::global();
  const Device device = device_of(o.call);
  require_backend(r, o.call.backend);
  const Context ctx(context_options(o.call));
  const CheckOptions options{
      .backend = o.call.backend, .function = o.function, .dtype = parse_dtype(o.call.dtype), .device = device};

  std::vector<std::pair<std::string, std::string>> errors;  // file, message
  std::vector<std::filesystem::path> files;
  for (const auto& path : o.paths) {
    std::error_code error;
    if (!std::filesystem::exists(path, error)) {
      errors.emplace_back(path, printable(path) + ": no such file or folder");
      continue;
    }
    const auto found = find_cases(path);
    if (found.empty()) print(stderr, "fla: {}: no .safetensors files\n", printable(path));
    files.insert(files.end(), found.begin(), found.end());
  }
  std::vector<CheckResult> results;
  {
    Progress progress;
    for (std::size_t i = 0; i < files.size(); ++i) {
      progress.show(fmt::format("check: {} of {}  {}", i + 1, files.size(), files[i].filename().string()));
      Result<std::vector<CheckResult>> checked = check_file(files[i], options, ctx);
      if (!checked) {
        errors.emplace_back(files[i].string(), checked.status().message());
        continue;
      }
      std::move(checked->begin(), checked->end(), std::back_inserter(results));
    }
  }
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
    print(" ({} files, {}, {})\n", files.size(), o.call.dtype,
          o.call.backend.empty() ? "the route of dispatch" : o.call.backend);
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
            const Json failed = {{"cases", Json::array()}, {"passed", 0}, {"failed", 1}, {"not_covered", 0}};
            return with_plugin(o->plugin, o->json, failed, [&](const std::string& backend) {
              if (o->call.backend.empty()) o->call.backend = backend;
              return run(*o);
            });
          }};
}

}  // namespace fla::tools
