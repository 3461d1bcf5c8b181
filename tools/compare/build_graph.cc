#include "tools/compare/build_graph.h"

#include <algorithm>

#include "tools/command.h"

namespace fla::tools {

namespace fs = std::filesystem;

namespace {

constexpr const char* kRegisterAll = "register_all";

// The library's objects, and its CUDA code's.
constexpr std::string_view kDirs[] = {"fla_objects.dir/", "fla_cuda_objects.dir/"};

bool of_library(const std::string& object) {
  return std::ranges::any_of(kDirs, [&](std::string_view dir) { return object.find(dir) != std::string::npos; });
}

// "CMakeFiles/fla_objects.dir/fla/ops/gla/gla.cc.o" -> "fla/ops/gla/gla.cc"
std::string source_of(const std::string& object) {
  std::string s = object;
  for (const std::string_view dir : kDirs)
    if (const std::size_t at = object.find(dir); at != std::string::npos) s = object.substr(at + dir.size());
  if (s.ends_with(".o")) s.resize(s.size() - 2);
  return s;
}

}  // namespace

std::vector<ObjectDeps> parse_ninja_deps(const std::string& text, const fs::path& build) {
  std::vector<ObjectDeps> list;
  for (const std::string& line : lines_of(text)) {
    if (line.empty()) continue;
    if (line[0] != ' ') {
      list.push_back({line.substr(0, line.find(": #deps")), {}});
    } else if (!list.empty()) {
      const fs::path p = line.substr(line.find_first_not_of(' '));
      list.back().sources.push_back((p.is_absolute() ? p : build / p).lexically_normal().string());
    }
  }
  return list;
}

std::vector<ObjectDeps> read_deps(const BuildTree& tree) {
  if (tree.value("CMAKE_GENERATOR") != "Ninja")
    refuse("{} was not made by Ninja, whose dependency log is needed here; use a preset", tree.directory.string());
  std::string ninja = tree.value("CMAKE_MAKE_PROGRAM");
  if (ninja.empty()) ninja = "ninja";
  const ChildResult r = run_child({ninja, "-C", tree.directory.string(), "-t", "deps"});
  if (!r.ok()) refuse("{} -t deps: {}", ninja, r.err);
  auto list = parse_ninja_deps(r.out, tree.directory);
  // The log keeps objects of sources that are gone.
  std::erase_if(list, [&](const ObjectDeps& d) { return !fs::exists(tree.directory / d.object); });
  return list;
}

std::map<std::string, ObjectSymbols> parse_symbols(const std::string& text) {
  std::map<std::string, ObjectSymbols> objects;
  for (const std::string& line : lines_of(text)) {
    // "OBJECT: NAME TYPE ..."
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const auto words = split(std::string_view(line).substr(colon + 2), ' ');
    if (words.size() < 2 || words[1].empty()) continue;
    ObjectSymbols& o = objects[line.substr(0, colon)];
    const char type = words[1][0];
    if (type == 'U')
      o.uses.insert(words[0]);
    else if (type == 'T' || type == 'D' || type == 'B' || type == 'R')
      o.defines.insert(words[0]);
  }
  return objects;
}

std::string family_of(const std::string& path) {
  constexpr std::string_view kOps = "fla/ops/", kGolden = "tests/golden/";
  for (const std::string_view prefix : {kOps, kGolden}) {
    if (!path.starts_with(prefix)) continue;
    const std::string rest = path.substr(prefix.size());
    const std::string name = rest.substr(0, rest.find('/'));
    return name == "spec" || name == rest ? "" : name;
  }
  return "";
}

namespace {

// What compares builds and reports on them: it decides nothing about an operator.
bool of_comparison(const std::string& file) {
  return file.starts_with("tools/compare/") || file.starts_with("tools/loop/") || file.starts_with("tools/report/");
}

}  // namespace

Reach reach_of(const std::vector<std::string>& changed, const std::vector<ObjectDeps>& deps,
               const std::map<std::string, ObjectSymbols>& symbols, const fs::path& source,
               const std::set<std::string>& families) {
  Reach r;
  std::set<std::string> hit;  // objects of the library
  for (const std::string& file : changed) {
    const std::string family = family_of(file);
    bool reaches = false;
    if (families.contains(family)) {
      r.families.insert(family);
      reaches = true;
    }
    const std::string absolute = (source / file).lexically_normal().string();
    for (const ObjectDeps& d : deps) {
      if (std::find(d.sources.begin(), d.sources.end(), absolute) == d.sources.end()) continue;
      reaches = true;
      if (of_library(d.object))
        hit.insert(d.object);
      else if (family.empty() && !of_comparison(file) &&
               !(file.starts_with("tests/") && !file.starts_with("tests/gate/")))
        r.everything = true;  // code of the gate, or of what it shares with the program
    }
    const bool build_file = fs::path(file).filename() == "CMakeLists.txt" && !file.starts_with("tests/loop/");
    if (!reaches && (build_file || file == "CMakePresets.json" || file.starts_with("cmake/")))
      r.everything = reaches = true;
    if (!reaches) r.unaffected.push_back(file);
  }

  // Who uses a symbol of a hit object is hit too, except the list of all families, which uses every one.
  std::map<std::string, std::set<std::string>> users;  // object -> objects that use it
  std::map<std::string, std::string> defined_in;
  for (const auto& [object, s] : symbols)
    for (const auto& name : s.defines) defined_in[name] = object;
  for (const auto& [object, s] : symbols) {
    if (object.find(kRegisterAll) != std::string::npos) continue;
    for (const auto& name : s.uses)
      if (const auto it = defined_in.find(name); it != defined_in.end()) users[it->second].insert(object);
  }
  std::vector<std::string> open(hit.begin(), hit.end());
  while (!open.empty()) {
    const std::string object = open.back();
    open.pop_back();
    for (const std::string& user : users[object])
      if (hit.insert(user).second) open.push_back(user);
  }
  for (const std::string& object : hit) {
    const std::string family = family_of(source_of(object));
    if (families.contains(family)) r.families.insert(family);
  }
  return r;
}

Reach reach_of(const std::vector<std::string>& changed, const BuildTree& tree, const std::set<std::string>& families) {
  const auto deps = read_deps(tree);
  std::vector<std::string> argv = {"nm", "--format=posix", "-A"};
  for (const ObjectDeps& d : deps)
    if (of_library(d.object)) argv.push_back(d.object);
  if (argv.size() == 3) refuse("{} holds no object of the library; build first", tree.directory.string());
  for (const std::string& file : changed) {
    const bool of_ours =
        file.starts_with("fla/") && (file.ends_with(".cc") || file.ends_with(".cu")) && fs::exists(tree.source / file);
    const std::string absolute = (tree.source / file).lexically_normal().string();
    if (of_ours && std::none_of(deps.begin(), deps.end(), [&](const ObjectDeps& d) {
          return std::find(d.sources.begin(), d.sources.end(), absolute) != d.sources.end();
        }))
      refuse("{} has not been built: nobody knows yet what it reaches; build first", file);
  }
  const ChildResult nm = run_child(argv, {.directory = tree.directory});
  if (!nm.ok()) refuse("nm: {}", nm.err);
  return reach_of(changed, deps, parse_symbols(nm.out), tree.source, families);
}

std::vector<std::string> sources_newer_than_build(const BuildTree& tree, const std::vector<fs::path>& built) {
  std::error_code error;
  fs::file_time_type oldest = fs::file_time_type::max();
  for (const fs::path& p : built) {
    const auto at = fs::last_write_time(fs::canonical(p, error), error);
    if (!error) oldest = std::min(oldest, at);
  }
  std::set<std::string> newer, seen;
  for (const ObjectDeps& d : read_deps(tree)) {
    if (!of_library(d.object)) continue;
    for (const std::string& s : d.sources) {
      const std::string relative = fs::path(s).lexically_relative(tree.source).generic_string();
      if (!relative.starts_with("fla/") || !seen.insert(relative).second) continue;
      const auto changed = fs::last_write_time(s, error);
      if (error || changed > oldest) newer.insert(relative);
    }
  }
  return {newer.begin(), newer.end()};
}

}  // namespace fla::tools
